"""What the documents say is tried: their code runs, their paths exist, their tables match the code."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from chord import _settings
from chord.build.builder import build
from chord.build.tree import Tree
from chord.registry import Registry

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the README's example needs torch")
@pytest.mark.parametrize("page", ["README.md", "docs/registry.md", "docs/w4a16.md"])
def test_python_blocks_run(page: str) -> None:
    assert blocks(page, "python")
    for block in blocks(page, "python"):
        done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, check=False, cwd=ROOT)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("example", sorted(ROOT.glob("examples/*.py")), ids=lambda example: example.name)
def test_examples_run(example: Path) -> None:
    for needed in ("torch", "safetensors"):
        pytest.importorskip(needed, reason="the examples need torch and safetensors")
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_and_links_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    links = [target for target in re.findall(r"\]\(([^)#\s]+)\)", text) if "://" not in target]
    assert [target for target in links if not (page.parent / target).exists()] == []
    named = re.findall(r"`((?:chord|templates|registry|build|tests|docs|examples|scripts|bench)/[\w./-]+)`", text)
    elsewhere = ("build/out", "templates/scale", "registry/scale")  # what a build makes, and the example's own files
    assert [path for path in named if not path.startswith(elsewhere) and not (ROOT / path).exists()] == []


def test_the_settings_table_is_the_one_in_the_code() -> None:
    rows = re.findall(r"^\| `(CHORD_\w+)` \| (.*) \|$", (ROOT / "docs/registry.md").read_text(), re.MULTILINE)
    assert dict(rows) == _settings.KNOWN


def test_the_requirements_name_the_files_that_hold_them() -> None:
    rows = re.findall(r"^\| (R\d\d) \|.*\| (.*) \|$", (ROOT / "docs/requirements.md").read_text(), re.MULTILINE)
    assert sorted(name for name, _ in rows) == [f"R{number:02}" for number in range(1, 26)]
    holding: dict[str, set[str]] = {name: set() for name, _ in rows}
    for path in ROOT.glob("tests/**/*.py"):
        for names in re.findall(r"^def test_(r\d\d)_(?:and_(r\d\d)_)?", path.read_text(), re.MULTILINE):
            for name in filter(None, names):
                holding[name.upper()].add(str(path.relative_to(ROOT)))
    assert {name: set(re.findall(r"`(.*?)`", files)) for name, files in rows} == holding


def test_the_commands_in_the_readme_exist() -> None:
    from chord.cli import app

    known = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    named = re.findall(r"^chord (\w+)", "\n".join(blocks("README.md", "sh")), re.MULTILINE)
    assert named
    assert set(named) <= known


def test_adding_a_kernel_builds_as_shown(tmp_path: Path) -> None:
    page = "docs/adding-a-kernel.md"
    files = {
        "templates/scale/block.cu.j2": blocks(page, "cuda")[0],
        "registry/scale.toml": blocks(page, "toml")[0],
        "registry/registry.toml": (ROOT / "registry/registry.toml").read_text(),
        "build/toolchain.toml": (ROOT / "build/toolchain.toml").read_text(),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    report = build(tree=Tree(tmp_path))
    assert report.compiled == 3
    registry = Registry.open(tmp_path)
    assert registry.lookup("scale", "sm_103a", {"num_tokens": 7}).program_name == "scale.block"
    assert registry.verify().ok
    assert json.loads((tmp_path / "manifest.json").read_text())["operators"]["scale"]["arms"]["block"]["template"]


@pytest.mark.parametrize("operator", ["moe_w4a16", "moe_w4a16_contiguous", "moe_w4a16_masked"])
def test_the_table_of_arms_is_the_manifests(operator: str) -> None:
    """docs/w4a16.md: every arm with its architectures, the same for all three but for the one for plans."""
    text = (ROOT / "docs/w4a16.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ((?:sm_\w+(?:, )?)+) \|", text, re.MULTILINE)
    programs = Registry.open().programs(operator).values()
    listed = {arm: set(archs.split(", ")) for arm, archs in rows}
    if operator != "moe_w4a16":
        del listed["turns_r16"]
    assert listed == {p.arm: set(p.architectures) for p in programs}


def test_the_log_line_that_is_shown_is_the_one_that_comes() -> None:
    """docs/vllm.md: Kimi K2 tensor parallel over 8 on an H200, whatever the routes name today."""
    pytest.importorskip("torch", reason="the operators need torch")
    from chord.integrations import moe
    from chord.registry import facade
    from chord.w4a16 import WeightShape

    registry, shapes = Registry.open(), [WeightShape(384, 512, 7168, gated=True), WeightShape(384, 7168, 256)]
    names = set()
    for operator in moe.INDEXED:
        for problem in moe._problems(operator, shapes):
            wanted = {key: facade._side(key, value) for key, value in problem.items()}
            names |= {r.program for r in registry.coverage(operator, "sm_90a") if facade._touches(r, wanted)}
    (line,) = blocks("docs/vllm.md", "text")
    version = registry.manifest.registry.version
    assert line == (
        f"chord {version}: INT4 experts by ChordIndexedExperts, kernels {', '.join(sorted(names))}, "
        "manifest <12 digits>\n"
    )


def test_figures_are_those_of_the_committed_results(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="chord.bench needs torch")
    assert torch
    from chord.bench import docs

    for page in [page for page in PAGES if "<!-- figures:" in page.read_text()]:
        copy = tmp_path / page.name
        copy.write_text(page.read_text())
        assert not docs.update(copy, ROOT / "bench/results"), f"{page.name}: run `chord bench docs`"
        for drawing in tmp_path.glob("*.svg"):
            assert drawing.read_text() == (page.parent / drawing.name).read_text(), "run `chord bench docs`"


def test_sizes_that_contributing_asks_for() -> None:
    python = [*ROOT.glob("chord/**/*.py"), *ROOT.glob("scripts/*.py")]
    kernels = [path for path in ROOT.glob("templates/**/*") if path.is_file()]
    assert [path for path in python if len(path.read_text().splitlines()) >= 500] == []
    assert [path for path in kernels if len(path.read_text().splitlines()) >= 450] == []
    long = [
        f"{path}:{node.lineno}"
        for path in python
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= 60
    ]
    assert long == []
