#!/usr/bin/env bash
# The figures of docs/router.md, measured again on the present GPU: times the router and its launches, fills the tables and
# draws the plots.
#   scripts/bench_router.sh [PEERS]    PEERS: a folder with SGLang's kernels (docs/router.md says how to fill it)
# Needs a CUDA build of torch (TORCH says which to install); with PEERS also nvcc.
set -euo pipefail
. "$(dirname "$0")/_env.sh"
chord build --locked
chord bench router ${1:+--peers "$1"}
chord bench host
chord bench docs docs/router.md
