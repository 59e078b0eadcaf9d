"""Who may import whom, and what has one home."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from chord import _paths
from chord._version import __version__
from chord.build import tables, toolchain

ROOT = _paths.PACKAGE.parent
BASE = {"chord.errors", "chord._paths", "chord._settings", "chord._version"}
"""Modules that anybody may use."""
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in _paths.PACKAGE.rglob("*.py"))


def imports_of(module: str) -> set[str]:
    """Every module that a file imports anywhere in it; `from x import y` counts as x.y."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / module).read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute here"
            assert node.module is not None
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def within(name: str, packages: set[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def foreign_to(packages: set[str], module: str) -> set[str]:
    """What `module` imports of ours from outside `packages`."""
    return {name for name in imports_of(module) if within(name, {"chord"}) and not within(name, packages | BASE)}


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("chord/registry/")])
def test_registry_imports_nothing_of_ours(module: str) -> None:
    assert foreign_to({"chord.registry"}, module) == set()


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("chord/build/")])
def test_build_imports_the_registry_alone(module: str) -> None:
    assert foreign_to({"chord.registry", "chord.build"}, module) == set()


@pytest.mark.parametrize(
    "module", [m for m in MODULES if not m.startswith(("chord/build/", "chord/cli/", "chord/__main__"))]
)
def test_only_the_command_line_imports_the_builder(module: str) -> None:
    assert not {name for name in imports_of(module) if within(name, {"chord.build", "chord.cli"})}


@pytest.mark.parametrize(
    ("package", "home"),
    [("typer", "chord/cli/"), ("rich", "chord/cli/"), ("jinja2", "chord/build/"), ("cuda", "chord/registry/driver.py")],
)
def test_dependencies_with_one_home(package: str, home: str) -> None:
    users = [module for module in MODULES if any(within(name, {package}) for name in imports_of(module))]
    assert [module for module in users if not module.startswith(home)] == []


@pytest.mark.parametrize("part", ["chord/registry/", "chord/build/"])
def test_no_torch(part: str) -> None:
    assert not [m for m in MODULES if m.startswith(part) and any(within(name, {"torch"}) for name in imports_of(m))]


def test_importing_loads_no_heavy_dependency() -> None:
    code = (
        "import sys, chord, chord.registry; "
        "print(sorted({'torch', 'typer', 'rich', 'cuda', 'jinja2', 'numpy', 'chord.build'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_the_wheels_hook_needs_what_the_build_requires() -> None:
    """What the builder imports from outside is a build requirement of the package."""
    code = (
        "import sys; before = set(sys.modules); import chord.build.release, chord.build.pool; "
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name for name in ran.stdout.split() if not name.startswith("_")}
    assert loaded - {"markupsafe", "tomli", "typing_extensions"} == {"chord", "jinja2", "msgspec"}


def test_one_folder_is_a_package() -> None:
    assert [path.parent.name for path in ROOT.glob("*/__init__.py")] == ["chord"]


def test_inline_ptx_has_one_home() -> None:
    sources = [path for path in (ROOT / "templates").rglob("*") if path.is_file()]
    code = {path: re.sub(r"/\*.*?\*/|//[^\n]*", "", path.read_text(), flags=re.DOTALL) for path in sources}
    users = {path.relative_to(ROOT / "templates").parts[:2] for path in sources if re.search(r"\basm\b", code[path])}
    assert users == {("include", "ptx")}


def test_no_lane_skips_a_collective() -> None:
    """A shuffle or vote of a whole warp must not stand where another operand decides whether it is evaluated.

    `idle` is one value for a warp.
    """
    skipped = re.compile(r"(?:&&|\|\||\?)[^;{}]*__\w+_sync\(kFullWarp")
    known = "if (!idle && __any_sync(kFullWarp"
    for path in (ROOT / "templates").rglob("*.cuh"):
        code = re.sub(r"//[^\n]*", "", path.read_text()).replace(known, "")
        assert not skipped.search(code), (path, skipped.search(code))


def test_headers_are_guarded() -> None:
    for path in (ROOT / "templates").rglob("*.cuh"):
        assert "#pragma once" in path.read_text(), path


def test_one_version() -> None:
    assert tables.load_registry(ROOT / "registry" / "registry.toml").version == __version__


def test_the_compiler_is_pinned_to_the_same_version_everywhere() -> None:
    pin = toolchain.load(ROOT / "build" / "toolchain.toml")
    requirement = f'"{pin.compiler.distribution}=={pin.compiler.version}"'
    text = (ROOT / "pyproject.toml").read_text()
    assert text.count(requirement) == text.count(pin.compiler.distribution) == 2


def test_every_test_file_is_collected() -> None:
    """pytest leaves out folders called build unless told otherwise."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    collected = {line.partition("::")[0] for line in ran.stdout.splitlines() if "::" in line}
    written = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    assert {file for file in written - collected if "/build/" in file or "/packaging/" in file} == set()


def test_git_keeps_the_build_folder() -> None:
    lines = (ROOT / ".gitignore").read_text().splitlines()
    assert "/build/out/" in lines
    assert not {"build", "build/", "/build", "/build/"}.intersection(lines)
