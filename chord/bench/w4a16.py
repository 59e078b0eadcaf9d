"""The W4A16 GEMM beside its peers: projections as eight GPUs share them, decode and prefill; Kimi K2's and others'."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from chord.bench.results import Results, Row, cubin_of, describe_run, recorder
from chord.bench.stats import summarize
from chord.bench.timing import EventTimer
from chord.bench.w4a16_models import OTHER_MODELS, expanded
from chord.bench.w4a16_models import SHAPES as MODEL_SHAPES
from chord.bench.w4a16_models import TOKENS as MODEL_TOKENS
from chord.bench.w4a16_peers import PEERS, Peer, Work
from chord.checks.w4a16 import ERROR_RATIO, checkpoint
from chord.router import route_plan
from chord.w4a16 import PackedW4A16, PreparedMoeW4A16, WeightShape, pack_w4a16, prepare_moe_w4a16, reference

TOP_K = 8
BLOCK_M = 8
DECODE_TOKENS = (1, 2, 4, 8, 16, 20, 30, 40, 50)
PREFILL_TOKENS = (1024,)
LONG_TOKENS = (2048, 4096, 8192, 16384)
READ_SCENARIO = "read"
"""Scenario of the row that says how fast this GPU reads."""
METHOD = (
    "CUDA events around each call, cold L2 (256 MB read before every call), subjects in turn on a warm board, the host"
    " ahead of the GPU; chord: prepared launch on a plan of the worst case's capacity, block_m 8; peers: their own"
    " choice of configuration, plans cut to size"
)

_EP = {"gate_up": WeightShape(48, 4096, 7168, gated=True), "down": WeightShape(48, 7168, 2048)}
_TP = {"gate_up": WeightShape(384, 512, 7168, gated=True), "down": WeightShape(384, 7168, 256)}
_KIMI = {"ep8_decode": _EP, "ep8_prefill": _EP, "tp8": _TP}
SHAPES = _KIMI | MODEL_SHAPES
_READ_BYTES = 1 << 30
_CHECKED_PAIRS = 64


class Cell(NamedTuple):
    """One row to be measured. tokens: of this GPU for decode, of all eight for prefill and TP8."""

    scenario: str
    proj: str
    tokens: int

    @property
    def shape(self) -> WeightShape:
        return SHAPES[self.scenario][self.proj]

    @property
    def local_tokens(self) -> int:
        """Tokens whose eight routes all lie on this GPU, which gives as many rows as it gets on average."""
        return self.tokens // 8 if self.scenario == "ep8_prefill" else self.tokens

    @property
    def top_k(self) -> int:
        """Of the GEMM: gate_up reads a token's row for each of its routes, down has a row for each."""
        return TOP_K if self.proj == "gate_up" else 1


class Weights(NamedTuple):
    """A projection's checkpoint and its packed form."""

    words: torch.Tensor
    scales: torch.Tensor
    packed: PackedW4A16


def cells(scenarios: Iterable[str] | None = None, *, long: bool = False) -> list[Cell]:
    """The cells of the suite, those that share weights one after the other. long: prefill up to 16384 tokens, too.

    scenarios: some of SHAPES; default Kimi's. Others are none of these cells'.
    """
    wanted = set(_KIMI if scenarios is None else scenarios)
    prefill = (*PREFILL_TOKENS, *LONG_TOKENS) if long else PREFILL_TOKENS
    counts = {"ep8_decode": DECODE_TOKENS, "ep8_prefill": prefill, "tp8": prefill, **MODEL_TOKENS}
    return [
        Cell(scenario, proj, tokens)
        for group in (("ep8_decode", "ep8_prefill"), ("tp8",), *((name,) for name in MODEL_SHAPES))
        for proj in ("gate_up", "down")
        for scenario in group
        if scenario in wanted
        for tokens in counts[scenario]
    ]


def least_bytes(shape: WeightShape, active_experts: int, rows: int, pairs: int) -> int:
    """Weights of experts with rows, each input row once, each output row."""
    return active_experts * shape.expert_bytes + 2 * rows * shape.k + 2 * pairs * shape.n


