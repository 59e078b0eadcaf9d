"""A whole MoE layer of Kimi K2, from the router's logits to the combined output, beside the same layer of its peers.

EP8 as eight GPUs share the experts: every route of the measured tokens is to one of this GPU's 48, so that it has the
rows that goals and the GEMM bench count. TP8: all 384 experts, an eighth of each. Every chain is one CUDA graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from chord import _runtime
from chord.bench.layer_peers import TOP_K, Chain, HummingChains, LayerWeights, LayerWork
from chord.bench.results import Results, Row, cubin_of, describe_run, recorder
from chord.bench.stats import summarize
from chord.bench.timing import EventTimer
from chord.bench.w4a16 import BLOCK_M, LONG_TOKENS, PREFILL_TOKENS, SHAPES
from chord.checks.graphs import graphed
from chord.checks.w4a16 import checkpoint
from chord.router import prepare_fused_router, reference
from chord.router.experts import expert_map_of
from chord.w4a16 import PackedW4A16, pack_w4a16, prepare_moe_w4a16, prepare_moe_w4a16_combine
from chord.w4a16.combine_launch import UNIT_COLUMNS
from chord.w4a16.launch import SUMS
from chord.w4a16.reference import contract_weights
from chord.w4a16.rows import swiglu_rows

EXPERTS = 384
LOCAL = range(144, 192)
"""Experts of the measured rank of eight, the fourth."""
TOKENS = {
    "ep8_decode": (20, 30, 40, 50),
    "ep8_prefill": (*PREFILL_TOKENS, *LONG_TOKENS),
    "tp8": (*PREFILL_TOKENS, *LONG_TOKENS),
}
METHOD = (
    "CUDA events around replays of one graph a chain (router, plan, gate_up, SwiGLU, down, weighted sum), cold L2"
    " (256 MB read before every replay), subjects in turn on a warm board, the host ahead of the GPU; a few tokens of"
    " every chain's output compared with float64 on dequantised weights before; chord: fused router, gate_up with"
    " SwiGLU, down with sums; peers: humming-kernels' GEMMs, activation and row copy between vLLM's compiled routing"
    " operators, the indexed chain summed by chord's combine"
)
MOST_ERROR = 5e-3
"""Relative error of a token's output that the roundings to bfloat16 on the way explain."""
MOST_PEER_ERROR = 1e-2
"""The same for peers: Humming may round partial sums, too (stream-K)."""
_CHECKED_TOKENS = 6


class Cell(NamedTuple):
    """One row to be measured. tokens: of this GPU for decode, of all eight for prefill and TP8."""

    scenario: str
    tokens: int

    @property
    def local_tokens(self) -> int:
        """Tokens whose eight routes all lie here, which gives as many rows as a rank gets on average."""
        return self.tokens // 8 if self.scenario == "ep8_prefill" else self.tokens

    @property
    def local_experts(self) -> range | None:
        return None if self.scenario == "tp8" else LOCAL


class Weights(NamedTuple):
    """A layer's checkpoint and its packed form."""

    checkpoint: LayerWeights
    w13: PackedW4A16
    w2: PackedW4A16


def cells(scenarios: Iterable[str] | None = None, tokens: Iterable[int] | None = None) -> list[Cell]:
    """The cells of the suite, those that share weights one after the other.

    scenarios: some of TOKENS, tokens: some of its counts; default all. Raises ValueError for others.
    """
    chosen = set(TOKENS if scenarios is None else scenarios)
    if not chosen <= set(TOKENS):
        raise ValueError(f"scenarios: expected some of {sorted(TOKENS)}, got {sorted(chosen - set(TOKENS))}")
    counts = None if tokens is None else set(tokens)
    found = [
        Cell(scenario, count)
        for scenario, every in TOKENS.items()
        if scenario in chosen
        for count in every
        if counts is None or count in counts
    ]
    unknown = (counts or set()).difference(*(TOKENS[scenario] for scenario in chosen))
    if unknown or not found:
        known = {scenario: TOKENS[scenario] for scenario in sorted(chosen)}
        raise ValueError(f"tokens: expected some of {known}, got {sorted(unknown)}")
    return found


