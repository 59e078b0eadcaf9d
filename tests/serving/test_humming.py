"""vLLM's own humming backend on chord's stand-in: oracle, conversion, experts, modular kernel."""

from __future__ import annotations

import pytest
import torch

import vllmhost
from chord.bench import vllm_layers as host
from chord.integrations import humming

SHAPE = {"experts": 16, "top_k": 4, "hidden": 256, "intermediate": 128, "backend": "humming"}
SPLITS = {"tp": {"tp": (1, 2)}, "ep": {"ep": (1, 2)}, "alone": {}}
TOLERANCE = 5e-3


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What of vLLM's humming experts needs a GPU: the sum of rows in Triton, and locks for as many SMs."""
    if not torch.cuda.is_available():
        from vllm.model_executor.layers.fused_moe.experts import fused_humming_moe as module

        monkeypatch.setattr(module, "moe_fused_mul_sum", vllmhost.mul_sum)
        monkeypatch.setattr(module, "create_humming_locks", lambda _: torch.zeros(8, dtype=torch.int32))
        monkeypatch.setattr(module, "num_compute_units", lambda _: 2)


def config_of(**weights: object):
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    return CompressedTensorsConfig.from_config(host.quantization_config(**weights))


def loaded_layer(split: str, seed: int = 0, **weights: object):
    layer = host.routed_experts(host.moe_config(**SHAPE, **SPLITS[split]), config_of(**weights))
    kept = host.fill(layer, seed)
    layer.quant_method.process_weights_after_loading(layer)
    return layer, kept


def test_vllm_finds_the_stand_in() -> None:
    import humming as module
    from vllm.utils.import_utils import has_humming

    assert humming.is_ours(module)
    assert has_humming()
    import vllm.utils.humming as facade

    for name in facade._EXPORTS:
        assert getattr(facade, name) is not None


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", ["auto", "indexed", "grouped"])
def test_the_layer_is_right(split: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HUMMING_MOE_GEMM_TYPE", kind)
    layer, weights = loaded_layer(split)
    name = type(layer.quant_method.moe_kernel.fused_experts).__name__
    grouped = kind == "grouped" or (kind == "auto" and split == "ep")
    assert name == ("HummingGroupedExperts" if grouped else "HummingIndexedExperts")
    given = host.routed(33, layer.moe_config, 5, missing=True)
    host.run(layer, given)
    host.poison_workspaces()
    found = host.run(layer, given)
    wanted = host.reference(weights, given, layer.expert_map)
    assert host.error(found[:-1], wanted[:-1]) < TOLERANCE  # a row without any expert is vLLM's to leave


@pytest.mark.parametrize("weights", [{"group_size": 128}, {"num_bits": 8}])
def test_other_schemes_name_a_way_out(weights: dict[str, object]) -> None:
    with pytest.raises(NotImplementedError, match=r"--moe-backend marlin .*unset CHORD_HUMMING"):
        loaded_layer("alone", **weights)


@pytest.mark.parametrize(
    ("variable", "value"),
    [("VLLM_HUMMING_USE_F16_ACCUM", "1"), ("VLLM_HUMMING_INPUT_QUANT_CONFIG", '{"dtype": "int8"}')],
)
def test_settings_that_are_not_served(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(NotImplementedError, match=variable):
        loaded_layer("alone")


def test_another_activation_is_refused() -> None:
    from vllm.model_executor.layers.fused_moe import MoEActivation

    layer, _ = loaded_layer("alone")
    layer.activation = MoEActivation.GELU
    with pytest.raises(NotImplementedError, match="the activation"):
        host.run(layer, host.routed(3, layer.moe_config, 1))
