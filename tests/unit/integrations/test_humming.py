"""The stand-in for humming by itself: its path, its surface, its refusals. tests/serving tries it in vLLM."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from chord import _paths
from chord.errors import UnsupportedDeviceError
from chord.integrations import hosts, humming, moe
from chord.integrations.humming import config, dtypes, schema
from chord.integrations.humming.forward import SWIGLU, humming_forward, may_process_input
from chord.integrations.humming.transform import prepare_and_transform_humming_tensors
from chord.integrations.humming.tune import get_heuristics_config

ROOT = _paths.PACKAGE.parent
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "type": "int",
    "num_bits": 4,
    "strategy": "group",
    "group_size": 32,
    "symmetric": True,
}
WAY_OUT = r"--moe-backend marlin .*unset CHORD_HUMMING"


def run(code: str, *paths: Path) -> str:
    command = [sys.executable, "-c", code]
    environment = {"PYTHONPATH": ":".join(str(path) for path in (ROOT, *paths)), "PATH": "/usr/bin:/bin"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_no_folder_named_humming_is_importable_without_asking() -> None:
    code = "from importlib.util import find_spec; import chord.integrations; print(find_spec('humming'))"
    assert run(code) == "None"


def test_activated_it_is_what_is_imported() -> None:
    code = (
        "from chord.integrations.humming import ROOT, activate, is_ours; print(activate(), activate()); "
        "import humming, humming.config.config, humming.device, humming.forward, humming.ops, humming.schema.fp8; "
        "import humming.schema.modelopt, humming.transform, humming.tune.process_input, humming.utils.smem; "
        "import humming.utils.weight; print(is_ours(humming))"
    )
    assert run(code).split() == ["True", "True", "True"]
    assert run("import humming; print(humming.__file__)", humming.ROOT) == str(humming.ROOT / "humming" / "__init__.py")


def test_activated_it_wins_over_another_humming_that_is_found_earlier(tmp_path: Path) -> None:
    (tmp_path / "humming").mkdir()
    (tmp_path / "humming" / "__init__.py").touch()
    code = (
        "import sys; from chord.integrations.humming import ROOT, activate, is_ours; "
        f"sys.path[:0] = [{str(tmp_path)!r}, str(ROOT)]; print(activate(), activate(), sys.path.count(str(ROOT))); "
        "import humming; print(is_ours(humming), activate())"
    )
    assert run(code).split() == ["True", "True", "1", "True", "True"]


def test_another_humming_that_is_imported_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    other = types.ModuleType("humming")
    other.__file__ = "/elsewhere/humming/__init__.py"
    monkeypatch.setitem(sys.modules, "humming", other)
    before = list(sys.path)
    assert not humming.activate()
    assert sys.path == before
    assert sys.modules["humming"] is other


def test_importing_starts_nothing() -> None:
    code = "import humming, humming.dtypes, torch; print(torch.cuda.is_initialized())"
    assert run(code, humming.ROOT) == "False"


def test_a_gpu_without_cubins_is_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "installed", lambda _: None)
    monkeypatch.setattr(humming, "_capability", lambda: (8, 0))
    with pytest.raises(ImportError, match=r"chord cannot stand in for humming: this GPU is 8\.0") as caught:
        humming.check_import()
    assert isinstance(caught.value.__cause__, UnsupportedDeviceError)


@pytest.mark.parametrize("capability", [None, (9, 0), (10, 3)])
def test_where_it_can_serve_the_import_works(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None
) -> None:
    monkeypatch.setattr(hosts, "installed", lambda _: "0.32.0")
    monkeypatch.setattr(humming, "_capability", lambda: capability)
    humming.check_import()


def test_another_release_of_vllm_is_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "installed", lambda _: "0.31.0")
    with pytest.raises(ImportError, match=r"serves vllm 0\.32 <= version < 0\.34, found 0\.31\.0"):
        humming.check_import()


def test_types_are_keys() -> None:
    found = [getattr(dtypes, name) for name in dtypes.NAMES]
    assert len(set(found)) == len(dtypes.NAMES)
    assert dtypes.DataType.from_any(torch.bfloat16) == dtypes.bfloat16 == dtypes.DataType.from_str("bfloat16")
    assert dtypes.DataType.from_any(torch.float8_e4m3fn) is dtypes.float8e4m3
    assert str(dtypes.uint4) == "uint4"
    assert (dtypes.uint4.num_bits, dtypes.bfloat16.num_bits, dtypes.float6e3m2.num_bits) == (4, 16, 6)
    with pytest.raises(ValueError, match="dtype: expected a name"):
        dtypes.DataType.from_any("NAMES")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"group_size": 128}, "group_size = 128"),
        ({"num_bits": 8}, "num_bits = 8"),
        ({"symmetric": False}, "symmetric = False"),
        ({"quant_method": "gptq"}, "quant_method = 'gptq'"),
    ],
)
def test_other_schemes_are_refused_by_name(changes: dict[str, object], said: str) -> None:
    assert isinstance(schema.BaseWeightSchema.from_config(INT4), schema.CompressedTensorsWeightSchema)
    with pytest.raises(NotImplementedError, match=f"{said} .*{WAY_OUT}"):
        schema.BaseWeightSchema.from_config(INT4 | changes)


def test_classes_that_are_not_served_say_so_when_they_are_made() -> None:
    for name in schema._UNSERVED:
        with pytest.raises(NotImplementedError, match=WAY_OUT):
            getattr(schema, name)()
    with pytest.raises(NotImplementedError, match="quantised activations"):
        schema.HummingInputSchema(a_dtype=dtypes.int8)
    with pytest.raises(NotImplementedError, match="weights with b_dtype = uint8"):
        schema.HummingWeightSchema(b_dtype=dtypes.uint8)
    with pytest.raises(NotImplementedError, match="VLLM_HUMMING_INPUT_QUANT_CONFIG"):
        schema.HummingInputSchema.from_config({"dtype": "int8"})


def test_other_parameters_are_refused() -> None:
    made = schema.CompressedTensorsWeightSchema()
    sizes = {"shape_n_stacks": [64], "shape_k_stacks": [64], "param_dtype": torch.bfloat16, "num_experts": 2}
    tensors = {"weight_packed": torch.zeros(2, 64, 8), "weight_scale": torch.zeros(2, 64, 2)}
    with pytest.raises(NotImplementedError, match=r"torch\.float16"):
        made.convert_humming(tensors, **(sizes | {"param_dtype": torch.float16}))
    with pytest.raises(NotImplementedError, match="a tensor weight_zero_point"):
        made.convert_humming(tensors | {"weight_zero_point": torch.zeros(1)}, **sizes)
    with pytest.raises(NotImplementedError, match="a linear layer"):
        made.convert_humming(tensors, **(sizes | {"num_experts": None}))


def transformed(experts: int, n: int, k: int, **changes: object):
    random = torch.Generator().manual_seed(1)
    words = torch.randint(-(1 << 31), 1 << 31, (experts, n, k // 8), generator=random).to(torch.int32)
    tensors = {"weight": words, "weight_scale": torch.full((experts, n, k // 32), 0.01, dtype=torch.bfloat16)}
    arguments = {
        "tensors": tensors,
        "shape_n": n,
        "shape_k": k,
        "pad_n_to_multiple": 256,
        "pad_k_to_multiple": 128,
        "input_schema": schema.HummingInputSchema(),
        "weight_schema": schema.HummingWeightSchema(),
        "has_bias": False,
        "num_experts": experts,
        "torch_dtype": torch.bfloat16,
        "device": torch.device("cpu"),
    }
    return prepare_and_transform_humming_tensors(**(arguments | changes))


def test_weights_are_packed_without_padding() -> None:
    found, tensors = transformed(3, 64, 192)
    assert (found.num_experts, found.shape_n, found.shape_k) == (3, 64, 192)
    assert (found.pad_shape_n, found.pad_shape_k) == (0, 0)
    assert found.a_dtype == found.c_dtype == dtypes.bfloat16
    assert not found.input_quant_mode.should_quantize
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {"weight": (3, 64 * 192 * 9 // 16)}


def test_shapes_and_biases_that_are_not_served() -> None:
    with pytest.raises(NotImplementedError, match=rf"96.*{WAY_OUT}"):
        transformed(1, 96, 64)
    with pytest.raises(NotImplementedError, match="biases"):
        transformed(1, 64, 64, has_bias=True)
    with pytest.raises(ValueError, match="weight: expected 2 experts"):
        transformed(1, 64, 64, num_experts=2)


def test_one_block_size_for_all_row_counts() -> None:
    made, _ = transformed(1, 64, 64)
    options = {"layer_config": made, "use_f16_accum": False, "use_batch_invariant": True}
    for kind in ("INDEXED", "GROUPED_CONTIGUOUS", "GROUPED_MASKED"):
        ((low, high, found),) = get_heuristics_config(**options, gemm_type=config.GemmType[kind])
        assert (low, high) == (0, 1 << 30)
        assert found["block_shape"][0] == 8
        json.dumps([[low, high, found]])
    with pytest.raises(NotImplementedError, match="the gemm type dense"):
        get_heuristics_config(**options, gemm_type="dense")
    with pytest.raises(NotImplementedError, match="VLLM_HUMMING_USE_F16_ACCUM=1"):
        get_heuristics_config(**(options | {"use_f16_accum": True}), gemm_type="indexed")


def test_activations_pass_through_or_are_refused() -> None:
    made, _ = transformed(1, 64, 64)
    x = torch.randn(3, 64).to(torch.bfloat16)
    assert may_process_input(made, x, outputs=None)[0] is x
    with pytest.raises(NotImplementedError, match=r"the activation 'fmaxf\(a, 0\.f\) \* b'"):
        may_process_input(made, x, outputs=x, activation_type="binary_split", activation_impl="fmaxf(a, 0.f) * b")
    with pytest.raises(ValueError, match="outputs: expected a tensor"):
        may_process_input(made, x, activation_type=SWIGLU[0], activation_impl=SWIGLU[1])
    with pytest.raises(NotImplementedError, match="rotated"):
        may_process_input(made, x, hadamard_block_size=32)


def test_scales_of_a_forward_are_refused() -> None:
    made, tensors = transformed(1, 64, 64)
    x = torch.randn(1, 64).to(torch.bfloat16)
    compute = json.dumps({"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": "grouped_contiguous"})
    offsets = torch.tensor([0, 1])
    out = torch.empty(1, 64, dtype=torch.bfloat16)
    given = {"outputs": out, "compute_config": compute, "valid_shape_m": 1, "expert_layout": offsets}
    assert humming_forward(made, inputs=x, weight=tensors["weight"], weight_scale=None, **given) is out
    assert not out.isnan().any()
    with pytest.raises(NotImplementedError, match="bias of a forward call"):
        humming_forward(made, inputs=x, weight=tensors["weight"], bias=x, **given)


def test_a_dense_forward_is_not_taken_for_a_masked_one() -> None:
    made, tensors = transformed(1, 64, 64)
    x = torch.randn(1, 64).to(torch.bfloat16)
    out = torch.full((1, 64), 7.0, dtype=torch.bfloat16)
    given = {"outputs": out, "valid_shape_m": 1, "expert_layout": torch.tensor([1], dtype=torch.int32)}
    with pytest.raises(NotImplementedError, match=rf"the gemm type dense is not served; .*{WAY_OUT}"):
        humming_forward(made, inputs=x, weight=tensors["weight"], compute_config='{"gemm_type": "dense"}', **given)
    assert bool((out == 7.0).all())
    compute = '{"gemm_type": "grouped_masked"}'
    humming_forward(made, inputs=x, weight=tensors["weight"], compute_config=compute, **given)
    assert not bool((out == 7.0).all())


def test_what_may_be_launched_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The projection's own operator and what moves rows; plans and sums are vLLM's."""
    asked = []
    monkeypatch.setattr(moe, "preload", lambda *given: asked.append(given))
    made, _ = transformed(1, 64, 128)
    made = dataclasses.replace(made, device_index=3)
    get_heuristics_config(
        layer_config=made, use_f16_accum=False, use_batch_invariant=False, gemm_type="grouped_contiguous"
    )
    operators = ("moe_w4a16_contiguous", "moe_swiglu", "moe_scatter")
    assert asked == [(torch.device("cuda", 3), [made.shape], operators)]
