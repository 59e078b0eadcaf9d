#!/usr/bin/env bash
# The batch build: every program for its architectures, proved equal to the committed manifest. Needs no GPU.
# Arguments go to `chord build`: scripts/build_all.sh -j 8
set -euo pipefail
. "$(dirname "$0")/_env.sh"
committed=$(sha256sum manifest.json)
chord build "$@"
sha256sum --check --quiet <<<"$committed" || { echo "the build changed manifest.json: its sources do not give what was committed" >&2; exit 1; }
chord verify
