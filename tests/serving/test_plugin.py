"""The plugin through vLLM's own classes: registration, loading, packing, the modular kernel."""

from __future__ import annotations

from pathlib import Path

import kimiexample
import pytest
import torch

from chord.bench import vllm_layers as host
from chord.integrations import hosts
from chord.integrations import vllm as plugin
from chord.w4a16 import WeightShape

SHAPE = {"experts": 16, "top_k": 4, "hidden": 256, "intermediate": 128}
SPLITS = {"tp": {"tp": (1, 2)}, "ep": {"ep": (1, 2)}, "alone": {}}
EXPERTS = {"tp": "ChordIndexedExperts", "ep": "ChordIndexedExperts", "alone": "ChordIndexedExperts"}
TOLERANCE = 5e-3


def entry():
    from vllm.model_executor.layers.quantization import get_quantization_config

    return get_quantization_config("chord")


def config_of(**weights: object):
    return entry().from_config(host.quantization_config(**weights))


def new_layer(split: str = "alone", **changes: object):
    return host.routed_experts(host.moe_config(**SHAPE, **SPLITS[split], **changes), config_of())


def loaded_layer(split: str = "alone", seed: int = 0):
    layer = new_layer(split)
    weights = host.fill(layer, seed)
    layer.quant_method.process_weights_after_loading(layer)
    return layer, weights


def test_the_method_is_taken_only_when_asked_for() -> None:
    plugin.register()  # once more: nothing changes
    cls, found = entry(), host.quantization_config()
    assert cls.override_quantization_method(found, "chord") == "chord"
    assert cls.override_quantization_method(found, None) is None
    assert cls.override_quantization_method(found, "compressed-tensors") is None
    with pytest.raises(ValueError, match=r"quant_method is compressed-tensors, got 'fp8'"):
        cls.override_quantization_method({"quant_method": "fp8"}, "chord")


def test_to_others_the_config_is_vllms() -> None:
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    config = config_of()
    assert isinstance(config, CompressedTensorsConfig)
    assert config.get_name() == "chord"
    assert config.get_quant_method(torch.nn.Linear(2, 2), "model.layers.0.x") is None
    assert config.get_supported_act_dtypes() == [torch.bfloat16]


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({"num_bits": 8}, r"weights\.num_bits = 8, chord serves 4"),
        ({"group_size": 128}, r"weights\.group_size = 128, chord serves 32"),
        ({"symmetric": False}, r"weights\.symmetric = False, chord serves True"),
        ({"strategy": "channel", "group_size": None}, r"weights\.strategy = .*channel"),
    ],
)
def test_other_schemes_are_refused_by_name(weights: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        host.routed_experts(host.moe_config(**SHAPE), config_of(**weights))
    assert "model.layers.1.mlp.experts.0" in str(caught.value)


def test_experts_that_are_not_quantised_are_refused() -> None:
    quantization = host.quantization_config()
    quantization["ignore"].append("re:.*experts.*")
    with pytest.raises(ValueError, match="not quantised, --quantization chord serves routed experts in INT4 alone"):
        host.routed_experts(host.moe_config(**SHAPE), entry().from_config(quantization))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"is_lora_enabled": True}, "LoRA"),
        ({"eplb": True}, "expert load balancing"),
        ({"has_bias": True}, "biases"),
        ({"in_dtype": torch.float16}, "float16"),
        ({"swiglu_limit": 7.0}, "clamped SwiGLU, swiglu_limit = 7.0"),
    ],
)
def test_deployments_are_refused_by_name(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=f"--quantization chord does not serve.*{said}"):
        new_layer(**changes)


def test_another_activation_is_refused() -> None:
    from vllm.model_executor.layers.fused_moe import MoEActivation

    with pytest.raises(ValueError, match="does not serve the activation"):
        new_layer(activation=MoEActivation.GELU)


def test_router_weights_on_the_input_are_refused_when_the_layer_is_made() -> None:
    with pytest.raises(ValueError, match=r"does not serve router weights on the input of experts \(model\.layers\.1"):
        host.routed_experts(host.moe_config(**SHAPE), config_of(), apply_router_weight_on_input=True)


