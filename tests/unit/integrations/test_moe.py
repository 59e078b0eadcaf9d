"""A layer over lent memory: pieces, plans, and the three ways of giving rows, on a CPU."""

from __future__ import annotations

import pytest
import torch

from chord import _runtime
from chord.integrations import moe
from chord.w4a16 import PackedW4A16, WeightShape, pack_w4a16
from chord.w4a16.reference import contract_weights
from chord.w4a16.rows import combine_rows, scatter_rows, swiglu_rows

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, TOKENS = 6, 128, 64, 2, 9


@pytest.fixture(scope="module")
def layer() -> tuple[PackedW4A16, PackedW4A16, torch.Tensor, torch.Tensor]:
    """(w13, w2, their dequantised weights)."""
    random = torch.Generator().manual_seed(2)
    found, dense = [], []
    for n, k, gated in ((2 * INTERMEDIATE, HIDDEN, True), (HIDDEN, INTERMEDIATE, False)):
        words = torch.randint(-(1 << 31), 1 << 31, (EXPERTS, n, k // 8), generator=random).to(torch.int32)
        scale = (torch.rand(EXPERTS, n, k // 32, generator=random) * 0.02).to(torch.bfloat16)
        found.append(pack_w4a16(words, scale, gated=gated))
        dense.append(contract_weights(words, scale).float())
    return found[0], found[1], dense[0], dense[1]


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)


def expert(layer, number: int, rows: torch.Tensor) -> torch.Tensor:
    gate, up = (rows.float() @ layer[2][number].T).chunk(2, dim=1)
    hidden = (torch.nn.functional.silu(gate) * up).to(torch.bfloat16)
    return hidden.float() @ layer[3][number].T


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((found.float() - wanted).norm() < 5e-3 * wanted.norm())


def test_pieces_start_on_boundaries_and_do_not_overlap() -> None:
    pieces = [(torch.int32, (3,)), (torch.bfloat16, (5, 7)), (torch.float32, (0,)), (torch.uint8, (1000,))]
    memory = torch.full((moe.bytes_of(pieces) // 2,), 1.5, dtype=torch.bfloat16)
    found = moe.cut(memory, pieces)
    assert [(piece.dtype, tuple(piece.shape)) for piece in found] == pieces
    assert all((piece.data_ptr() - memory.data_ptr()) % moe.BOUNDARY_BYTES == 0 for piece in found if piece.numel())
    for value, piece in enumerate(found):
        piece.fill_(value)
    assert all((piece == value).all() for value, piece in enumerate(found))


def test_ids_and_weights_are_copied_only_when_they_must_be() -> None:
    rooms = moe.cut(torch.empty(4096, dtype=torch.uint8), moe.routing_pieces(4, 2))
    ids, weights = torch.arange(8).view(4, 2), torch.rand(4, 2)
    found = moe.routing(ids, weights, rooms)
    assert found[0] is rooms[0]
    assert found[0].tolist() == ids.tolist()
    assert found[1] is weights


def test_a_plans_scratch_memory_suffices_for_every_program() -> None:
    for tokens in (1, 64, 100_000):
        kind, (size,) = moe.plan_pieces(tokens, 8, EXPERTS)[-1]
        assert kind == torch.uint8
        for program in _runtime.operator("route_plan").programs.values():
            assert size >= program.workspace.bytes + program.workspace.bytes_per_token * tokens * 8


@pytest.mark.parametrize("local", [None, torch.tensor([-1, 0, 1, 2, 3, 4, 5, -1], dtype=torch.int32)])
def test_indexed(layer, x: torch.Tensor, local: torch.Tensor | None) -> None:
    """With an id that is nobody's, and with experts that live elsewhere."""
    numbers = EXPERTS if local is None else local.numel()
    ids = torch.randint(0, numbers, (TOKENS, TOP_K), generator=torch.Generator().manual_seed(4)).to(torch.int32)
    ids[3, 1] = -1
    pieces = moe.plan_pieces(TOKENS, TOP_K, EXPERTS)
    buffers = moe.cut(torch.full((moe.bytes_of(pieces),), 255, dtype=torch.uint8), pieces)
    plan = moe.make_plan(ids, buffers, numbers, EXPERTS, local)
    hidden = torch.full((TOKENS * TOP_K, INTERMEDIATE), float("nan"), dtype=torch.bfloat16)
    routed = torch.full((TOKENS * TOP_K, HIDDEN), float("nan"), dtype=torch.bfloat16)
    weights, out = torch.rand(TOKENS, TOP_K), torch.full((TOKENS, HIDDEN), float("nan"), dtype=torch.bfloat16)
    given = (x, layer[0], layer[1], plan, weights, ids, hidden, routed, out)
    moe.indexed(*given, num_experts=numbers, expert_map=local, expected_rows=3, invariant=False)
    for token, routes in enumerate(ids.tolist()):
        wanted = torch.zeros(1, HIDDEN)
        for route, number in enumerate(routes):
            place = number if local is None or number < 0 else int(local[number])
            if place >= 0:
                wanted += weights[token, route] * expert(layer, place, x[token : token + 1])
        assert close(out[token : token + 1], wanted) or not (out[token].any() or wanted.any())


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_contiguous(layer, kind: torch.dtype) -> None:
    counts = [2, 0, 5, 1, 0, 3]
    offsets = torch.tensor([0, *counts]).cumsum(0).to(kind)
    rows = torch.randn(15, HIDDEN).to(torch.bfloat16)
    rows[11:] = float("nan")
    hidden = torch.full((15, INTERMEDIATE), float("nan"), dtype=torch.bfloat16)
    routed = torch.full((15, HIDDEN), 7.0, dtype=torch.bfloat16)
    moe.contiguous(rows, layer[0], layer[1], offsets, hidden, routed, expected_rows=2, invariant=False)
    for number, count in enumerate(counts):
        mine = slice(int(offsets[number]), int(offsets[number]) + count)
        if count:
            assert close(routed[mine], expert(layer, number, rows[mine]))
    assert (routed[11:] == 7.0).all()


def test_masked(layer) -> None:
    counts = torch.tensor([0, 5, 8, 1, 0, 3], dtype=torch.int32)
    slabs = torch.randn(EXPERTS, 8, HIDDEN).to(torch.bfloat16)
    hidden = torch.full((EXPERTS, 8, INTERMEDIATE), float("nan"), dtype=torch.bfloat16)
    routed = torch.full((EXPERTS, 8, HIDDEN), 7.0, dtype=torch.bfloat16)
    moe.masked(slabs, layer[0], layer[1], counts, hidden, routed, expected_rows=2, invariant=False)
    for number, count in enumerate(counts.tolist()):
        if count:
            assert close(routed[number, :count], expert(layer, number, slabs[number, :count]))
        assert (routed[number, count:] == 7.0).all()


def shapes_of(layer) -> list[WeightShape]:
    return [packed.shape for packed in layer[:2]]


def test_a_cpu_has_nothing_to_load(layer) -> None:
    assert moe.preload(torch.device("cpu"), shapes_of(layer), moe.INDEXED) == []


@pytest.mark.parametrize(
    ("operators", "around"),
    [
        (moe.INDEXED, {"route_plan": {"block_m": moe.BLOCK_M}, "moe_w4a16_combine": {}}),
        (moe.CONTIGUOUS, {"moe_scatter": {}, "moe_combine": {}}),
        (moe.MASKED, {}),
    ],
)
def test_what_is_launched_is_loaded_and_nothing_else(layer, operators, around, monkeypatch) -> None:
    asked = []

    class Recorder:
        def preload(self, operator: str, ranges: dict[str, int], device: int) -> tuple[str, ...]:
            asked.append((operator, ranges, device))
            return (f"{operator}.some",)

    monkeypatch.setattr(_runtime, "registry", Recorder)
    found = moe.preload(torch.device("cuda", 2), shapes_of(layer), operators)
    gemm, *others = operators
    assert others == list(around)
    projections = [{"n": s.n, "k": s.k, "experts": s.experts} for s in shapes_of(layer)]
    wanted = [(gemm, ranges, 2) for ranges in projections]
    assert asked == wanted + [(operator, ranges, 2) for operator, ranges in around.items()]
    assert found == sorted(f"{operator}.some" for operator in operators)


@pytest.mark.parametrize("operators", [moe.INDEXED, moe.CONTIGUOUS, moe.MASKED])
def test_the_registry_has_what_is_loaded(layer, operators) -> None:
    for operator in operators:
        keys = {key for axis in _runtime.operator(operator).axes for key in axis.keys}
        assert all(keys.issuperset(ranges) for ranges in moe._problems(operator, shapes_of(layer)))


def test_rows_that_do_not_exist_are_neither_read_nor_written() -> None:
    gate_up = torch.randn(6, 32).to(torch.bfloat16)
    wanted = (torch.nn.functional.silu(gate_up[:, :16].float()) * gate_up[:, 16:].float()).to(torch.bfloat16)
    out = torch.full((6, 16), 7.0, dtype=torch.bfloat16)
    swiglu_rows(gate_up, out, limit=torch.tensor([2]))
    assert torch.equal(out[:2], wanted[:2])
    assert (out[2:] == 7.0).all()
    out.fill_(7.0)
    swiglu_rows(gate_up, out, row_ids=torch.tensor([3, -1, 0, 1, -1, 2], dtype=torch.int32))
    assert torch.equal(out[:4], wanted[[2, 3, 5, 0]])
    assert (out[4:] == 7.0).all()
    out.fill_(7.0)
    swiglu_rows(gate_up, out, counts=torch.tensor([1, 0, 2], dtype=torch.int32))
    assert torch.equal(out[[0, 4, 5]], wanted[[0, 4, 5]])
    assert (out[1:4] == 7.0).all()


def test_scatter_and_combine_are_inverse(x: torch.Tensor) -> None:
    places = torch.randperm(TOKENS * TOP_K, generator=torch.Generator().manual_seed(5)).to(torch.int32).view(TOKENS, -1)
    limit = torch.tensor(13)
    rows = torch.full((TOKENS * TOP_K, HIDDEN), float("nan"), dtype=torch.bfloat16)
    scatter_rows(x, rows, places, limit=limit)
    assert rows[13:].isnan().all()
    assert not rows[:13].isnan().any()
    ids = torch.zeros(TOKENS, TOP_K, dtype=torch.int32)
    ids[0] = -1  # nobody's
    ids[1] = 1  # elsewhere
    weights = torch.rand(TOKENS, TOP_K)
    out = torch.full_like(x, float("nan"))
    local = torch.tensor([0, -1], dtype=torch.int32)
    combine_rows(rows, out, weights, ids, num_experts=2, expert_map=local, row_ids=places, limit=limit)
    counted = (places < 13) & (ids == 0)
    wanted = x.float() * (weights * counted).sum(1, keepdim=True)
    assert (out.float() - wanted).abs().max() < 0.02 * x.float().abs().max()
    assert not out[:2].any()


def test_rows_refuse_what_they_cannot_read() -> None:
    out = torch.empty(4, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"gate_up: expected shape \[4, 32\]"):
        swiglu_rows(out, out)
    with pytest.raises(ValueError, match="columns, got 12"):
        swiglu_rows(torch.empty(4, 24, dtype=torch.bfloat16), out[:, :12].contiguous())
    with pytest.raises(ValueError, match="counts: expected one for each of equal slabs of 4 rows, got 3"):
        swiglu_rows(torch.empty(4, 32, dtype=torch.bfloat16), out, counts=torch.zeros(3, dtype=torch.int32))
    ids = torch.zeros(4, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="rows: expected one for each of 8 pairs, got 4"):
        combine_rows(torch.empty(4, 16, dtype=torch.bfloat16), out, torch.ones(4, 2), ids, num_experts=1)


def test_rows_that_32_bits_cannot_count_are_refused() -> None:
    """On tensors without memory."""
    most, meta = 1 << 31, {"device": "meta"}

    def rows(count: int, width: int = 8) -> torch.Tensor:
        return torch.empty(count, width, dtype=torch.bfloat16, **meta)

    with pytest.raises(ValueError, match=rf"gate_up \(rows\): expected 0 to {most - 1}, got {most}"):
        swiglu_rows(rows(most, 16), rows(most))
    ids = torch.empty(most // 8, 8, dtype=torch.int32, **meta)
    with pytest.raises(ValueError, match=rf"row_ids \(pairs\): expected 0 to {most - 1}, got {most}"):
        scatter_rows(rows(most // 8), rows(16), ids)
    with pytest.raises(ValueError, match=rf"topk_ids \(pairs\): expected 0 to {most - 1}, got {most}"):
        combine_rows(rows(most), rows(most // 8), ids.float(), ids, num_experts=1)
    with pytest.raises(ValueError, match=rf"out \(rows\): expected 0 to {most - 1}, got {most}"):
        combine_rows(rows(0), rows(most), ids.float().view(most, 1)[:, :0], ids.view(most, 1)[:, :0], num_experts=1)


def test_a_sum_over_no_rows_is_zero() -> None:
    """What a rank without a single row combines: ids that are all absent or elsewhere."""
    out = torch.full((4, 16), 7.0, dtype=torch.bfloat16)
    ids, places = torch.zeros(4, 2, dtype=torch.int32), torch.full((4, 2), -1, dtype=torch.int32)
    places[0, 0] = 0
    none, weights = torch.empty(0, 16, dtype=torch.bfloat16), torch.ones(4, 2)
    combine_rows(none, out, weights, ids, num_experts=1, row_ids=places, limit=torch.tensor(0))
    assert not out.any()
    out.fill_(7.0)
    nobody = torch.empty(0, dtype=torch.int32)
    combine_rows(torch.ones(8, 16, dtype=torch.bfloat16), out, weights, ids, num_experts=0, expert_map=nobody)
    assert not out.any()
