#!/usr/bin/env bash
# Run the tests in the project's environment. Arguments go to pytest: scripts/test.sh -m gpu
set -euo pipefail
. "$(dirname "$0")/_env.sh"
chord build --locked
exec python -m pytest "$@"
