"""Whatever a file holds: a clean error, in little memory and time, and nothing of it is run or followed elsewhere.

Random damage by Hypothesis, and a table of inputs that are meant to hurt. scripts/fuzz.sh searches longer.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from chord import _paths
from chord.errors import ManifestError, VerificationError
from chord.registry import canonical
from chord.registry.store import Store
from fuzz.bombs import BOMBS
from fuzz.targets import TARGETS, try_one

ROOT = _paths.PACKAGE.parent
JSON_TARGETS = ("manifest", "lock", "receipt", "envelope", "signature")
slow = settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)

STRANGE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.sampled_from(
        ["", "\0", "../../etc/passwd", "/etc/passwd", "a" * 5000, "toy.many", "sm_90a", "0" * 63, "\ud7ff"]
    ),
    st.text(max_size=20),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
)


@pytest.mark.parametrize("name", TARGETS)
def test_the_seeds_are_good(name):
    seeds = TARGETS[name].seeds()
    assert seeds
    if name != "cubin" or len(seeds) > 1:  # without a build there is no cubin to start from
        assert [try_one(name, seed) for seed in seeds] == [""] * len(seeds)


@pytest.mark.parametrize("name", TARGETS)
@given(data=st.binary(max_size=300))
@example(data=b"")
@example(data=b"\0" * 200)
@slow
def test_random_bytes(name, data):
    try_one(name, data)


@pytest.mark.parametrize("name", TARGETS)
@given(data=st.data())
@slow
def test_damaged_bytes(name, data):
    """Cut, overwrite, repeat or remove a stretch of a good file."""
    good = data.draw(st.sampled_from(TARGETS[name].seeds()))
    at, length = data.draw(st.integers(0, len(good))), data.draw(st.integers(0, 64))
    stretch = data.draw(
        st.one_of(st.binary(max_size=16), st.sampled_from([good[at : at + length] * 3, b"", b'"', b"{["]))
    )
    try_one(name, good[:at] + stretch + good[at + length :])
    try_one(name, good[:at])


@pytest.mark.parametrize("name", JSON_TARGETS)
@given(data=st.data())
@slow
def test_strange_values_in_good_documents(name, data):
    """One value anywhere is replaced, or a key is removed, renamed or added."""
    document = json.loads(data.draw(st.sampled_from(TARGETS[name].seeds())))
    node = document
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            break
        key = data.draw(st.sampled_from(keys))
        if not isinstance(node[key], dict | list) or data.draw(st.integers(0, 3)) == 0:
            break
        node = node[key]
    if keys:
        if isinstance(node, dict) and data.draw(st.booleans()):
            node[data.draw(st.text(max_size=12))] = node.pop(key)
        else:
            node[key] = data.draw(STRANGE)
    try_one(name, json.dumps(document).encode())


@given(data=st.data())
@slow
def test_extreme_numbers_in_cubin_headers(data):
    """Offsets, sizes, counts and indices at the edges of their types."""
    image = bytearray(data.draw(st.sampled_from(TARGETS["cubin"].seeds())))
    for _ in range(data.draw(st.integers(1, 4))):
        width = data.draw(st.sampled_from([1, 2, 4, 8]))
        tables = int.from_bytes(image[40:48], "little")
        region = data.draw(st.sampled_from([(0, 64), (tables, len(image)), (64, len(image))]))
        at = data.draw(st.integers(*sorted(min(edge, len(image) - width) for edge in region)))
        value = data.draw(st.one_of(st.sampled_from([0, 1, 2**15, 2**31, 2**32 - 1, 2**63, 2**64 - 1]), st.integers(0)))
        image[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
    try_one("cubin", bytes(image))


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_and_cost_little(name):
    words = [sys.executable, str(ROOT / "tests/fuzz/bombs.py"), name]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["said"]
    assert found["seconds"] < 10
    assert found["mebibytes"] < 300, found


@pytest.mark.parametrize(
    "path", ["../x", "a/../../x", "/etc/passwd", "a\0b", "", "a//b", "./a", "..", "a/..", "C:\\x", "a b", "~root"]
)
def test_no_path_leaves_its_folder(path):
    """A manifest's paths are names below templates/, and nothing names a file of the store but by its hash."""
    raw = json.loads(TARGETS["manifest"].seeds()[0])
    raw["sources"] = {path: "0" * 64}
    with pytest.raises(ManifestError, match="below templates/"):
        canonical.decode(json.dumps(raw).encode(), "here")
    raw["sources"] = {}
    raw["operators"]["toy"]["arms"]["many"]["template"] = path
    with pytest.raises(ManifestError, match="below templates/"):
        canonical.decode(json.dumps(raw).encode(), "here")
    with pytest.raises(ValueError, match="is not a SHA-256"):
        Store(Path("/nowhere")).path_of(path)


@pytest.mark.parametrize("kind", ["link out", "link to a device", "pipe", "folder", "link to itself", "link within"])
def test_nothing_but_plain_files_of_the_store_is_read(tmp_path, kind):
    data = b"0123456789"
    store = Store(tmp_path / "cubins")
    sha256 = store.write(data)
    path = store.path_of(sha256)
    path.rename(tmp_path / "moved")
    if kind == "link out":
        path.symlink_to(tmp_path / "moved")
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link to itself":
        path.symlink_to(path)
    else:
        (store.root / "inside").write_bytes(data)
        path.symlink_to("inside")
    if kind == "link within":
        assert store.read_verified(sha256, len(data)) == data
        return
    with pytest.raises(VerificationError, match=str(path)):
        store.read_verified(sha256, len(data))


def test_data_is_never_run():
    """No reader of ours calls eval, exec, compile, pickle, marshal, yaml or a shell."""
    refused = {"pickle", "marshal", "shelve", "yaml", "dill", "cloudpickle"}
    for path in _paths.PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "compile"), path
            if isinstance(node, ast.Call):
                assert not any(k.arg == "shell" for k in node.keywords), path
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not refused.intersection(name.partition(".")[0] for name in names), path


def test_the_fuzzer_runs():
    pytest.importorskip("atheris", reason="needs Atheris: pip install 'chord-registry[fuzz]'")
    command = [sys.executable, str(ROOT / "tests/fuzz/run_atheris.py"), "lock", "-runs=2000", "-verbosity=0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert subprocess.run([*command[:2], "nothing"], capture_output=True, check=False).returncode == 1
