#!/usr/bin/env bash
# Run vLLM's own MoE code on chord: tests/serving, on this machine's GPU or else on the CPU. Arguments go to pytest.
# Installs vLLM's published package, without what its servers need, into a virtual environment of its own: several
# hundred MB, so that CI does not run it. VLLM: the release (default below). VENV_VLLM: where the environment lies.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
release=${VLLM:-0.33.0}
venv=${VENV_VLLM:-$root/.venv-vllm-$release}
stamp=$venv/.chord-$(sha256sum "$root/pyproject.toml" "${BASH_SOURCE[0]}" | sha256sum | cut -c1-16)
if [ ! -e "$stamp" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --upgrade pip
    "$venv/bin/python" -m pip install --quiet "${TORCH:-torch==2.13.0}"
    "$venv/bin/python" -m pip install --quiet --editable "$root[build,dev,torch]"
    "$venv/bin/python" -m pip install --quiet 'pydantic>=2.12' 'transformers>=5.16.1,<5.21' loguru pyyaml regex requests
    "$venv/bin/python" -m pip install --quiet --no-deps 'compressed-tensors>=0.17' "vllm==$release"
    touch "$stamp"
fi
. "$venv/bin/activate"
cd "$root"
chord build --locked
exec python -m pytest tests/serving "$@"
