"""Tables: every mistake is an error that names the file, the line and the cell."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import toytree
from chord import _paths
from chord.build import jobs, tables
from chord.build.tree import Tree
from chord.errors import TableError
from chord.registry.schema import Axis

TOY = "registry/toy.toml"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(toytree.write(tmp_path))


def line_of(text: str, occurrence: int = 0) -> int:
    """Line of the toy table on which `text` stands."""
    lines = [number for number, line in enumerate(toytree.TABLE.lstrip("\n").splitlines(), 1) if line.startswith(text)]
    return lines[occurrence]


ARMS, PROGRAMS, ROUTES = (line_of(f"[[{name}]]") for name in ("arms", "programs", "routes"))
MANY, ROUTES_2 = line_of("[[arms]]", 1), line_of("[[routes]]", 1)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("schema = 1", "schema = 2", r"toy\.toml:1: schema: "),
        ("abi_version = 1", "abi_version = 0", r"toy\.toml:3: abi_version: expected `int` >= 1"),
        ("schema = 1", "schema = ", r"toy\.toml: expected TOML: .*line 1"),
        (
            "abi_version = 1",
            "abi_version = 1\ncolour = 3",
            r"toy\.toml:4: colour: unknown key: expected one of schema, operator, abi_version, axes, tags, args",
        ),
        (
            "[tags]\n",
            "[[colours]]\nred = 1\n[tags]\n",
            rf"toy\.toml:{line_of('[tags]')}: colours: unknown key: expected",
        ),
        ("[tags]\n", "[colours.red]\n[tags]\n", rf"toy\.toml:{line_of('[tags]')}: colours: unknown key: expected"),
        ("schema = 1\n", "colours.red = 1\nschema = 1\n", r"toy\.toml:1: colours: unknown key: expected"),
        (
            'operator = "toy"',
            'operator = "toys"',
            r"toy\.toml:2: operator: expected 'toy', the file's name, got 'toys'",
        ),
        ("last = 1000\n", 'last = "1000"\n', r"axes\[2\]\.last: expected `int`, got `str`"),
        ("last = 32", "last = 33", r"axes: axis block_m: 8\.\.33 is not a range"),
        ('width = "w"\n', "", r"tags: expected a tag for width"),
        ('width = "w"\n', 'width = "w"\nheight = "h"\n', r"tags\.height: expected an axis key: width, lanes, kind"),
        ('width = "w"\n', 'width = "l"\n', r"tags\.width: expected lower-case letters that no other tag has, got 'l'"),
        ('[["f32"], ["bf16"]]', '[["f32"], ["half"]]', r"kind = 'half': a word in a name is letters and then a number"),
        ('out = "buffer f32"', 'out = "buffer f33"', r"args\.out: expected one of buffer .*, got 'buffer f33'"),
        ('out = "buffer f32"', 'out = "pointer"', r"args\.out: expected one of"),
        ('args = ["out", "factor"]', 'args = ["out", "fact"]', rf"toml:{ARMS}: arms\[0\]: single: args: .*fact"),
        ('args = ["out", "factor"]', 'args = ["out", "out"]', r"arms\[0\]: single: args: "),
        ('"toy/single.cu.j2"', '"../single.cu.j2"', r"arms\[0\]: single: template: expected a plain path"),
        ('name = "many"', 'name = "single"', rf"toml:{MANY}: arms\[1\]: single: declared twice"),
        ('suffix = "finish"', 'suffix = ""', r"arms\[1\]: many: kernels: "),
        ('suffix = "finish"', 'suffix = "Fin"', r"arms\[1\]: many: kernels: a suffix is lower-case"),
        ('name = "many"', 'name = "many"\nflags = ["-I."]', r"arms\[1\]: many: flags: refused -I\."),
        ('name = "many"', 'name = "many"\nflags = ["--generate-line-info"]', r"flags: refused --generate-line-info"),
        (
            '"width * lanes // 2"',
            '"width * lane // 2"',
            r"arms\[0\]\.constants\.threads: toy\.single\.w64.*'lane' is undefined",
        ),
        (
            '{ threads = "width',
            '{ width = 3, threads = "width',
            r"arms\[0\]: single: constants: width is the axes' own",
        ),
        (
            'block = "threads"',
            'block = "threads * 16"',
            r"kernels\[0\]\.block: toy\..* at most 1024 threads .*got 4096",
        ),
        ("block = [32, 2]", "block = [32, 64]", r"kernels\[1\]\.block: .*got 32 x 64"),
        ("block = [32, 2]", "block = [8, 2, 2, 2]", r"kernels\[1\]\.block: "),
        ("cluster = 2", "cluster = 17", r"kernels\[1\]\.cluster: .*1\.\.16, got 17"),
        ("cluster = 2", "cluster = 3", r"kernels\[1\]\.grid\.blocks: .*whole clusters of 3, got 4"),
        (
            '"width * 16"',
            '"width * 16 * 200"',
            r"arms\[1\]\.kernels\[1\]\.dynamic_smem_bytes: toy.many.w128.*0\.\.232448, got 409600",
        ),
        ('"width * 16"', '"width / 3"', r"dynamic_smem_bytes: .*expected a whole number"),
        ('param = "num_tokens", ', "", r"kernels\[0\]\.grid: .*expected either blocks"),
        ('param = "num_tokens"', 'param = "factor"', r"grid\.param: .*integer parameter of the arm, got 'factor'"),
        ("max_per_sm = 4", "max_per_sm = 0", r"grid\.max_per_sm: .*at least 1, got 0"),
        ("max_per_sm = 4", "max_per_gpc = 4", r"arms\[1\]\.kernels\[0\]\.grid.* unknown field `max_per_gpc`"),
        ("dependent = true", "dependent = 1", r"kernels\[1\]\.dependent: expected `bool`, got `int`"),
        ('bytes = "width * 4"', 'bytes = "0 - width"', r"workspace\.bytes: .*at least 0, got -64"),
        (
            "num_tokens = [1, 2]",
            "num_tokens = [1, 2000]",
            rf"toml:{PROGRAMS}: programs\[0\]\.num_tokens\[1\]: .*got 2000",
        ),
        (
            "num_tokens = [1, 2]",
            "num_tokens = [1, 1]",
            r"programs\[0\]: toy\.single\.w64\.l2\.f32\.t1\.bm8 is declared twice",
        ),
        ("num_tokens = [1, 2]", "num_tokens = []", r"programs\[0\]\.num_tokens: expected at least one value"),
        ("num_tokens = [1, 2]", 'num_tokens = ["1"]', r"programs\[0\].*expected `int`, got `str`"),
        (
            "num_tokens = [1, 2]",
            "num_token = [1, 2]",
            r"programs\[0\]\.num_token: unknown key: expected one of arm, archs, only, num_tokens",
        ),
        ("block_m = [8]\n", "block_m = [12]\n", r"programs\[0\]\.block_m\[0\]: expected 8\.\.32 in steps of 8, got 12"),
        ('arm = "single"', 'arm = "double"', r"programs\[0\]\.arm: 'double' is not an arm of this table: single, many"),
        ('[1, 1, "single"]', '[1, 1, "double"]', r"routes\[0\]\.table\[1\]: .*no program of arm double"),
        (
            '[2, 2, "single"]',
            '[2, 3, "single"]',
            r"routes\[0\]\.table\[2\]: .*num_tokens=2\.\.3.* no program of arm single serves all",
        ),
        (
            '[3, 1000, "many"]',
            '[4, 1000, "many"]',
            rf"toml:{ROUTES}: routes: sm_90a: .*num_tokens=3\.\.3, block_m=8\.\.8: no route",
        ),
        (
            '[3, 1000, "many"]',
            '[2, 1000, "many"]',
            r"routes: sm_90a: .*num_tokens=2\.\.2, block_m=8\.\.8: more than one route",
        ),
        ('[3, 1000, "many"]', '[3, 1001, "many"]', r"routes\[0\]\.table\[3\]: num_tokens = \[3, 1001\]"),
        ('[3, 1000, "many"]', "[3, 1000]", r"routes\[0\]\.table\[3\]: expected `array` of length 3"),
        ("block_m = [16, 32]", "block_m = [16, 28]", rf"toml:{ROUTES_2}: routes\[1\]\.block_m: block_m = \[16, 28\]"),
        ("block_m = [16, 32]", "block_n = [16, 32]", r"routes\[1\]\.block_n: unknown key"),
        (
            'note = "reasoned"',
            'notes = "reasoned"',
            r"routes\[0\]\.notes: unknown key: expected one of archs, table, note, only, block_m",
        ),
        (
            'only = { kind = ["bf16"] }',
            'only = { kind = ["f16"] }',
            r"routes\[2\]\.only\.kind: expected one or more of bf16, f32",
        ),
        ('only = { kind = ["bf16"] }', 'only = { sort = ["f16"] }', r"routes\[2\]\.only\.sort: expected a choice key"),
    ],
)
def test_mistakes_name_the_cell(tree: Tree, old: str, new: str, said: str) -> None:
    text = (tree.root / TOY).read_text()
    assert old in text
    (tree.root / TOY).write_text(text.replace(old, new, 1))
    with pytest.raises(TableError, match=said) as caught:
        jobs.read(tree)
    assert str(caught.value).startswith("registry/toy.toml")


BORROWED = """
[[borrow]]
operator = "toy"
instead_of = "toy/single.cu.j2"
template = "toy/single.cu.j2"
args = ["factor", "out"]
"""


def add_borrower(tree: Tree, borrow: str) -> None:
    """A table `other` like toy's, that has only toy's second arm of its own."""
    text = toytree.TABLE.lstrip("\n").replace('operator = "toy"', 'operator = "other"')
    first, second = (text.index("[[arms]]"), text.rindex("[[arms]]"))
    one, two = text.index("[[programs]]"), text.rindex("[[programs]]")
    kept = text[:first] + borrow.lstrip("\n") + text[second:one] + text[two:]
    (tree.registry / "other.toml").write_text(kept)


def test_borrowed_arms_are_the_lenders_but_for_template_and_arguments(tree: Tree) -> None:
    add_borrower(tree, BORROWED)
    other, toy = jobs.read(tree).operators
    assert (other.name, toy.name) == ("other", "toy")
    assert [name.replace("other.", "toy.") for name in other.programs] == list(toy.programs)
    for mine, lent in zip(other.programs.values(), toy.programs.values(), strict=True):
        assert (mine.constants, mine.architectures) == (lent.constants, lent.architectures)
    mine, lent = other.arms["single"], toy.arms["single"]
    assert [arg.name for arg in mine.args] == ["factor", "out"]
    assert (mine.template, mine.summary) == (lent.template, lent.summary)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('operator = "toy"', 'operator = "toys"', r"borrow\[0\]\.operator: expected a table with arms of .*got 'toys'"),
        (
            'instead_of = "toy/single',
            'instead_of = "toy/no',
            r"expected a table with arms of toy/no\.cu\.j2, got 'toy'",
        ),
        ('args = ["factor", "out"]', 'args = ["fact"]', r"single: args: expected names from \[args\].*fact"),
        ("instead_of", "instead", r"borrow\[0\].*unknown field `instead`"),
    ],
)
def test_mistakes_in_borrowing_name_the_cell(tree: Tree, old: str, new: str, said: str) -> None:
    add_borrower(tree, BORROWED.replace(old, new))
    with pytest.raises(TableError, match=said) as caught:
        jobs.read(tree)
    assert str(caught.value).startswith("registry/other.toml")


@pytest.mark.parametrize("arch", ["sm_90", "90a", "sm_100", "sm_100f", "sm_103", "SM_90A", ""])
def test_architecture_names_are_strict(tree: Tree, arch: str) -> None:
    text = (tree.root / TOY).read_text()
    for place in ("programs", "routes"):
        before, header, after = text.partition(f"[[{place}]]")
        (tree.root / TOY).write_text(before + header + after.replace('"sm_90a"', f'"{arch}"', 1))
        with pytest.raises(TableError, match=rf"{place}\[0\]\.archs\[0\]: expected one of sm_90a, sm_100a, sm_103a"):
            jobs.read(tree)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('version = "1"\n', "missing required field `serial`"),
        ("version = 1\nserial = 1\n", r"registry\.toml:1: version: expected `str`, got `int`"),
        (
            'version = "1"\nserial = 1\nname = "x"\n',
            r"registry\.toml:3: name: unknown key: expected one of version, serial",
        ),
        ('version = "1"\nserial = 0\n', r"registry/registry\.toml:2: serial: expected `int` >= 1"),
    ],
)
def test_registry_row(tree: Tree, text: str, said: str) -> None:
    (tree.registry / "registry.toml").write_text(text)
    with pytest.raises(TableError, match=said):
        jobs.read(tree)


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"none\.toml: expected a readable TOML file, got No such file"):
        tables.load(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(TableError, match=r"bytes\.toml: expected TOML"):
        tables.load(tmp_path / "bytes.toml")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_damage_is_a_table_error_or_a_plan(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Lines lost, doubled or cut: planning succeeds or raises TableError, never anything else."""
    root = toytree.write(tmp_path_factory.mktemp("tree"))
    lines = toytree.TABLE.splitlines()
    index = data.draw(st.integers(0, len(lines) - 1))
    cut = data.draw(st.integers(0, len(lines[index])))
    damaged = data.draw(st.sampled_from([[], [lines[index]] * 2, [lines[index][:cut]], [lines[index][cut:]]]))
    (root / TOY).write_text("\n".join([*lines[:index], *damaged, *lines[index + 1 :]]))
    with suppress(TableError):
        jobs.read(Tree(root))


@pytest.mark.parametrize(
    "row", [tables.ArmRow, tables.BorrowRow, tables.KernelRow, tables.GridRow, tables.WorkspaceRow, Axis]
)
def test_every_key_is_in_the_legend(row: type[msgspec.Struct]) -> None:
    page = (_paths.PACKAGE.parent / "docs" / "adding-a-kernel.md").read_text()
    assert [field for field in row.__struct_fields__ if not re.search(rf"\b{field}\b", page)] == []
