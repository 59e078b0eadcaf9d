"""Rendering: strict, deterministic, and its errors name template and line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chord.build.render import Renderer, RenderError

WORDS = st.from_regex(r"k_[a-z][a-z_]{0,8}", fullmatch=True)


@pytest.fixture
def renderer(tmp_path: Path) -> Renderer:
    return Renderer(tmp_path)


def template(tmp_path: Path, text: str) -> str:
    (tmp_path / "op").mkdir(exist_ok=True)
    (tmp_path / "op" / "arm.cu.j2").write_text(text)
    return "op/arm.cu.j2"


def test_binds_constants_and_symbol(tmp_path: Path, renderer: Renderer) -> None:
    name = template(tmp_path, "constexpr int kN = {{ n }};\nvoid {{ symbol }}();\n")
    assert renderer.render(name, {"n": 3}, "op_arm_n3") == "constexpr int kN = 3;\nvoid op_arm_n3();\n"


def test_optional_constants_can_be_asked_for(tmp_path: Path, renderer: Renderer) -> None:
    name = template(tmp_path, "{% if num_tokens is defined %}\n{{ num_tokens }}\n{% else %}\nany\n{% endif %}\n")
    assert renderer.render(name, {}, "s") == "any\n"
    assert renderer.render(name, {"num_tokens": 4}, "s") == "4\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("one\ntwo {{ missing }}\n", r"op/arm\.cu\.j2:2: 'missing' is undefined; given are n=3"),
        ("{% if missing > 2 %}{% endif %}", r"op/arm\.cu\.j2:1: 'missing' is undefined"),
        ("one\n{% if %}\n", r"op/arm\.cu\.j2:2: "),
        ("\n\n{{ 1 // 0 }}\n", r"op/arm\.cu\.j2:3: .*zero"),
        ("one\n{% include 'other.cuh' %}", r"^templates/op/arm\.cu\.j2:2: templates/other\.cuh: no such template"),
        ("{{ [1, 2] | random }}", r"op/arm\.cu\.j2:1: No filter named 'random'"),
        ("{{ lipsum() }}", r"'lipsum' is undefined"),
        ("{{ cycler.__init__.__globals__ }}", r"op/arm\.cu\.j2:1: .*unsafe"),
        ("one\n{% include 'op/part.txt' %}", r"op/arm\.cu\.j2:2: templates/op/part\.txt: expected a name that ends in"),
    ],
)
def test_errors_name_template_and_line(tmp_path: Path, renderer: Renderer, text: str, said: str) -> None:
    with pytest.raises(RenderError, match=said):
        renderer.render(template(tmp_path, text), {"n": 3}, "s")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\n{% include 'op/gone.cuh' %}\n", r"^templates/op/part\.cuh:2: templates/op/gone\.cuh: no such template"),
        ("\n\n{{ missing }}\n", r"^templates/op/part\.cuh:3: 'missing' is undefined"),
    ],
)
def test_errors_name_the_template_that_was_included(tmp_path: Path, renderer: Renderer, text: str, said: str) -> None:
    name = template(tmp_path, "{% include 'op/part.cuh' %}\n")
    (tmp_path / "op" / "part.cuh").write_text(text)
    with pytest.raises(RenderError, match=said):
        renderer.render(name, {}, "s")


def test_a_link_that_leads_out_is_refused(
    tmp_path: Path, renderer: Renderer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside") / "secret.cu.j2"
    outside.write_text("secret")
    (tmp_path / "op").mkdir(exist_ok=True)
    (tmp_path / "op" / "out.cu.j2").symlink_to(outside)
    with pytest.raises(RenderError, match=rf"templates/op/out\.cu\.j2: a link out of templates/, to {outside}"):
        renderer.render("op/out.cu.j2", {}, "s")


def test_a_missing_template(renderer: Renderer) -> None:
    with pytest.raises(RenderError, match=r"^templates/op/none\.cu\.j2: no such template"):
        renderer.render("op/none.cu.j2", {}, "s")


@given(st.dictionaries(WORDS, st.integers(0, 10**9), max_size=5))
def test_renders_the_same_whatever_the_order(
    tmp_path_factory: pytest.TempPathFactory, constants: dict[str, int]
) -> None:
    folder = tmp_path_factory.mktemp("templates")
    text = "".join(f"{key} = {constants[key]}\n" for key in sorted(constants))
    (folder / "t.cu.j2").write_text("".join(f"{key} = {{{{ {key} }}}}\n" for key in sorted(constants)))
    backwards = dict(reversed(constants.items()))
    assert (
        Renderer(folder).render("t.cu.j2", constants, "s") == Renderer(folder).render("t.cu.j2", backwards, "s") == text
    )


@pytest.mark.parametrize(
    ("expression", "value"),
    [(7, 7), ("n * 4", 12), ("[n, 8] | max", 8), ("n // 2 + 1", 2), ("'word'", "word"), ("n if big else 1", 3)],
)
def test_evaluates(renderer: Renderer, expression: int | str, value: int | str) -> None:
    assert renderer.evaluate(expression, {"n": 3, "big": 1}) == value


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("missing", "'missing' is undefined; given are n=3"),
        ("missing + 1", "'missing' is undefined"),
        ("n / 2", "expected a whole number, got 1.5"),
        ("n > 2", "expected a whole number, got True"),
        ("n //", "unexpected"),
        ("n // 0", "zero"),
        ("n + 'x'", "expression"),
        ("none", "got None"),
        ("cycler.__init__.__globals__.os.getpid()", "call is not arithmetic"),
        ("''.__class__", "getattr is not arithmetic"),
        ("n ** 9999999", "pow is not arithmetic"),
        ("range(n) | list", "list is not arithmetic"),
        ("'x' * 999999999", "takes numbers, got str"),
        ("[n] * 999999999", "takes numbers, got list"),
        ("(" * 190 + "n" + ")" * 190, "recursion"),
        ("n + " * 200 + "n", "expected at most 400 characters"),
        ("999999999 * 999999999 * 999999999", "expected a number of 64 bits, got one of 90"),
    ],
)
def test_refuses_expressions(renderer: Renderer, expression: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        renderer.evaluate(expression, {"n": 3})
