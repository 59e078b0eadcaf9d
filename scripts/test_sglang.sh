#!/usr/bin/env bash
# Run SGLang's own MoE code on chord: tests/serving_sglang, on this machine's GPU or else on the CPU. Arguments go to
# pytest.
# Installs SGLang's published package, without what its servers need, into a virtual environment of its own.
# SGLANG: the release (default below). VENV_SGLANG: where the environment lies.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
release=${SGLANG:-0.5.23}
venv=${VENV_SGLANG:-$root/.venv-sglang-$release}
stamp=$venv/.chord-$(sha256sum "$root/pyproject.toml" "${BASH_SOURCE[0]}" | sha256sum | cut -c1-16)
if [ ! -e "$stamp" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --upgrade pip
    "$venv/bin/python" -m pip install --quiet "${TORCH:-torch==2.13.0}"
    "$venv/bin/python" -m pip install --quiet --editable "$root[build,dev,torch]"
    "$venv/bin/python" -m pip install --quiet 'pydantic>=2.12' 'transformers>=5.16.1,<5.21' aiohttp dill einops fastapi \
        ipython loguru openai-harmony orjson partial_json_parser pillow prometheus_client psutil py-cpuinfo pybase64 \
        python-multipart pyyaml pyzmq regex requests setproctitle uvicorn uvloop
    "$venv/bin/python" -m pip install --quiet --no-deps 'compressed-tensors>=0.17' "sglang==$release"
    touch "$stamp"
fi
. "$venv/bin/activate"
cd "$root"
chord build --locked
exec python -m pytest tests/serving_sglang "$@"
