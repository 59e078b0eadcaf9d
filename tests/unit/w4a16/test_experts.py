"""W4A16Experts: against float64, partial ranks that add up, state, compile, and every checkpoint form it loads."""

import json
import pickle

import pytest
import torch
from safetensors.torch import save_file

import chord
from chord.w4a16 import checkpoint as checkpoints
from chord.w4a16.layout import codes_from_words, words_from_codes
from chord.w4a16.reference import contract_weights

EXPERTS, HIDDEN, INTER, TOKENS, TOP_K = 6, 128, 128, 9, 3
PREFIX = "model.layers.1.mlp.experts"
SCHEME = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
                "actorder": None,
                "dynamic": False,
            },
            "input_activations": None,
            "output_activations": None,
        }
    },
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


def draw(n, k, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (EXPERTS, n, k), generator=generator, dtype=torch.int32)
    scale = torch.rand(EXPERTS, n, k // 32, generator=generator) * 0.04 + 0.005
    return words_from_codes(codes), scale.to(torch.bfloat16)


@pytest.fixture(scope="module")
def weights():
    return {"w13": draw(2 * INTER, HIDDEN, 1), "w2": draw(HIDDEN, INTER, 2)}


@pytest.fixture(scope="module")
def layer(weights):
    return chord.W4A16Experts(chord.pack_w4a16(*weights["w13"], gated=True), chord.pack_w4a16(*weights["w2"]))


@pytest.fixture(scope="module")
def inputs():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).to(torch.bfloat16)
    chosen = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K)
    return x, torch.softmax(chosen.values, 1), chosen.indices.to(torch.int32)


def exact(weights, inputs):
    x, route_weights, ids = inputs
    dense13, dense2 = (contract_weights(*weights[name]).to(torch.float64) for name in ("w13", "w2"))
    result = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for token in range(TOKENS):
        for weight, expert in zip(route_weights[token].tolist(), ids[token].tolist(), strict=True):
            if expert >= 0:
                gate, up = (dense13[expert] @ x[token].to(torch.float64)).chunk(2)
                result[token] += weight * (dense2[expert] @ (torch.nn.functional.silu(gate) * up))
    return result


def relative_error(got, want):
    return float((got - want).square().mean().sqrt() / want.square().mean().sqrt())


def test_the_layer_is_the_moe_formula(layer, weights, inputs):
    assert relative_error(layer(*inputs), exact(weights, inputs)) < 1e-2
    plan = chord.route_plan(inputs[2], EXPERTS, 16)
    assert torch.equal(layer(*inputs, plan, block_m=16), layer(*inputs))
    assert "experts=6 of 6, hidden=128, intermediate=128, profile=h200_prefill_ep8" in repr(layer)


def test_routes_without_an_expert_count_as_zero(layer, weights, inputs):
    x, route_weights, ids = inputs
    ids = ids.clone()
    ids[::2, 1] = -1
    assert relative_error(layer(x, route_weights, ids), exact(weights, (x, route_weights, ids))) < 1e-2


