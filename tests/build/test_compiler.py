"""The compiling processes: what they are told, how they fail, and that the build survives it."""

from __future__ import annotations

import os
import signal

import pytest

import toytree
from chord.build import jobs as jobs_module
from chord.build.builder import build
from chord.build.nvrtc import Nvrtc, Request
from chord.build.pool import CompilerPool
from chord.build.tree import Tree
from chord.errors import ToolchainError


def request(source: str, headers: dict[str, str] | None = None) -> Request:
    options = ("--gpu-architecture=sm_90a", "--std=c++17", "--no-source-include", "--no-cache")
    return Request(name="k.cu", source=source, headers=headers or {}, options=options)


GOOD = request('extern "C" __global__ void k() {}')


def alter_digests(tree: Tree) -> None:
    """Pin libraries that nobody has; closures stay the same, since they name the version."""
    for start in ("7c67c6b5", "3a599a16"):
        toytree.edit(tree.root, "build/toolchain.toml", start, "00000000")


@pytest.fixture
def pool(tree: Tree) -> CompilerPool:
    return CompilerPool(jobs_module.read(tree).pin, 1)


def test_log_names_source_header_and_line(pool: CompilerPool) -> None:
    bad = request('\n#include "x.cuh"\n', {"x.cuh": "\n\nnowhere;\n"})
    with pool:
        ((_, result),) = pool.compile_all({"bad": bad})
    assert result.cubin is None
    assert "x.cuh(3): error" in result.log


def test_a_compiler_that_dies_costs_one_result(pool: CompilerPool) -> None:
    with pool:
        assert next(pool.compile_all({0: GOOD}))[1].cubin
        os.kill(pool._processes[0]._popen.pid, signal.SIGKILL)
        ((_, died),) = pool.compile_all({1: GOOD})
        ((_, again),) = pool.compile_all({2: GOOD})
    assert died.cubin is None
    assert died.log == f"the compiler's process ended without a result (status -{int(signal.SIGKILL)})"
    assert again.cubin


def test_leaving_the_pool_ends_its_processes(pool: CompilerPool) -> None:
    with pool:
        next(pool.compile_all(dict.fromkeys(range(20), GOOD)))
    assert [process._popen.poll() for process in pool._processes] == [-signal.SIGKILL]


@pytest.mark.parametrize("jobs", [0, -1])
def test_jobs_are_at_least_one(tree: Tree, jobs: int) -> None:
    with pytest.raises(ToolchainError, match=f"jobs: expected at least 1, got {jobs}"):
        build(tree=tree, jobs=jobs)


def test_a_compiler_with_other_bytes_is_not_loaded(tree: Tree) -> None:
    alter_digests(tree)
    with pytest.raises(ToolchainError, match=r"libnvrtc\.so\.12: expected SHA-256 .* not loaded"):
        build(tree=tree, jobs=2)
    assert not tree.manifest.exists()


def test_a_library_of_another_version_is_refused(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Nvrtc, "version", lambda self: "12.8")
    with pytest.raises(ToolchainError, match=r"says that it is NVRTC 12\.8, the pin is 12\.9\.86"):
        Nvrtc.open(jobs_module.read(tree).pin)


def test_nothing_to_compile_needs_no_compiler(built: Tree) -> None:
    alter_digests(built)
    assert build(tree=built).reused == toytree.CUBINS
