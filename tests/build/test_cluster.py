"""`chord build --executor dask://HOST:PORT` on a local cluster: the same bytes, and the same refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import toytree
from chord import _paths
from chord.build.cluster import ClusterPool
from chord.build.toolchain import load
from chord.build.tree import Tree
from chord.errors import ChordError

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
        env=environment, cwd=folder,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        assert address.startswith("tcp://"), address
        yield address.replace("tcp://", "dask://")
    finally:
        process.communicate(timeout=60)


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


def compilers() -> set[int]:
    """Processes of this machine that run our compiling loop."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"chord.build.worker" in path.read_bytes():
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found


def test_the_cluster_gives_the_same_bytes(tree: Tree, built: Tree, cluster: str) -> None:
    before = compilers()
    report = json.loads(chord("build", "--root", tree.root, "--executor", cluster, "--json"))
    assert report["compiled"] == toytree.CUBINS
    assert tree.manifest.read_bytes() == built.manifest.read_bytes()
    assert {path.name for path in tree.store.iterdir()} == {path.name for path in built.store.iterdir()}
    assert compilers() <= before, "no compiler outlives the build"


def test_a_compile_error_there_publishes_nothing(built: Tree, cluster: str) -> None:
    before = built.manifest.read_bytes()
    toytree.edit(built.root, SINGLE, "kThreads = ", "kThreads = nowhere + ")
    said = chord("build", "--root", built.root, "--executor", cluster, code=1)
    assert "12 cubins could not be built" in said
    assert 'identifier "nowhere" is undefined' in said
    assert built.manifest.read_bytes() == before


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