def test_grouped_rows_give_what_the_routed_tokens_give(layer, inputs):
    """Rows sorted by expert as offsets and as slabs: the same bits as the layer's own, before the sum over routes."""
    x, route_weights, ids = inputs
    order = ids.flatten().argsort(stable=True)
    counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
    rows, row_weight = x[order // TOP_K], route_weights.flatten()[order]
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    routed = torch.empty(TOKENS * TOP_K, HIDDEN, dtype=torch.bfloat16)
    routed[order] = layer.forward_contiguous(rows, offsets=offsets)
    weighted = routed.view(TOKENS, TOP_K, HIDDEN).float() * route_weights.unsqueeze(-1)
    assert torch.equal(weighted.sum(dim=1).to(torch.bfloat16), layer(*inputs))
    sorted_rows = layer.forward_contiguous(rows, offsets=offsets, row_weight=row_weight)
    slabs, weights = torch.zeros(EXPERTS, 9, HIDDEN, dtype=torch.bfloat16), torch.zeros(EXPERTS, 9)
    for expert in range(EXPERTS):
        mine = slice(offsets[expert], offsets[expert + 1])
        slabs[expert, : counts[expert]], weights[expert, : counts[expert]] = rows[mine], row_weight[mine]
    masked = layer.forward_masked(slabs, counts.to(torch.int32), expected_rows=5, row_weight=weights, zero_missing=True)
    assert torch.equal(torch.cat([masked[e, : counts[e]] for e in range(EXPERTS)]), sorted_rows)
    assert all((masked[e, counts[e] :] == 0).all() for e in range(EXPERTS))


def test_no_tokens(layer):
    assert layer(
        torch.empty(0, HIDDEN, dtype=torch.bfloat16), torch.empty(0, TOP_K), torch.empty(0, TOP_K, dtype=torch.int32)
    ).shape == (0, HIDDEN)


def test_state_is_restored_and_another_layout_refused(layer, inputs):
    other = chord.W4A16Experts(
        chord.PackedW4A16(torch.zeros_like(layer.w13), layer.w13_shape),
        chord.PackedW4A16(torch.zeros_like(layer.w2), layer.w2_shape),
    )
    state = layer.state_dict()
    other.load_state_dict(state)
    assert torch.equal(other.to(torch.float16)(*inputs), layer(*inputs)), "casting leaves packed bytes alone"
    with pytest.raises(
        ValueError, match="layout_version: this chord reads packed weights of version 1, the state has 2"
    ):
        other.load_state_dict(state | {"_extra_state": torch.tensor([2])})


def test_a_module_that_was_saved_with_another_layout_is_refused(layer, inputs):
    saved = pickle.loads(pickle.dumps(layer))
    assert torch.equal(saved(*inputs), layer(*inputs))
    saved.layout_version = 2  # as another chord would have left it
    again = pickle.loads(pickle.dumps(saved))
    with pytest.raises(ValueError, match="layout_version: this chord reads packed weights of version 1, got 2"):
        again(*inputs)


def test_compiles_to_one_graph(layer, inputs):
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*inputs), layer(*inputs))


def test_projections_that_do_not_belong_together_are_refused(weights):
    gated, plain = chord.pack_w4a16(*weights["w13"], gated=True), chord.pack_w4a16(*weights["w13"])
    down = chord.pack_w4a16(*weights["w2"])
    with pytest.raises(ValueError, match="expected w13 packed with gated=True, w2 without"):
        chord.W4A16Experts(plain, down)
    with pytest.raises(
        ValueError, match=r"expected \[E, 2 I, H\] and \[E, H, I\], got \[6, 256, 128\] and \[6, 256, 128"
    ):
        chord.W4A16Experts(gated, plain)
    with pytest.raises(TypeError, match=r"w2: expected a chord\.PackedW4A16"):
        chord.W4A16Experts(gated, down.data)
    with pytest.raises(ValueError, match=r"expected the ids of 6 experts, got range\(0, 5\)"):
        chord.W4A16Experts(gated, down, local_experts=range(5), num_global_experts=12)