def run(
    peers: Path | None = None,
    *,
    scenarios: Iterable[str] | None = None,
    long: bool = False,
    samples: int = 101,
    steady_ms: int = 200,
    commit: str | None = None,
    progress: Callable[[Row], None] = lambda row: None,
    save: Callable[[Results], None] = lambda results: None,
) -> Results:
    """Measures the suite on the current GPU. peers: a folder as w4a16_peers describes it; without one, chord alone.

    scenarios: some of SHAPES, w4a16_grouped.SIZES, w4a16_combine.TOKENS, and w4a16_swiglu.SWIGLU; default all of
    Kimi's, other_models for the others. long: prefill of Kimi's up to 16384 tokens as well. progress and save are
    called after each row. Raises RuntimeError when a kernel's result is wrong: a wrong kernel has no time.
    """
    from chord.bench import w4a16_combine, w4a16_grouped, w4a16_swiglu  # which build on this module

    chosen = _chosen(scenarios)
    found = {} if peers is None else usable_peers(peers)
    versions = {name: peer.version for name, peer in found.items()}
    results = describe_run("w4a16", METHOD, "read", steady_ms, versions, commit)
    add, timer = recorder(results, progress, save), EventTimer(steady_ms)
    add(measure_read(timer, samples))
    weights: Weights | None = None
    every: list[Cell | w4a16_swiglu.SwigluCell | w4a16_combine.CombineCell | w4a16_grouped.GroupedCell] = [
        *cells(chosen, long=long),
        *w4a16_swiglu.cells(chosen),
        *w4a16_combine.cells(chosen),
        *w4a16_grouped.cells(chosen),
    ]
    for cell in every:
        if weights is None or weights.packed.shape != cell.shape:
            weights = None  # before the next ones are made: both need not fit
            weights = make_weights(cell.shape)
        given = (weights, timer, list(found.values()), samples)
        if isinstance(cell, Cell):
            add(measure_cell(cell, *given))
        elif isinstance(cell, w4a16_swiglu.SwigluCell):
            add(w4a16_swiglu.measure_cell(cell, *given))
        elif isinstance(cell, w4a16_combine.CombineCell):
            add(w4a16_combine.measure_cell(cell, weights, timer, samples))
        else:
            add(w4a16_grouped.measure_cell(cell, *given))
    return results


def known_scenarios() -> set[str]:
    """Every scenario that rows of this suite can have: Kimi's and other models'."""
    return _kimi() | set(MODEL_SHAPES)


def _kimi() -> set[str]:
    from chord.bench import w4a16_combine, w4a16_grouped, w4a16_swiglu

    return {*_KIMI, *w4a16_grouped.SIZES, *w4a16_combine.TOKENS, w4a16_swiglu.SWIGLU}


def _chosen(scenarios: Iterable[str] | None) -> set[str]:
    known = {*known_scenarios(), OTHER_MODELS}
    chosen = _kimi() if scenarios is None else set(scenarios)
    if not chosen <= known:
        raise ValueError(f"scenarios: expected some of {sorted(known)}, got {sorted(chosen - known)}")
    return expanded(chosen)


def usable_peers(folder: Path) -> dict[str, Peer]:
    """By name; one that cannot be had from the folder is left out with a warning. Raises ValueError when none can."""
    found = {}
    for name, make in PEERS.items():
        try:
            found[name] = make(folder)
        except (ImportError, OSError, RuntimeError) as error:
            warnings.warn(f"{name} left out: {error}", stacklevel=2)
    if not found:
        raise ValueError(f"{folder}: expected a folder with {' or '.join(PEERS)}, neither can be used")
    return found


def make_weights(shape: WeightShape) -> Weights:
    """Random codes and scales on the current GPU."""
    words, scales = checkpoint(shape, torch.device("cuda", torch.cuda.current_device()))
    return Weights(words, scales, pack_w4a16(words, scales, gated=shape.gated))


