"""The checks of the row kernels themselves: silent on what is right, and loud on each kind of fault."""

from __future__ import annotations

import re

import pytest
import torch

from chord.checks import w4a16_rows as rows

CPU = torch.device("cpu")


@pytest.mark.parametrize("operator", rows.OPERATORS)
def test_torch_agrees_with_itself(operator: str) -> None:
    found = rows.row_problems(operator, CPU, tiny=True)
    assert found
    assert not any(found)


def faulty(spoil):
    """Runs well at first, for the expected output, and then spoiled."""
    calls = []

    def call(move, out: torch.Tensor) -> None:
        out[1] = 1.0
        calls.append(out)
        if len(calls) == 2:
            spoil(out)

    return call


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda out: out[1].fill_(1.1), r"8 entries differ, the first in row 1"),
        (lambda out: out[1].fill_(float("nan")), r"8 entries differ"),
        (lambda out: out[2].fill_(0.0), r"wrote a row that nothing names"),
        (lambda out: out.as_strided((1, 8), (8, 1), 0).fill_(0.0), r"wrote outside its output"),
    ],
)
def test_faults_are_found(spoil, said: str) -> None:
    problems = rows._differences(faulty(spoil), 3, 8, CPU)
    assert any(re.search(said, problem) for problem in problems)
