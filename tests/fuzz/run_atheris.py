"""`python tests/fuzz/run_atheris.py TARGET [options of libFuzzer]`: Atheris over one of targets.py's targets.

scripts/fuzz.sh runs all of them for a while each. Whatever is found is kept as a file and named; running the script
with that file repeats it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]
with atheris.instrument_imports(include=["chord"]):
    from fuzz.targets import TARGETS, try_one


def main() -> None:
    """Fuzz until the options say stop; the process ends with a status that is not 0 when something was found."""
    name, *options = sys.argv[1:] or [""]
    if name not in TARGETS:
        sys.exit(f"expected one of {', '.join(TARGETS)}, got {name!r}")
    corpus = Path(options[-1]) if options and not options[-1].startswith("-") else None
    if corpus is not None and corpus.is_dir():
        for number, seed in enumerate(TARGETS[name].seeds()):
            (corpus / f"seed-{number}").write_bytes(seed)
    atheris.Setup([sys.argv[0], *options], lambda data: try_one(name, bytes(data)))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
