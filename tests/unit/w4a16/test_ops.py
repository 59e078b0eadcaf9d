"""The operator on a CPU: against the reference, with wrong arguments and plans, opcheck and torch.compile."""

import pytest
import torch

import chord
from chord.w4a16.layout import WeightShape, words_from_codes
from chord.w4a16.reference import contract_weights

OPS = torch.ops.chord
TOKENS, TOP_K, EXPERTS, N, K = 6, 2, 4, 128, 64


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
def problem():
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (EXPERTS, N, K), generator=generator, dtype=torch.int32)
    scale = (torch.rand(EXPERTS, N, K // 32, generator=generator) * 0.04 + 0.005).to(torch.bfloat16)
    x = torch.randn(TOKENS, K, generator=generator).to(torch.bfloat16)
    ids = torch.tensor([[0, 2], [1, 2], [2, -1], [0, 1], [3, 2], [-1, 3]], dtype=torch.int32)
    return x, codes, scale, ids, chord.route_plan(ids, EXPERTS, 8)


def expected(problem, out, row_weight=None, gated=False):
    x, codes, scale, ids, _ = problem
    dense = contract_weights(words_from_codes(codes), scale).to(torch.float32)
    for pair, expert in enumerate(ids.flatten().tolist()):
        if expert >= 0:
            row = x[pair // TOP_K].to(torch.float32) @ dense[expert].T
            out[pair] = (row * row_weight[pair] if row_weight is not None else row).to(out.dtype)
    return out


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_operator_follows_the_plan_and_leaves_other_rows_alone(problem, gated, weighted):
    x, codes, scale, _, plan = problem
    packed = chord.pack_w4a16(words_from_codes(codes), scale, gated=gated)
    row_weight = torch.rand(TOKENS * TOP_K, generator=torch.Generator().manual_seed(2)) if weighted else None
    out = torch.full((TOKENS * TOP_K, N), 3.0, dtype=torch.bfloat16)
    want = expected(problem, out.clone(), row_weight)
    got = chord.moe_w4a16(
        x, packed, plan, top_k=TOP_K, block_m=8, row_weight=row_weight, out=out, validate=True, invariant=True
    )
    assert got is out
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-3)
    cleared = chord.moe_w4a16(
        x, packed, tuple(plan[:3]), top_k=TOP_K, block_m=8, row_weight=row_weight, zero_missing=True
    )
    assert torch.equal(cleared, torch.where(want == 3, torch.zeros_like(want), got))


def test_swiglu_is_rounded_once(problem):
    x, codes, scale, ids, plan = problem
    packed = chord.pack_w4a16(words_from_codes(codes), scale, gated=True)
    row_weight = torch.rand(TOKENS * TOP_K, generator=torch.Generator().manual_seed(2))
    options = {"top_k": TOP_K, "block_m": 8, "row_weight": row_weight, "zero_missing": True}
    got = chord.moe_w4a16(x, packed, plan, **options, swiglu=True)
    dense, want = (
        contract_weights(words_from_codes(codes), scale).to(torch.float32),
        torch.zeros(TOKENS * TOP_K, N // 2),
    )
    for pair, expert in enumerate(ids.flatten().tolist()):
        if expert >= 0:
            gate, up = (dense[expert] @ x[pair // TOP_K].to(torch.float32)).chunk(2)
            want[pair] = torch.nn.functional.silu(gate) * up * row_weight[pair]
    torch.testing.assert_close(got, want.to(torch.bfloat16), rtol=2**-8, atol=1e-5)
    out = torch.zeros(TOKENS * TOP_K, N // 2, dtype=torch.bfloat16)
    prepared = chord.prepare_moe_w4a16(x, packed, plan, **options, swiglu=True, out=out)
    prepared()
    assert torch.equal(out, got)
    with pytest.raises(ValueError, match=r"out: expected shape \[12, 64\], got \[12, 128\]"):
        chord.moe_w4a16(x, packed, plan, **options, swiglu=True, out=torch.zeros(12, N, dtype=torch.bfloat16))


def test_plain_codes_pack_to_the_same_bytes(problem):
    _, codes, scale, _, _ = problem
    plain, words = chord.pack_w4a16(codes, scale), chord.pack_w4a16(words_from_codes(codes), scale)
    assert torch.equal(plain.data, words.data)
    assert plain.shape == words.shape == WeightShape(EXPERTS, N, K)
    restored, restored_scale = chord.unpack_w4a16(plain)
    assert torch.equal(restored, words_from_codes(codes))
    assert torch.equal(restored_scale, scale)
    assert torch.equal(plain.to("cpu").data, plain.data)


def test_weights_that_are_not_served_are_refused(problem):
    _, codes, scale, _, _ = problem
    with pytest.raises(ValueError, match=r"scale: expected torch\.bfloat16, got torch\.float16"):
        chord.pack_w4a16(codes, scale.to(torch.float16))
    with pytest.raises(ValueError, match="other group sizes are not served"):
        chord.pack_w4a16(codes, torch.cat([scale, scale], dim=2))
    with pytest.raises(ValueError, match=r"codes: expected torch\.int32"):
        chord.pack_w4a16(codes.to(torch.uint8), scale)
    with pytest.raises(ValueError, match="expected 0 to 15"):
        chord.pack_w4a16(codes + 1, scale)
    with pytest.raises(ValueError, match="n: expected a positive multiple of 64"):
        chord.pack_w4a16(codes[:, :96].contiguous(), scale[:, :96].contiguous())
    packed = chord.pack_w4a16(codes, scale)
    with pytest.raises(ValueError, match="layout_version: this chord reads packed weights of version 1, got 2"):
        chord.PackedW4A16(packed.data, packed.shape, 2)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"top_k": 0}, ValueError, "top_k: expected 1 to"),
        ({"top_k": True}, TypeError, "top_k: expected an int"),
        ({"block_m": 12}, ValueError, "block_m: expected a multiple of 8"),
        ({"expected_rows": -1}, ValueError, "expected_rows: expected at least 0"),
        ({"x": torch.zeros(6, 64)}, ValueError, r"x: expected torch\.bfloat16"),
        ({"x": torch.zeros(6, 96, dtype=torch.bfloat16)}, ValueError, "x: expected rows of"),
        ({"x": torch.zeros(64, 6, dtype=torch.bfloat16).T}, ValueError, "x: expected a contiguous tensor"),
        ({"packed": torch.zeros(4, 9216, dtype=torch.uint8)}, TypeError, r"packed: expected a chord\.PackedW4A16"),
        ({"row_weight": torch.ones(5)}, ValueError, r"row_weight: expected shape \[12\], got \[5\]"),
        ({"out": torch.zeros(12, 64, dtype=torch.bfloat16)}, ValueError, r"out: expected shape \[12, 128\]"),
        (
            {"plan": (torch.zeros(8), torch.zeros(1), torch.zeros(1))},
            ValueError,
            "sorted_token_ids: expected torch.int32",
        ),
    ],
)
def test_wrong_arguments_are_named(problem, change, error, message):
    x, codes, scale, _, plan = problem
    arguments = {"x": x, "packed": chord.pack_w4a16(codes, scale), "plan": plan, "top_k": TOP_K, "block_m": 8} | change
    with pytest.raises(error, match=message):
        chord.moe_w4a16(arguments.pop("x"), arguments.pop("packed"), arguments.pop("plan"), **arguments)


@pytest.mark.parametrize(
    ("ids", "experts", "count", "message"),
    [
        ([0, 12, 12, 12, 12, 12, 12, 12], [0], 7, "num_tokens_post_padded: expected a multiple of block_m = 8"),
        ([0, 12, 12, 12, 12, 12, 12, 12], [0], 16, "from 0 to 8"),
        ([0, 12, 12, 12, 12, 12, 12, 12], [4], 8, "expert_ids: expected -1 .no expert. or 0 to 3, got 4"),
        ([0, 12, 12, 12, 12, 12, 12, -3], [0], 8, "sorted_token_ids: expected 0 to 11, or at least 12.*got -3"),
        ([0, 12, 1, 12, 12, 12, 12, 12], [0], 8, "pairs before its empty places, got 1"),
        ([0, 5, 5, 12, 12, 12, 12, 12], [0], 8, "expected each pair once, got 5"),
        ([0] * 16, [0], 16, "expert_ids: expected at least 2 entries for 16 ids, got 1"),
    ],
)
def test_wrong_plans_are_named_when_asked(problem, ids, experts, count, message):
    x, codes, scale, _, _ = problem
    plan = tuple(torch.tensor(part, dtype=torch.int32) for part in (ids, experts, [count]))
    with pytest.raises(ValueError, match=message):
        chord.moe_w4a16(x, chord.pack_w4a16(codes, scale), plan, top_k=TOP_K, block_m=8, validate=True)


def test_blocks_of_remote_experts_are_a_valid_plan(problem):
    x, codes, scale, _, _ = problem
    ids = torch.full((16,), 12, dtype=torch.int32)
    ids[8] = 3
    plan = (ids, torch.tensor([-1, 2], dtype=torch.int32), torch.tensor(16, dtype=torch.int32))
    out = chord.moe_w4a16(
        x, chord.pack_w4a16(codes, scale), plan, top_k=TOP_K, block_m=8, zero_missing=True, validate=True
    )
    assert out.abs().sum(dim=1).nonzero().flatten().tolist() == [3]


def scalars(packed):
    return (packed.shape.gated, TOP_K, 8, 3, False, True, False)


def test_opcheck(problem, filled_memory):
    x, codes, scale, _, plan = problem
    packed = chord.pack_w4a16(codes, scale)
    arguments = (x, packed.data, *plan[:3], torch.ones(TOKENS * TOP_K), *scalars(packed))
    torch.library.opcheck(OPS.moe_w4a16.default, arguments)
    out = torch.zeros(TOKENS * TOP_K, N, dtype=torch.bfloat16)
    torch.library.opcheck(OPS.moe_w4a16_out.default, (*arguments, out))


def test_compiles_to_one_graph_with_symbolic_tokens(problem):
    _, codes, scale, _, _ = problem
    packed = chord.pack_w4a16(codes, scale)
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    def layer(x, ids):
        plan = chord.route_plan(ids, EXPERTS, 8)
        return chord.moe_w4a16(x * 2, packed, plan, top_k=TOP_K, block_m=8, zero_missing=True) + 1

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (5, 9, 12):
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, K, generator=generator).to(torch.bfloat16)
        ids = torch.randint(0, EXPERTS, (tokens, TOP_K), generator=generator, dtype=torch.int32)
        assert torch.equal(compiled(x, ids), layer(x, ids))
    assert len(graphs) == 1, "one graph serves every token count"


def test_nothing_is_differentiable(filled_memory, problem):
    x, codes, scale, _, plan = problem
    packed = chord.pack_w4a16(words_from_codes(codes), scale)
    rows, weight = x.clone().requires_grad_(), torch.ones(TOKENS * TOP_K, requires_grad=True)
    settings = {"top_k": TOP_K, "block_m": 8, "row_weight": weight, "zero_missing": True}
    out = torch.empty(TOKENS * TOP_K, N, dtype=torch.bfloat16, requires_grad=True)
    eager = chord.moe_w4a16(rows, packed, plan, **settings)
    prepared = chord.prepare_moe_w4a16(rows, packed, plan, **settings)
    prepared()
    layer = torch.compile(
        lambda a: chord.moe_w4a16(a * 1, packed, plan, **settings), fullgraph=True, backend="aot_eager"
    )
    for result in (eager, prepared.out, layer(rows)):
        assert (result.requires_grad, result.grad_fn) == (False, None)
        assert torch.equal(result, eager)
    chord.moe_w4a16(rows, packed, plan, out=out, **settings)  # a leaf, which autograd would not let be written
    assert out.is_leaf
    assert torch.equal(out, eager)
    arguments = (rows, packed.data, *plan[:3], weight, False, TOP_K, 8, 3, False, True, False)
    torch.library.opcheck(OPS.moe_w4a16.default, arguments)
