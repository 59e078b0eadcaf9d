"""`python -m chord.build`: build everything and print plain lines; `chord build` adds choices and colours."""

from __future__ import annotations

import argparse
import sys

from chord.build.builder import build
from chord.build.make import Step
from chord.errors import ChordError


def _print(step: Step) -> None:
    if step.outcome == "waiting":
        print("waiting for another build of this tree")
    elif step.outcome != "reused":
        print(f"[{step.done}/{step.total}] {step.outcome} {step.program} for {step.arch}", flush=True)


def main() -> int:
    """The exit status."""
    argparse.ArgumentParser(
        prog="python -m chord.build", description="Build every cubin and the manifest."
    ).parse_args()
    try:
        report = build(progress=_print)
    except ChordError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; finished cubins are kept for the next build", file=sys.stderr)
        return 130
    for (program, arch), log in report.warnings.items():
        print(f"{program} for {arch}:\n{log}", file=sys.stderr)
    print(f"{report.cubins} cubins ({report.compiled} compiled) in {report.seconds:.1f} s; manifest {report.digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
