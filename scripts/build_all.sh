#!/usr/bin/env bash
# The batch build: every program for its architectures, proved equal to the committed manifest. Needs no GPU.
# Arguments go to `chord build`: scripts/build_all.sh -j 8
set -euo pipefail
. "$(dirname "$0")/_env.sh"
chord build --locked "$@"
chord verify