def run(
    peers: Path | None = None,
    *,
    scenarios: Iterable[str] | None = None,
    tokens: Iterable[int] | None = None,
    samples: int = 101,
    steady_ms: int = 200,
    commit: str | None = None,
    progress: Callable[[Row], None] = lambda row: None,
    save: Callable[[Results], None] = lambda results: None,
) -> Results:
    """Measures the suite on the current GPU. peers: a folder as w4a16_peers describes it; without one, chord alone.

    progress and save are called after each row. Raises RuntimeError when chord's result is wrong: a wrong kernel has
    no time. A peer that is wrong or refuses the work is left out with a warning.
    """
    every = cells(scenarios, tokens)
    chains = None if peers is None else HummingChains(peers)
    results = describe_run("layer", METHOD, "read", steady_ms, chains.versions if chains else {}, commit)
    add, timer = recorder(results, progress, save), EventTimer(steady_ms)
    weights: Weights | None = None
    for cell in every:
        shapes = tuple(SHAPES[cell.scenario].values())
        if weights is None or weights.checkpoint.shapes != shapes:
            weights = None  # before the next ones are made: both need not fit
            if chains is not None:
                chains.forget()
            weights = make_weights(cell.scenario)
        add(measure_cell(cell, weights, timer, chains, samples))
    return results


def make_weights(scenario: str, device: torch.device | str | None = None) -> Weights:
    """Random codes and scales of a scenario's two projections, on the current GPU unless a device is given."""
    where = torch.device("cuda", torch.cuda.current_device()) if device is None else torch.device(device)
    up, down = SHAPES[scenario].values()
    (words13, scales13), (words2, scales2) = checkpoint(up, where), checkpoint(down, where, seed=1)
    made = LayerWeights((up, down), (words13, words2), (scales13, scales2))
    return Weights(made, pack_w4a16(words13, scales13, gated=True), pack_w4a16(words2, scales2))


def draw_work(cell: Cell, hidden: int, device: torch.device | str = "cuda") -> LayerWork:
    """The cell's logits, as the GEMM bench draws its routing, and random rows.

    A bias keeps the routes on this rank: scores are between 0 and 1, and those of experts elsewhere lose 2.
    """
    torch.manual_seed(cell.tokens)
    local = cell.local_experts
    experts = EXPERTS if local is None else len(local)
    logits = torch.randn(cell.local_tokens, EXPERTS, device=device)
    bias = torch.zeros(EXPERTS, device=device)
    expert_map = None
    if local is not None:
        torch.manual_seed(cell.tokens)
        logits[:, local.start : local.stop] = torch.randn(cell.local_tokens, experts, device=device)
        bias -= 2
        bias[local.start : local.stop] = 0
        expert_map = expert_map_of(local, EXPERTS, torch.device(device))
    x = torch.randn(cell.local_tokens, hidden, device=device).to(torch.bfloat16)
    return LayerWork(logits, bias, x, expert_map)


def measure_cell(cell: Cell, weights: Weights, timer: EventTimer, peers: HummingChains | None, samples: int) -> Row:
    """One row: chord's chains and the peers', on the same tokens and weights."""
    work = draw_work(cell, weights.w13.shape.k)
    right = reference_rows(work, weights.checkpoint)
    own = {name: make() for name, make in chord_chains(work, weights, cell.local_experts).items()}
    calls = {name: replay_of(chain, right, name, MOST_ERROR) for name, chain in own.items()}
    for name, make in ({} if peers is None else peers.chains(work, weights.checkpoint)).items():
        try:
            calls[name] = replay_of(make(), right, name, MOST_PEER_ERROR)
        except Exception as error:
            warnings.warn(f"{name} left out of {cell}: {error}", stacklevel=2)
    times = {name: summarize(values) for name, values in timer.measure(calls, samples).items()}
    ours = times["chord"]
    programs = own["chord"].programs
    return Row(
        scenario=cell.scenario,
        tokens=cell.tokens,
        block_m=BLOCK_M,
        program=", ".join(programs),
        cubins={name: cubin_of(name, work.x.device) for name in programs},
        samples=samples,
        us=ours.median,
        p10=ours.p10,
        p90=ours.p90,
        peers={name: summary.median for name, summary in times.items() if name not in own},
        chord={name: summary.median for name, summary in times.items() if name in own and name != "chord"},
    )


