"""The receipts that are committed, if any are: sound, of passes, and about cubins of the architecture that ran them."""

from __future__ import annotations

import pytest

from chord import _paths
from chord.registry import Registry, receipts

FILES = sorted((_paths.PACKAGE.parent / receipts.FOLDER).glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_a_committed_receipt_is_sound_and_says_that_all_passed(path):
    receipt = receipts.decode(path.read_bytes(), str(path))
    assert path.read_bytes() == receipts.encode(receipt), "as it was written, not by hand"
    assert receipt.programs
    assert {name for name, found in receipt.programs.items() if not (found.passed and found.cases)} == set()
    assert receipt.checks.keys() == {name.partition(".")[0] for name in receipt.programs}
    by_digest = {
        build.cubin_sha256: arch
        for program in Registry.open().programs().values()
        for arch, build in program.builds.items()
    }
    known = {by_digest.get(found.cubin_sha256, receipt.arch) for found in receipt.programs.values()}
    assert known == {receipt.arch}


def test_committed_receipts_speak_of_what_is_here():
    """Whoever changes kernels leaves the old receipts behind: those that speak of no cubin any more are to go."""
    registry = Registry.open()
    digests = {build.cubin_sha256 for program in registry.programs().values() for build in program.builds.values()}
    stale = [
        path.name
        for path in FILES
        if digests.isdisjoint(o.cubin_sha256 for o in receipts.decode(path.read_bytes(), str(path)).programs.values())
    ]
    assert stale == []
