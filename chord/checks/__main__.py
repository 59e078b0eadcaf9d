"""`python -m chord.checks [--tiny] [--only PATTERNS] [--counts N,N]`: qualifies the current GPU, a line per program.

With --tiny the inputs suit a sanitizer: they are made and judged on the host, and hardly a kernel but chord's runs.
scripts/sanitize.sh runs compute-sanitizer over every arm this way.
"""

from __future__ import annotations

import argparse
import sys

import torch

from chord.checks.qualify import Verdict
from chord.checks.suites import qualify_all


def main() -> int:
    """0 when every program passed, 1 when one failed or none was meant."""
    parser = argparse.ArgumentParser(prog="python -m chord.checks", description="Check every program on this GPU.")
    parser.add_argument("--tiny", action="store_true", help="inputs small enough for compute-sanitizer")
    parser.add_argument("--only", default="*", help="shell patterns of program names, separated by commas")
    parser.add_argument("--counts", type=_counts, help="numbers of router tokens, separated by commas")
    options = parser.parse_args()
    device = torch.cuda.current_device()
    verdicts = qualify_all(device, tiny=options.tiny, only=options.only, counts=options.counts, progress=_show)
    failed = sum(bool(verdict.problems) for verdict in verdicts)
    print(f"{len(verdicts)} programs, {failed} failed")
    return 1 if failed or not verdicts else 0


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def _show(verdict: Verdict) -> None:
    state = "FAILED" if verdict.problems else "ok"
    print(f"{state:6} {verdict.program} on {verdict.arch}, {verdict.cases} cases", flush=True)
    for problem in verdict.problems[:5]:
        print(f"       {problem}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
