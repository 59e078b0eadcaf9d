"""Both ways to qualify a GPU go through one list of suites."""

from __future__ import annotations

from chord.checks import suites
from chord.checks.qualify import Verdict


def test_every_suite_gets_what_was_asked_and_verdicts_keep_their_order(monkeypatch):
    asked = []

    def suite(name):
        def run(device, **options):
            asked.append((name, device, options))
            return [Verdict(name, "sm_90a", "0" * 64, 1, [])]

        return run

    monkeypatch.setattr(suites, "qualify_router", suite("router"))
    monkeypatch.setattr(suites, "qualify_w4a16", suite("w4a16"))
    found = suites.qualify_all(1, tiny=True, only="x*", counts=(3,), progress=print)
    assert [verdict.program for verdict in found] == ["router", "w4a16"]
    common = {"tiny": True, "brief": False, "only": "x*", "progress": print}
    assert asked == [("router", 1, {**common, "counts": (3,)}), ("w4a16", 1, common)]


def test_every_operator_is_qualified_and_says_how():
    """A cubin that no suite runs could never get a receipt."""
    from chord import _runtime

    assert set(_runtime.registry().manifest.operators) == set(suites._CHECKS)
