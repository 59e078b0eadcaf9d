# Sourced by the scripts beside it: activates a virtual environment with chord (editable) and all that builds and tests it.
# VENV: where it lies (default .venv in the checkout). TORCH: which torch to install (default: the version CI uses).
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${VENV:-$root/.venv}
stamp=$venv/.chord-$(sha256sum "$root/pyproject.toml" | cut -c1-16)
if [ ! -e "$stamp" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --upgrade pip
    "$venv/bin/python" -m pip install --quiet "${TORCH:-torch==2.13.0}"
    "$venv/bin/python" -m pip install --quiet --editable "$root[build,dev,torch]"
    touch "$stamp"
fi
# shellcheck disable=SC1091
. "$venv/bin/activate"
cd "$root"