@pytest.mark.parametrize(
    ("local", "all_experts", "error", "message"),
    [
        (range(8, 14), 12, ValueError, r"local_experts: expected ids of 0 to 11, got range\(8, 14\)"),
        (range(6), None, None, ""),
        (range(6, 12), None, ValueError, r"local_experts: expected ids of 0 to 5, got range\(6, 12\)"),
        (range(-6, 0), 12, ValueError, "local_experts: expected ids of 0 to 11"),
        (range(0), 12, ValueError, "local_experts: expected ids of 0 to 11"),
        ([0, 1, 2, 3, 4, 5], 12, TypeError, r"local_experts: expected a range, got \[0, 1, .*list"),
        (range(6), 12.0, TypeError, "num_global_experts: expected an int"),
        (range(6), 1025, ValueError, "num_global_experts: expected 1 to 1024"),
        (None, 12, ValueError, r"expected the ids of 6 experts, got range\(0, 12\)"),
    ],
)
def test_experts_of_a_rank_are_checked_when_the_layer_is_made(weights, local, all_experts, error, message):
    packed = chord.pack_w4a16(*weights["w13"], gated=True), chord.pack_w4a16(*weights["w2"])
    if error is None:
        chord.W4A16Experts(*packed, local_experts=local, num_global_experts=all_experts)
        return
    with pytest.raises(error, match=message):
        chord.W4A16Experts(*packed, local_experts=local, num_global_experts=all_experts)


# --- checkpoints ----------------------------------------------------------------------------------------------------


def per_expert(weights, names=("gate_proj", "up_proj", "down_proj"), unpacked=False):
    tensors = {}
    for e in range(EXPERTS):
        gate, up = (part[e].chunk(2) for part in weights["w13"])
        parts = ((gate[0], up[0]), (gate[1], up[1]), tuple(part[e] for part in weights["w2"]))
        for name, (words, scale) in zip(names, parts, strict=True):
            stem = f"{PREFIX}.{e}.{name}.weight"
            if unpacked:
                tensors[stem] = codes_from_words(words).to(torch.int32)
            else:
                tensors[f"{stem}_packed"] = words.clone()
                tensors[f"{stem}_shape"] = torch.tensor([words.shape[0], words.shape[1] * 8])
            tensors[f"{stem}_scale"] = scale.clone()
    return tensors


def stacked(weights, unpacked=False):
    tensors = {}
    for name, (words, scale) in weights.items():
        kind = "weight" if unpacked else "weight_packed"
        tensors[f"{PREFIX}.{name}_{kind}"] = codes_from_words(words).to(torch.int32) if unpacked else words.clone()
        tensors[f"{PREFIX}.{name}_weight_scale"] = scale.clone()
    return tensors


def write(folder, tensors, config=None, files=1):
    names, homes = sorted(tensors), {}
    for part in range(files):
        file = f"model-{part}.safetensors"
        save_file({name: tensors[name] for name in names[part::files]}, folder / file)
        homes |= dict.fromkeys(names[part::files], file)
    if files > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


FORMS = {
    "compressed_tensors": per_expert,
    "other_names": lambda weights: per_expert(weights, ("w1", "w3", "w2")),
    "unpacked": lambda weights: per_expert(weights, unpacked=True),
    "stacked": stacked,
    "stacked_unpacked": lambda weights: stacked(weights, unpacked=True),
}


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_bytes(form, files, weights, layer, tmp_path):
    config = {"quantization_config": SCHEME} if files == 1 else {"text_config": {"quantization_config": SCHEME}}
    folder = write(tmp_path, FORMS[form](weights), config, files)
    loaded = chord.W4A16Experts.from_safetensors(folder, f"{PREFIX}.", device="cpu")
    assert torch.equal(loaded.w13, layer.w13)
    assert torch.equal(loaded.w2, layer.w2)
    assert (loaded.w13_shape, loaded.w2_shape) == (layer.w13_shape, layer.w2_shape)


@pytest.mark.parametrize("form", ["compressed_tensors", "stacked_unpacked"])
def test_expert_parallel_ranks_add_up(form, weights, layer, inputs, tmp_path):
    folder = write(tmp_path, FORMS[form](weights))
    parts = []
    for local in (range(2), range(2, 6)):
        rank = chord.W4A16Experts.from_safetensors(folder, PREFIX, device="cpu", local_experts=local)
        assert (rank.num_global_experts, rank.w13_shape.experts) == (EXPERTS, len(local))
        parts.append(rank(*inputs).to(torch.float64))
    assert relative_error(sum(parts), exact(weights, inputs)) < 1e-2


