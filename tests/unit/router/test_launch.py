"""What a launch knows without a GPU: the argument list agreed on with the manifest, and which programs fit."""

from __future__ import annotations

import pytest
import torch

from chord.errors import ManifestError, NoProgramError
from chord.registry.schema import Arg, Arm, GridRule, KernelConfig, Operator, Program, Workspace
from chord.router import launch
from chord.router.plan import empty_route_plan

BUFFERS = [
    "logits",
    "bias",
    "topk_weights",
    "topk_ids",
    "sorted_token_ids",
    "expert_ids",
    "num_tokens_post_padded",
    "expert_counts",
    "expert_offsets",
    "expert_scatter_offsets",
    "expert_map",
    "workspace",
]
PARAMETERS = ["num_tokens", "num_local_experts", "block_m", "renormalize", "routed_scaling_factor"]
CONSTANTS = {"num_experts": 896, "top_k": 16, "logits": "f32"}


def operator(names, abi_version=1):
    args = [Arg(kind="buffer" if name in BUFFERS else "parameter", name=name, type="i32") for name in names]
    return Operator(
        abi_version=abi_version,
        axes=(),
        arms={"small": Arm(template="t", args=tuple(args), summary="")},
        programs={},
        routes={},
        notes={},
    )


def program(**constants):
    kernel = KernelConfig(
        symbol="s",
        block=(224, 1, 1),
        cluster=1,
        dynamic_smem_bytes=0,
        grid=GridRule(blocks=1),
        cooperative=False,
        dependent=False,
    )
    return Program(
        arm="small",
        constants={**CONSTANTS, **constants},
        num_tokens=constants.get("num_tokens"),
        block_m=constants.get("block_m"),
        flags=(),
        kernels=(kernel,),
        workspace=Workspace(bytes=0, bytes_per_token=0, zeroed=False),
        architectures=("sm_90a",),
        builds={},
    )


def test_all_arguments_of_the_contract_are_accepted():
    names = (*BUFFERS, *PARAMETERS)
    assert launch.check_abi("fused_router", operator(names), "p", program()) == names


@pytest.mark.parametrize("compiled_in", ["num_tokens", "block_m"])
def test_scalars_may_be_left_out_only_when_they_are_compiled_in(compiled_in):
    names = [name for name in (*BUFFERS, *PARAMETERS) if name not in ("workspace", compiled_in)]
    launch.check_abi("fused_router", operator(names), "p", program(**{compiled_in: 8}))
    with pytest.raises(ManifestError, match=rf"p: .* missing \['{compiled_in}'\], unknown \[\]"):
        launch.check_abi("fused_router", operator(names), "p", program())


@pytest.mark.parametrize("dropped", [name for name in (*BUFFERS, *PARAMETERS) if name != "workspace"])
def test_r10_an_argument_list_that_is_too_short_is_refused(dropped):
    names = [name for name in (*BUFFERS, *PARAMETERS) if name != dropped]
    with pytest.raises(ManifestError, match=rf"missing \['{dropped}'\]"):
        launch.check_abi("fused_router", operator(names), "p", program())


def test_r10_unknown_arguments_and_abi_versions_are_refused():
    with pytest.raises(ManifestError, match=r"unknown \['temperature'\]"):
        launch.check_abi("fused_router", operator((*BUFFERS, *PARAMETERS, "temperature")), "p", program())
    with pytest.raises(ManifestError, match=r"passes ABI version 1, the manifest has 2"):
        launch.check_abi("fused_router", operator((*BUFFERS, *PARAMETERS), abi_version=2), "p", program())


def test_a_program_serves_what_it_was_compiled_for():
    logits = torch.empty(4, 896)
    problem = launch.router_problem(logits, 16, 8)
    assert problem == {**CONSTANTS, "num_tokens": 4, "block_m": 8}
    assert launch.admits(program(), problem)
    assert launch.admits(program(num_tokens=4, block_m=8, threads=224), problem)
    assert launch.admits(program(max_tokens=4), problem)
    assert not launch.admits(program(max_tokens=3), problem)
    for other in ({"num_tokens": 5}, {"block_m": 16}, {"logits": "bf16"}, {"num_experts": 384, "top_k": 8}):
        assert not launch.admits(program(**other), problem)
        with pytest.raises(NoProgramError, match=rf"p: compiled for .*{next(iter(other))}"):
            launch.check_admits("p", program(**other), problem)


def test_values_cover_the_contract():
    logits, bias = torch.empty(4, 896), torch.empty(896)
    results = torch.empty(4, 16), torch.empty(4, 16, dtype=torch.int32)
    plan = empty_route_plan(4, 16, 896, 8, torch.device("cpu"))
    values = launch.router_values(logits, bias, 8, True, 2.5, None, *results, plan)
    assert set(values) == {*BUFFERS, *PARAMETERS} - {"workspace"}
    assert values["expert_map"] == 0
    assert values["num_local_experts"] == 896
    assert (values["renormalize"], values["routed_scaling_factor"]) == (1, 2.5)
    assert values["sorted_token_ids"] == plan.sorted_token_ids.data_ptr()
    ids = torch.empty(4, 8, dtype=torch.int32)
    assert set(launch.plan_values(ids, 48, 8, None, plan)) == {
        "topk_ids", "num_pairs", "num_experts", "num_local_experts", "block_m", "expert_map", *plan._fields
    }  # fmt: skip
