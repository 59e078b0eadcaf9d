"""The instructions of the W4A16 cubins: no local memory, tensor-core instructions where an arm is named after them,
and weights that are read from shared memory 16 bytes at a time.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from functools import lru_cache
from pathlib import Path

import pytest

from chord.errors import ChordError
from chord.registry import Registry

_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", re.MULTILINE)


def disassembler() -> str | None:
    """nvdisasm from the path, or from NVIDIA's package beside this Python."""
    packaged = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin/nvdisasm"))
    return shutil.which("nvdisasm") or (str(packaged[-1]) if packaged else None)


NVDISASM = disassembler()


@lru_cache(maxsize=1)
def opened() -> Registry:
    return Registry.open()


def cubins() -> list[tuple[str, str]]:
    """(program, architecture) of the committed manifest; none when it cannot be read, which other tests say."""
    try:
        programs = {name: p for name, p in opened().programs().items() if name.startswith(("moe_", "w4a16_"))}
    except ChordError:
        return []
    return [(name, arch) for name, program in sorted(programs.items()) for arch in sorted(program.builds)]


@pytest.mark.skipif(NVDISASM is None, reason="needs nvdisasm: pip install 'chord-registry[sass]'")
@pytest.mark.parametrize(("name", "arch"), cubins(), ids=" ".join)
def test_instructions(name: str, arch: str) -> None:
    assert NVDISASM is not None
    registry = opened()
    cubin = registry.store.path_of(registry.programs()[name].builds[arch].cubin_sha256)
    if not cubin.is_file():
        pytest.skip("not built here: chord build --locked")
    done = subprocess.run([NVDISASM, "-c", str(cubin)], capture_output=True, text=True, check=True)
    found = Counter(_INSTRUCTION.findall(done.stdout))
    assert sum(found.values()) > 50, "instructions were found at all"
    assert not [one for one in found if one.startswith(("LDL", "STL"))], "no local memory"
    _, arm = name.split(".", 1)
    kinds = {one.partition(".")[0] for one in found}
    if arm.startswith(("wgmma", "resident", "turns")):
        assert "HGMMA" in kinds
    if arm.startswith("mma"):
        assert "HMMA" in kinds
    if arm.startswith(("wgmma", "resident", "turns", "mma")):
        assert found["LDS.128"] >= 16, "weights come in 16-byte shared loads"
