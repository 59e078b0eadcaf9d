"""`python -m chord.checks [--tiny] [--only PATTERNS] [--jobs N] [--receipt FOLDER]`: qualifies the current GPU.

Prints a line per program, with the seconds that it took, and keeps the receipt up to date with them, so that a run that
is ended early leaves one of what it has checked. What `chord qualify` does, where neither typer nor rich is installed.
With --tiny the inputs suit a sanitizer: they are made and judged on the host, and hardly a kernel but chord's runs;
with --brief as well, there are fewer of them.
scripts/sanitize.sh runs compute-sanitizer over every arm this way.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch

from chord.checks import receipts
from chord.checks.qualify import Verdict
from chord.checks.shards import encode, qualify_in_processes
from chord.checks.suites import qualify_all


def main() -> int:
    """0 when every program passed, 1 when one failed or none was meant, 2 when nothing could be run."""
    parser = argparse.ArgumentParser(prog="python -m chord.checks", description="Check every program on this GPU.")
    parser.add_argument("--tiny", action="store_true", help="inputs small enough for compute-sanitizer")
    parser.add_argument("--brief", action="store_true", help="with --tiny: the fewest of them, each launched once")
    parser.add_argument("--only", default="*", help="shell patterns of program names, separated by commas")
    parser.add_argument("--counts", type=_counts, help="numbers of router tokens, separated by commas")
    parser.add_argument("--receipt", type=Path, help="folder for a receipt; none is written without it")
    parser.add_argument("--key", type=Path, help="Ed25519 private key (PEM) that signs the receipt")
    parser.add_argument("--jobs", "-j", type=int, default=1, help="processes at a time (default 1)")
    parser.add_argument("--device", type=int, help="CUDA ordinal, instead of the current device")
    parser.add_argument("--verdicts", action="store_true", help=argparse.SUPPRESS)  # for chord.checks.shards
    options = parser.parse_args()
    if options.counts and options.jobs > 1:
        parser.error("--counts: expected with one process, got --jobs as well")
    if options.brief and (options.jobs > 1 or options.receipt or not options.tiny):
        parser.error("--brief: expected with --tiny, with one process and without --receipt: it is for sanitizers")
    if options.key is not None and options.receipt is None:
        parser.error("--key signs a receipt: expected --receipt FOLDER as well")
    if not torch.cuda.is_available():
        print("expected a CUDA device, torch sees none; `chord doctor` says what is there", file=sys.stderr)
        return 2
    folder = None if options.receipt is None else receipts.folder(options.receipt)
    device = torch.cuda.current_device() if options.device is None else options.device
    check = partial(_verdicts, options, device)
    if folder is None:
        verdicts = check(_hand_over if options.verdicts else _show)
    else:
        journal = receipts.Journal(folder, device, tiny=options.tiny, key=options.key)
        verdicts = receipts.recorded(check, _show, journal)
        if journal.path is not None:
            print(f"receipt: {journal.path}")
    failed = sum(bool(verdict.problems) for verdict in verdicts)
    if not options.verdicts:
        print(f"{len(verdicts)} programs, {failed} failed")
    return 1 if failed or not verdicts else 0


def _verdicts(options: argparse.Namespace, device: int, progress: receipts.Progress) -> list[Verdict]:
    if options.jobs > 1:
        return qualify_in_processes(device, options.jobs, tiny=options.tiny, only=options.only, progress=progress)
    size = {"tiny": options.tiny, "brief": options.brief}
    return qualify_all(device, **size, only=options.only, counts=options.counts, progress=progress)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def _show(verdict: Verdict) -> None:
    state = "FAILED" if verdict.problems else "ok"
    cases = f"{verdict.cases} cases, {verdict.seconds:.1f} s"
    print(f"{state:6} {verdict.program} on {verdict.arch}, {cases}", flush=True)
    for problem in verdict.problems[:5]:
        print(f"       {problem}", flush=True)


def _hand_over(verdict: Verdict) -> None:
    print(encode(verdict), flush=True)


if __name__ == "__main__":
    sys.exit(main())
