"""A build that fails publishes nothing, says where and why, and keeps what was finished (case R25)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import toytree
from chord._version import __version__
from chord.build.builder import BuildFailedError, build
from chord.build.check import check
from chord.build.nvrtc import Request, Result
from chord.build.pool import CompilerPool
from chord.build.tree import Tree
from chord.errors import ManifestError, TableError

SINGLE = "templates/toy/single.cu.j2"
MANY = "templates/toy/many.cu.j2"


def snapshot(tree: Tree) -> dict[str, bytes]:
    """Manifest and store."""
    return {path.name: path.read_bytes() for path in [tree.manifest, *tree.store.iterdir()]}


def fail(tree: Tree) -> BuildFailedError:
    """Build, see it fail, and check that nothing was published."""
    before = snapshot(tree)
    with pytest.raises(BuildFailedError) as caught:
        build(tree=tree, jobs=2)
    assert snapshot(tree) == before
    return caught.value


def test_r25_an_error_on_one_architecture_alone(built: Tree) -> None:
    body = "    constexpr int kThreads"
    toytree.edit(built.root, SINGLE, body, f"#if __CUDA_ARCH__ == 1030\n    nowhere(factor);\n#endif\n{body}")
    error = fail(built)
    assert {failure.arch for failure in error.failures} == {"sm_103a"}
    assert len(error.failures) == 4
    first = error.failures[0]
    assert first.where == f"{first.program}.cu:5"
    assert 'identifier "nowhere" is undefined' in first.log
    assert first.kept_source == built.failed / f"{first.program}.sm_103a.cu"
    assert first.kept_source.read_text().splitlines()[4].strip() == "nowhere(factor);"
    text = str(error)
    assert text.startswith("4 cubins could not be built:\ntoy.single.w64.l2.f32.t1.bm8 for sm_103a: ")
    assert 'identifier "nowhere" is undefined' in text
    assert str(first.kept_source) in text


def test_r25_finished_work_is_reused_next_time(built: Tree) -> None:
    toytree.edit(built.root, "templates/include/common/base.cuh", "1.0f", "2.0f")
    toytree.edit(built.root, SINGLE, "kThreads = ", "kThreads = nowhere + ")
    assert len(fail(built).failures) == 4 * 3
    toytree.edit(built.root, SINGLE, "nowhere + ", "")
    report = build(tree=built, jobs=2)
    assert (report.compiled, report.reused) == (4 * 3, 4 * 3)
    assert not built.failed.exists()


def test_a_mistake_in_a_header_does_not_bury_the_reader(built: Tree) -> None:
    toytree.edit(built.root, "templates/include/common/base.cuh", "1.0f", "nowhere")
    text = str(fail(built))
    assert text.startswith(f"{toytree.CUBINS} cubins could not be built:\n")
    assert text.count('identifier "nowhere" is undefined') == 10
    assert text.count(" for sm_100a: common/base.cuh:5") == toytree.PROGRAMS


def test_r25_an_undefined_name_in_a_template(built: Tree) -> None:
    toytree.edit(built.root, SINGLE, "+ {{ num_tokens }}", "+ {{ num_token }}")
    error = fail(built)
    assert [failure.where for failure in error.failures] == ["templates/toy/single.cu.j2:5"] * 12
    assert "'num_token' is undefined; given are width=64" in error.failures[0].log


def test_a_template_that_is_not_there(built: Tree) -> None:
    (built.root / SINGLE).unlink()
    assert "templates/toy/single.cu.j2: no such template" in fail(built).failures[0].log


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('#include "local.cuh"', "'local.cuh' is not under templates/include"),
        ('#include "/etc/passwd"', "absolute includes are refused"),
        ('#if __has_include("stray.h")\n#endif', "'stray.h' is not under templates/include"),
        ("const char* when = __TIME__;", "__TIME__ is refused"),
        ("#include <cuda_fp16.h>", "'cuda_fp16.h' is not under templates/include"),
    ],
)
def test_r24_what_would_escape_the_closure(built: Tree, line: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(built.root)
    (built.root / "local.cuh").write_text("")
    toytree.edit(built.root, SINGLE, '#include "toy/scale.cuh"', f'#include "toy/scale.cuh"\n{line}')
    error = fail(built)
    assert said in error.failures[0].log
    assert error.failures[0].where == f"{error.failures[0].program}.cu:2"


def test_spills_fail_unless_the_table_allows_them(built: Tree) -> None:
    old = "out[threadIdx.x] = toy::scale(threadIdx.x, factor)"
    toytree.edit(
        built.root,
        SINGLE,
        f"    if (threadIdx.x < kThreads) {old}",
        "    float kept[256];\n    for (int i = 0; i < 256; ++i) kept[static_cast<int>(out[i]) & 255] = out[i];\n"
        f"    if (threadIdx.x < kThreads) {old} + kept[static_cast<int>(factor) & 255]",
    )
    assert "needs 1024 bytes of local memory a thread" in fail(built).failures[0].log
    toytree.edit(built.root, "registry/toy.toml", 'name = "single"', 'name = "single"\nallow_spills = true')
    report = build(tree=built)
    assert (report.compiled, report.reused) == (12, 12)


def test_shared_memory_is_limited_with_what_the_kernel_declares(built: Tree) -> None:
    toytree.edit(built.root, "registry/toy.toml", '"width * 16"', '"232448"')
    failure = fail(built).failures[0]
    assert (
        "arms[1].kernels[1].dynamic_smem_bytes: toy_many_w64_l2_f32_finish needs 8 bytes of static and 232448"
        in failure.log
    )
    assert failure.where.startswith("registry/toy.toml:")


def test_kernels_and_arguments_that_are_not_the_tables(built: Tree) -> None:
    toytree.edit(built.root, MANY, "{{ symbol }}_finish", "{{ symbol }}_end")
    assert (
        "expected the kernels toy_many_w64_l2_f32, toy_many_w64_l2_f32_finish; it defines"
        in fail(built).failures[0].log
    )
    toytree.edit(
        built.root,
        MANY,
        "{{ symbol }}_end(float* out, int num_tokens",
        "{{ symbol }}_finish(float* out, long num_tokens",
    )
    assert "takes parameters of [8, 8, 4] bytes, the table's args (out, num_tokens, factor) are [8, 4, 4]" in (
        fail(built).failures[0].log
    )


def test_an_error_in_the_table_comes_before_anything_else(built: Tree) -> None:
    before = snapshot(built)
    toytree.edit(built.root, "registry/toy.toml", '[3, 1000, "many"]', '[4, 1000, "many"]')
    with pytest.raises(TableError, match="no route"):
        build(tree=built)
    assert snapshot(built) == before


def test_a_registry_of_another_version_is_not_published(built: Tree) -> None:
    before = snapshot(built)
    toytree.edit(built.root, "registry/registry.toml", f'version = "{__version__}"', 'version = "99.0"')
    with pytest.raises(TableError, match=rf"registry\.toml: version: expected {__version__}, .* got 99\.0"):
        build(tree=built)
    assert snapshot(built) == before


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (Result(cubin=b"", log=""), "the compiler's result has 0 bytes"),
        (Result(cubin=b"<html>", log=""), "expected a cubin, got an HTML page"),
        (Result(cubin=None, log="worker gone"), "worker gone"),
    ],
)
def test_r25_results_that_are_no_cubins(
    built: Tree, result: Result, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(built.work)
    monkeypatch.setattr(CompilerPool, "_compile", lambda self, request: result)
    assert said in fail(built).failures[0].log


def test_a_cubin_for_another_architecture(built: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(built.work)
    honest = CompilerPool._compile

    def confuse(self: CompilerPool, request: Request) -> Result:
        options = tuple(option.replace("sm_103a", "sm_100a") for option in request.options)
        return honest(self, Request(name=request.name, source=request.source, headers=request.headers, options=options))

    monkeypatch.setattr(CompilerPool, "_compile", confuse)
    error = fail(built)
    assert {failure.arch for failure in error.failures} == {"sm_103a"}
    assert "the compiler's result is for sm_100a, expected sm_103a" in error.failures[0].log


def test_failed_sources_are_those_of_the_last_build(tree: Tree) -> None:
    toytree.edit(tree.root, SINGLE, "kThreads = ", "kThreads = nowhere + ")
    with pytest.raises(BuildFailedError):
        build(tree=tree, jobs=2)
    assert len(list(tree.failed.glob("*.cu"))) == len(list(tree.failed.glob("*.log"))) == 12
    assert not tree.manifest.exists()
    assert not Path(tree.store).exists()


def test_a_serial_that_goes_back(built: Tree) -> None:
    before = snapshot(built)
    toytree.edit(built.root, "registry/registry.toml", "serial = 3", "serial = 2")
    for locked in (False, True):
        with pytest.raises(TableError, match=r"^registry/registry\.toml: serial: .* at least 3, .*got 2: .*raise it"):
            build(tree=built, jobs=2, locked=locked)
    assert snapshot(built) == before
    toytree.edit(built.root, "registry/registry.toml", "serial = 2", "serial = 4")
    build(tree=built, jobs=2)
    assert b'"serial": 4' in built.manifest.read_bytes()


def test_a_manifest_too_large_to_be_one_is_not_read(built: Tree) -> None:
    good = built.manifest.read_bytes()
    with built.manifest.open("ab") as file:
        file.truncate(1 << 36)  # takes no room on the disk
    with pytest.raises(ManifestError, match="cannot be read: expected at most"):
        check(tree=built)
    build(tree=built, jobs=2)
    assert built.manifest.read_bytes() == good


def test_a_manifest_that_cannot_be_read_holds_no_serial_back(built: Tree) -> None:
    toytree.edit(built.root, "registry/registry.toml", "serial = 3", "serial = 2")
    built.manifest.write_text("<<<<<<< ours\n")
    assert build(tree=built, jobs=2).compiled == 0
