"""The checks of what moves rows: right results pass, wrong ones are found."""

from __future__ import annotations

import pytest
import torch

from chord.checks import rows

CPU = torch.device("cpu")


@pytest.mark.parametrize("operator", rows.OPERATORS)
def test_the_reference_passes(operator):
    assert [p for size in rows.SIZES for p in rows.row_problems(operator, *size, CPU)] == []


@pytest.mark.parametrize("operator", rows.OPERATORS)
@pytest.mark.parametrize("fault", ["value", "more"])
def test_faults_are_found(operator, fault, monkeypatch):
    function, variants = rows._CALLS[operator]
    calls = []

    def wrong(*, out, **given):
        function(out=out, **given)
        calls.append(1)
        if len(calls) % 2 == 0 and out.numel():  # the device's turn
            if fault == "more":
                out.view(torch.int16)[out.view(torch.int16) == rows.POISON] = 0
            else:
                out[out.view(torch.int16) != rows.POISON] *= 1.1

    monkeypatch.setitem(rows._CALLS, operator, (wrong, variants))
    found = list(rows.row_problems(operator, 17, 264, CPU))
    assert found or (fault == "more" and operator == "moe_combine")
    assert all(("other rows" if fault == "more" else "values differ") in problem for problem in found)