def test_a_backend_that_is_not_heeded_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        for _ in range(2):
            host.routed_experts(host.moe_config(**SHAPE, backend="marlin"), config_of())
        host.routed_experts(host.moe_config(**SHAPE), config_of())
    said = [record.getMessage() for record in caplog.records if "--moe-backend" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("--moe-backend marlin chooses among vLLM's own kernels")


def test_a_shard_that_no_kernel_takes_is_refused() -> None:
    config = host.moe_config(**{**SHAPE, "intermediate": 96})
    with pytest.raises(ValueError, match=r"k: expected a positive multiple of 64, got 96 .*intermediate size 96"):
        host.routed_experts(config, config_of())


@pytest.mark.parametrize("split", SPLITS)
def test_a_checkpoint_loads_through_vllms_loader(split: str) -> None:
    """Expert by expert, under the checkpoint's names; the packed bytes are those of the loaded halves."""
    layer = new_layer(split)
    assert {name.partition("_")[0] for name, _ in layer.named_parameters()} == {"w13", "w2"}
    random = torch.Generator().manual_seed(1)
    sent = {}
    hidden, intermediate = SHAPE["hidden"], SHAPE["intermediate"]
    for expert in range(SHAPE["experts"]):
        for name, n, k in (
            ("gate_proj", intermediate, hidden),
            ("up_proj", intermediate, hidden),
            ("down_proj", hidden, intermediate),
        ):
            words = torch.randint(-(1 << 31), 1 << 31, (n, k // 8), generator=random).to(torch.int32)
            scale = (torch.rand(n, k // 32, generator=random) * 0.01).to(torch.bfloat16)
            stem = f"{expert}.{name}.weight_"
            sent |= {f"{stem}packed": words, f"{stem}scale": scale, f"{stem}shape": torch.tensor([n, k])}
    list(layer.load_weights(sent.items()))
    (tp_rank, tp), (ep_rank, ep) = SPLITS[split].get("tp", (0, 1)), SPLITS[split].get("ep", (0, 1))
    first = ep_rank * SHAPE["experts"] // ep
    half = slice(tp_rank * intermediate // tp, (tp_rank + 1) * intermediate // tp)
    gate, up = (sent[f"{first}.{name}.weight_packed"][half] for name in ("gate_proj", "up_proj"))
    assert torch.equal(layer.w13_weight_packed[0].cpu(), torch.cat([gate, up]))
    layer.quant_method.process_weights_after_loading(layer)
    from chord import PackedW4A16, unpack_w4a16

    shape = WeightShape(SHAPE["experts"] // ep, 2 * (half.stop - half.start), hidden, gated=True)
    codes, scale = unpack_w4a16(PackedW4A16(layer.w13_weight.data, shape))
    assert torch.equal(codes[0].cpu(), torch.cat([gate, up]))
    assert scale.shape == (shape.experts, shape.n, hidden // 32)
    assert {name for name, _ in layer.named_parameters()} == {"w13_weight", "w2_weight"}


def test_the_examples_checkpoint_gives_what_the_layer_gives(tmp_path: Path) -> None:
    """Written by the example, loaded by vLLM's loader and by chord.W4A16Experts: equal bytes and equal outputs."""
    import chord

    example = kimiexample.written(tmp_path)
    config = entry().from_config({**example.quantization})
    layer = host.routed_experts(host.moe_config(**example.sizes), config, example.prefix)
    list(layer.load_weights((name.removeprefix(f"{example.prefix}."), each) for name, each in example.tensors.items()))
    layer.quant_method.process_weights_after_loading(layer)
    own = chord.W4A16Experts.from_safetensors(tmp_path, example.prefix, device=layer.w13_weight.device)
    assert torch.equal(layer.w13_weight, own.w13)
    assert torch.equal(layer.w2_weight, own.w2)
    given = host.routed(33, layer.moe_config, 5, missing=True)
    assert torch.equal(host.run(layer, given), own(given.x, given.weights, given.ids))


def test_packing_takes_the_memory_of_the_checkpoint() -> None:
    layer = new_layer()
    before = layer.w13_weight_packed.untyped_storage().data_ptr()
    host.fill(layer, 0)
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.w13_weight.untyped_storage().data_ptr() == before


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("tokens", [1, 7, 33])
def test_the_layer_is_right(split: str, tokens: int) -> None:
    layer, weights = loaded_layer(split)
    assert type(layer.quant_method.moe_kernel.fused_experts).__name__ == EXPERTS[split]
    given = host.routed(tokens, layer.moe_config, 5, missing=tokens > 1)
    host.run(layer, given)  # the workspaces have grown
    host.poison_workspaces()
    found = host.run(layer, given)
    assert host.error(found, host.reference(weights, given, layer.expert_map)) < TOLERANCE
    if tokens > 1:
        assert not found[-1].any()  # a row without any expert


def test_rows_of_expert_parallel_experts_by_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHORD_EP_ROWS", "contiguous")
    layer, weights = loaded_layer("ep")
    assert type(layer.quant_method.moe_kernel.fused_experts).__name__ == "ChordContiguousExperts"
    given = host.routed(17, layer.moe_config, 5, missing=True)
    assert host.error(host.run(layer, given), host.reference(weights, given, layer.expert_map)) < TOLERANCE
    monkeypatch.setenv("CHORD_EP_ROWS", "sorted")
    with pytest.raises(ValueError, match="CHORD_EP_ROWS is 'sorted': expected indexed or contiguous"):
        new_layer("ep")


def test_two_layers_in_turn() -> None:
    (first, first_weights), (second, second_weights) = loaded_layer(seed=0), loaded_layer(seed=7)
    given = host.routed(9, first.moe_config, 5)
    for _ in range(2):
        host.poison_workspaces()
        one, two = host.run(first, given).clone(), host.run(second, given)
        assert host.error(one, host.reference(first_weights, given, None)) < TOLERANCE
        assert host.error(two, host.reference(second_weights, given, None)) < TOLERANCE


@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_ids_and_weights_of_other_types(kind: torch.dtype) -> None:
    layer, weights = loaded_layer()
    given = host.routed(5, layer.moe_config, 3)
    other = given._replace(ids=given.ids.to(kind), weights=given.weights.to(torch.bfloat16))
    wanted = host.reference(weights, given._replace(weights=other.weights.float()), None)
    assert host.error(host.run(layer, other), wanted) < TOLERANCE


def test_batch_invariance_reaches_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    layer, _ = loaded_layer()
    assert layer.quant_method.moe_kernel.fused_experts._invariant
    given = host.routed(40, layer.moe_config, 5)
    alone = host.run(layer, host.Routed(*(part[:1] for part in given)))
    assert torch.equal(host.run(layer, given)[:1], alone)


def test_slabs_of_a_batched_dispatcher() -> None:
    """DeepEP's prepare step needs its library: the experts are called as the modular kernel calls them."""
    from vllm.model_executor.layers.fused_moe import modular_kernel as mk

    from chord.integrations.vllm.experts import ChordMaskedExperts

    layer, weights = loaded_layer("ep")
    made, slab = layer.quant_method, 24
    experts = ChordMaskedExperts(*made._weights, made.moe, made.moe_quant_config, slab, 1)
    local, hidden = SHAPE["experts"] // 2, SHAPE["hidden"]
    device = layer.w13_weight.device
    counts = torch.tensor([0, 5, 24, 1, 0, 17, 3, 2], dtype=torch.int32, device=device)
    x = torch.full((local, slab, hidden), float("nan"), dtype=torch.bfloat16, device=device)
    wanted = torch.zeros(local, slab, hidden, device=device)
    for expert, count in enumerate(counts.tolist()):
        rows = torch.randn(count, hidden, device=device).to(torch.bfloat16)
        x[expert, :count] = rows
        ids = torch.full((count, 1), expert, dtype=torch.int32, device=device)
        one = torch.ones(count, 1, device=device)
        wanted[expert, :count] = host.reference(weights, host.Routed(rows, one, ids), None)
    first, second, shape = experts.workspace_shapes(slab, 0, hidden, 4, 16, local, None, layer.activation)
    empty = [torch.full(size, float("nan"), dtype=torch.bfloat16, device=device) for size in (first, second)]
    output = torch.full(shape, 7.0, dtype=torch.bfloat16, device=device)
    meta = mk.ExpertTokensMetadata(expert_num_tokens=counts, expert_num_tokens_cpu=None)
    given = torch.ones(8, 4, device=device)
    experts.apply(
        output, x, layer.w13_weight, layer.w2_weight, given, given.int(), layer.activation, 16, None, None, None,
        *empty, meta, False,
    )  # fmt: skip
    rows = torch.arange(slab, device=device) < counts.unsqueeze(1)
    assert host.error(output[rows], wanted[rows]) < TOLERANCE
    assert (output[~rows] == 7.0).all()


def test_the_log_says_which_kernels_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    from chord.integrations import layers
    from chord.integrations.vllm import method

    said: list[str] = []
    monkeypatch.setattr(layers, "_said", set())
    monkeypatch.setattr(method._log, "info", lambda text, *parts: said.append(text % parts))
    loaded_layer()
    loaded_layer()
    (line,) = said
    assert "INT4 experts by ChordIndexedExperts" in line
    assert "manifest" in line


def test_another_release_leaves_vllm_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers import quantization

    from chord.integrations.vllm import entry as module

    monkeypatch.setattr(quantization, "QUANTIZATION_METHODS", [])
    monkeypatch.setattr(hosts, "installed", lambda _: "0.40.1")
    monkeypatch.setattr(module, "register", lambda: pytest.fail("registered"))
    plugin.register()
