"""The plugin through SGLang's own classes: registration, configuration, layer, weight loader, dispatcher."""

from __future__ import annotations

import types
from pathlib import Path

import kimiexample
import pytest
import torch

import sglanghost
from chord.bench import vllm_layers as host
from chord.integrations import hosts
from chord.integrations import sglang as plugin

SHAPE = {"experts": 16, "top_k": 4, "hidden": 256, "intermediate": 128}
PROJECTIONS = (("w1", 128, 256), ("w3", 128, 256), ("w2", 256, 128))


def config_of(**weights: object):
    from sglang.srt.layers.quantization import get_quantization_config

    return get_quantization_config("chord").from_config(host.quantization_config(**weights))


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
    layer = sglanghost.layer(**SHAPE)
    (field, value), *_ = weights.items()
    with pytest.raises(ValueError, match=rf"experts\.0\.gate_proj: .*weights\.{field} = {value}"):
        config_of(**weights).get_quant_method(layer, sglanghost.NAME)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"activation": "gelu"}, "the activation gelu"),
        ({"swiglu_limit": 7.0}, "a clamped SwiGLU, swiglu_limit = 7.0"),
        ({"no_combine": True}, "no_combine = True"),
        ({"apply_router_weight_on_input": True}, "apply_router_weight_on_input = True"),
        ({"with_bias": True}, "biases of experts"),
        ({"dtype": torch.float16}, r"parameters of torch\.float16"),
    ],
)
def test_limits_are_named(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=f"{sglanghost.NAME}: --quantization chord does not serve {said}"):
        sglanghost.layer(**SHAPE, **changes)


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ({"enable_lora": True}, r"LoRA on routed experts \(--enable-lora\)"),
        ({"enable_eplb": True}, r"expert load balancing \(--enable-eplb"),
        ({"ep_num_redundant_experts": 2}, "expert load balancing"),
    ],
)
def test_deployments_are_refused_by_name(server: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=f"{sglanghost.NAME}: --quantization chord does not serve {said}"):
        sglanghost.layer(**SHAPE, server=server)


def test_an_all_to_all_backend_is_refused_when_the_layer_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.moe.utils import MoeA2ABackend

    from chord.integrations.sglang import method

    layer = sglanghost.layer(**SHAPE)
    monkeypatch.setattr(method, "get_moe_a2a_backend", lambda: MoeA2ABackend.DEEPEP)
    with pytest.raises(ValueError, match=rf"{sglanghost.NAME}: .* does not serve --moe-a2a-backend deepep \(none is\)"):
        layer.quant_method.create_moe_runner(layer, layer.moe_runner_config)


def test_deterministic_inference_reaches_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from chord.integrations import moe

    layer = sglanghost.layer(**SHAPE, server={"enable_deterministic_inference": True})
    sglanghost.load(layer, 1, **SHAPE)
    layer.quant_method.process_weights_after_loading(layer)
    seen, run = [], moe.indexed
    monkeypatch.setattr(moe, "indexed", lambda *given, **named: (seen.append(named["invariant"]), run(*given, **named)))
    given = sglanghost.routed(40, torch.Generator(layer.w13_weight.device).manual_seed(2), **SHAPE)
    alone = sglanghost.forward(layer, host.Routed(*(part[:1] for part in given)))
    assert torch.equal(sglanghost.forward(layer, given)[:1], alone)
    assert seen == [True, True]


