"""The grouped operators on a CPU: offsets, indices and counts, wrong arguments and data, opcheck and torch.compile."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import chord
from chord.w4a16.grouped_rows import SEGMENT, ContiguousRows, MaskedRows
from chord.w4a16.layout import WeightShape, words_from_codes
from chord.w4a16.reference import contract_weights

OPS = torch.ops.chord
EXPERTS, N, K = 4, 128, 64
COUNTS = [3, 0, 9, 5]
ROWS = sum(COUNTS)
CALLS = ["offsets", "wide_offsets", "m_indices", "masked"]


@pytest.fixture
def filled_memory():
    """torch.empty gives a constant, so that rows which an op leaves alone compare equal between two runs."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


@pytest.fixture(scope="module")
def weights():
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (EXPERTS, N, K), generator=generator, dtype=torch.int32)
    scale = (torch.rand(EXPERTS, N, K // 32, generator=generator) * 0.04 + 0.005).to(torch.bfloat16)
    return words_from_codes(codes), scale


@pytest.fixture(scope="module")
def packed(weights):
    return chord.pack_w4a16(*weights, gated=True)


def prefix_sums(counts, dtype=torch.int32):
    return torch.nn.functional.pad(torch.tensor(counts).cumsum(0), (1, 0)).to(dtype)


def call_of(kind, counts=COUNTS, seed=2):
    """(function, its prepared form, x, arguments, expert of each row of x or -1) of one form of grouped rows."""
    generator = torch.Generator().manual_seed(seed)
    owners = [expert for expert, count in enumerate(counts) for _ in range(count)]
    if kind == "masked":
        each = max(counts) + 2
        owners = [e if i < count else -1 for e, count in enumerate(counts) for i in range(each)]
        x = torch.randn(len(counts), each, K, generator=generator).to(torch.bfloat16)
        arguments = {"counts": torch.tensor(counts, dtype=torch.int32), "expected_rows": 4}
        return chord.moe_w4a16_masked, chord.prepare_moe_w4a16_masked, x, arguments, owners
    if kind == "m_indices":
        owners = []
        for expert, count in enumerate(counts):
            owners += [expert] * count + [-1] * (-count % SEGMENT)
        arguments = {"m_indices": torch.tensor(owners, dtype=torch.int32)}
    else:
        owners += [-1, -1]  # rows beyond the last offset
        arguments = {"offsets": prefix_sums(counts, torch.int64 if kind == "wide_offsets" else torch.int32)}
    x = torch.randn(len(owners), K, generator=generator).to(torch.bfloat16)
    return chord.moe_w4a16_contiguous, chord.prepare_moe_w4a16_contiguous, x, arguments, owners


def expected(x, weights, owners, out, row_weight=None, swiglu=False):
    """Row by row, in float32, written into a copy of out."""
    dense, out = contract_weights(*weights).to(torch.float32), out.clone()
    flat, rows = out.view(-1, out.shape[-1]), x.view(-1, K)
    factors = None if row_weight is None else row_weight.flatten()
    for row, expert in enumerate(owners):
        if expert >= 0:
            value = dense[expert] @ rows[row].to(torch.float32)
            if swiglu:
                value = torch.nn.functional.silu(value[: N // 2]) * value[N // 2 :]
            flat[row] = value if factors is None else value * factors[row]
    return out


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", CALLS)
def test_rows_meet_their_expert_and_others_are_left_alone(weights, packed, kind, weighted, swiglu):
    run, prepare, x, arguments, owners = call_of(kind)
    nobody = torch.tensor(owners) < 0
    x.view(-1, K)[nobody] = float("nan")
    row_weight = torch.rand(x.shape[:-1], generator=torch.Generator().manual_seed(3)) if weighted else None
    out = torch.full((*x.shape[:-1], N // 2 if swiglu else N), 3.0, dtype=torch.bfloat16)
    options = {**arguments, "row_weight": row_weight, "swiglu": swiglu}
    want = expected(x, weights, owners, out, row_weight, swiglu)
    got = run(x, packed, **options, out=out, validate=True, invariant=True)
    assert got is out
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-3)
    assert (got.view(-1, out.shape[-1])[nobody] == 3).all()
    cleared = run(x, packed, **options, zero_missing=True)
    got.view(-1, out.shape[-1])[nobody] = 0
    assert torch.equal(cleared, got)
    prepared = prepare(x, packed, **options, zero_missing=True)
    assert prepared.program == "reference"
    prepared.out.fill_(7)
    prepared()
    assert torch.equal(prepared.out, cleared)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 40), min_size=EXPERTS, max_size=EXPERTS), st.integers(0, 1 << 20))
def test_every_form_gives_a_row_the_same_bits(counts, seed):
    codes = torch.randint(0, 16, (EXPERTS, 64, K), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    packed = chord.pack_w4a16(codes, torch.full((EXPERTS, 64, K // 32), 0.01, dtype=torch.bfloat16))
    results = []
    rows = torch.randn(sum(counts), K, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    for kind in CALLS:
        run, _, x, arguments, owners = call_of(kind, counts)
        mine = torch.tensor(owners, dtype=torch.int64) >= 0
        x.view(-1, K)[mine] = rows
        results.append(run(x, packed, **arguments, validate=True).view(-1, 64)[mine])
    assert all(torch.equal(results[0], other) for other in results[1:])


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(-(1 << 31), (1 << 31) - 1) | st.integers(-3, 20), min_size=EXPERTS + 1, max_size=EXPERTS + 1)
)
def test_wrong_data_names_no_row_outside(values):
    shape, x = WeightShape(EXPERTS, N, K), torch.empty(17, K)
    numbers = torch.tensor(values, dtype=torch.int32)
    named = ContiguousRows(numbers.to(torch.int64) * 3, None).by_expert(x, shape)
    named |= {e + EXPERTS: rows for e, rows in ContiguousRows(numbers, None).by_expert(x, shape).items()}
    assert all(rows.numel() and int(rows.min()) >= 0 and int(rows.max()) < 17 for rows in named.values())
    slabs = MaskedRows(numbers[:EXPERTS]).by_expert(x.new_empty(EXPERTS, 6, K), shape)
    assert all(6 * e <= int(rows.min()) and int(rows.max()) < 6 * (e + 1) for e, rows in slabs.items())
    repeated = numbers.repeat(4)[:17]
    owned = ContiguousRows(None, repeated).by_expert(x, shape)
    assert set(owned) <= set(range(EXPERTS))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"offsets": None}, ValueError, "offsets, m_indices: expected exactly one of the two, got neither"),
        ({"m_indices": torch.zeros(6, dtype=torch.int32)}, ValueError, "exactly one of the two, got both"),
        ({"offsets": torch.zeros(4, dtype=torch.int32)}, ValueError, r"offsets: expected shape \[5\], got \[4\]"),
        ({"offsets": torch.zeros(5)}, ValueError, r"offsets: expected torch\.int32 or torch\.int64"),
        ({"expected_rows": -1}, ValueError, "expected_rows: expected at least 0"),
        ({"expected_rows": True}, TypeError, "expected_rows: expected an int"),
        ({"swiglu": 1}, TypeError, "swiglu: expected a bool"),
        ({"x": torch.zeros(6, 64)}, ValueError, r"x: expected torch\.bfloat16"),
        ({"x": torch.zeros(2, 3, 64, dtype=torch.bfloat16)}, ValueError, r"x: expected shape \[any, any\]"),
        ({"x": torch.zeros(6, 96, dtype=torch.bfloat16)}, ValueError, "x: expected rows of"),
        ({"packed": torch.zeros(4, 9216, dtype=torch.uint8)}, TypeError, r"packed: expected a chord\.PackedW4A16"),
        ({"row_weight": torch.ones(5)}, ValueError, r"row_weight: expected shape \[6\], got \[5\]"),
        ({"out": torch.zeros(6, 64, dtype=torch.bfloat16)}, ValueError, r"out: expected shape \[6, 128\]"),
    ],
)
def test_wrong_arguments_of_contiguous_are_named(packed, change, error, message):
    arguments = {"x": torch.zeros(6, K, dtype=torch.bfloat16), "packed": packed, "offsets": prefix_sums([1, 2, 3, 0])}
    arguments |= change
    for run in (chord.moe_w4a16_contiguous, chord.prepare_moe_w4a16_contiguous):
        given_now = dict(arguments)
        with pytest.raises(error, match=message):
            run(given_now.pop("x"), given_now.pop("packed"), **given_now)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"counts": torch.zeros(4, dtype=torch.int64)}, ValueError, r"counts: expected torch\.int32"),
        ({"counts": torch.zeros(3, dtype=torch.int32)}, ValueError, r"counts: expected shape \[4\], got \[3\]"),
        ({"x": torch.zeros(3, 5, K, dtype=torch.bfloat16)}, ValueError, r"x: expected shape \[4, any, 64\]"),
        ({"x": torch.zeros(20, K, dtype=torch.bfloat16)}, ValueError, r"x: expected shape \[any, any, any\]"),
        ({"row_weight": torch.ones(20)}, ValueError, r"row_weight: expected shape \[4, 5\]"),
        ({"out": torch.zeros(4, 5, 64, dtype=torch.bfloat16)}, ValueError, r"out: expected shape \[4, 5, 128\]"),
        ({"expected_rows": -2}, ValueError, "expected_rows: expected at least 0"),
    ],
)
def test_wrong_arguments_of_masked_are_named(packed, change, error, message):
    arguments = {"x": torch.zeros(4, 5, K, dtype=torch.bfloat16), "counts": torch.zeros(4, dtype=torch.int32)}
    arguments |= {"expected_rows": 2, **change}
    for run in (chord.moe_w4a16_masked, chord.prepare_moe_w4a16_masked):
        given_now = dict(arguments)
        with pytest.raises(error, match=message):
            run(given_now.pop("x"), packed, given_now.pop("counts"), **given_now)


