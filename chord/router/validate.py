"""Argument checks of the router operators: every error names the argument, what was expected and what was found.

A wrong kind of object is a TypeError, everything else a ValueError. Metadata checks work on fake tensors as well, so
that tracing reports the same errors; `check_memory` reads addresses and runs on real tensors only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import torch

from chord.router.plan import RoutePlan, most_blocks

SELECTIONS = ((896, 16), (384, 8))
"""(num_experts, top_k) that fused_router serves."""
LOGITS_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}
"""Logit types, with the word that names them in a problem."""
MAX_TOKENS = 1 << 20
MAX_PAIRS = 1 << 24
"""Most pairs (num_tokens * top_k) of a route plan: MAX_TOKENS rows of 16."""
MAX_EXPERTS = 1024
MAX_BLOCK_M = 256
BLOCK_M_STEP = 8
MAX_FLOAT32 = 3.4028234663852886e38
ALIGNMENT_BYTES = 16


def check_int(name: str, value: object, first: int | None = None, last: int | None = None) -> None:
    """Raises TypeError unless value is a plain int, ValueError outside [first, last]; None: no such bound. A symbolic
    int passes untested.
    """
    if isinstance(value, torch.SymInt):
        return
    if type(value) is not int:
        raise TypeError(f"{name}: expected an int, got {value!r} ({type(value).__name__})")
    if first is not None and (value < first or (last is not None and value > last)):
        wanted = f"at least {first}" if last is None else f"{first} to {last}"
        raise ValueError(f"{name}: expected {wanted}, got {value}")


def check_bool(name: str, value: object) -> None:
    """Raises TypeError unless value is a bool, or a symbolic one: torch's dispatcher takes numbers and None for one."""
    if type(value) is not bool and not isinstance(value, torch.SymBool):
        raise TypeError(f"{name}: expected a bool, got {value!r} ({type(value).__name__})")


def check_dense(name: str, value: object) -> torch.Tensor:
    """The value, a tensor with strides; everything else about it is for others to check.

    Called before the dispatcher of torch sees it, which raises RuntimeError for other objects and NotImplementedError
    for sparse tensors. Raises TypeError, ValueError.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    if value.layout is not torch.strided:
        raise ValueError(f"{name}: expected a dense tensor, got one of layout {value.layout}; pass {name}.to_dense()")
    return value


def check_block_m(block_m: object) -> None:
    """block_m is a multiple of 8 from 8 to 256."""
    check_int("block_m", block_m, BLOCK_M_STEP, MAX_BLOCK_M)
    if isinstance(block_m, int) and block_m % BLOCK_M_STEP:
        raise ValueError(f"block_m: expected a multiple of {BLOCK_M_STEP} up to {MAX_BLOCK_M}, got {block_m}")


def check_settings(top_k: object, block_m: object, renormalize: object, routed_scaling_factor: object) -> None:
    """What is no tensor, before the dispatcher of torch sees it: it raises RuntimeError, and takes None for False."""
    check_int("top_k", top_k, 1, MAX_EXPERTS)
    check_block_m(block_m)
    check_bool("renormalize", renormalize)
    factor = routed_scaling_factor
    if isinstance(factor, bool) or not isinstance(factor, (float, int, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"routed_scaling_factor: expected a number, got {factor!r} ({type(factor).__name__})")
    check_factor(factor)


def check_factor(factor: float | torch.SymFloat | torch.SymInt) -> None:
    """routed_scaling_factor reaches the kernels as a float32. A symbolic number passes untested."""
    if isinstance(factor, (torch.SymFloat, torch.SymInt)):
        return
    if not -MAX_FLOAT32 <= factor <= MAX_FLOAT32:
        raise ValueError(f"routed_scaling_factor: expected a finite float32, got {factor!r}")


def check_tensor(name: str, value: object, dtypes: Collection[torch.dtype], shape: tuple[int | None, ...]) -> None:
    """A dense contiguous tensor of one of `dtypes` and of `shape`, where None stands for any size."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        value = check_dense(name, value)
    if value.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name}: expected {wanted}, got {value.dtype}")
    if value.shape != shape and not _fits(value.shape, shape):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: expected shape [{wanted}], got {list(value.shape)}")
    if not value.is_contiguous():
        raise ValueError(
            f"{name}: expected a contiguous tensor, got strides {value.stride()} for shape {list(value.shape)};"
            f" pass {name}.contiguous()"
        )


def _fits(found: Sequence[int], wanted: Sequence[int | None]) -> bool:
    if len(found) != len(wanted):
        return False
    return all(want is None or have == want for have, want in zip(found, wanted, strict=True))


def check_devices(tensors: Mapping[str, torch.Tensor]) -> None:
    """All tensors are on one device. Raises ValueError that lists each argument's device."""
    first, *others = [tensor.device for tensor in tensors.values()]
    if any(device != first for device in others):
        found = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
        raise ValueError(f"expected all tensors on one device, got {found}")