def measure_read(timer: EventTimer, samples: int) -> Row:
    """How fast torch's fastest reduction reads 1 GiB: what a kernel that streams weights is held against."""
    memory = torch.ones(_READ_BYTES // 4, dtype=torch.float32, device="cuda")
    result = torch.empty((), dtype=torch.float32, device="cuda")
    calls: dict[str, Callable[[], object]] = {
        "sum": lambda: torch.sum(memory, dim=0, out=result),
        "amax": lambda: torch.amax(memory, dim=0, out=result),
    }
    best = min((summarize(times) for times in timer.measure(calls, samples).values()), key=lambda s: s.median)
    return Row(scenario=READ_SCENARIO, samples=samples, us=best.median, p10=best.p10, p90=best.p90, bytes=_READ_BYTES)


def measure_cell(cell: Cell, weights: Weights, timer: EventTimer, peers: Sequence[Peer], samples: int) -> Row:
    """One row: the routed program and the peers that serve the shape, on one routing."""
    work = draw_work(cell)
    prepared = checked_launch(work, weights)
    calls: dict[str, Callable[[], object]] = {"chord": prepared.launch}
    for peer in peers:
        calls |= working(peer, work, peer.calls)
    times = {name: summarize(values) for name, values in timer.measure(calls, samples).items()}
    ours = times.pop("chord")
    active = int(work.ids.unique().numel())  # type: ignore[no-untyped-call]
    return Row(
        scenario=cell.scenario,
        proj=cell.proj,
        tokens=cell.tokens,
        block_m=BLOCK_M,
        program=prepared.program,
        cubin_sha256=cubin_of(prepared.program, work.x.device),
        samples=samples,
        us=ours.median,
        p10=ours.p10,
        p90=ours.p90,
        bytes=least_bytes(cell.shape, active, work.x.shape[0], work.pairs),
        peers={name: summary.median for name, summary in times.items()},
    )


def draw_work(cell: Cell) -> Work:
    """The cell's routing (torch seeded with the token count, top-k of normal scores) and random rows."""
    torch.manual_seed(cell.tokens)
    scores = torch.randn(cell.local_tokens, cell.shape.experts, device="cuda")
    ids = scores.topk(TOP_K, 1).indices.to(torch.int32)
    rows = cell.local_tokens if cell.proj == "gate_up" else ids.numel()
    x = torch.randn(rows, cell.shape.k, device="cuda").to(torch.bfloat16)
    return Work(cell.shape, x, ids, cell.top_k)


def checked_launch(
    work: Work, weights: Weights, program: str | None = None, *, swiglu: bool = False
) -> PreparedMoeW4A16:
    """A prepared launch of the routed program, or the named one, after rows of its result were compared."""
    plan = route_plan(work.ids, work.shape.experts, BLOCK_M)
    prepared = prepare_moe_w4a16(
        work.x, weights.packed, plan, top_k=work.top_k, block_m=BLOCK_M, program=program, swiglu=swiglu
    )
    prepared.out.fill_(float("nan"))
    prepared()
    problem = sampled_problem(work, weights, prepared.out, swiglu=swiglu)
    if problem:
        raise RuntimeError(f"{prepared.program} is wrong, so it is not timed: {problem}")
    return prepared


def sampled_problem(work: Work, weights: Weights, out: torch.Tensor, *, swiglu: bool = False) -> str:
    """What is wrong with some rows of a result; empty for a pass. Every row must be written."""
    if out.isnan().any():
        return "rows were not written, or hold NaN"
    flat = work.ids.reshape(-1)
    picked = torch.randperm(work.pairs, device=out.device)[:_CHECKED_PAIRS]
    rows = {int(e): picked[flat[picked] == e] for e in flat[picked].unique()}  # type: ignore[no-untyped-call]
    given = (work.x, weights.words, weights.scales, rows)
    exact = reference.moe_w4a16(*given, top_k=work.top_k, exact=True, swiglu=swiglu)[picked]
    plain = reference.moe_w4a16(*given, top_k=work.top_k, swiglu=swiglu)[picked]
    error, allowed = reference.rms_error(out[picked], exact), reference.rms_error(plain, exact) * ERROR_RATIO
    return "" if error <= allowed else f"RMS error {error:.3e} over {picked.numel()} rows, allowed {allowed:.3e}"


def working(
    peer: Peer, work: Work, calls: Callable[[Work], dict[str, Callable[[], object]]]
) -> dict[str, Callable[[], object]]:
    """The peer's launches that run, each tried once."""
    found: dict[str, Callable[[], object]] = {}
    name = type(peer).__name__
    try:
        for name, call in calls(work).items():
            call()
            torch.cuda.synchronize()
            found[name] = call
    except Exception as error:
        warnings.warn(f"{name} left out at {work.pairs} rows of {work.shape}: {error}", stacklevel=2)
    return found