@pytest.mark.parametrize("form", FORMS)
def test_tensor_parallel_ranks_add_up(form, weights, inputs, tmp_path):
    folder = write(tmp_path, FORMS[form](weights))
    parts = []
    for rank in range(2):
        shard = chord.W4A16Experts.from_safetensors(
            folder, PREFIX, device="cpu", tp_rank=rank, tp_size=2, profile="h200_tp8"
        )
        assert (shard.w13_shape.n, shard.w2_shape.k) == (INTER, INTER // 2)
        parts.append(shard(*inputs).to(torch.float64))
    assert relative_error(sum(parts), exact(weights, inputs)) < 1e-2


def test_one_expert_is_read_at_a_time(weights, tmp_path, monkeypatch):
    folder = write(tmp_path, stacked(weights))
    sizes = []
    original = checkpoints.ExpertReader._cut
    monkeypatch.setattr(
        checkpoints.ExpertReader,
        "_cut",
        lambda *arguments: sizes.append((read := original(*arguments)).nbytes) or read,
    )
    chord.W4A16Experts.from_safetensors(folder, PREFIX, device="cpu")
    assert max(sizes) == 2 * INTER * HIDDEN // 2, "bytes of one expert's gate and up codes"


def changed(change):
    """SCHEME with one field of the group, of its weights, or of the top changed."""
    scheme = json.loads(json.dumps(SCHEME))
    for path, value in change.items():
        place = scheme if path.startswith("top.") else scheme["config_groups"]["group_0"]
        *parents, last = path.removeprefix("top.").split(".")
        for parent in parents:
            place = place[parent]
        place[last] = value
    return scheme


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights.group_size": 128}, r"weights\.group_size = 128, chord serves 32 alone"),
        ({"weights.symmetric": False}, r"weights\.symmetric = False, chord serves True alone"),
        ({"weights.actorder": "group"}, r"weights\.actorder = 'group', chord serves None or False"),
        ({"weights.num_bits": 8}, r"weights\.num_bits = 8, chord serves 4"),
        ({"weights.type": "float"}, r"weights\.type = 'float', chord serves 'int'"),
        ({"weights.strategy": "channel"}, r"weights\.strategy = 'channel', chord serves 'group'"),
        ({"weights.dynamic": True}, r"weights\.dynamic = True"),
        ({"input_activations": {"num_bits": 8}}, r"input_activations = \{'num_bits': 8\}, chord serves None"),
        ({"weights": None}, "gate_proj: its weights are not quantised"),
        ({"targets": ["re:.*self_attn.*"]}, "no config group has it among its targets"),
        ({"format": "int-quantized"}, "format = 'int-quantized', chord serves 'pack-quantized'"),
        ({"top.format": "float-quantized"}, "format = 'float-quantized'"),
        ({"top.quant_method": "awq"}, "quant_method = 'awq', chord serves 'compressed-tensors'"),
        ({"top.ignore": ["re:.*mlp.experts.*"]}, "ignore names it"),
    ],
)
def test_schemes_that_are_not_served_are_named(change, message, weights, tmp_path):
    folder = write(tmp_path, per_expert(weights), {"quantization_config": changed(change)})
    with pytest.raises(ValueError, match=message):
        chord.W4A16Experts.from_safetensors(folder, PREFIX, device="cpu")