def check_router_inputs(logits: torch.Tensor, bias: torch.Tensor, top_k: int, block_m: int) -> None:
    """Takes logits [M, E] float32 or bfloat16, bias [E] float32, contiguous on one device, (E, top_k) in SELECTIONS."""
    check_tensor("logits", logits, LOGITS_DTYPES, (None, None))
    check_int("top_k", top_k, 1)
    num_tokens, num_experts = logits.shape
    if (num_experts, top_k) not in SELECTIONS:
        allowed = ", ".join(f"{experts} experts with top_k {k}" for experts, k in SELECTIONS)
        raise ValueError(
            f"logits, top_k: fused_router serves {allowed}; got logits of {num_experts} experts with top_k {top_k}"
        )
    check_int("num_tokens (rows of logits)", num_tokens, 0, MAX_TOKENS)
    check_block_m(block_m)
    check_tensor("bias", bias, (torch.float32,), (num_experts,))
    check_devices({"logits": logits, "bias": bias})


def check_plan_inputs(topk_ids: torch.Tensor, num_experts: int, block_m: int) -> None:
    """topk_ids [M, k] int32 contiguous, at most MAX_PAIRS entries; 1 to 1024 experts."""
    check_tensor("topk_ids", topk_ids, (torch.int32,), (None, None))
    check_int("top_k (columns of topk_ids)", topk_ids.shape[1], 1)
    check_int("num_pairs (entries of topk_ids)", topk_ids.numel(), 0, MAX_PAIRS)
    check_int("num_experts", num_experts, 1, MAX_EXPERTS)
    check_block_m(block_m)


def check_experts(expert_map: torch.Tensor | None, num_experts: int, num_local_experts: int) -> None:
    """expert_map [num_experts] int32 with 1 to num_experts local experts; without a map all experts are local."""
    if expert_map is None:
        if num_local_experts != num_experts:
            raise ValueError(
                f"num_local_experts: expected {num_experts} (all) without an expert map, got {num_local_experts}"
            )
        return
    check_tensor("local_experts", expert_map, (torch.int32,), (num_experts,))
    check_int("num_local_experts", num_local_experts, 1, num_experts)


def check_plan(plan: RoutePlan, num_tokens: int, top_k: int, num_local_experts: int, block_m: int) -> None:
    """Dtypes, exact per-expert shapes and worst-case capacity of a caller's plan."""
    blocks = most_blocks(num_tokens, top_k, num_local_experts, block_m)
    for name, value, shape in (
        ("sorted_token_ids", plan.sorted_token_ids, None),
        ("expert_ids", plan.expert_ids, None),
        ("num_tokens_post_padded", plan.num_tokens_post_padded, 1),
        ("expert_counts", plan.expert_counts, num_local_experts),
        ("expert_offsets", plan.expert_offsets, num_local_experts + 1),
        ("expert_scatter_offsets", plan.expert_scatter_offsets, num_local_experts),
    ):
        check_tensor(f"plan.{name}", value, (torch.int32,), (shape,))
    for name, value, need in (
        ("sorted_token_ids", plan.sorted_token_ids, blocks * block_m),
        ("expert_ids", plan.expert_ids, blocks),
    ):
        if value.shape[0] < need:
            raise ValueError(
                f"plan.{name}: expected at least {need} entries for {num_tokens} tokens, top_k {top_k},"
                f" {num_local_experts} experts and block_m {block_m}, got {value.shape[0]};"
                " chord.allocate_route_plan gives enough"
            )


def check_results(topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_tokens: int, top_k: int) -> None:
    """The caller's routing buffers: topk_weights [M, k] float32, topk_ids [M, k] int32, contiguous."""
    check_tensor("topk_weights", topk_weights, (torch.float32,), (num_tokens, top_k))
    check_tensor("topk_ids", topk_ids, (torch.int32,), (num_tokens, top_k))


def check_memory(
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    anywhere: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> None:
    """Every buffer starts on a 16-byte boundary and no output shares bytes with another buffer.

    anywhere: more inputs, which may start at any address.
    """
    spans = []
    for name, tensor in (*inputs.items(), *outputs.items(), *anywhere.items()):
        start, size = tensor.data_ptr(), tensor.nbytes
        if size == 0:
            continue
        if start % ALIGNMENT_BYTES and name not in anywhere:
            raise ValueError(
                f"{name}: expected an address that is a multiple of {ALIGNMENT_BYTES} bytes, got {start:#x}"
                f" (off by {start % ALIGNMENT_BYTES}); pass a copy of its own"
            )
        spans.append((start, start + size, name))
    spans.sort()
    reach, holder = -1, ""
    for start, end, name in spans:
        if start < reach and (name in outputs or holder in outputs):
            raise ValueError(f"{holder} and {name}: expected separate buffers, but they overlap at {start:#x}")
        if end > reach:
            reach, holder = end, name


def plan_tensors(plan: RoutePlan) -> dict[str, torch.Tensor]:
    """The plan's tensors under the names that errors use."""
    return {f"plan.{name}": tensor for name, tensor in plan._asdict().items()}
