"""The short form of the load; scripts/load.sh runs the long one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HAMMER = Path(__file__).with_name("hammer.py")


def run(*words):
    done = subprocess.run(
        [sys.executable, str(HAMMER), *words], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(done.stdout.splitlines()[-1])


def test_a_registry_under_load_while_its_cubins_are_replaced():
    found = run("--processes", "3", "--threads", "4", "--seconds", "6")
    assert found["faults"] == 0
    assert min(found[what] for what in ("opened", "verified", "loaded", "replaced")) > 20, found


@pytest.mark.gpu
def test_kernels_under_load():
    found = run("--processes", "4", "--threads", "4", "--seconds", "15", "--gpu", "--deadline", "150")
    assert found["faults"] == 0
    assert found["launches"] > 100, found
