"""Times whole experts in vLLM, Kimi K2 on eight GPUs, beside vLLM's humming backend, and writes a results file.

    python scripts/bench_vllm.py --peers PEERS [--out FOLDER]

For a machine with an H200, torch with CUDA and vLLM's package; tests/vllmhost.py stands in for what a bare one lacks.
PEERS holds whl/humming_kernels-*.whl, which is unpacked unless humming is installed. Humming compiles in processes of
their own first, all at the same time. It finds a compiled kernel again only from the same folder, so that with an
installed one a second run can do --without-warm-up.
"""

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PART = "vllm"
"""Ends the results file's name: `chord bench layer` writes the other part of the suite."""
WARM = [
    ("vllm_tp8", "humming_indexed"),
    ("vllm_ep8", "humming_grouped"),
    ("vllm_ep8", "humming_indexed"),
]
"""A split, and the subject whose kernels for all sizes one forward compiles."""


def main() -> None:
    """Either the whole run, or with --warm one of its processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True, help="folder with humming's wheel")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="folder for the results file")
    parser.add_argument("--samples", type=int, default=31)
    parser.add_argument("--commit", help="of the code that is measured, where git cannot tell")
    parser.add_argument("--without-warm-up", action="store_true", help="Humming has compiled all of it before")
    parser.add_argument("--warm", nargs=2, metavar=("SPLIT", "NAME"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    if options.warm:
        warm(options.peers, *options.warm)
    else:
        run(options)


def start(humming: Path) -> None:
    """vLLM, with humming found before it looks for it."""
    sys.path.insert(0, str(humming))
    import vllmhost  # type: ignore[import-not-found]

    vllmhost.start()
    from chord.integrations import vllm as plugin

    plugin.register()


def warm(humming: Path, split: str, name: str) -> None:
    start(humming)
    from chord.bench import vllm as bench

    bench.warm(split, name)


def run(options: argparse.Namespace) -> None:
    humming = installed() or unpacked(options.peers)
    command = [sys.executable, __file__, "--peers", str(humming), "--warm"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    todo = [] if options.without_warm_up else WARM
    jobs = {words: subprocess.Popen([*command, *words], **quiet) for words in todo}  # type: ignore[call-overload]
    start(humming)
    for words, job in jobs.items():
        said = job.communicate()[1]
        if job.returncode:
            print(f"{' '.join(words)} did not warm up:\n{said[-2000:]}", file=sys.stderr)
    from chord.bench import vllm as bench
    from chord.bench.results import Results, Row, file_name, write

    def show(row: Row) -> None:
        others = {**row.peers, **row.chord}
        words = [f"{name} {us:.1f} us ({us / row.us:.2f}x)" for name, us in others.items()]
        print(f"{row.scenario} {row.tokens:5d} tokens: chord {row.us:.1f} us, {', '.join(words)}", flush=True)

    def save(found: Results) -> None:
        write(found, options.out / file_name(found, PART))

    given = {"samples": options.samples, "commit": options.commit}
    found = bench.run(options.peers, steady_ms=100, progress=show, save=save, **given)
    print(f"written: {options.out / file_name(found, PART)}")


def installed() -> Path | None:
    """The folder that holds humming's package, if it can be imported."""
    found = importlib.util.find_spec("humming")
    return None if found is None or found.origin is None else Path(found.origin).parents[1]


def unpacked(peers: Path) -> Path:
    """Humming's wheel as a folder. Its programs must be executable, which zipfile forgets."""
    wheels = sorted((peers / "whl").glob("humming_kernels-*.whl"))
    if not wheels:
        raise SystemExit(f"--peers {peers}: expected a wheel whl/humming_kernels-*.whl in this folder, found none")
    wheel = wheels[-1]
    folder = Path(tempfile.mkdtemp(prefix="chord-peers-"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    for path in folder.rglob("*"):
        path.chmod(path.stat().st_mode | 0o555)
    return folder


if __name__ == "__main__":
    main()
