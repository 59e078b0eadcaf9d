"""`chord build --executor dask://HOST:PORT` on a local cluster: the same bytes, and the same refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

import toytree
from chord import _paths
from chord._version import __version__
from chord.build import cluster as cluster_module
from chord.build.cluster import ClusterPool
from chord.build.nvrtc import Request, Result
from chord.build.toolchain import ToolchainPin, load
from chord.build.tree import Tree
from chord.errors import ChordError, ToolchainError

CLUSTER = """
import sys
from distributed import LocalCluster
if __name__ == "__main__":
    with LocalCluster(2, threads_per_worker=1, host="127.0.0.1", dashboard_address=None) as cluster:
        print(cluster.scheduler_address, flush=True)
        sys.stdin.read()
"""
SCHEDULER = """
import asyncio, sys
from distributed import Scheduler
async def main():
    async with Scheduler(host="127.0.0.1", port=0, dashboard_address=None) as scheduler:
        print(scheduler.address, flush=True)
        await asyncio.to_thread(sys.stdin.read)
asyncio.run(main())
"""
SINGLE = "templates/toy/single.cu.j2"


def _started(code: str, folder: Path) -> Iterator[str]:
    """Its address as --executor takes it. A process of its own: it starts threads and warns as it likes."""
    script = folder / "cluster.py"
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(_paths.PACKAGE.parent), "NVRTC_APPEND_FLAGS": "--nonsense"}
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=environment, cwd=folder, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        assert address.startswith("tcp://"), address
        yield address.replace("tcp://", "dask://")
    finally:
        _ended(process)


def _ended(process: subprocess.Popen[str]) -> None:
    """Asks the cluster to end, and then sees to it: on a loaded machine Dask's own way out may not lead there."""
    try:
        process.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=20)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("distributed", reason="needs Dask: pip install 'chord-registry[cluster]'")
    yield from _started(CLUSTER, tmp_path_factory.mktemp("cluster"))


