"""Several builders on one tree, killed ones among them (case R06)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import toytree
from chord import _paths
from chord.build.builder import build
from chord.build.lock import exclusive
from chord.build.tree import Tree

SCRIPT = """
import sys
from pathlib import Path
from chord.build.builder import build
from chord.build.tree import Tree
print(build(tree=Tree(Path(sys.argv[1])), jobs=1).digest)
"""


def start(root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(root)],
        env={**os.environ, "PYTHONPATH": str(_paths.PACKAGE.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out.strip(), err


def wait_for(path: Path, files: int) -> None:
    """Until `path` holds that many files."""
    deadline = time.monotonic() + 60
    while not path.is_dir() or len(list(path.iterdir())) < files:
        assert time.monotonic() < deadline, f"{path} never held {files} files"
        time.sleep(0.005)


def partial_files(tree: Tree) -> list[Path]:
    """Files under final names whose bytes are not what their names say."""
    import hashlib

    files = [*tree.store.glob("*.cubin"), *(path for path in tree.work.iterdir() if not path.name.startswith("."))]
    digests = [re.search(r"([0-9a-f]{64})(\.cubin)?$", path.name) for path in files]
    return [
        path
        for path, digest in zip(files, digests, strict=True)
        if digest is None or hashlib.sha256(path.read_bytes()).hexdigest() != digest[1]
    ]


def test_r06_eight_builders_one_killed(tree: Tree, built: Tree) -> None:
    builders = [start(tree.root) for _ in range(8)]
    wait_for(tree.work, 3)
    victim = builders[0]
    os.kill(victim.pid, signal.SIGKILL)
    results = [finish(builder) for builder in builders]
    assert results[0][0] == -signal.SIGKILL
    for status, digest, err in results[1:]:
        assert (status, err) == (0, "")
        assert digest == results[1][1]
    assert tree.manifest.read_bytes() == built.manifest.read_bytes()
    assert not partial_files(tree)
    assert {path.name for path in tree.store.iterdir()} == {path.name for path in built.store.iterdir()}


@pytest.mark.parametrize("files", [1, 8, 20])
def test_r06_killed_at_any_moment(tree: Tree, built: Tree, files: int) -> None:
    killed = start(tree.root)
    wait_for(tree.work, files)
    killed.send_signal(signal.SIGKILL)
    assert finish(killed)[0] == -signal.SIGKILL
    assert not partial_files(tree)
    report = build(tree=tree, jobs=2)
    assert report.reused >= files - 1  # the last file may still have had its temporary name
    assert tree.manifest.read_bytes() == built.manifest.read_bytes()


def test_no_compiler_outlives_a_killed_build(tree: Tree) -> None:
    killed = start(tree.root)
    wait_for(tree.work, 1)
    children = Path(f"/proc/{killed.pid}/task/{killed.pid}/children")
    workers = children.read_text().split() if children.exists() else []
    killed.send_signal(signal.SIGKILL)
    assert finish(killed)[2] == "", "its compiler has nothing to say about a parent that is gone"
    deadline = time.monotonic() + 30
    while any(_runs(worker) for worker in workers):
        assert time.monotonic() < deadline, f"still there: {workers}"
        time.sleep(0.05)


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_waiting_is_told(tree: Tree) -> None:
    told: list[str] = []
    with exclusive(tree.out / "lock", waiting=lambda: None):
        waiter = subprocess.Popen(
            [sys.executable, "-c", WAITER, str(tree.root)],
            env={**os.environ, "PYTHONPATH": str(_paths.PACKAGE.parent)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert waiter.stdout is not None
        told.append(waiter.stdout.readline().strip())
    out, _ = waiter.communicate(timeout=60)
    assert (told, out.split()[-1]) == (["waiting"], str(toytree.CUBINS))


WAITER = """
import sys
from pathlib import Path
from chord.build.builder import build
from chord.build.tree import Tree
print(build(tree=Tree(Path(sys.argv[1])), jobs=2, progress=lambda step: print(step.outcome, flush=True)).cubins)
"""


TOGETHER = """
import sys, threading
sys.path[:0] = sys.argv[2:]
from unit.registry.fakes import FakeApi
from chord.registry import Registry
from chord.registry.driver import Driver
from chord.registry.loading import Loader
print("ready", flush=True)
sys.stdin.readline()
registry = Registry.open(sys.argv[1])
registry._loader = Loader(Driver(FakeApi()))
assert registry.verify().ok
for name, program in registry.programs(arch="sm_90a").items():
    registry.load(name)
print(len(registry._loader.driver.api.images))
"""


def test_r06_eight_processes_open_verify_and_load_together(built: Tree) -> None:
    paths = [str(_paths.PACKAGE.parent), str(_paths.PACKAGE.parent / "tests")]
    command = [sys.executable, "-c", TOGETHER, str(built.root), *paths]
    readers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    for reader in readers:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "ready\n"
    for reader in readers:  # all at once
        assert reader.stdin is not None
        reader.stdin.write("go\n")
        reader.stdin.flush()
    for reader in readers:
        out, err = reader.communicate(timeout=120)
        assert (reader.returncode, out, err) == (0, f"{toytree.PROGRAMS}\n", "")