@pytest.mark.parametrize("projection", ["gate_proj", "up_proj", "down_proj"])
def test_a_scheme_of_one_projection_alone_is_named(projection, weights, tmp_path):
    scheme = changed({})
    group = json.loads(json.dumps(scheme["config_groups"]["group_0"]))
    group["weights"]["num_bits"] = 8
    scheme["config_groups"]["group_1"] = {**group, "targets": [f"re:.*experts.*{projection}"]}
    folder = write(tmp_path, per_expert(weights), {"quantization_config": scheme})
    with pytest.raises(ValueError, match=rf"experts\.0\.{projection}: quantization_config has weights\.num_bits = 8"):
        chord.W4A16Experts.from_safetensors(folder, PREFIX, device="cpu")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"text_config": 3}, "expected an object as text_config, got 3"),
        ({"quantization_config": [1]}, r"expected an object as quantization_config, got \[1\]"),
        ({"quantization_config": {**SCHEME, "config_groups": [1]}}, "expected an object as config_groups"),
        ({"quantization_config": {**SCHEME, "config_groups": {"group_0": 1}}}, "expected an object as group_0, got 1"),
        ({"quantization_config": changed({"targets": "Linear"})}, r"a list of texts as group_0\.targets, got 'Linear'"),
        ({"quantization_config": changed({"weights": "int4"})}, "expected an object as weights, got 'int4'"),
        ({"quantization_config": {**SCHEME, "ignore": [3]}}, r"expected a list of texts as ignore, got \[3\]"),
        ({"quantization_config": {**SCHEME, "ignore": ["re:("]}}, r"a regular expression behind re:, got 're:\('"),
    ],
)
def test_a_config_of_another_form_is_named(config, message, weights, tmp_path):
    folder = write(tmp_path, per_expert(weights), config)
    with pytest.raises(ValueError, match=message):
        chord.W4A16Experts.from_safetensors(folder, PREFIX, device="cpu")


def test_a_group_that_names_the_experts_goes_first(weights, tmp_path):
    scheme = changed({"weights.group_size": 128})
    scheme["config_groups"]["group_1"] = {**SCHEME["config_groups"]["group_0"], "targets": ["re:.*mlp.experts.*"]}
    folder = write(tmp_path, per_expert(weights), {"quantization_config": scheme})
    chord.W4A16Experts.from_safetensors(folder, PREFIX, device="cpu")


GATE = f"{PREFIX}.0.gate_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t | {f"{GATE}_zero_point": torch.zeros(1)}, "weight_zero_point: zero points are not served"),
        (lambda t: t | {f"{GATE}_g_idx": torch.zeros(1)}, "weight_g_idx: act order are not|weight_g_idx: act order"),
        (lambda t: t | {f"{PREFIX}.0.gate_proj.input_scale": torch.ones(1)}, "input_scale: quantised inputs"),
        (lambda t: t | {f"{GATE}_scale": t[f"{GATE}_scale"].half()}, r"expected bfloat16 scales \(BF16\), got F16"),
        (
            lambda t: t | {f"{GATE}_scale": t[f"{GATE}_scale"][:, ::4].contiguous()},
            "32 codes of a row, got groups of 128",
        ),
        (
            lambda t: t | {f"{GATE}_packed": t[f"{GATE}_packed"].to(torch.int64)},
            r"expected int32 codes \(I32\), got I64",
        ),
        (lambda t: t | {f"{GATE}_shape": torch.tensor([1, 2])}, r"weight_shape: expected \[128, 128\].*got \[1, 2\]"),
        (
            lambda t: {k: v for k, v in t.items() if k != f"{GATE}_scale"},
            "expected a tensor .*weight_scale, found none",
        ),
        (lambda t: {k: v for k, v in t.items() if ".2." not in k}, "expected experts 0 to 5, got 5"),
        (lambda t: {k.replace("gate_proj", "fc1"): v for k, v in t.items()}, "expected projections gate_proj/up_proj"),
        (lambda t: {"nothing": torch.zeros(1)}, "w2_weight_packed or .*w2_weight, found neither"),
    ],
)
def test_tensors_that_are_not_served_are_named(change, message, weights, tmp_path):
    folder = write(tmp_path, change(per_expert(weights)))
    with pytest.raises(ValueError, match=message):
        chord.W4A16Experts.from_safetensors(folder, PREFIX, device="cpu")


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("w13_weight_zero_point", "zero points"),
        ("w2_weight_g_idx", "act order"),
        ("w2_input_scale", "quantised inputs"),
        ("w13_bias", "biases"),
    ],
)
def test_tensors_of_stacks_that_are_not_served_are_named(name, meaning, weights, tmp_path):
    folder = write(tmp_path, {**stacked(weights), f"{PREFIX}.{name}": torch.zeros(1)})
    with pytest.raises(ValueError, match=f"{name}: {meaning} are not served"):
        chord.W4A16Experts.from_safetensors(folder, PREFIX, device="cpu")


