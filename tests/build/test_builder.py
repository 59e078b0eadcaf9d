"""`chord build` on the toy tree: complete, incremental, deterministic, its store exactly the manifest's."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

import toytree
from chord import _paths
from chord.build import jobs as jobs_module
from chord.build.builder import build, read_manifest, recorded_builds
from chord.build.jobs import Selection
from chord.build.make import Step
from chord.build.tree import Tree
from chord.errors import ChordError, ToolchainError
from chord.registry import canonical, cubin
from chord.registry.schema import Manifest
from chord.registry.store import Store


def manifest_of(tree: Tree) -> Manifest:
    return canonical.decode(tree.manifest.read_bytes(), "manifest.json")


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_cold_build_makes_everything(tree: Tree) -> None:
    steps: list[Step] = []
    report = build(tree=tree, jobs=2, progress=steps.append)
    assert (report.cubins, report.compiled, report.reused) == (toytree.CUBINS, toytree.CUBINS, 0)
    assert [step.done for step in steps] == list(range(1, toytree.CUBINS + 1))
    assert {step.outcome for step in steps} == {"compiled"}
    assert report.digest == canonical.digest(tree.manifest.read_bytes())
    manifest = manifest_of(tree)
    assert len(manifest.operators["toy"].programs) == toytree.PROGRAMS
    named = {f"{entry.cubin_sha256}.cubin" for entry in recorded_builds(manifest).values()}
    assert {path.name for path in tree.store.iterdir()} == named


def test_every_record_is_its_cubins(built: Tree) -> None:
    store, manifest = Store(built.store), manifest_of(built)
    for (name, arch), entry in recorded_builds(manifest).items():
        data = store.read_verified(entry.cubin_sha256, entry.size_bytes)
        info = cubin.parse(data)
        assert info.arch == arch
        kernels = manifest.operators["toy"].programs[name].kernels
        assert {config.symbol for config in kernels} == set(info.kernels)
        for config, recorded in zip(kernels, entry.kernels, strict=True):
            found = info.kernels[config.symbol]
            assert (recorded.registers, recorded.spill_bytes) == (found.registers, 0)
            assert recorded.static_smem_bytes == found.static_smem_bytes


def test_what_the_table_says_is_in_the_manifest(built: Tree) -> None:
    manifest = manifest_of(built)
    assert (manifest.registry.serial, manifest.toolchain.version) == (3, "12.9.86")
    assert manifest.toolchain.options["sm_90a"][0] == "--gpu-architecture=sm_90a"
    toy = manifest.operators["toy"]
    many = toy.programs["toy.many.w128.l4.bf16"]
    assert many.constants == {"width": 128, "lanes": 4, "kind": "bf16"}
    assert (many.num_tokens, many.block_m) == (None, None)
    assert (many.workspace.bytes, many.workspace.bytes_per_token, many.workspace.zeroed) == (512, 8, True)
    first, second = many.kernels
    assert (first.symbol, first.block, first.grid.param) == ("toy_many_w128_l4_bf16", (128, 1, 1), "num_tokens")
    assert (second.symbol, second.cluster, second.dynamic_smem_bytes) == ("toy_many_w128_l4_bf16_finish", 2, 2048)
    single = toy.programs["toy.single.w64.l2.f32.t2.bm8"]
    assert single.constants == {"width": 64, "lanes": 2, "kind": "f32", "num_tokens": 2, "block_m": 8, "threads": 64}
    assert (single.num_tokens, single.block_m) == (2, 8)
    routed = {route.program for route in toy.routes["sm_100a"] if route.where["num_tokens"] == (2, 2)}
    assert routed == {"toy.single.w64.l2.f32.t2.bm8", "toy.single.w128.l4.f32.t2.bm8"}
    assert toy.notes["sm_103a"] == "reasoned"
    assert (
        manifest.sources["include/common/base.cuh"]
        == hashlib.sha256((built.include / "common" / "base.cuh").read_bytes()).hexdigest()
    )


def test_nothing_changed_compiles_nothing(built: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("the compiler was asked for")

    monkeypatch.setattr("chord.build.make.CompilerPool", refuse)
    before, times = built.manifest.read_bytes(), built.manifest.stat().st_mtime_ns
    report = build(tree=built)
    assert (report.compiled, report.reused, report.removed) == (0, toytree.CUBINS, ())
    assert (built.manifest.read_bytes(), built.manifest.stat().st_mtime_ns) == (before, times)


def test_one_template_changed_compiles_its_programs_alone(built: Tree) -> None:
    before = recorded_builds(read_manifest(built))
    toytree.edit(built.root, "templates/toy/single.cu.j2", "+ {{ num_tokens }}", "- {{ num_tokens }}")
    report = build(tree=built, jobs=2)
    assert report.compiled == 4 * len(toytree.ARCHS)
    after = recorded_builds(read_manifest(built))
    changed = {key for key in before if before[key] != after[key]}
    assert {name.split(".")[1] for name, _ in changed} == {"single"}
    assert len(report.removed) == report.compiled
    assert {path.stem for path in built.store.iterdir()} == {entry.cubin_sha256 for entry in after.values()}


def test_a_comment_in_a_header_changes_closures_not_names(built: Tree) -> None:
    before = recorded_builds(read_manifest(built))
    toytree.edit(built.root, "templates/include/common/verbose.cuh", "#pragma once", "#pragma once  // said")
    assert build(tree=built, jobs=2).compiled == toytree.CUBINS
    after = recorded_builds(read_manifest(built))
    assert before.keys() == after.keys()
    assert all(before[key].closure_sha256 != after[key].closure_sha256 for key in before)
    assert all(before[key].cubin_sha256 == after[key].cubin_sha256 for key in before)


@pytest.mark.parametrize("fault", ["missing", "empty", "altered", "folder"])
def test_a_damaged_store_is_repaired(built: Tree, fault: str) -> None:
    before = files_of(built.store)
    victim = sorted(built.store.iterdir())[3]
    if fault == "altered":
        victim.write_bytes(victim.read_bytes()[:-1] + b"\xaa")
    elif fault == "empty":
        victim.write_bytes(b"")
    else:
        victim.unlink()
    if fault == "folder":
        (built.store / "stray").mkdir()
    (built.store / "deadbeef.cubin").write_bytes(b"stray")
    (built.store / f".{'0' * 64}.abcd.tmp").write_bytes(b"left by a killed writer")
    (built.root / ".manifest.json.abcd.tmp").write_bytes(b"left by a killed writer")
    report = build(tree=built)
    assert files_of(built.store) == before
    assert "deadbeef.cubin" in report.removed
    assert not list(built.root.glob(".*.tmp"))


def test_a_damaged_finished_cubin_is_compiled_again(built: Tree) -> None:
    victim = sorted(built.work.iterdir())[0]
    victim.write_bytes(b"\0" * 100)
    assert build(tree=built).compiled == 1


def test_a_manifest_that_lies_is_replaced(built: Tree) -> None:
    good = built.manifest.read_bytes()
    builds = recorded_builds(read_manifest(built))
    one, other = (builds["toy.many.w64.l2.f32", arch].cubin_sha256.encode() for arch in ("sm_90a", "sm_100a"))
    built.manifest.write_bytes(good.replace(one, other))
    build(tree=built)
    assert built.manifest.read_bytes() == good


def test_selection_builds_a_part_and_publishes_nothing_half(tree: Tree) -> None:
    report = build(Selection(architectures=("sm_90a",)), tree=tree, jobs=2)
    assert (report.cubins, report.digest) == (toytree.PROGRAMS, None)
    assert {arch for _, arch in report.stale} == {"sm_100a", "sm_103a"}
    assert not tree.manifest.exists()
    report = build(tree=tree, jobs=2)
    assert (report.compiled, report.reused) == (2 * toytree.PROGRAMS, toytree.PROGRAMS)


def test_selection_keeps_the_others_entries(built: Tree) -> None:
    good = built.manifest.read_bytes()
    for path in built.work.iterdir():
        path.unlink()
    report = build(Selection(architectures=("sm_100a",), operators=("toy",)), tree=built, jobs=2)
    assert (report.compiled, report.stale) == (toytree.PROGRAMS, ())
    assert built.manifest.read_bytes() == good


def test_selection_with_others_out_of_date_says_so(built: Tree) -> None:
    good = built.manifest.read_bytes()
    toytree.edit(built.root, "templates/toy/single.cu.j2", "+ {{ num_tokens }}", "- {{ num_tokens }}")
    report = build(Selection(architectures=("sm_100a",)), tree=built, jobs=2)
    assert report.digest is None
    assert len(report.stale) == 4 * 2
    assert built.manifest.read_bytes() == good


@pytest.mark.parametrize("arch", ["sm_90", "90a", "sm_100", "sm_100f", "sm_103", "SM_90A", ""])
def test_selected_architectures_are_strict(tree: Tree, arch: str) -> None:
    with pytest.raises(ToolchainError, match="expected one of sm_90a, sm_100a, sm_103a"):
        build(Selection(architectures=(arch,)), tree=tree)


def test_selected_operators_are_strict(tree: Tree) -> None:
    with pytest.raises(ChordError, match="operator 'toys' is not known: expected one of toy"):
        build(Selection(operators=("toys",)), tree=tree)


def test_an_installed_package_is_not_built_in() -> None:
    with pytest.raises(ChordError, match="belongs to an installed package"):
        build(tree=Tree(_paths.PACKAGE / "_data"))


def test_order_of_files_and_rows_does_not_reach_the_manifest(built: Tree) -> None:
    good = built.manifest.read_bytes()
    text = (built.registry / "toy.toml").read_text()
    head, first, second = text.partition("[[routes]]")[0], *text.split("[[programs]]")[1:]
    rows, tail = second.split("[[routes]]", 1)
    head = head.split("[[programs]]")[0]
    (built.registry / "toy.toml").write_text(f"{head}[[programs]]{rows}[[programs]]{first}\n[[routes]]{tail}")
    build(tree=built)
    assert built.manifest.read_bytes() == good


def test_jobs_of_the_toy_tree(tree: Tree) -> None:
    assert len(jobs_module.read(tree).jobs) == toytree.CUBINS
