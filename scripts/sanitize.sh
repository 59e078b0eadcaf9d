#!/usr/bin/env bash
# compute-sanitizer's four tools over small cases of every arm, several processes at a time; exit 1 for any finding.
# Needs a GPU, the CUDA toolkit's compute-sanitizer and a CUDA build of torch. Arguments: scripts/sanitize.sh --help
set -euo pipefail
. "$(dirname "$0")/_env.sh"
chord build --locked
exec python -m chord.checks.sanitize "$@"