def test_what_cannot_be_loaded_says_why(weights, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="expected a safetensors file, or a folder that holds some"):
        chord.W4A16Experts.from_safetensors(tmp_path, PREFIX, device="cpu")
    folder = write(tmp_path, per_expert(weights, unpacked=True))
    load = chord.W4A16Experts.from_safetensors
    with pytest.raises(ValueError, match=r"local_experts: expected ids of 0 to 5, got range\(4, 8\)"):
        load(folder, PREFIX, device="cpu", local_experts=range(4, 8))
    for name in ("profile", "role"):
        with pytest.raises(ValueError, match=f"{name}: expected .* got 'typo'"):
            load(tmp_path / "not even there", PREFIX, device="cpu", **{name: "typo"})
    with pytest.raises(ValueError, match="tp_size: gate_proj of expert 0 has 128 entries, which 3 GPUs cannot share"):
        load(folder, PREFIX, device="cpu", tp_size=3)
    with pytest.raises(ValueError, match="n: expected a positive multiple of 64, got 32"):
        load(folder, PREFIX, device="cpu", tp_size=8)
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'chord-registry\[safetensors\]'"):
        load(folder, PREFIX, device="cpu")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("model-0.safetensors", b"", "model-0.safetensors: expected a file that safetensors can read"),
        ("model-0.safetensors", b"\xff" * 4096, "model-0.safetensors: expected a file that safetensors can read"),
        ("model-1.safetensors", None, "model-1.safetensors: expected a file that safetensors can read, got: No such"),
        (checkpoints.INDEX, b"{", "index.json: expected JSON, got"),
        (checkpoints.INDEX, b"\xff\xfe", "index.json: expected JSON, got"),
        (checkpoints.INDEX, b"[]", "index.json: expected a JSON object, got list"),
        (checkpoints.INDEX, b"{}", "index.json: expected a weight_map"),
        (checkpoints.INDEX, b'{"weight_map": {"a": 1}}', "index.json: expected a weight_map"),
        (checkpoints.INDEX, b'{"weight_map": {"a": "../a.safetensors"}}', "names of files beside it"),
        ("config.json", b"[" * 100_000, "config.json: expected JSON"),
        ("config.json", b"3", "config.json: expected a JSON object, got int"),
    ],
)
def test_files_that_cannot_be_read_are_named(name, data, message, weights, tmp_path):
    folder = write(tmp_path, per_expert(weights), SCHEME, files=3)
    if data is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        chord.W4A16Experts.from_safetensors(folder, PREFIX, device="cpu")


def test_a_file_without_the_tensor_that_the_index_puts_there_is_named(weights, tmp_path):
    folder = write(tmp_path, per_expert(weights), files=3)
    save_file({"other": torch.zeros(1)}, folder / "model-2.safetensors")
    with pytest.raises(ValueError, match=r"model-2\.safetensors: expected a tensor .*, as model.*index"):
        chord.W4A16Experts.from_safetensors(folder, PREFIX, device="cpu")


def test_stacks_of_another_rank_or_number_of_experts_are_named(weights, tmp_path):
    tensors = stacked(weights)
    for name in (f"{PREFIX}.w13_weight_packed", f"{PREFIX}.w13_weight_scale"):
        tensors[name] = tensors[name][:4].clone()
    with pytest.raises(ValueError, match=r"w13_weight_packed and its scales: expected .*at least 5 experts, got \[4"):
        chord.W4A16Experts.from_safetensors(write(tmp_path, tensors), PREFIX, device="cpu")
    flat = {name: tensor.flatten() for name, tensor in stacked(weights).items()}
    with pytest.raises(ValueError, match=r"w2_weight_packed and its scales: expected \[experts, outputs, k\]"):
        chord.W4A16Experts.from_safetensors(write(tmp_path, flat), PREFIX, device="cpu")


