"""Whatever a public function is given instead of an argument: it works, or it says which argument, in chord's words."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the operators need torch")

import torch
from cases.operators import CASES, ROW_MOVERS, tensors_of, with_tensor

import chord
from chord.errors import ChordError
from chord.router import RoutePlan
from chord.w4a16.layout import WeightShape

PACKAGE = Path(chord.__file__).parent
CPU = torch.device("cpu")


def strangers() -> Iterator[Any]:
    """What is never right, or only by chance."""
    yield from (None, "x", b"x", -1, 0, 3, 1 << 31, 1 << 63, 1 << 70, 3.5, float("nan"), True, 1j, [], (1, 2), {})
    yield from (object(), torch.float32, range(3), range(0), [None], ["a"], lambda: 1)
    yield from (torch.zeros(()), torch.zeros(0), torch.zeros(2, 2), torch.zeros(3, dtype=torch.int32))
    yield from (torch.zeros(2, 2, 2, dtype=torch.bool), torch.empty(2, 2, device="meta"), torch.eye(3).to_sparse())


def relatives(value: Any) -> Iterator[Any]:
    """Values that have much in common with the right one."""
    if isinstance(value, torch.Tensor):
        yield from (value.to(dtype) for dtype in (torch.float64, torch.int64, torch.uint8, torch.complex64))
        yield from (
            value.unsqueeze(0),
            value.flatten(),
            value[..., ::2],
            value[:0],
            value[:1].expand(3, *value.shape[1:]),
        )
        yield from (value.to("meta"), value.to_sparse(), torch.cat([value, value]))
        if value.is_floating_point():
            yield from (value.clone().requires_grad_(), torch.full_like(value, float("nan")))
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from (tuple(value), value[:-1], value[:2], list(value))
        for name, member in zip(value._fields, value, strict=True):
            yield from (value._replace(**{name: other}) for other in (*strangers(), *relatives(member)))


def calls() -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """(label, function, right arguments): every operator's call, its preparation, and what goes with them."""
    for operator in dict.fromkeys(case.operator for case in CASES):
        case = next(case for case in CASES if case.operator == operator)
        given = case.make(3, CPU)
        yield operator, ROW_MOVERS[operator][0] if operator in ROW_MOVERS else case.call, given
        if case.prepare:
            yield f"prepare_{operator}", case.prepare, given
    sizes = {"num_tokens": 3, "top_k": 8, "num_experts": 48, "block_m": 8}
    yield "fused_router into a plan", chord.fused_router, _router_with_plan()
    yield "max_route_blocks", chord.max_route_blocks, sizes
    yield "allocate_route_plan", chord.allocate_route_plan, {**sizes, "device": "cpu"}
    yield "route_intervals", chord.route_intervals, {"n": 256, "k": 256, "experts": 8, "arch": "sm_90a"}
    yield "WeightShape", WeightShape, {"experts": 8, "n": 256, "k": 256}
    packed = next(case for case in CASES if case.operator == "w4a16_unpack").make(2, CPU)["packed"]
    yield "PackedW4A16", chord.PackedW4A16, {"data": packed.data, "shape": packed.shape}


def _router_with_plan() -> dict[str, Any]:
    given = next(case for case in CASES if case.operator == "fused_router").make(3, CPU)
    sizes = {"top_k": given["top_k"], "num_experts": given["bias"].numel(), "block_m": given["block_m"]}
    return {**given, "plan": chord.allocate_route_plan(3, **sizes, device="cpu")}


ALL = list(calls())


@pytest.mark.parametrize(("function", "given"), [c[1:] for c in ALL], ids=[c[0] for c in ALL])
def test_wrong_arguments_raise_errors_of_ours(function, given):
    function(**given)
    faults = []
    for name in inspect.signature(function).parameters:
        for value in (*strangers(), *relatives(given.get(name))):
            try:
                function(**{**given, name: value})
            except (TypeError, ValueError, ChordError) as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                if not Path(last.filename).is_relative_to(PACKAGE) or "raise" not in (last.line or ""):
                    faults.append(f"{name} = {value!r:.60}: not raised on purpose: {error!r:.200}")
            except Exception as error:
                faults.append(f"{name} = {value!r:.60}: {error!r:.200}")
    assert not faults, "\n".join(faults[:20])


def over(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors of the same sizes and types that share their first bytes; the second keeps its values."""
    memory = torch.zeros(max(first.nbytes, second.nbytes), dtype=torch.uint8)
    a, b = (memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for tensor in (first, second))
    return a, b.copy_(second)


OUT_CASES = [case for case in CASES if case.operator in ROW_MOVERS or case.operator.startswith("moe_w4a16")]


@pytest.mark.parametrize("case", OUT_CASES, ids=lambda case: f"{case.operator}-{case.name}")
def test_an_output_over_anything_that_is_read_is_refused_and_both_are_named(case):
    given = case.make(3, CPU)
    if case.operator == "moe_combine":
        given["expert_map"] = torch.arange(given["num_experts"], dtype=torch.int32)
    if case.operator in ROW_MOVERS:
        given["limit"] = torch.tensor([3])
    outputs = {"out": case.call(**given)}
    if case.operator == "moe_w4a16_combine":
        experts = given["packed"].shape.experts
        given |= {"num_experts": experts, "local_experts": torch.arange(experts, dtype=torch.int32)}
        outputs["routed"] = torch.empty(given["x"].shape[0], outputs["out"].shape[1], dtype=torch.bfloat16)
    for output, like in outputs.items():
        for name, tensor in tensors_of(given).items():
            if name in outputs or (case.operator, output, name) == ("moe_w4a16_combine", "out", "x"):
                continue  # the sums may lie over x, which the GEMM has read by then
            if name in RoutePlan._fields[3:]:
                continue  # what of a route plan no GEMM reads
            placed, shared = over(like, tensor)
            both = {output, "expert_map" if name == "local_experts" else name}
            for call in (case.call, *([case.prepare] if case.prepare else [])):
                with pytest.raises(ValueError, match="expected separate buffers, but they overlap") as caught:
                    call(**{**with_tensor(given, name, shared), output: placed})
                first, second = str(caught.value).partition(":")[0].split(" and ")
                assert {first, second} == both, (output, name, str(caught.value))