def chord(*words: object, code: int = 0) -> str:
    command = [sys.executable, "-m", "chord", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(_paths.PACKAGE.parent)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr if code else done.stdout


def compilers(factory: pytest.TempPathFactory) -> set[int]:
    """Processes that run our compiling loop for clusters of this run: those are told the folder of its script.

    Others of this machine come and go as other builds do.
    """
    folder = os.fsencode(factory.getbasetemp())
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            said = path.read_bytes()
            if b"chord.build.worker" in said and folder in said:
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found


def test_the_cluster_gives_the_same_bytes(
    tree: Tree, built: Tree, cluster: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    report = json.loads(chord("build", "--root", tree.root, "--executor", cluster, "--json"))
    assert report["compiled"] == toytree.CUBINS
    assert tree.manifest.read_bytes() == built.manifest.read_bytes()
    assert {path.name for path in tree.store.iterdir()} == {path.name for path in built.store.iterdir()}
    assert not compilers(tmp_path_factory), "no compiler outlives the build"


def test_a_compile_error_there_publishes_nothing(built: Tree, cluster: str) -> None:
    before = built.manifest.read_bytes()
    toytree.edit(built.root, SINGLE, "kThreads = ", "kThreads = nowhere + ")
    said = chord("build", "--root", built.root, "--executor", cluster, code=1)
    assert "12 cubins could not be built" in said
    assert 'identifier "nowhere" is undefined' in said
    assert built.manifest.read_bytes() == before


class Compiler:
    """In the place of a compiler's process: its result names the pin that it was started with."""

    def __init__(self, pin: ToolchainPin) -> None:
        self.pin, self.alive, self.closed = pin, True, False
        STARTED.append(self)

    def compile(self, request: Request) -> Result:
        return Result(cubin=None, log=self.pin.identity if self.alive else "ended")

    def end(self) -> int:
        self.alive = False
        return -9

    def close(self) -> None:
        self.closed = True


STARTED: list[Compiler] = []


@pytest.fixture
def worker(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Compiles for a build with a version pinned, on this thread, as a worker's does; returns which version did."""
    monkeypatch.setattr(cluster_module, "CompilerProcess", Compiler)
    monkeypatch.setattr(cluster_module, "_processes", {})
    monkeypatch.setattr(cluster_module, "_ended", deque(maxlen=4))
    STARTED.clear()
    pin = load(tree.toolchain)
    request = msgspec.msgpack.encode(Request(name="a", source="", headers={}, options=()))

    def compiled(build: str, version: str) -> str:
        compiler = msgspec.structs.replace(pin.compiler, version=version)
        wanted = msgspec.msgpack.encode(msgspec.structs.replace(pin, compiler=compiler))
        answer = cluster_module._compile(build, wanted, request, __version__)
        return msgspec.msgpack.decode(answer, type=Result).log.rpartition(" ")[2]

    return compiled


def test_two_pins_on_one_worker(worker: Callable[..., str]) -> None:
    """Builds that take turns, and one whose pin changes: each request is compiled by the pin that it brings."""
    turns = [("a", "12.9.1"), ("b", "13.0.0"), ("a", "12.9.1"), ("b", "13.0.0"), ("b", "12.9.1")]
    assert [worker(*turn) for turn in turns] == [version for _, version in turns]
    assert len(STARTED) == 3, "kept from request to request"


def test_a_build_ends_its_own_compilers_alone(worker: Callable[..., str]) -> None:
    worker("a", "12.9.1")
    worker("b", "12.9.1")
    cluster_module._end_processes("a")
    first, second = STARTED
    assert not first.alive
    assert first.closed
    assert second.alive
    assert worker("b", "12.9.1") == "12.9.1"
    assert len(STARTED) == 2
    assert worker("a", "12.9.1") == "ended", "a request that comes late gets no result"
    assert not STARTED[-1].alive
    assert STARTED[-1].closed
    cluster_module._end_processes("b")
    assert cluster_module._processes == {}


def test_a_compiler_that_died_is_replaced(worker: Callable[..., str]) -> None:
    worker("a", "12.9.1")
    STARTED[0].end()
    assert worker("a", "12.9.1") == "12.9.1"
    assert STARTED[0].closed
    assert list(cluster_module._processes.values()) == STARTED[1:]


def test_a_worker_takes_the_pin_of_each_build(
    tree: Tree, cluster: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """On a real cluster: a compiler that another build has running does not hide a pin that cannot be had."""
    pin = load(tree.toolchain)
    libraries = {platform: dict.fromkeys(files, "0" * 64) for platform, files in pin.libraries.items()}
    options = pin.options("sm_90a")
    request = Request(name="a.cu", source='extern "C" __global__ void a() {}', headers={}, options=options)
    four = dict.fromkeys(range(4), request)  # so that both workers have one
    with ClusterPool(pin, cluster) as right:
        assert all(result.cubin for _, result in right.compile_all(four))
        before = compilers(tmp_path_factory)
        assert before
        with (
            pytest.raises(ToolchainError, match="cannot compile"),
            ClusterPool(msgspec.structs.replace(pin, libraries=libraries), cluster) as wrong,
        ):
            list(wrong.compile_all(four))
        assert before <= compilers(tmp_path_factory), "the build that goes on keeps its own"
        assert all(result.cubin for _, result in right.compile_all(four))


class Silent:
    """In the place of a client whose cluster does not answer any more."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.never = threading.Event()

    def run(self, *words: object) -> None:
        self.asked.append("run")
        self.never.wait()

    def close(self) -> None:
        self.asked.append("close")
        raise OSError("the scheduler is gone")


def test_a_build_does_not_wait_for_a_cluster_that_is_silent(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "_LEAVE_S", 0.2)
    pool = ClusterPool(load(tree.toolchain), "dask://127.0.0.1:1")
    client = pool._client = Silent()
    start = time.monotonic()
    pool.__exit__(None, None, None)
    assert time.monotonic() - start < 10
    assert client.asked == ["run", "close"]
    client.never.set()


@pytest.mark.parametrize(
    ("executor", "said"),
    [
        ("dask://127.0.0.1:1", "expected a Dask scheduler, cannot connect"),
        ("tcp://127.0.0.1:8786", "expected dask://HOST:PORT"),
        ("dask://somewhere", "expected dask://HOST:PORT"),
        ("ray://127.0.0.1:1", "expected dask://HOST:PORT"),
    ],
)
def test_an_executor_that_is_none(tree: Tree, executor: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed", reason="needs Dask: pip install 'chord-registry[cluster]'")
    monkeypatch.setattr("chord.build.cluster._CONNECT_S", 1)
    pin = load(tree.toolchain)
    with pytest.raises(ChordError, match=said):
        ClusterPool(pin, executor).__enter__()
    assert not tree.manifest.exists()


def test_a_cluster_without_workers(tree: Tree, tmp_path: Path) -> None:
    pytest.importorskip("distributed", reason="needs Dask: pip install 'chord-registry[cluster]'")
    for address in _started(SCHEDULER, tmp_path):
        assert "it has none; start some" in chord("build", "--root", tree.root, "--executor", address, code=1)


def test_check_compiles_here(tree: Tree) -> None:
    words = "build", "--check", "--root", tree.root, "--executor", "dask://127.0.0.1:1"
    assert "--executor compiles for a build" in " ".join(chord(*words, code=2).split())
