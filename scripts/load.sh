#!/usr/bin/env bash
# The registry under load: 16 processes of 4 threads open, verify, look up, load and (with --gpu) launch for 5 minutes,
# while every cubin is replaced atomically. Arguments: scripts/load.sh --help
set -euo pipefail
. "$(dirname "$0")/_env.sh"
chord build --locked
exec python tests/load/hammer.py "$@"