def test_swiglu_needs_gates(weights):
    plain = chord.pack_w4a16(*weights)
    x, offsets = torch.zeros(6, K, dtype=torch.bfloat16), prefix_sums([1, 2, 3, 0])
    with pytest.raises(ValueError, match="swiglu: expected weights packed with gated=True"):
        chord.moe_w4a16_contiguous(x, plain, offsets=offsets, swiglu=True)
    plan = chord.route_plan(torch.zeros(6, 1, dtype=torch.int32), EXPERTS, 8)
    with pytest.raises(ValueError, match="swiglu: expected weights packed with gated=True"):
        chord.moe_w4a16(x, plain, plan, top_k=1, block_m=8, swiglu=True)


SEGMENTS = [0] * 3 + [-1] * 125 + [2] * 128


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"offsets": [1, 2, 3, 4, 5]}, "offsets: expected 0 in front, got 1"),
        ({"offsets": [0, 5, 4, 6, 6]}, "offsets: expected prefix sums, which do not fall, got 4"),
        ({"offsets": [0, 1, 2, 3, 257]}, r"offsets: expected at most 256 \(rows of x\) at the end, got 257"),
        ({"m_indices": [*SEGMENTS[:-1], 4]}, r"m_indices: expected -1 \(nobody's row\) or 0 to 3, got 4"),
        ({"m_indices": [*SEGMENTS[:-1], -2]}, r"m_indices: expected -1 .* or 0 to 3, got -2"),
        ({"m_indices": [*SEGMENTS[:-1], 3]}, "m_indices: expected one expert in each 128 rows, got 3"),
        ({"m_indices": [-1, *SEGMENTS[1:]]}, "m_indices: expected the rows of 128 that hold something before"),
    ],
)
def test_wrong_data_of_contiguous_is_named_when_asked(packed, arguments, message):
    x = torch.zeros(256, K, dtype=torch.bfloat16)
    given_now = {name: torch.tensor(values, dtype=torch.int32) for name, values in arguments.items()}
    with pytest.raises(ValueError, match=message):
        chord.moe_w4a16_contiguous(x, packed, **given_now, validate=True)


