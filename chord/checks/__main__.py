"""`python -m chord.checks [--tiny] [--only PATTERN]`: qualifies the current GPU and prints a line per program.

With --tiny the inputs suit a sanitizer, which need not look at torch's kernels:

    compute-sanitizer --tool memcheck --kernel-name kernel_substring=fused_router python -m chord.checks --tiny
    compute-sanitizer --tool racecheck --kernel-name kernel_substring=fused_router python -m chord.checks --tiny
    compute-sanitizer --tool racecheck --kernel-name kernel_substring=w4a16 python -m chord.checks --tiny --only 'moe*'
    compute-sanitizer --tool synccheck --kernel-name kernel_substring=route_plan python -m chord.checks --tiny
"""

from __future__ import annotations

import argparse
import sys

import torch

from chord.checks.qualify import Verdict, qualify_router
from chord.checks.qualify_w4a16 import qualify_w4a16


def main() -> int:
    """0 when every program passed."""
    parser = argparse.ArgumentParser(prog="python -m chord.checks", description="Check every program on this GPU.")
    parser.add_argument("--tiny", action="store_true", help="inputs small enough for compute-sanitizer")
    parser.add_argument("--only", default="*", help="shell pattern of program names; route_plan names its operator")
    options = parser.parse_args()
    device = torch.cuda.current_device()
    verdicts = qualify_router(device, tiny=options.tiny, only=options.only, progress=_show)
    verdicts += qualify_w4a16(device, tiny=options.tiny, only=options.only, progress=_show)
    failed = sum(bool(verdict.problems) for verdict in verdicts)
    print(f"{len(verdicts)} programs, {failed} failed")
    return 1 if failed else 0


def _show(verdict: Verdict) -> None:
    state = "FAILED" if verdict.problems else "ok"
    print(f"{state:6} {verdict.program} on {verdict.arch}, {verdict.cases} cases", flush=True)
    for problem in verdict.problems[:5]:
        print(f"       {problem}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
