"""A registry under load: processes of several threads that open, verify, look up, load and launch all the time, while
its cubins are replaced atomically underneath them.

`scripts/load.sh` runs the long form (16 processes of 4 threads, 5 minutes). Without a GPU a driver that runs nothing
stands in, and everything but the kernels' results is checked. Half of the replacements are the same bytes in a new
file; every twentieth cubin also holds damaged bytes for a while, which must be refused and never loaded.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

from chord.errors import VerificationError
from chord.registry import Registry
from chord.registry.files import write_atomically
from chord.registry.verify import verified_bytes

VICTIMS = 20
"""Of so many cubins one is damaged at times."""
SLACK_BYTES = {False: 16 << 20, True: 96 << 20}
"""How much a process may grow after its warm-up, without and with a GPU: allocators keep some of what they get."""


def copy_registry(target: Path) -> Path:
    """The present registry in a folder of its own."""
    source = Registry.open(relock=True)
    store = target / "build" / "out" / "cubins"
    store.mkdir(parents=True)
    shutil.copy(source.root / "manifest.json", target)
    for path in source.store.listing():
        shutil.copyfile(path, store / path.name)
    return target


def is_victim(sha256: str) -> bool:
    return int(sha256[:8], 16) % VICTIMS == 0


def replace_cubins(root: Path, stop: threading.Event) -> int:
    """Replace one cubin after another until told to stop, and leave good ones behind; how many replacements."""
    registry = Registry.open(root)
    good = {path.stem: path.read_bytes() for path in registry.store.listing()}
    count = 0
    while not stop.is_set():
        for sha256, data in good.items():
            path = registry.store.path_of(sha256)
            if is_victim(sha256):
                write_atomically(path, data[:-1] + bytes([data[-1] ^ 1]))
                time.sleep(0.002)
            write_atomically(path, data)
            count += 1
            if stop.is_set():
                break
    return count


class Worker:
    """One process: its threads, what they did, and what went wrong."""

    def __init__(self, root: Path, threads: int, seconds: float, gpu: bool) -> None:
        self.root, self.threads, self.seconds, self.gpu = root, threads, seconds, gpu
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.lock = threading.Lock()
        started = time.monotonic()
        if gpu:
            from load.kernels import Kernels

            self.kernels = Kernels(root, threads)
            self._count("refused", self.kernels.refused)
        self.startup_s = round(time.monotonic() - started, 1)

    def run(self) -> dict[str, object]:
        start = time.monotonic()
        warm = start + max(0.3 * self.seconds, 1.0)
        workers = [threading.Thread(target=self._loop, args=(n, start + self.seconds)) for n in range(self.threads)]
        for worker in workers:
            worker.start()
        while time.monotonic() < warm:
            time.sleep(0.05)
        before = usage()
        for worker in workers:
            worker.join()
        gc.collect()
        after = usage()
        if after["rss"] - before["rss"] > SLACK_BYTES[self.gpu]:
            self.faults.append(f"memory grew from {before['rss']} to {after['rss']} bytes")
        if after["descriptors"] > before["descriptors"]:
            self.faults.append(f"open files grew from {before['descriptors']} to {after['descriptors']}")
        if self.gpu:
            self.faults += self.kernels.faults()
        report = {"counts": dict(self.counts), "faults": self.faults[:20], "startup_s": self.startup_s}
        return {**report, "before": before, "after": after}

    def _loop(self, number: int, end: float) -> None:
        draw = random.Random(os.getpid() * 100 + number)
        try:
            while time.monotonic() < end:
                self._once(draw)
                if self.gpu:
                    self._count("launches", self.kernels.launch(number, draw))
        except BaseException as error:
            import traceback

            with self.lock:
                self.faults.append(f"{type(error).__name__}: {error}\n{traceback.format_exc()[-1500:]}")

    def _once(self, draw: random.Random) -> None:
        """Open anew, look up and verify a few programs, and load them through a loader of one's own."""
        registry = Registry.open(self.root)
        self._count("opened", 1)
        loader = None if self.gpu else fake_loader()
        if loader is not None:
            registry._loader = loader
        for _ in range(12):
            operator = draw.choice(sorted(registry.manifest.operators))
            arch = draw.choice(sorted(registry.manifest.operators[operator].routes))
            route = draw.choice(registry.coverage(operator, arch))
            problem = {k: draw.choice(v) if isinstance(v, tuple) else v for k, v in route.where.items()}
            found = registry.lookup(operator, arch, problem)
            if found.program_name != route.program:
                raise AssertionError(f"{problem} on {arch} found {found.program_name}, routed to {route.program}")
            self._prove(registry, found.program_name, arch)
            if loader is not None and arch == "sm_90a":
                self._load(registry, found.program_name)
        if loader is not None:
            api = loader.driver.api
            if len(api.images) != len(loader._loaded):
                raise AssertionError(f"{len(api.images)} modules for {len(loader._loaded)} loaded cubins")

    def _prove(self, registry: Registry, name: str, arch: str) -> None:
        operator = registry.manifest.operators[name.partition(".")[0]]
        program = operator.programs[name]
        sha256 = program.builds[arch].cubin_sha256
        try:
            data = verified_bytes(registry.store, name, program, operator.arms[program.arm], arch)
        except VerificationError:
            if not is_victim(sha256):
                raise
            self._count("refused", 1)
            return
        if hashlib.sha256(data).hexdigest() != sha256:
            raise AssertionError(f"{name} for {arch}: other bytes than the manifest's passed")
        self._count("verified", 1)

    def _load(self, registry: Registry, name: str) -> None:
        build = registry.programs()[name].builds["sm_90a"]
        try:
            registry.load(name)
        except VerificationError:
            if not is_victim(build.cubin_sha256):
                raise
            self._count("refused", 1)
            return
        images = {hashlib.sha256(image).hexdigest() for image in registry._loader.driver.api.images.values()}
        if build.cubin_sha256 not in images:
            raise AssertionError(f"{name}: the driver got other bytes")
        self._count("loaded", 1)

    def _count(self, what: str, number: int) -> None:
        with self.lock:
            self.counts[what] += number


