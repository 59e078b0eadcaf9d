"""Importing, opening, looking up and verifying touch no driver, write no file and open no socket."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest

import chord
from chord import _paths

FOREIGN = ("chord", "cuda", "torch", "nvidia")

SCRIPT = """
import os, sys
allowed_flags = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | os.O_DIRECTORY | os.O_NONBLOCK
complaints = []

def hook(event, args):
    if event == "open" and (args[2] & ~allowed_flags or str(args[1] or "r").strip("rbt")):
        complaints.append((event, args))
    if event.startswith(("socket.", "subprocess.", "ctypes.dlopen")) or event in (
        "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.link", "os.chmod", "os.truncate",
        "os.fork", "os.exec", "os.posix_spawn", "os.system", "shutil.copyfile", "tempfile.mkstemp",
    ):
        complaints.append((event, args))

import ctypes, hashlib
before = set(sys.modules)
sys.addaudithook(hook)
import chord
import chord.registry
from chord.registry import Registry
registry = Registry.open(sys.argv[1])
problem = {"width": 896, "ways": 16, "num_tokens": 7, "block_m": 8}
selection = registry.lookup("toy", "sm_90a", problem)
registry.programs(), registry.coverage("toy", "sm_90a")
assert registry.verify().ok
assert not complaints, complaints
unwanted = ("torch", "cuda", "jinja2", "typer", "rich", "nvidia", "numpy")
loaded = [m for m in set(sys.modules) - before if m.split(".")[0] in unwanted]
assert not loaded, loaded
with open("/proc/self/maps") as maps:
    mapped = maps.read()
assert "libcuda" not in mapped and "nvrtc" not in mapped
print("quiet", selection.program_name)
"""


def run(script: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(_paths.PACKAGE.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=env | environment, cwd="/", check=False)


def test_nothing_but_reading(root):
    done = run(SCRIPT, root, HOME="/nonexistent", TMPDIR="/nonexistent")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "quiet toy.many\n"


def test_a_read_only_store_is_left_as_it_is(root):
    before = {path: path.stat() for path in root.rglob("*")}
    assert run(SCRIPT, root).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == {p: s.st_mtime_ns for p, s in before.items()}


def test_importing_chord_imports_nothing_big():
    done = run(
        "import sys, chord; print(sorted(m for m in sys.modules if m.startswith(('chord', 'msgspec', 'torch'))))"
    )
    assert done.stdout.strip() == "['chord', 'chord._version']"


def test_the_operators_bring_the_drivers_bindings_and_the_registry_does_not():
    pytest.importorskip("torch", reason="the operators need torch")
    script = (
        "import sys, torch; sys.modules.pop('cuda.bindings.driver', None); import chord; {}; print('{}' in sys.modules)"
    )
    driver = "cuda.bindings.driver"
    assert run(script.format("chord.fused_router", driver)).stdout == "True\n"
    assert run(script.format("chord.Registry", driver)).stdout == "False\n"
    missing = "import sys, torch; sys.modules['cuda.bindings.driver'] = None; import chord; print(chord.fused_router)"
    assert run(missing).returncode == 0
    assert "fused_router" in run(missing).stdout


def test_public_names_and_modules():
    from chord.registry import Kernel, PreparedLaunch, Registry, Selection

    found = chord.Registry, chord.Selection, chord.Kernel, chord.PreparedLaunch
    assert found == (Registry, Selection, Kernel, PreparedLaunch)
    assert chord.errors.ChordError is chord.ChordError
    assert {"Registry", "fused_router", "__version__"} <= set(dir(chord))
    assert not hasattr(chord, "nothing")


@pytest.mark.parametrize("module", sorted(chord._MODULES))
def test_submodules_are_imported_when_asked_for(module):
    if module in ("router", "w4a16"):
        pytest.importorskip("torch", reason="the operators need torch")
    script = f"import chord; print(chord.{module}.__name__, chord.{module} is chord.{module}, {module!r} in dir(chord))"
    assert run(script).stdout.split() == [f"chord.{module}", "True", "True"]


def test_the_package_runs_as_the_command():
    words = [["--version"], ["ls", "--json"], ["no-such-command"]]
    for command in words:
        want, got = (
            subprocess.run([sys.executable, "-m", module, *command], capture_output=True, text=True, check=False)
            for module in ("chord.cli", "chord")
        )
        assert (got.returncode, got.stdout) == (want.returncode, want.stdout)
    assert got.returncode == 2


def test_submodules_say_that_torch_is_missing():
    error = run("import sys, chord; sys.modules['torch'] = None; chord.router").stderr
    assert "ImportError: chord.router needs torch: pip install 'chord-registry[torch]'" in error


def test_operators_say_that_torch_is_missing():
    script = "import sys, chord; sys.modules['torch'] = None; chord.fused_router"
    error = run(script).stderr
    assert "ImportError: chord.fused_router needs torch: pip install 'chord-registry[torch]'" in error


def test_foreign_files_in_the_package_are_refused(tmp_path):
    (tmp_path / "chord").symlink_to(_paths.PACKAGE)
    assert run("import chord", PYTHONPATH=str(tmp_path)).returncode == 0
    (tmp_path / "chord").unlink()
    (tmp_path / "chord").mkdir()
    for path in _paths.PACKAGE.glob("*.py"):
        (tmp_path / "chord" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chord" / "left_over").mkdir()
    assert run("import chord", PYTHONPATH=str(tmp_path)).returncode == 0
    (tmp_path / "chord" / "left_over" / "__init__.py").touch()
    (tmp_path / "chord" / "audio.py").touch()
    error = run("import chord", PYTHONPATH=str(tmp_path)).stderr
    assert "holds files of another distribution (audio.py, left_over)" in error


def test_the_registry_imports_nothing_else_of_chord_and_cuda_in_one_place():
    allowed = {"chord._paths", "chord._settings", "chord._version", "chord.errors"}
    for path in (_paths.PACKAGE / "registry").glob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                module = node.module or ""
                names = [f"chord.{alias.name}" for alias in node.names] if module == "chord" else [module]
            for name in names:
                assert name in allowed or name.startswith("chord.registry") or not name.startswith(FOREIGN), name
        mentions = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        assert ("cuda.bindings.driver" in mentions) == (path.name == "driver.py")
