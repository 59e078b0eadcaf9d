#!/usr/bin/env bash
# Formatting, lints and types, as CI checks them.
set -euo pipefail
. "$(dirname "$0")/_env.sh"
ruff format --check .
ruff check .
mypy