@pytest.mark.parametrize("split", [{"tp": (1, 2)}, {"ep": (1, 2)}, {}], ids=["tp", "ep", "alone"])
def test_the_layer_is_right(split: dict[str, host.Rank]) -> None:
    """Made, loaded and run by SGLang's layer; ids of -1 and of experts elsewhere among them."""
    layer = sglanghost.layer(**SHAPE, **split)
    assert layer.runner_backend is None  # a direct kernel on local ids
    device = layer.w13_weight_packed.device
    random = torch.Generator(device).manual_seed(1)
    sent = {}
    for expert in range(SHAPE["experts"]):
        for shard, n, k in PROJECTIONS:
            sent[expert, shard] = sglanghost.checkpoint(n, k, random)
            sglanghost.send(layer, expert, shard, *sent[expert, shard])
    weights = sglanghost.kept(layer)
    layer.quant_method.process_weights_after_loading(layer)
    given = sglanghost.routed(11, random, **SHAPE)
    given.ids[3] = -1
    found = sglanghost.forward(layer, given)
    rank, size = split.get("ep", (0, 1))
    wanted = host.reference(weights, given, sglanghost.local_experts(SHAPE["experts"], (rank, size), device))
    assert host.error(found, wanted) < 5e-3
    assert not found[3].any()
    tp_rank, tp = split.get("tp", (0, 1))
    half = slice(tp_rank * 128 // tp, (tp_rank + 1) * 128 // tp)
    first = rank * SHAPE["experts"] // size
    assert torch.equal(weights.w13[0], torch.cat([sent[first, "w1"][0][half], sent[first, "w3"][0][half]]))


def test_a_shard_that_no_kernel_takes_names_the_layer() -> None:
    with pytest.raises(
        ValueError, match=rf"{sglanghost.NAME}: k: expected .* 64, got 96 .*intermediate size 96 on thi"
    ):
        sglanghost.layer(**SHAPE | {"intermediate": 96})


def test_the_log_says_which_kernels_serve(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from chord.integrations import layers

    monkeypatch.setattr(layers, "_said", set())
    with caplog.at_level("INFO", "chord.integrations.sglang"):
        for seed in (1, 2):
            layer = sglanghost.layer(**SHAPE)
            sglanghost.load(layer, seed, **SHAPE)
            layer.quant_method.process_weights_after_loading(layer)
    (line,) = [record.getMessage() for record in caplog.records if "INT4 experts" in record.getMessage()]
    assert "INT4 experts by ChordMoEMethod, kernels " in line
    assert "manifest" in line


def test_the_examples_checkpoint_gives_what_the_layer_gives(tmp_path: Path) -> None:
    """Written by the example, loaded by SGLang's loader and by chord.W4A16Experts: equal bytes and equal outputs."""
    import chord

    example = kimiexample.written(tmp_path)
    layer, prefix, tensors = sglanghost.layer(**example.sizes), example.prefix, example.tensors
    for expert in range(example.sizes["experts"]):
        for shard, projection in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
            stem = f"{prefix}.{expert}.{projection}.weight"
            sglanghost.send(layer, expert, shard, tensors[f"{stem}_packed"], tensors[f"{stem}_scale"])
    layer.quant_method.process_weights_after_loading(layer)
    device = layer.w13_weight.device
    own = chord.W4A16Experts.from_safetensors(tmp_path, prefix, device=device)
    assert torch.equal(layer.w13_weight, own.w13)
    assert torch.equal(layer.w2_weight, own.w2)
    given = sglanghost.routed(11, torch.Generator(device).manual_seed(3), **example.sizes)
    assert torch.equal(sglanghost.forward(layer, given), own(given.x, given.weights, given.ids))


def test_an_empty_batch_and_another_dispatch_format() -> None:
    layer = sglanghost.layer(**SHAPE)
    sglanghost.load(layer, 1, **SHAPE)
    layer.quant_method.process_weights_after_loading(layer)
    device = layer.w13_weight.device
    nothing = sglanghost.routed(0, torch.Generator(device), **SHAPE)
    assert sglanghost.forward(layer, nothing).shape == (0, 256)
    other = types.SimpleNamespace(format=types.SimpleNamespace(is_standard=lambda: False))
    with pytest.raises(ValueError, match="does not serve the dispatch format"):
        layer.quant_method.apply(layer, other)


def test_another_release_leaves_sglang_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers import quantization

    monkeypatch.setattr(quantization, "QUANTIZATION_METHODS", {})
    monkeypatch.setattr(hosts, "installed", lambda _: "0.6.0")
    plugin.register()
    assert not quantization.QUANTIZATION_METHODS
