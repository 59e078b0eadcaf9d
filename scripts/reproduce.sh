#!/usr/bin/env bash
# Prove that a commit's sources give its manifest, cubin by cubin: a clean clone, a fresh environment, everything compiled.
#   scripts/reproduce.sh [REVISION [FOLDER]]    REVISION: a commit or tag (default HEAD). FOLDER: a deployed registry
#   (manifest.json and cubins, such as site-packages/chord/_data) that must be the reproduced one, byte for byte.
# Needs git, Python 3.10 to 3.13 with venv and a package index; no GPU. VENV: an environment to use instead of a fresh one.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
revision=${1:-HEAD}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
git clone --quiet --no-hardlinks "$root" "$scratch/clone"
git -C "$scratch/clone" checkout --quiet --detach "$(git -C "$root" rev-parse --verify "$revision^{commit}")"
if [ -z "${VENV:-}" ]; then
    VENV=$scratch/venv
    "${PYTHON:-python3}" -m venv "$VENV"
    "$VENV/bin/python" -m pip install --quiet --editable "$scratch/clone[build]"
fi
cd "$scratch/clone"
unset CHORD_REGISTRY CHORD_PIN CHORD_LOCK CHORD_KEY CHORD_RECEIPTS CHORD_REQUIRE_RECEIPT
chord() { PYTHONPATH=$scratch/clone "$VENV/bin/python" -m chord "$@"; }
chord build --locked # nothing is built yet: every cubin is compiled here, and its hash compared with the manifest's
chord verify
digest=$(sha256sum manifest.json | cut -d' ' -f1)
if [ $# -ge 2 ]; then
    chord verify --registry "$(cd "$root" && realpath "$2")" --pin "$digest"
fi
echo "reproduced: $(git rev-parse HEAD), manifest $digest"
