"""The plugin through SGLang's own classes: registration, configuration, weight loader, dispatch types."""

from __future__ import annotations

import pytest
import torch

from chord.bench import vllm_layers as host
from chord.integrations import sglang as plugin

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("default")]

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 16, 4, 256, 128
NAME = "model.layers.1.mlp.experts"
PROJECTIONS = (("w1", INTERMEDIATE, HIDDEN), ("w3", INTERMEDIATE, HIDDEN), ("w2", HIDDEN, INTERMEDIATE))


@pytest.fixture(scope="session", autouse=True)
def sglang() -> None:
    import sglanghost

    sglanghost.start()
    plugin.register()
    plugin.register()


def config_of(**weights: object):
    from sglang.srt.layers.quantization import get_quantization_config

    return get_quantization_config("chord").from_config(host.quantization_config(**weights))


def new_layer(tp: host.Rank = (0, 1), ep: host.Rank = (0, 1), dtype: torch.dtype = torch.bfloat16, **changes: object):
    """SGLang's layer up to its weights; its constructor asks for process groups."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig

    layer = FusedMoE.__new__(FusedMoE)
    torch.nn.Module.__init__(layer)
    local = EXPERTS // ep[1]
    fields = {
        "moe_tp_rank": tp[0], "moe_tp_size": tp[1], "moe_ep_rank": ep[0], "moe_ep_size": ep[1], "layer_id": 1,
        "num_experts": EXPERTS, "num_local_experts": local, "_num_local_routed": local, "_num_global_routed": EXPERTS,
        "num_fused_shared_experts": 0, "_has_fused_shared": False, "_expert_storage_rank": ep[0], "scheme": None,
        "use_triton_kernels": False, "use_flashinfer_trtllm_moe": False, "use_deep_gemm": False, "layer_name": NAME,
        "use_presharded_weights": False, "uses_expert_location": False, "_pending_fp8_shared_weights": {},
        "quant_config": None,
    }  # fmt: skip
    for name, value in fields.items():
        setattr(layer, name, value)
    sizes = {"hidden_size": HIDDEN, "intermediate_size_per_partition": INTERMEDIATE // tp[1], "params_dtype": dtype}
    config = MoeRunnerConfig(num_experts=EXPERTS, num_local_experts=local, top_k=TOP_K, **sizes, **changes)
    layer.moe_runner_config = config
    method = config_of().get_quant_method(layer, NAME)
    layer.quant_method = method
    method.create_weights(layer, num_experts=local, weight_loader=layer.weight_loader, with_bias=False, **sizes)
    method.create_moe_runner(layer, config)
    return layer


def checkpoint() -> dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(1)
    return {
        (expert, shard): (
            torch.randint(-(1 << 31), 1 << 31, (n, k // 8), generator=random).to(torch.int32),
            (torch.rand(n, k // 32, generator=random) * 0.02).to(torch.bfloat16),
        )
        for expert in range(EXPERTS)
        for shard, n, k in PROJECTIONS
    }


def load(layer: torch.nn.Module, sent: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]]) -> None:
    for (expert, shard), (words, scale) in sent.items():
        stem = "w2" if shard == "w2" else "w13"
        shape = torch.tensor([words.shape[0], words.shape[1] * 8])
        for suffix, tensor in (("packed", words), ("scale", scale), ("shape", shape)):
            name = f"{stem}_weight_{suffix}"
            parameter = getattr(layer, name)
            parameter.weight_loader(parameter, tensor, f"experts.{name}", shard_id=shard, expert_id=expert)


def test_the_method_is_taken_only_when_asked_for() -> None:
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS
    from sglang.srt.server_args import QUANTIZATION_CHOICES

    cls = QUANTIZATION_METHODS["chord"]
    assert QUANTIZATION_CHOICES.count("chord") == 1
    assert cls.override_quantization_method({"quant_method": "compressed-tensors"}, "chord") == "chord"
    assert cls.override_quantization_method({"quant_method": "compressed-tensors"}, None) is None
    with pytest.raises(ValueError, match="quant_method is compressed-tensors, got 'fp8'"):
        cls.override_quantization_method({"quant_method": "fp8"}, "chord")
    config = config_of()
    assert config.get_name() == "chord"
    assert config.get_quant_method(torch.nn.Linear(2, 2), "model.layers.0.x") is None


@pytest.mark.parametrize("weights", [{"group_size": 128}, {"num_bits": 8}, {"symmetric": False}])
def test_other_schemes_are_refused_by_name(weights: dict[str, object]) -> None:
    layer = new_layer()
    (field, value), *_ = weights.items()
    with pytest.raises(ValueError, match=rf"experts\.0\.gate_proj: .*weights\.{field} = {value}"):
        config_of(**weights).get_quant_method(layer, NAME)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"activation": "gelu"}, "the activation gelu"),
        ({"swiglu_limit": 7.0}, "a clamped SwiGLU, swiglu_limit = 7.0"),
        ({"no_combine": True}, "no_combine = True"),
        ({"dtype": torch.float16}, r"parameters of torch\.float16"),
    ],
)
def test_limits_are_named(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=f"{NAME}: --quantization chord does not serve {said}"):
        new_layer(**changes)


@pytest.mark.parametrize("split", [{"tp": (1, 2)}, {"ep": (1, 2)}, {}], ids=["tp", "ep", "alone"])
def test_the_layer_is_right(split: dict[str, host.Rank]) -> None:
    """Loaded by SGLang's loader, run on its types; ids of -1 and of experts elsewhere among them."""
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput, _map_topk_ids_to_local_experts
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    layer, sent = new_layer(**split), checkpoint()
    assert layer.quant_method.get_moe_runner_backend(layer) is None  # a direct kernel on local ids
    load(layer, sent)
    codes = [layer.w13_weight_packed.clone(), layer.w13_weight_scale.clone()]
    weights = host.Weights(*codes, layer.w2_weight_packed.clone(), layer.w2_weight_scale.clone())
    layer.quant_method.process_weights_after_loading(layer)
    random = torch.Generator().manual_seed(2)
    x = torch.randn(11, HIDDEN, generator=random).to(torch.bfloat16)
    chosen = torch.rand(11, EXPERTS, generator=random).topk(TOP_K)
    ids = chosen.indices.to(torch.int32)
    ids[3] = -1
    rank, size = split.get("ep", (0, 1))
    local = torch.full((EXPERTS,), -1, dtype=torch.int32)
    mine = EXPERTS // size
    local[rank * mine : (rank + 1) * mine] = torch.arange(mine, dtype=torch.int32)
    here = _map_topk_ids_to_local_experts(ids, local)
    given = StandardDispatchOutput(x, None, StandardTopKOutput(chosen.values, here, torch.zeros(11, EXPERTS)))
    found = layer.quant_method.apply(layer, given).hidden_states
    wanted = host.reference(weights, host.Routed(x, chosen.values, here), None)
    assert host.error(found, wanted) < 5e-3
    assert not found[3].any()
    tp_rank, tp = split.get("tp", (0, 1))
    half = slice(tp_rank * INTERMEDIATE // tp, (tp_rank + 1) * INTERMEDIATE // tp)
    first = rank * mine
    assert torch.equal(weights.w13[0], torch.cat([sent[first, "w1"][0][half], sent[first, "w3"][0][half]]))