def fake_loader():
    from unit.registry.fakes import FakeApi

    from chord.registry.driver import Driver
    from chord.registry.loading import Loader

    return Loader(Driver(FakeApi()))


def usage() -> dict[str, int]:
    """Resident bytes and open files of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"rss": pages * os.sysconf("SC_PAGE_SIZE"), "descriptors": len(list(Path("/proc/self/fd").iterdir()))}


def main() -> int:
    """0 when nothing went wrong. One line a fault, one JSON line in all."""
    parser = argparse.ArgumentParser(prog="scripts/load.sh", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--gpu", action="store_true", help="launch kernels, too, and compare every result")
    parser.add_argument("--deadline", type=float, help="end a process after so many seconds (default: twice + 240)")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.deadline = options.deadline or 2 * options.seconds + 240
    if options.worker:
        faulthandler.dump_traceback_later(options.deadline, exit=True)  # says where a process that hangs is
        print(json.dumps(Worker(options.worker, options.threads, options.seconds, options.gpu).run()))
        return 0
    with tempfile.TemporaryDirectory(prefix="chord-load-") as folder:
        return hammer(copy_registry(Path(folder)), options)


def hammer(root: Path, options: argparse.Namespace) -> int:
    """Run the workers while the cubins are replaced; print what they did."""
    words = [sys.executable, __file__, "--worker", str(root), f"--threads={options.threads}"]
    words += [f"--seconds={options.seconds}", f"--deadline={options.deadline}", *(["--gpu"] if options.gpu else [])]
    environment = {**os.environ, "CHORD_REGISTRY": str(root)}
    stop, replaced = threading.Event(), []
    replacer = threading.Thread(target=lambda: replaced.append(replace_cubins(root, stop)))
    replacer.start()
    processes = [
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for _ in range(options.processes)
    ]
    faults, counts, grown, startup_s = [], Counter(), 0, 0.0
    try:
        for process in processes:
            out, err = process.communicate(timeout=options.deadline + 60)
            if process.returncode or not out:
                faults.append(f"a process ended with {process.returncode}: {err[-2000:]}")
                continue
            report = json.loads(out.splitlines()[-1])
            faults += report["faults"]
            counts.update(report["counts"])
            startup_s = max(startup_s, report["startup_s"])
            grown = max(grown, report["after"]["rss"] - report["before"]["rss"])
    finally:
        stop.set()
        replacer.join()
        for process in processes:
            process.kill()
    if not Registry.open(root).verify().ok:
        faults.append("the store is not intact afterwards")
    print(*faults, sep="\n", file=sys.stderr)
    done = {"processes": options.processes, "threads": options.threads, "seconds": options.seconds}
    done |= {"startup_s": startup_s, "replaced": sum(replaced), "most_growth_bytes": grown, "faults": len(faults)}
    print(json.dumps({**done, **counts}))
    return 1 if faults or not counts["verified"] or (options.gpu and not counts["launches"]) else 0


if __name__ == "__main__":
    sys.exit(main())
