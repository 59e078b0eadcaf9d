"""`python -m chord.checks [--tiny]`: qualifies the current GPU and prints a line per program.

With --tiny the inputs suit a sanitizer:

    compute-sanitizer --tool memcheck python -m chord.checks --tiny
    compute-sanitizer --tool racecheck python -m chord.checks --tiny
    compute-sanitizer --tool synccheck python -m chord.checks --tiny
"""

from __future__ import annotations

import argparse
import sys

import torch

from chord.checks.qualify import ROUTER_COUNTS, TINY_COUNTS, Verdict, qualify_router


def main() -> int:
    """0 when every program passed."""
    parser = argparse.ArgumentParser(
        prog="python -m chord.checks", description="Check every router program on this GPU."
    )
    parser.add_argument("--tiny", action="store_true", help="inputs small enough for compute-sanitizer")
    counts = TINY_COUNTS if parser.parse_args().tiny else ROUTER_COUNTS
    verdicts = qualify_router(torch.cuda.current_device(), counts, _show)
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
