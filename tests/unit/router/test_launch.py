"""What a launch knows without a GPU: the argument list agreed on with the manifest, and which programs fit."""

from __future__ import annotations

import threading
from operator import itemgetter

import pytest
import torch

from chord.errors import ManifestError, NoProgramError
from chord.registry.schema import Arg, Arm, GridRule, KernelConfig, Operator, Program, Workspace
from chord.router import launch, workspaces
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


class FakeKernel:
    """Stands in for registry.Kernel: notes what it is given and when it runs."""

    def __init__(self):
        self.args = (
            Arg(kind="buffer", name="workspace", type="u8"),
            Arg(kind="parameter", name="num_tokens", type="i32"),
        )
        self.prepared = []
        self.launched = []

    def prepare(self, arguments, *, stream, owners=None):
        self.prepared.append((dict(arguments), stream))
        return lambda: self.launched.append((dict(arguments), stream))


@pytest.fixture
def gpu(monkeypatch):
    """A pretended GPU: its memory is the host's; `stream` and `capturing` can be set."""

    class State:
        stream, capturing, capture = 7, False, 1

        @classmethod
        def capture_id(cls, stream):
            return cls.capture

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: State.stream, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: State.capturing)
    monkeypatch.setattr(workspaces, "_place", lambda device: torch.device("cpu"))
    monkeypatch.setattr(workspaces, "_by_stream", {})
    monkeypatch.setattr(workspaces, "_by_capture", {})
    monkeypatch.setattr(workspaces, "default_driver", lambda: State)
    launch._bound.cache_clear()
    return State


def loaded(kernel, size, zeroed=False, lock=None, name="p"):
    names = ("workspace", "num_tokens")
    return launch.Loaded(name, kernel, names, itemgetter(*names), size, zeroed, lock)


def test_equal_launches_are_prepared_once(gpu):
    kernel = FakeKernel()
    for tokens, stream in ((1, 7), (1, 7), (2, 7), (1, 8), (1, 7)):
        gpu.stream = stream
        launch._launch(loaded(kernel, 0), {"workspace": 0, "num_tokens": tokens}, 0)
    assert [stream for _, stream in kernel.launched] == [7, 7, 7, 8, 7]
    assert [values["num_tokens"] for values, _ in kernel.launched] == [1, 1, 2, 1, 1]
    assert len(kernel.prepared) == 3


def test_a_self_resetting_workspace_belongs_to_stream_and_program(gpu):
    kernel = FakeKernel()

    def workspace(size=64, name="p"):
        launch._launch(loaded(kernel, size, zeroed=True, name=name), {"num_tokens": 1}, 0)
        return kernel.launched[-1][0]["workspace"]

    first = workspace()
    assert workspace() == first, "zeroed once, reused on the same stream"
    assert workspace(name="q") != first, "another program may leave other values behind"
    gpu.stream = 8
    assert workspace() != first, "launches on two streams may overlap"
    gpu.stream = 7
    grown = workspace(size=4096)
    assert workspaces._by_stream[0, 7, "p"].numel() == 4096
    assert workspace() == grown, "the larger one serves smaller launches"
    assert not workspaces._by_stream[0, 7, "p"].any()


def test_a_graph_owns_its_workspace(gpu):
    kernel = FakeKernel()

    def workspace(size=64):
        launch._launch(loaded(kernel, size, zeroed=True), {"num_tokens": 1}, 0)
        return kernel.launched[-1][0]["workspace"]

    eager = workspace()
    gpu.capturing = True
    first = workspace()
    assert first != eager
    assert workspace() == first, "launches of one graph follow each other on the stream"
    assert workspace(size=4096) != first
    gpu.stream = 8
    assert workspace() != first, "a branch of the graph may overlap"
    gpu.stream, gpu.capture = 7, 2
    assert workspace() != eager, "another graph zeroes its own"
    assert workspaces._by_capture[0, 7, "p"][0] == 2
    gpu.capture = None
    assert workspace() not in (eager, workspaces._by_capture[0, 7, "p"][1].data_ptr()), "a capture that cannot be told"
    gpu.capturing = False
    assert workspace() == eager


def test_a_plain_workspace_is_not_shared(gpu):
    launch._launch(loaded(FakeKernel(), 64), {"num_tokens": 1}, 0)
    assert workspaces._by_stream == workspaces._by_capture == {}


def test_launches_that_share_a_workspace_do_not_interleave(gpu):
    lock = threading.Lock()
    kernel = FakeKernel()
    kernel.prepare = lambda arguments, *, stream, owners=None: lambda: kernel.launched.append(lock.locked())
    launch._launch(loaded(kernel, 64, zeroed=True, lock=lock), {"num_tokens": 1}, 0)
    assert kernel.launched == [True]
    assert not lock.locked()