def chord_chains(work: LayerWork, weights: Weights, local: range | None) -> dict[str, Callable[[], Chain]]:
    """Makers of chord's ways to do the layer; `chord` is the one that counts."""
    return {
        "chord": lambda: chord_chain(work, weights, local),
        "swiglu_apart": lambda: chord_chain(work, weights, local, fused_swiglu=False),
    }


def chord_chain(work: LayerWork, weights: Weights, local: range | None, *, fused_swiglu: bool = True) -> Chain:
    """Router, gate_up with or without its SwiGLU, down, and the sum over a token's experts."""
    router = prepare_fused_router(work.logits, work.bias, top_k=TOP_K, block_m=BLOCK_M, local_experts=local)
    up = prepare_moe_w4a16(work.x, weights.w13, router.plan, top_k=TOP_K, block_m=BLOCK_M, swiglu=fused_swiglu)
    hidden = up.out if fused_swiglu else up.out.new_empty(work.pairs, weights.w2.shape.k)
    routes = (router.topk_weights, router.topk_ids)
    down = prepare_moe_w4a16_combine(
        hidden, weights.w2, router.plan, *routes,
        block_m=BLOCK_M, num_experts=work.logits.shape[1], local_experts=work.expert_map,
    )  # fmt: skip

    def call() -> None:
        router.launch()
        up.launch()
        if not fused_swiglu:
            swiglu_rows(up.out, hidden)
        down.launch()

    return Chain(call, down.out, (router.program, up.program, down.program, combine_program(down.out)))


def replay_of(chain: Chain, right: torch.Tensor, name: str, most_error: float) -> Callable[[], None]:
    """A chain's graph, after its first tokens' output was compared. Raises RuntimeError for a wrong one."""
    chain.out.fill_(float("nan"))
    replay = graphed(chain.call)
    chain.out.fill_(float("nan"))
    replay()
    problem = output_problem(chain.out, right, most_error)
    if problem:
        raise RuntimeError(f"{name} is wrong, so it is not timed: {problem}")
    return replay


def output_problem(out: torch.Tensor, right: torch.Tensor, most_error: float = MOST_ERROR) -> str:
    """What is wrong with an output, of whose tokens the first are known; empty for a pass."""
    if out.isnan().any():
        return "rows were not written, or hold NaN"
    difference = out[: right.shape[0]].double() - right
    errors = difference.norm(dim=1) / right.norm(dim=1)
    worst = float(errors.max())
    return "" if worst <= most_error else f"relative error of a token {worst:.2e}, allowed {most_error:.0e}"


def reference_rows(work: LayerWork, weights: LayerWeights, tokens: int = _CHECKED_TOKENS) -> torch.Tensor:
    """The layer's output for the first tokens in float64, on dequantised bfloat16 weights: [tokens, H]."""
    x = work.x[:tokens].double()
    route, ids = reference.route(work.logits[:tokens], work.bias, TOP_K, True, 1.0)
    local = ids.long() if work.expert_map is None else work.expert_map[ids.long()].long()
    out = torch.zeros_like(x)
    for expert in local[local >= 0].unique().tolist():  # type: ignore[no-untyped-call]
        token, place = (local == expert).nonzero(as_tuple=True)
        w13, w2 = (
            contract_weights(words[expert], scales[expert]).double()
            for words, scales in zip(weights.words, weights.scales, strict=True)
        )
        gate, up = (x[token] @ w13.T).chunk(2, dim=1)
        rows = (torch.nn.functional.silu(gate) * up) @ w2.T
        out.index_add_(0, token, rows * route[token, place].double()[:, None])
    return out


def combine_program(out: torch.Tensor) -> str:
    """Name of the program that sums into such an output."""
    if not out.is_cuda:
        return "reference"
    arch = _runtime.architecture(out.device.index)
    units = out.shape[0] * -(-out.shape[1] // UNIT_COLUMNS)
    return _runtime.registry().lookup(SUMS, arch, {"num_units": units}).program_name
