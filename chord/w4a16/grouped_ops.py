"""The torch custom ops of the grouped W4A16 GEMMs: kernels on CUDA, the reference on a CPU, fakes.

chord::moe_w4a16_contiguous and chord::moe_w4a16_masked, each with an _out form. None is differentiable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from chord.router.validate import check_devices, check_int, check_memory, check_tensor
from chord.w4a16 import launch, layout, reference
from chord.w4a16.grouped_rows import ContiguousRows, GroupedRows, MaskedRows
from chord.w4a16.layout import WeightShape
from chord.w4a16.validate import check_swiglu

_SETTINGS = "Tensor? row_weight, bool gated, bool swiglu, SymInt expert_rows, bool invariant, bool zero_missing"
_SCHEMAS = {
    "moe_w4a16_contiguous": f"Tensor x, Tensor packed, Tensor? offsets, Tensor? m_indices, {_SETTINGS}",
    "moe_w4a16_masked": f"Tensor x, Tensor packed, Tensor counts, {_SETTINGS}",
}
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_LIBRARY = torch.library.Library("chord", "FRAGMENT")  # type: ignore[no-untyped-call]


class Settings(NamedTuple):
    """What the ops take after the tensors that tell of rows, in the schema's order.

    row_weight: float32, one for each row of x, or None.
    """

    row_weight: torch.Tensor | None
    gated: bool
    swiglu: bool
    expert_rows: int
    invariant: bool
    zero_missing: bool


def check(x: torch.Tensor, packed: torch.Tensor, rows: GroupedRows, settings: Settings) -> WeightShape:
    """Types, shapes and devices of everything that is read; returns the projection's shape."""
    shape = rows.check(x, packed, settings.gated)
    check_swiglu(settings.swiglu, settings.gated)
    check_int("expected_rows", settings.expert_rows, 0)
    if settings.row_weight is not None:
        check_tensor("row_weight", settings.row_weight, (torch.float32,), tuple(x.shape[:-1]))
        check_devices({"x": x, "row_weight": settings.row_weight})
    return shape


def check_out(out: torch.Tensor, x: torch.Tensor, shape: WeightShape, swiglu: bool) -> None:
    """out: bfloat16, a row of n (n / 2 with swiglu) for each row of x."""
    check_tensor("out", out, (torch.bfloat16,), (*x.shape[:-1], shape.outputs(swiglu)))
    check_devices({"x": x, "out": out})


def check_buffers(
    x: torch.Tensor, packed: torch.Tensor, rows: GroupedRows, settings: Settings, out: torch.Tensor
) -> None:
    """x, packed, m_indices, row_weight and out start on 16-byte boundaries, offsets and counts anywhere; out shares no
    byte with the others.
    """
    inputs, anywhere = {"x": x, "packed": packed}, {}
    if isinstance(rows, MaskedRows):
        anywhere["counts"] = rows.counts
    elif rows.m_indices is not None:
        inputs["m_indices"] = rows.m_indices
    elif rows.offsets is not None:
        anywhere["offsets"] = rows.offsets
    if settings.row_weight is not None:
        inputs["row_weight"] = settings.row_weight
    check_memory(inputs, {"out": out}, anywhere)


def new_output(x: torch.Tensor, shape: WeightShape, swiglu: bool) -> torch.Tensor:
    """Memory for a result."""
    return torch.empty(*x.shape[:-1], shape.outputs(swiglu), dtype=torch.bfloat16, device=x.device)


def run(
    x: torch.Tensor,
    packed: torch.Tensor,
    rows: GroupedRows,
    out: torch.Tensor,
    shape: WeightShape,
    settings: Settings,
) -> None:
    """Writes `out` from checked arguments: a kernel for CUDA tensors, the reference for CPU tensors."""
    if settings.zero_missing:
        out.detach().zero_()
    if x.is_cuda:
        if out.numel():
            values = gemm_values(x, packed, rows, out, shape, settings)
            launch.launch(
                rows.operator, values, x.device.index, shape, settings.expert_rows, settings.invariant
            )  # fmt: skip
        return
    words, scales = layout.unpack(packed, shape)
    weight = None if settings.row_weight is None else settings.row_weight.reshape(-1)
    with torch.no_grad():  # a kernel records nothing either
        reference.moe_w4a16(
            x.reshape(-1, shape.k), words, scales, rows.by_expert(x, shape),
            top_k=1, row_weight=weight, out=out.view(-1, out.shape[-1]), swiglu=settings.swiglu,
        )  # fmt: skip


