"""The operators as data: one `Case` a way of calling one, over which the requirements' tests run.

A new operator joins by a row in CASES. `test_every_operator_has_cases` fails for one that has none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import chord
from chord.checks.compare import check_ids, check_weights
from chord.checks.inputs import expert_parallel_ids, normal_case
from chord.checks.w4a16 import checkpoint, draw_experts, plan_of
from chord.checks.w4a16_combine import combine_case
from chord.router.plan import RoutePlan
from chord.w4a16 import layout, reference
from chord.w4a16.layout import WeightShape
from chord.w4a16.rows import combine_rows, scatter_rows, swiglu_rows
from chord.w4a16.weights import PackedW4A16

Arguments = dict[str, Any]
Outputs = list[torch.Tensor]


class Case(NamedTuple):
    """One way of calling an operator."""

    operator: str
    """Its name in the manifest."""
    name: str
    make: Callable[[int, torch.device], Arguments]
    """Keyword arguments for a number of tokens (of experts, for what moves weights)."""
    call: Callable[..., Any]
    outputs: Callable[[Arguments, Any], Outputs]
    """What the result promises: no byte of a buffer that is left as it was."""
    problems: Callable[[Arguments, Any], list[str]]
    """What is wrong with a result, against the plain reference on a CPU."""
    empty: tuple[tuple[int, ...], ...]
    """Shapes of the outputs for no tokens; () for an operator that has no such call."""
    alone: Callable[[Arguments, int], Arguments] | None = None
    """Arguments for one of the tokens without its companions; None where rows do not come out of tokens."""
    row: Callable[[Any, int], Outputs] | None = None
    """What a result says of one token."""
    prepare: Callable[..., Any] | None = None
    others: tuple[str, ...] = ()
    """Operators whose programs it launches, too."""
    torch_op: bool = True
    """Whether it is one for users of torch, who trace it and capture its first call."""


def tensors_of(arguments: Arguments) -> dict[str, torch.Tensor]:
    """The tensors that a call is given, as its errors name them."""
    found = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, PackedW4A16):
            found[name] = value.data
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            found.update({field: getattr(value, field) for field in value._fields})
    return found


def with_tensor(arguments: Arguments, name: str, tensor: torch.Tensor) -> Arguments:
    """The same call with one tensor of `tensors_of` replaced."""
    if name in arguments:
        old = arguments[name]
        return arguments | {name: PackedW4A16(tensor, old.shape) if isinstance(old, PackedW4A16) else tensor}
    (plan,) = (key for key, value in arguments.items() if name in getattr(value, "_fields", ()))
    return arguments | {plan: arguments[plan]._replace(**{name: tensor})}


def moved(arguments: Arguments, device: torch.device) -> Arguments:
    """The same call with every tensor on another device."""
    for name, tensor in tensors_of(arguments).items():
        arguments = with_tensor(arguments, name, tensor.to(device))
    return arguments


def plan_outputs(plan: RoutePlan, block_m: int) -> Outputs:
    extent = int(plan.num_tokens_post_padded)
    return [plan.sorted_token_ids[:extent], plan.expert_ids[: extent // block_m], *plan[2:]]


def plan_problems(plan: RoutePlan, ids: torch.Tensor, experts: int, block_m: int) -> list[str]:
    want = chord.route_plan(ids.cpu(), experts, block_m)
    pairs = zip(plan_outputs(want, block_m), plan_outputs(plan, block_m), strict=True)
    return [f"plan[{place}] differs" for place, (a, b) in enumerate(pairs) if not torch.equal(a, b.cpu())]


def _router(name: str, experts: int, top_k: int, dtype: torch.dtype, block_m: int, **more: Any) -> Case:
    def make(tokens: int, device: torch.device) -> Arguments:
        case = normal_case(tokens, experts, dtype, device)
        return {"logits": case.logits, "bias": case.bias, "top_k": top_k, "block_m": block_m, **more}

    def problems(given: Arguments, result: Any) -> list[str]:
        logits, bias = given["logits"].cpu(), given["bias"].cpu()
        ids, weights = result.topk_ids.cpu(), result.topk_weights.cpu()
        scale = given.get("routed_scaling_factor", 1.0)
        found = check_ids(ids, logits, bias)
        found += check_weights(weights, ids, logits, bias, given.get("renormalize", True), scale)
        return found + plan_problems(result.plan, ids, experts, block_m)

    return Case(
        "fused_router", name, make, chord.fused_router,
        lambda given, result: [result.topk_weights, result.topk_ids, *plan_outputs(result.plan, block_m)],
        problems,
        ((0, top_k), (0, top_k), (0,), (0,), (1,), (experts,), (experts + 1,), (experts,)),
        alone=lambda given, token: given | {"logits": given["logits"][token : token + 1].clone()},
        row=lambda result, token: [result.topk_weights[token], result.topk_ids[token]],
        prepare=chord.prepare_fused_router,
    )  # fmt: skip


def _plan(name: str, experts: int, top_k: int, block_m: int) -> Case:
    def make(tokens: int, device: torch.device) -> Arguments:
        ids = expert_parallel_ids(tokens, top_k, experts, device)
        return {"topk_ids": ids, "num_experts": experts, "block_m": block_m}

    return Case(
        "route_plan", name, make, chord.route_plan,
        lambda given, plan: plan_outputs(plan, block_m),
        lambda given, plan: plan_problems(plan, given["topk_ids"], experts, block_m),
        ((0,), (0,), (1,), (experts,), (experts + 1,), (experts,)),
    )  # fmt: skip


def _gemm(name: str, shape: WeightShape, top_k: int, block_m: int, *, weighted: bool, **more: Any) -> Case:
    def make(tokens: int, device: torch.device) -> Arguments:
        host = torch.device("cpu")
        words, scales = checkpoint(shape, host)
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, shape.k, generator=generator).to(torch.bfloat16)
        experts = draw_experts("random", tokens * top_k, shape.experts)
        weight = torch.rand(tokens * top_k, generator=generator) if weighted else None
        given = {
            "x": x, "packed": chord.pack_w4a16(words, scales, gated=shape.gated),
            "plan": plan_of(experts, shape.experts, block_m, host, strange=False),
            "top_k": top_k, "block_m": block_m, **({"row_weight": weight} if weighted else {}), **more,
        }  # fmt: skip
        return moved(given, device)

    def pairs_of(given: Arguments) -> torch.Tensor:
        return draw_experts("random", given["x"].shape[0] * top_k, shape.experts)

    def problems(given: Arguments, out: torch.Tensor) -> list[str]:
        given = moved(given, torch.device("cpu"))
        experts, (words, scales) = pairs_of(given), chord.unpack_w4a16(given["packed"])
        rows = {e: (experts == e).nonzero().flatten() for e in range(shape.experts)}
        call = (given["x"], words, scales, rows)
        options = {"top_k": top_k, "row_weight": given.get("row_weight")}
        exact = reference.moe_w4a16(*call, **options, exact=True)
        plain = reference.rms_error(reference.moe_w4a16(*call, **options), exact) if len(experts) else 0.0
        error = reference.rms_error(out.cpu(), exact) if len(experts) else 0.0
        return [] if error <= 1.1 * plain + 1e-9 else [f"RMS error {error:.3e}, the plain reference has {plain:.3e}"]

    def alone(given: Arguments, token: int) -> Arguments:
        mine = pairs_of(given)[token * top_k : (token + 1) * top_k]
        single = given | {
            "x": given["x"][token : token + 1].clone(),
            "plan": plan_of(mine, shape.experts, block_m, given["x"].device, strange=False),
        }
        if weighted:
            single["row_weight"] = given["row_weight"][token * top_k : (token + 1) * top_k].clone()
        return single

    return Case(
        "moe_w4a16", name, make, chord.moe_w4a16, lambda given, out: [out], problems, ((0, shape.n),),
        alone=alone,
        row=lambda out, token: [out[token * top_k : (token + 1) * top_k]],
        prepare=chord.prepare_moe_w4a16,
    )  # fmt: skip


def _combined(name: str, shape: WeightShape, top_k: int, block_m: int, **more: Any) -> Case:
    def make(tokens: int, device: torch.device) -> Arguments:
        case = combine_case(shape, tokens, top_k, block_m, "random", torch.device("cpu"))
        plan = plan_of(case.gemm.expert_of, shape.experts, block_m, case.gemm.x.device, strange=False)
        given = {
            "x": case.gemm.x, "packed": case.gemm.packed, "plan": plan, "topk_weights": case.topk_weights,
            "topk_ids": case.gemm.expert_of.view(tokens, top_k).to(torch.int32), "block_m": block_m, **more,
        }  # fmt: skip
        return moved(given, device)

    def problems(given: Arguments, out: torch.Tensor) -> list[str]:
        given = moved(given, torch.device("cpu"))
        words, scales = chord.unpack_w4a16(given["packed"])
        ids = given["topk_ids"].flatten()
        rows = {e: (ids == e).nonzero().flatten() for e in range(shape.experts)}
        exact, plain = (
            reference.moe_w4a16(given["x"], words, scales, rows, top_k=1, exact=kind).view(-1, top_k, shape.n)
            for kind in (True, False)
        )
        factors = given["topk_weights"].unsqueeze(-1)
        wanted = (exact * factors).sum(dim=1)
        allowed = (
            reference.rms_error((plain.float() * factors).sum(dim=1).to(torch.bfloat16), wanted) if len(ids) else 0
        )
        error = reference.rms_error(out.cpu(), wanted) if len(ids) else 0.0
        return (
            [] if error <= 1.1 * allowed + 1e-9 else [f"RMS error {error:.3e}, the plain reference has {allowed:.3e}"]
        )

    def alone(given: Arguments, token: int) -> Arguments:
        mine = slice(token * top_k, (token + 1) * top_k)
        experts = given["topk_ids"].flatten().cpu()[mine].long()
        return given | {
            "x": given["x"][mine].clone(),
            "plan": plan_of(experts, shape.experts, block_m, given["x"].device, strange=False),
            "topk_weights": given["topk_weights"][token : token + 1].clone(),
            "topk_ids": given["topk_ids"][token : token + 1].clone(),
        }

    return Case(
        "moe_w4a16_combine", name, make, chord.moe_w4a16_combine, lambda given, out: [out], problems, ((0, shape.n),),
        alone=alone, row=lambda out, token: [out[token]], prepare=chord.prepare_moe_w4a16_combine,
        others=("moe_w4a16",),
    )  # fmt: skip


def _draw_rows(tokens: int, experts: int) -> torch.Tensor:
    """[tokens] int64: the expert of each row, in order."""
    return draw_experts("random", tokens, experts).sort().values


def _grouped_problems(given: Arguments, owners: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> list[str]:
    """Rows of x and out [R, ...] that belong to the experts `owners`, against exact products."""
    if not len(owners):
        return []
    words, scales = chord.unpack_w4a16(given["packed"].to("cpu"))
    rows = {e: (owners == e).nonzero().flatten() for e in range(words.shape[0])}
    options = {"top_k": 1, "swiglu": given.get("swiglu", False)}
    exact = reference.moe_w4a16(x.cpu(), words, scales, rows, **options, exact=True)
    plain = reference.rms_error(reference.moe_w4a16(x.cpu(), words, scales, rows, **options), exact)
    error = reference.rms_error(out.cpu(), exact)
    return [] if error <= 1.1 * plain + 1e-9 else [f"RMS error {error:.3e}, the plain reference has {plain:.3e}"]


def _contiguous(name: str, shape: WeightShape, *, indices: bool = False, **more: Any) -> Case:
    def offsets_of(owners: torch.Tensor, device: torch.device) -> torch.Tensor:
        counts = torch.bincount(owners, minlength=shape.experts)
        return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(device, torch.int32)

    def make(tokens: int, device: torch.device) -> Arguments:
        owners = _draw_rows(tokens, shape.experts)
        told: Arguments = {"offsets": offsets_of(owners, device)}
        if indices:
            counts = torch.bincount(owners, minlength=shape.experts).tolist()
            parts = [
                torch.full((-(-n // 128) * 128,), -1).index_fill(0, torch.arange(n), e) for e, n in enumerate(counts)
            ]
            owners = torch.cat(parts)
            told = {"m_indices": owners.to(device, torch.int32)}
        x = torch.randn(len(owners), shape.k, generator=torch.Generator().manual_seed(tokens)).to(torch.bfloat16)
        words, scales = checkpoint(shape, torch.device("cpu"))
        packed = chord.pack_w4a16(words, scales, gated=shape.gated)
        return {**moved({"x": x, "packed": packed}, device), **told, **more}

    def owners_of(given: Arguments) -> torch.Tensor:
        if indices:
            return given["m_indices"].cpu().long()
        return torch.repeat_interleave(torch.arange(shape.experts), given["offsets"].cpu().diff().long())

    def problems(given: Arguments, out: torch.Tensor) -> list[str]:
        owners = owners_of(given)
        real = owners >= 0
        return _grouped_problems(given, owners[real], given["x"].cpu()[real], out.cpu()[real])

    def alone(given: Arguments, row: int) -> Arguments:
        mine = owners_of(given)[row : row + 1]
        return given | {"x": given["x"][row : row + 1].clone(), "offsets": offsets_of(mine, given["x"].device)}

    return Case(
        "moe_w4a16_contiguous", name, make, chord.moe_w4a16_contiguous,
        lambda given, out: [out[(owners_of(given) >= 0).to(out.device)]],
        problems,
        ((0, shape.n // 2 if more.get("swiglu") else shape.n),),
        alone=None if indices else alone,
        row=None if indices else lambda out, row: [out[row]],
        prepare=chord.prepare_moe_w4a16_contiguous,
    )  # fmt: skip


def _masked(name: str, shape: WeightShape, **more: Any) -> Case:
    def make(tokens: int, device: torch.device) -> Arguments:
        """Slabs of `tokens` rows, the first of them full."""
        generator = torch.Generator().manual_seed(tokens)
        counts = torch.randint(0, tokens + 1, (shape.experts,), generator=generator, dtype=torch.int32)
        counts[0] = tokens
        x = torch.randn(shape.experts, tokens, shape.k, generator=generator).to(torch.bfloat16)
        x[torch.arange(tokens) >= counts[:, None]] = float("nan")
        words, scales = checkpoint(shape, torch.device("cpu"))
        packed = chord.pack_w4a16(words, scales, gated=shape.gated)
        return moved({"x": x, "packed": packed, "counts": counts, "expected_rows": max(tokens // 2, 1), **more}, device)

    def real(given: Arguments, slabs: torch.Tensor) -> torch.Tensor:
        counts = given["counts"].to(slabs.device)
        return slabs[torch.arange(slabs.shape[1], device=slabs.device) < counts[:, None]]

    def problems(given: Arguments, out: torch.Tensor) -> list[str]:
        owners = torch.repeat_interleave(torch.arange(shape.experts), given["counts"].cpu().long())
        return _grouped_problems(given, owners, real(given, given["x"].cpu()), real(given, out.cpu()))

    def alone(given: Arguments, row: int) -> Arguments:
        """Row `row` of the first slab."""
        counts = torch.zeros_like(given["counts"])
        counts[0] = 1
        return given | {"x": given["x"][:, row : row + 1].clone(), "counts": counts}

    return Case(
        "moe_w4a16_masked", name, make, chord.moe_w4a16_masked, lambda given, out: [real(given, out)], problems,
        ((0, shape.n // 2 if more.get("swiglu") else shape.n),),
        alone=alone, row=lambda out, row: [out[0, row]], prepare=chord.prepare_moe_w4a16_masked,
    )  # fmt: skip


def _swiglu_arguments(rows: int, random: torch.Generator) -> tuple[Arguments, int]:
    return {"gate_up": torch.randn(rows, 2 * 264, generator=random).to(torch.bfloat16)}, rows


def _scatter_arguments(tokens: int, random: torch.Generator) -> tuple[Arguments, int]:
    x = torch.randn(tokens, 264, generator=random).to(torch.bfloat16)
    places = torch.randperm(4 * tokens, generator=random).to(torch.int32).view(tokens, 4)
    return {"x": x, "row_ids": places}, 4 * tokens


def _combine_arguments(tokens: int, random: torch.Generator) -> tuple[Arguments, int]:
    rows = torch.rand(4 * tokens, 264, generator=random).to(
        torch.bfloat16
    )  # no signs: a sum that cancels has no digits
    ids = torch.randint(-1, 9, (tokens, 4), generator=random, dtype=torch.int32)
    weights = torch.rand(tokens, 4, generator=random)
    return {"rows": rows, "weights": weights, "topk_ids": ids, "num_experts": 8}, tokens


ROW_MOVERS: dict[str, tuple[Callable[..., None], Callable[[int, torch.Generator], tuple[Arguments, int]]]] = {
    "moe_swiglu": (swiglu_rows, _swiglu_arguments),
    "moe_scatter": (scatter_rows, _scatter_arguments),
    "moe_combine": (combine_rows, _combine_arguments),
}


def _rows(operator: str) -> Case:
    """What moves rows into an output that it is given."""
    function, arguments = ROW_MOVERS[operator]

    def make(tokens: int, device: torch.device) -> Arguments:
        given, rows = arguments(tokens, torch.Generator().manual_seed(tokens))
        out = torch.full((rows, 264), 7.0, dtype=torch.bfloat16)
        return moved({**given, "out": out}, device)

    def call(**given: Any) -> torch.Tensor:
        function(**given)
        result: torch.Tensor = given["out"]
        return result

    def problems(given: Arguments, out: torch.Tensor) -> list[str]:
        host = moved(given, torch.device("cpu"))
        want = call(**{**host, "out": torch.full_like(host["out"], 7.0)})
        close = torch.allclose(out.cpu().float(), want.float(), rtol=2.0**-7, atol=1e-5)
        return [] if close else ["values differ"]

    return Case(operator, "first", make, call, lambda given, out: [out], problems, ((0, 264),), torch_op=False)


def _weights(experts: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    words, scales = checkpoint(WeightShape(max(experts, 1), 192, 320), torch.device("cpu"))
    return words.to(device), scales.to(device)


def _pack(name: str, plain: bool) -> Case:
    def make(experts: int, device: torch.device) -> Arguments:
        words, scales = _weights(experts, device)
        codes = layout.codes_from_words(words.cpu()).to(device, torch.int32) if plain else words
        return {"codes": codes, "scale": scales}

    def problems(given: Arguments, packed: PackedW4A16) -> list[str]:
        want = chord.pack_w4a16(given["codes"].cpu(), given["scale"].cpu()).data
        return [] if torch.equal(packed.data.cpu(), want) else ["packed bytes differ"]

    return Case("w4a16_pack", name, make, chord.pack_w4a16, lambda given, out: [out.data], problems, ())


def _unpack() -> Case:
    def make(experts: int, device: torch.device) -> Arguments:
        words, scales = _weights(experts, torch.device("cpu"))
        return {"packed": chord.pack_w4a16(words, scales).to(device)}

    def problems(given: Arguments, found: tuple[torch.Tensor, ...]) -> list[str]:
        words, scales = _weights(found[0].shape[0], torch.device("cpu"))
        return [] if torch.equal(found[0].cpu(), words) and torch.equal(found[1].cpu(), scales) else ["values differ"]

    return Case("w4a16_unpack", "all", make, chord.unpack_w4a16, lambda given, out: list(out), problems, ())


CASES = [
    _router("k3", 896, 16, torch.float32, 8),
    _router("k2", 384, 8, torch.bfloat16, 16, renormalize=False, routed_scaling_factor=2.5),
    _plan("ep8", 48, 8, 8),
    _plan("wide", 1024, 4, 64),
    _gemm("gate_up", WeightShape(8, 256, 128, gated=True), 4, 8, weighted=False),
    _gemm("down", WeightShape(8, 192, 320), 1, 16, weighted=True),
    _gemm("invariant", WeightShape(8, 128, 192), 4, 8, weighted=True, invariant=True),
    _combined("down", WeightShape(8, 192, 320), 4, 8),
    _combined("invariant", WeightShape(8, 704, 128), 2, 16, invariant=True),
    _contiguous("offsets", WeightShape(8, 192, 128)),
    _contiguous("m_indices", WeightShape(4, 128, 192), indices=True),
    _contiguous("invariant", WeightShape(8, 256, 128, gated=True), swiglu=True, invariant=True),
    _masked("slabs", WeightShape(8, 192, 128)),
    _masked("invariant", WeightShape(4, 256, 128, gated=True), swiglu=True, invariant=True),
    *(_rows(operator) for operator in ROW_MOVERS),
    _pack("words", plain=False),
    _pack("codes", plain=True),
    _unpack(),
]
IDS = [f"{case.operator}-{case.name}" for case in CASES]
TOKEN_CASES = [case for case in CASES if case.empty]
TOKEN_IDS = [f"{case.operator}-{case.name}" for case in TOKEN_CASES]
OP_CASES = [case for case in TOKEN_CASES if case.torch_op]
OP_IDS = [f"{case.operator}-{case.name}" for case in OP_CASES]
FIRST_CASES = list({case.operator: case for case in reversed(OP_CASES)}.values())
"""One for each operator, where a test takes a process for each."""
FIRST_IDS = [case.operator for case in FIRST_CASES]
MASKED_CASES = [case for case in CASES if case.operator == "moe_w4a16_masked"]
MASKED_IDS = [case.name for case in MASKED_CASES]
ROW_CASES = [case for case in CASES if case.alone]
ROW_IDS = [f"{case.operator}-{case.name}" for case in ROW_CASES]
PREPARED_CASES = [case for case in CASES if case.prepare]
PREPARED_IDS = [f"{case.operator}-{case.name}" for case in PREPARED_CASES]


def same_bits(first: Outputs, second: Outputs) -> bool:
    """Bitwise, whatever the devices."""
    pairs = zip(first, second, strict=True)
    return all(a.shape == b.shape and torch.equal(_raw(a), _raw(b)) for a, b in pairs)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
