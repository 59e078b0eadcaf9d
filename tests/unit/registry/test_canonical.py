"""The manifest's bytes: canonical to write, strict to read, and free of contradictions."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.registry.samples import kernel, plain_manifest, program, route

from chord.errors import ManifestError
from chord.registry import canonical
from chord.registry import schema as s

GOOD = plain_manifest()


def changed(edit) -> bytes:
    raw = json.loads(canonical.encode(GOOD))
    edit(raw)
    return json.dumps(raw).encode()


def replaced(**changes) -> s.Manifest:
    """The good manifest with parts of its operator replaced."""
    return msgspec.structs.replace(GOOD, operators={"toy": msgspec.structs.replace(GOOD.operators["toy"], **changes)})


@given(
    st.text(max_size=8),
    st.integers(1, 2**31),
    st.dictionaries(
        st.from_regex("[a-z0-9]{1,4}(/[a-z][a-z.]{0,3})?", fullmatch=True),
        st.from_regex("[0-9a-f]{64}", fullmatch=True),
        max_size=4,
    ),
)
def test_equal_manifests_have_equal_bytes_and_come_back_equal(version, serial, sources):
    info = s.RegistryInfo(version=version, serial=serial)
    made = msgspec.structs.replace(GOOD, registry=info, sources=sources)
    again = msgspec.structs.replace(GOOD, registry=info, sources=dict(reversed(list(sources.items()))))
    data = canonical.encode(made)
    assert canonical.encode(again) == data
    assert canonical.decode(data, "manifest.json") == made
    assert canonical.encode(canonical.decode(data, "manifest.json")) == data


def test_the_canonical_form():
    text = canonical.encode(GOOD).decode()
    assert text == json.dumps(json.loads(text), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not a manifest"),
        (b"{}", "is not a manifest: .*schema_version"),
        (b"\xff", "is not a manifest"),
        (b"<html>", "is not a manifest"),
        (changed(lambda m: m.update(schema_version=2)), "has schema_version 2, this chord reads 1"),
        (changed(lambda m: m.update(schema_version=2, more=1)), "has schema_version 2"),
        (changed(lambda m: m.update(more=1)), "unknown field `more`"),
        (changed(lambda m: m.pop("toolchain")), "missing required field `toolchain`"),
        (changed(lambda m: m["registry"].update(serial=0)), r"at registry.serial"),
    ],
)
def test_what_is_no_manifest_is_refused(data, message):
    with pytest.raises(ManifestError, match=f"^m.json.*{message}"):
        canonical.decode(data, "m.json")


@pytest.mark.parametrize("digest", ["", "0" * 63, "0" * 65, "0" * 64 + "\n", "A" * 64, "../" + "0" * 61, 7])
def test_r02_a_malformed_hash_names_its_entry(digest):
    def edit(raw):
        raw["operators"]["toy"]["programs"]["toy.one.t1"]["builds"]["sm_100a"]["cubin_sha256"] = digest

    entry = r"operators\['toy'\]\.programs\['toy\.one\.t1'\]\.builds\['sm_100a'\]\.cubin_sha256"
    with pytest.raises(ManifestError, match=entry):
        canonical.decode(changed(edit), "m.json")


TOY = GOOD.operators["toy"]
MANY = TOY.programs["toy.many"]


def with_program(name: str, **changes) -> s.Manifest:
    return replaced(programs=TOY.programs | {name: msgspec.structs.replace(MANY, **changes)})


def with_args(*args: s.Arg) -> s.Manifest:
    return replaced(arms=TOY.arms | {"many": s.Arm(template="t", args=args, summary="")})


def with_kernel(**changes) -> s.Manifest:
    return with_program("toy.many", kernels=(kernel("toy_many", **changes),))


CONTRADICTIONS = {
    "gap": (
        replaced(routes={"sm_90a": TOY.routes["sm_90a"][1:]}),
        "sm_90a: width=896, ways=16, num_tokens=0..0.*no route",
    ),
    "overlap": (replaced(routes={"sm_90a": TOY.routes["sm_90a"] * 2}), "more than one route"),
    "route to nothing": (
        replaced(routes={"sm_90a": (route(896, (0, 1000), "toy.none"), *TOY.routes["sm_90a"][4:])}),
        "route of toy.none: there is no such program",
    ),
    "route beyond a constant": (
        replaced(routes={"sm_90a": (route(896, (0, 1000), "toy.one.t1"), *TOY.routes["sm_90a"][4:])}),
        r"covers num_tokens \(0, 1000\), the program is made for 1",
    ),
    "route beyond a limit": (
        with_program("toy.many", constants={"max_tokens": 4}),
        r"covers num_tokens \(\d+, \d+\), the program serves at most 4",
    ),
    "route on another architecture": (
        replaced(routes={"sm_103a": TOY.routes["sm_90a"]}),
        "sm_103a: route of toy.many: the program is declared for sm_90a, sm_100a",
    ),
    "unknown architecture": (replaced(routes={"sm_90": TOY.routes["sm_90a"]}), "'sm_90': expected one of sm_90a"),
    "a template outside": (
        replaced(arms=TOY.arms | {"many": msgspec.structs.replace(TOY.arms["many"], template="../../etc/passwd")}),
        r"arm many: template '../../etc/passwd': expected names .* below templates/",
    ),
    "a source outside": (
        msgspec.structs.replace(GOOD, sources={"/etc/passwd": "0" * 64}),
        r"sources: '/etc/passwd': expected names",
    ),
    "a symbol with a NUL": (with_program("toy.many", kernels=(kernel("toy\0many"),)), "expected a C identifier"),
    "too many choices": (
        replaced(axes=tuple(s.Axis(keys=(f"k{i}",), choices=tuple((n,) for n in range(10))) for i in range(20))),
        "combinations of choices, expected at most 4096",
    ),
    "unparsable name": (with_program("toy.Many"), "arm name 'Many'"),
    "name of another operator": (with_program("toi.many"), "names operator toi, stands under toy"),
    "name of another arm": (with_program("toy.more"), "names arm more, has arm many"),
    "name with a foreign constant": (with_program("toy.many.t4"), "names constant t4"),
    "no such arm": (with_program("toy.none", arm="none"), "arm none does not exist; there are many, one"),
    "num_tokens against constants": (with_program("toy.many", num_tokens=4), "num_tokens is 4, its constants say None"),
    "builds against architectures": (
        with_program("toy.many", architectures=("sm_90a",)),
        "declared for sm_90a, built for sm_100a, sm_90a",
    ),
    "resources against kernels": (
        with_program("toy.many", kernels=(kernel("a"), kernel("b"))),
        "resources of 1 kernels, expected 2",
    ),
    "a symbol twice": (with_program("toy.many", kernels=(kernel("a"), kernel("a"))), "each with its own symbol"),
    "a grid of nothing": (with_kernel(grid=s.GridRule()), "its grid needs either"),
    "a grid of both": (with_kernel(grid=s.GridRule(blocks=1, param="num_tokens")), "its grid needs either"),
    "a grid that follows a buffer": (with_kernel(grid=s.GridRule(param="x")), "its grid follows x, which is not"),
    "half a cluster": (
        with_kernel(cluster=4, grid=s.GridRule(blocks=6)),
        "6 blocks are no whole number of clusters of 4",
    ),
    "an argument twice": (with_args(*TOY.arms["many"].args, TOY.arms["many"].args[0]), "an argument is listed twice"),
    "an unknown type": (
        with_args(s.Arg(kind="parameter", name="n", type="int")),
        "parameter type 'int', expected one of",
    ),
    "an argument kind of the future": (with_args(s.Arg(kind="tensor_map", name="t", type="u8")), "not tensor_map"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_contradiction_is_named(case):
    made, message = CONTRADICTIONS[case]
    with pytest.raises(ManifestError, match=message):
        canonical.decode(canonical.encode(made), "m.json")


def test_symbols_may_be_shared_between_programs():
    shared = program("many", [kernel("k")])
    canonical.decode(canonical.encode(replaced(programs=TOY.programs | {"toy.many": shared})), "m.json")