def gemm_values(
    x: torch.Tensor,
    packed: torch.Tensor,
    rows: GroupedRows,
    out: torch.Tensor,
    shape: WeightShape,
    settings: Settings,
) -> dict[str, int]:
    """Every argument of the operator's contract by name; pointers as ints."""
    weight = settings.row_weight
    return {
        "x": x.data_ptr(),
        "packed": packed.data_ptr(),
        "row_weight": 0 if weight is None else weight.data_ptr(),
        "out": out.data_ptr(),
        "n": shape.n,
        "k": shape.k,
        "num_experts": shape.experts,
        "gated": launch.store_of(shape, settings.swiglu),
        **rows.values(x, shape),
    }


def _new(x: torch.Tensor, packed: torch.Tensor, rows: GroupedRows, settings: Settings) -> torch.Tensor:
    shape = check(x, packed, rows, settings)
    out = new_output(x, shape, settings.swiglu)
    check_buffers(x, packed, rows, settings, out)
    run(x, packed, rows, out, shape, settings)
    return out


def _out(
    x: torch.Tensor, packed: torch.Tensor, rows: GroupedRows, settings: Settings, out: torch.Tensor
) -> None:  # fmt: skip
    shape = check(x, packed, rows, settings)
    check_out(out, x, shape, settings.swiglu)
    check_buffers(x, packed, rows, settings, out)
    run(x, packed, rows, out, shape, settings)


def _new_fake(x: torch.Tensor, packed: torch.Tensor, rows: GroupedRows, settings: Settings) -> torch.Tensor:
    return new_output(x, check(x, packed, rows, settings), settings.swiglu)


def _out_fake(
    x: torch.Tensor, packed: torch.Tensor, rows: GroupedRows, settings: Settings, out: torch.Tensor
) -> None:  # fmt: skip
    check_out(out, x, check(x, packed, rows, settings), settings.swiglu)


def _of_contiguous(done: Callable[..., Any]) -> Callable[..., Any]:
    """The op's flat arguments as the four or five of `done`."""

    def call(
        x: torch.Tensor,
        packed: torch.Tensor,
        offsets: torch.Tensor | None,
        m_indices: torch.Tensor | None,
        *rest: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        return done(x, packed, ContiguousRows(offsets, m_indices), Settings(*rest[:6]), *rest[6:])

    return call


def _of_masked(done: Callable[..., Any]) -> Callable[..., Any]:
    def call(x: torch.Tensor, packed: torch.Tensor, counts: torch.Tensor, *rest: Any) -> Any:  # noqa: ANN401
        return done(x, packed, MaskedRows(counts), Settings(*rest[:6]), *rest[6:])

    return call


def _register() -> None:
    for name, form in (("moe_w4a16_contiguous", _of_contiguous), ("moe_w4a16_masked", _of_masked)):
        _LIBRARY.define(f"{name}({_SCHEMAS[name]}) -> Tensor", tags=_TAGS)  # type: ignore[no-untyped-call]
        _LIBRARY.define(f"{name}_out({_SCHEMAS[name]}, Tensor(a!) out) -> ()", tags=_TAGS)  # type: ignore[no-untyped-call]
        for op, real, fake in ((name, _new, _new_fake), (f"{name}_out", _out, _out_fake)):
            for key in ("CPU", "CUDA"):
                _LIBRARY.impl(op, form(real), key)  # type: ignore[no-untyped-call]
            # Without this torch gives results a grad_fn that warns, when an input requires grad.
            _LIBRARY.impl(op, torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]
            torch.library.register_fake(f"chord::{op}", form(fake), lib=_LIBRARY)


_register()