@pytest.mark.parametrize(
    ("changed_argument", "message"),
    [
        ({"tp_rank": "0"}, "tp_rank: expected an int"),
        ({"tp_size": None}, "tp_size: expected an int"),
        ({"local_experts": [0]}, "local_experts: expected a range"),
        ({"prefix": None}, "prefix: expected a str"),
        ({"device": 1.5}, "device: expected a torch.device or its name"),
    ],
)
def test_arguments_of_another_type_are_named(changed_argument, message, weights, tmp_path):
    arguments = {"path": write(tmp_path, stacked(weights)), "prefix": PREFIX, "device": "cpu", **changed_argument}
    with pytest.raises(TypeError, match=message):
        chord.W4A16Experts.from_safetensors(**arguments)


def test_codes_outside_four_bits_are_refused(weights, tmp_path):
    tensors = per_expert(weights, unpacked=True)
    tensors[GATE][3, 3] = 16
    with pytest.raises(ValueError, match="experts, gate and up of expert 0: codes: expected 0 to 15"):
        chord.W4A16Experts.from_safetensors(write(tmp_path, tensors), PREFIX, device="cpu")


@pytest.mark.parametrize(("rows", "words"), [(64, None), (None, 8)])
def test_gate_and_up_of_two_sizes_are_named(rows, words, weights, tmp_path):
    """Together they may have as many rows as two that belong together."""
    up = f"{PREFIX}.0.up_proj.weight"
    tensors = {name: part for name, part in per_expert(weights).items() if name != f"{up}_shape"}
    tensors[f"{up}_packed"] = tensors[f"{up}_packed"][:rows, :words].clone()
    tensors[f"{up}_scale"] = tensors[f"{up}_scale"][:rows, : words and words // 4].clone()
    with pytest.raises(ValueError, match=r"experts\.0: expected gate_proj and up_proj of one size, got codes"):
        chord.W4A16Experts.from_safetensors(write(tmp_path, tensors), PREFIX, device="cpu")


def test_stacks_of_an_odd_number_of_rows_are_named(weights, tmp_path):
    tensors = stacked(weights)
    for part in ("packed", "scale"):
        name = f"{PREFIX}.w13_weight_{part}"
        tensors[name] = torch.cat([tensors[name], tensors[name][:, :1]], dim=1)
    with pytest.raises(ValueError, match="w13 of expert 0: expected as many gate rows as up rows, got 257 in all"):
        chord.W4A16Experts.from_safetensors(write(tmp_path, tensors), PREFIX, device="cpu")


def test_an_expert_of_another_size_or_without_finite_scales_is_named(weights, tmp_path):
    tensors, down = per_expert(weights), f"{PREFIX}.3.down_proj.weight"
    tensors[f"{down}_scale"][5, 1] = float("nan")
    with pytest.raises(ValueError, match=r"experts, down of expert 3: scale: expected magnitudes below 2\^31"):
        chord.W4A16Experts.from_safetensors(write(tmp_path, tensors), PREFIX, device="cpu")
    tensors = {name: part for name, part in per_expert(weights).items() if not name.startswith(f"{down}_shape")}
    for part in (f"{down}_packed", f"{down}_scale"):
        tensors[part] = tensors[part][:64].clone()
    with pytest.raises(ValueError, match=r"down of expert 3: codes: expected a projection of 128 x 128, got 64 x 128"):
        chord.W4A16Experts.from_safetensors(write(tmp_path, tensors), PREFIX, device="cpu")
