#!/usr/bin/env bash
# Fuzz everything that reads data (manifest, lock, receipts, signatures, keys, tables, cubins) with Atheris, a while each:
#   scripts/fuzz.sh [SECONDS [TARGET...]]     default: 60 s for each target of tests/fuzz/targets.py
# An input may take 10 s and 2 GiB. What breaks is kept in build/out/fuzz/<target>; exit 1 if anything was found.
set -euo pipefail
. "$(dirname "$0")/_env.sh"
seconds=${1:-60}
# Atheris takes anything else for 0, which is no limit.
[[ $seconds =~ ^[1-9][0-9]*$ ]] || { echo "SECONDS: expected a whole number above 0, got '$seconds'" >&2; exit 2; }
python -c "import atheris" 2>/dev/null || python -m pip install --quiet --editable "$root[fuzz]"
shift || true
targets=("$@")
if [ "${#targets[@]}" -eq 0 ]; then
    mapfile -t targets < <(PYTHONPATH=tests python -c "from fuzz.targets import TARGETS; print(*TARGETS, sep='\n')")
fi
status=0
for target in "${targets[@]}"; do
    corpus=build/out/fuzz/$target/corpus
    mkdir -p "$corpus"
    echo "$target: $seconds s"
    python tests/fuzz/run_atheris.py "$target" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -max_len=200000 \
        -print_final_stats=1 -verbosity=0 -artifact_prefix="build/out/fuzz/$target/" "$corpus" || status=1
done
exit $status