@pytest.mark.parametrize("wrong", [-1, 6])
def test_wrong_counts_are_named_when_asked(packed, wrong):
    x, counts = torch.zeros(4, 5, K, dtype=torch.bfloat16), torch.tensor([0, 5, wrong, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match=rf"counts: expected 0 to 5 \(rows of an expert in x\), got {wrong}"):
        chord.moe_w4a16_masked(x, packed, counts, expected_rows=2, validate=True)


@pytest.mark.parametrize("kind", CALLS)
def test_nothing_to_do(packed, kind):
    run, prepare, x, arguments, _ = call_of(kind, [0] * EXPERTS)
    empty = x[:, :0] if kind == "masked" else x[:0]
    if kind == "m_indices":
        arguments = {"m_indices": arguments["m_indices"][:0]}
    assert run(empty, packed, **arguments).numel() == 0
    prepare(empty, packed, **arguments)()


def op_arguments(kind, packed):
    _, _, x, arguments, _ = call_of(kind)
    tensors = (arguments["counts"],) if kind == "masked" else (arguments.get("offsets"), arguments.get("m_indices"))
    return (x, packed.data, *tensors, torch.ones(x.shape[:-1]), True, True, 3, False, True)


@pytest.mark.parametrize("kind", CALLS)
def test_opcheck(packed, kind, filled_memory):
    name = "moe_w4a16_masked" if kind == "masked" else "moe_w4a16_contiguous"
    arguments = op_arguments(kind, packed)
    torch.library.opcheck(getattr(OPS, name).default, arguments)
    out = torch.zeros(*arguments[0].shape[:-1], N // 2, dtype=torch.bfloat16)
    torch.library.opcheck(getattr(OPS, f"{name}_out").default, (*arguments, out))


@pytest.mark.parametrize("kind", CALLS)
def test_compiles_to_one_graph_with_symbolic_rows(packed, kind):
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    run = chord.moe_w4a16_masked if kind == "masked" else chord.moe_w4a16_contiguous

    def layer(x, told):
        options = {"counts": told, "expected_rows": 4} if kind == "masked" else {kind.removeprefix("wide_"): told}
        return run(x * 2, packed, **options, swiglu=True, zero_missing=True) + 1

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for counts in ([3, 0, 9, 5], [4, 4, 4, 5], [1, 300, 2, 7]):
        _, _, x, arguments, _ = call_of(kind, counts)
        told = arguments["counts"] if kind == "masked" else next(iter(arguments.values()))
        assert torch.equal(compiled(x, told), layer(x, told))
    assert len(graphs) == 1, "one graph serves every number of rows"


def test_nothing_is_differentiable(packed):
    run, _, x, arguments, _ = call_of("offsets")
    rows = x.clone().requires_grad_()
    result = run(rows, packed, **arguments, zero_missing=True)
    assert (result.requires_grad, result.grad_fn) == (False, None)
    out = torch.empty_like(result, requires_grad=True)
    run(rows, packed, **arguments, zero_missing=True, out=out)
    assert out.is_leaf
    assert torch.equal(out, result)


def test_gate_up_and_down_run_on_the_same_offsets(weights, packed):
    """SwiGLU rows leave in the order in which the next projection takes them."""
    down = chord.pack_w4a16(weights[0][:, :64].contiguous(), weights[1][:, :64].contiguous())
    _, _, x, arguments, _ = call_of("offsets")
    both = chord.moe_w4a16_contiguous(
        chord.moe_w4a16_contiguous(x, packed, **arguments, swiglu=True), down, **arguments
    )  # fmt: skip
    ids = torch.repeat_interleave(torch.arange(EXPERTS), torch.tensor(COUNTS)).to(torch.int32)[:, None]
    plan = chord.route_plan(ids, EXPERTS, 8)
    hidden = chord.moe_w4a16(x[:ROWS], packed, plan, top_k=1, block_m=8, swiglu=True)
    assert torch.equal(both[:ROWS], chord.moe_w4a16(hidden, down, plan, top_k=1, block_m=8))
