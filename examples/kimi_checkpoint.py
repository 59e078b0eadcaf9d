"""Writes a small checkpoint in the layout of Kimi's INT4 releases, and runs its experts in two ways.

    python examples/kimi_checkpoint.py [FOLDER]

One way is chord's layer, which reads safetensors by itself. The other is the weight path of the serving plugins: the
checkpoint's tensors are copied into parameters that are then packed in place, as a framework's loader does it; vLLM's
and SGLang's own loaders get this checkpoint in tests/serving and tests/serving_sglang. Equal bits are expected. Needs
torch and safetensors; runs on a GPU that chord has kernels for, else on the CPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import chord
from chord.integrations import moe, slabs
from chord.w4a16 import WeightShape

LAYER, EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, TOKENS = 1, 12, 256, 128, 4, 19
PREFIX = f"model.layers.{LAYER}.mlp.experts"
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
            "input_activations": None,
            "output_activations": None,
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|down)_proj.*"],
}


def write(folder: Path) -> None:
    """One layer's experts in two files with an index, and the config.json beside them."""
    random = torch.Generator().manual_seed(0)
    shards: list[dict[str, torch.Tensor]] = [{}, {}]
    for expert in range(EXPERTS):
        for name, n, k in (
            ("gate_proj", INTERMEDIATE, HIDDEN),
            ("up_proj", INTERMEDIATE, HIDDEN),
            ("down_proj", HIDDEN, INTERMEDIATE),
        ):
            words = torch.randint(-(1 << 31), 1 << 31, (n, k // 8), generator=random)
            scale = torch.rand(n, k // 32, generator=random) * 0.02 + 0.001
            stem = f"{PREFIX}.{expert}.{name}.weight"
            shards[expert % 2] |= {
                f"{stem}_packed": words.to(torch.int32),
                f"{stem}_scale": scale.to(torch.bfloat16),
                f"{stem}_shape": torch.tensor([n, k], dtype=torch.int32),
            }
    files = [f"model-{place + 1:05}-of-{len(shards):05}.safetensors" for place in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, folder / file)
    places = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    config = {"model_type": "kimi_k2", "quantization_config": QUANTIZATION}
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def by_the_plugin(folder: Path, device: torch.device) -> tuple[chord.PackedW4A16, chord.PackedW4A16]:
    """w13 and w2 through the memory that the plugins give a framework's loader."""
    layer = torch.nn.Module()
    with torch.device(device):  # what the plugins do when a framework makes a layer
        slabs.register_parameters(layer, "w13", WeightShape(EXPERTS, 2 * INTERMEDIATE, HIDDEN, gated=True))
        slabs.register_parameters(layer, "w2", WeightShape(EXPERTS, HIDDEN, INTERMEDIATE))
    gate, up = slice(0, INTERMEDIATE), slice(INTERMEDIATE, None)
    homes = {"gate_proj": ("w13", gate), "up_proj": ("w13", up), "down_proj": ("w2", slice(None))}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            expert, projection, kind = name.removeprefix(f"{PREFIX}.").split(".")
            stem, rows = homes[projection]
            if kind != "weight_shape":
                getattr(layer, f"{stem}_{kind}").data[int(expert), rows].copy_(tensor)
    return slabs.pack_parameters(layer, "w13", gated=True), slabs.pack_parameters(layer, "w2")


def run(
    w13: chord.PackedW4A16, w2: chord.PackedW4A16, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """One forward as the plugins do it, in lent memory."""
    pairs, device = TOKENS * TOP_K, x.device
    pieces = [(torch.bfloat16, (pairs, INTERMEDIATE)), (torch.bfloat16, (pairs, HIDDEN))]
    pieces += moe.plan_pieces(TOKENS, TOP_K, EXPERTS)
    lent = torch.empty(moe.bytes_of(pieces), dtype=torch.uint8, device=device)
    hidden, routed, *plan_pieces = moe.cut(lent, pieces)
    plan = moe.make_plan(ids, plan_pieces, EXPERTS, EXPERTS, None)
    out = torch.empty_like(x)
    moe.indexed(
        x, w13, w2, plan, weights, ids, hidden, routed, out,
        num_experts=EXPERTS, expert_map=None, expected_rows=pairs // EXPERTS, invariant=False,
    )  # fmt: skip
    return out


def main(folder: Path) -> None:
    """Raises AssertionError if the two ways differ."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    write(folder)
    layer = chord.W4A16Experts.from_safetensors(folder, PREFIX, device=device)
    w13, w2 = by_the_plugin(folder, device)
    assert torch.equal(layer.w13, w13.data), "w13: the packed bytes differ"
    assert torch.equal(layer.w2, w2.data), "w2: the packed bytes differ"
    random = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, HIDDEN, generator=random).to(device, torch.bfloat16)
    scores = torch.rand(TOKENS, EXPERTS, generator=random).topk(TOP_K)
    weights, ids = scores.values.to(device), scores.indices.to(device, torch.int32)
    expected = run(
        chord.PackedW4A16(layer.w13, layer.w13_shape), chord.PackedW4A16(layer.w2, layer.w2_shape), x, weights, ids
    )
    found = run(w13, w2, x, weights, ids)
    assert torch.equal(expected, found), "the two loadings give different results"
    assert torch.equal(layer(x, weights, ids), found), "chord.W4A16Experts and the plugins' forward differ"
    print(f"{folder}: {EXPERTS} experts, the same packed bytes and results from both loadings")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A small checkpoint in Kimi's INT4 layout, loaded in two ways.")
    parser.add_argument("folder", nargs="?", type=Path, help="where the checkpoint stays; default a temporary folder")
    given = parser.parse_args().folder
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        main(given)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch))
