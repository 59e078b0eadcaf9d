"""Program names: made and parsed by one class."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chord.registry.names import ProgramName

words = st.from_regex(r"[a-z][a-z0-9]{0,4}(_[a-z0-9]{1,3})?", fullmatch=True)
tokens = st.lists(st.tuples(st.from_regex("[a-z]{1,3}", fullmatch=True), st.integers(0, 2**40)), max_size=5)


@given(words, words, tokens)
def test_parse_is_the_inverse_of_str(operator, arm, constants):
    name = ProgramName(operator, arm, tuple(constants))
    assert ProgramName.parse(str(name)) == name
    assert name.symbol.isidentifier()


@pytest.mark.parametrize(
    "text", ["", "toy", "Toy.one", "toy.one.", "toy.one.t01", "toy.one.8", "toy.one.t-1", "toy..t1"]
)
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match=r"name|constant"):
        ProgramName.parse(text)
