"""`chord bench | tune`: what users run on their own GPU. All of them need torch with CUDA."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chord.cli._output import console, errors
from chord.errors import ChordError

if TYPE_CHECKING:
    from collections.abc import Callable

    from chord.bench.results import Results, Row
    from chord.tune.tuning import Tuning

Out = Annotated[Path, typer.Option("--out", help="Folder for the results file.")]
Commit = Annotated[
    str | None, typer.Option("--commit", help="Commit of the code that is measured, where git cannot tell.")
]
Part = Annotated[str, typer.Option("--part", help="Ends the results file's name: for a run of some scenarios.")]
LimitS = Annotated[
    float | None, typer.Option("--limit-s", help="Stop after so many seconds, with what is measured by then.")
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    bench = typer.Typer(help="Measure on this GPU and write bench/results JSON.", no_args_is_help=True)
    bench.command("router")(bench_router)
    bench.command("w4a16")(bench_w4a16)
    bench.command("layer")(bench_layer)
    bench.command("host")(bench_host)
    bench.command("docs")(bench_docs)
    tune = typer.Typer(help="Measure every arm on this GPU and write the routes.", no_args_is_help=True)
    tune.command("router")(tune_router)
    tune.command("w4a16")(tune_w4a16)
    app.add_typer(bench, name="bench")
    app.add_typer(tune, name="tune")


def bench_router(
    out: Out = Path("bench/results"),
    peers: Annotated[
        Path | None, typer.Option("--peers", help="Folder with SGLang's kernels (docs/router.md says how to fill it).")
    ] = None,
    scenario: Annotated[
        list[str] | None, typer.Option("--scenario", help="k3, k2, k3_bf16, k3_ep8 or k2_ep8; repeatable; default all.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Calls of each kernel; the median counts.")] = 101,
    commit: Commit = None,
) -> None:
    """Time the fused router on this GPU, cold L2, interleaved with its peers."""
    require_gpu()
    from chord.bench.router import run

    found = run(peers, scenarios=scenario, samples=samples, commit=commit, progress=_print_row, save=_saver(out))
    _write(found, out)


def bench_w4a16(
    out: Out = Path("bench/results"),
    peers: Annotated[
        Path | None,
        typer.Option("--peers", help="Folder with Humming's wheel and Marlin's library (docs/w4a16.md says how)."),
    ] = None,
    scenario: Annotated[
        list[str] | None,
        typer.Option(
            "--scenario",
            help="ep8_decode, ep8_prefill, tp8, swiglu_ep8, combine_ep8_decode, combine_ep8_prefill, combine_tp8, "
            "grouped_contiguous, grouped_masked, sorted_ep8; or other_models, which stands for <model>_ep8 and "
            "<model>_tp8 of qwen3_235b, deepseek_v3 and glm_4_6. Repeatable; default all but other_models.",
        ),
    ] = None,
    long: Annotated[bool, typer.Option("--long", help="Prefill of 2048 to 16384 tokens as well.")] = False,
    samples: Annotated[int, typer.Option(min=1, help="Calls of each kernel; the median counts.")] = 101,
    part: Part = "",
    commit: Commit = None,
) -> None:
    """Time the W4A16 GEMM on Kimi K2's shapes, or other models', cold L2, interleaved with its peers."""
    require_gpu()
    from chord.bench.w4a16 import run

    save = _saver(out, part)
    found = run(peers, scenarios=scenario, long=long, samples=samples, commit=commit, progress=_print_row, save=save)
    _write(found, out, part)


def bench_layer(
    out: Out = Path("bench/results"),
    peers: Annotated[
        Path | None,
        typer.Option("--peers", help="Folder with Humming's wheel and vLLM's library (docs/w4a16.md says how)."),
    ] = None,
    scenario: Annotated[
        list[str] | None, typer.Option("--scenario", help="ep8_decode, ep8_prefill or tp8; repeatable; default all.")
    ] = None,
    tokens: Annotated[
        list[int] | None, typer.Option("--tokens", help="Some of the token counts; repeatable; default all.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Replays of each chain; the median counts.")] = 101,
    part: Part = "",
    commit: Commit = None,
) -> None:
    """Time whole MoE layers of Kimi K2, router to combined output, cold L2, interleaved with the same of its peers."""
    require_gpu()
    from chord.bench.layer import run

    save = _saver(out, part)
    found = run(
        peers, scenarios=scenario, tokens=tokens, samples=samples, commit=commit, progress=_print_row, save=save
    )
    _write(found, out, part)


def bench_host(
    out: Out = Path("bench/results"),
    processes: Annotated[int, typer.Option(min=1, help="Fresh processes whose first call is timed.")] = 3,
    commit: Commit = None,
) -> None:
    """Time launches on the host: bare, prepared and eager; a process's first call, and first ones after preload.

    Takes about 30 seconds, most of them the starts of fresh processes (3 to 4 each; seven by default); the results file
    is written after each row.
    """
    require_gpu()
    from chord.bench.host import run

    _write(run(processes=processes, commit=commit, progress=_print_row, save=_saver(out)), out)


def bench_docs(
    results: Annotated[Path, typer.Option("--results", help="Folder with results files.")] = Path("bench/results"),
    document: Annotated[
        list[Path] | None,
        typer.Argument(help="Documents to fill; default those of router, w4a16, vllm and performance in docs."),
    ] = None,
) -> None:
    """Fill the tables and plots of documents from results files."""
    from chord.bench.docs import update

    pages = [Path(f"docs/{name}.md") for name in ("router", "w4a16", "vllm", "performance")]
    for path in document or pages:
        console().print(f"{path}: {'updated' if update(path, results) else 'unchanged'}")


def tune_router(
    out: Out = Path("bench/results"),
    samples: Annotated[int, typer.Option(min=1, help="Calls of each kernel; the median counts.")] = 41,
    experts: Annotated[
        list[int] | None, typer.Option("--experts", help="896 or 384; repeatable; default both.")
    ] = None,
    block_m: Annotated[
        list[int] | None, typer.Option("--block-m", help="8, 16, or any other for all of 24 to 256; repeatable.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="Tune up to so many tokens; routes beyond stay.")
    ] = None,
    limit_s: LimitS = None,
    commit: Commit = None,
) -> None:
    """Time every router arm at every size and write the routes into the registry; then run `chord build`."""
    _require_tuning()
    from chord.tune.router import Part, tune

    part = Part(tuple(experts or ()), tuple(block_m or ()), max_tokens)
    save = _saver(out, "tune")
    _hand_over(tune(part, samples=samples, limit_s=limit_s, commit=commit, progress=_print_row, save=save), out)


def tune_w4a16(
    out: Out = Path("bench/results"),
    samples: Annotated[int, typer.Option(min=1, help="Calls of each kernel; the median counts.")] = 41,
    limit_s: LimitS = None,
    commit: Commit = None,
) -> None:
    """Time every W4A16 arm at every size and write the routes into the registry; then run `chord build`."""
    _require_tuning()
    from chord.tune.w4a16 import tune

    save = _saver(out, "tune")
    _hand_over(tune(samples=samples, limit_s=limit_s, commit=commit, progress=_print_row, save=save), out)


def _require_tuning() -> None:
    """What a tuner needs last is better missed now than after the measurements."""
    import tomlkit  # noqa: F401

    from chord.build.tree import Tree

    Tree.default().require_checkout()
    require_gpu()


def require_gpu() -> None:
    """Raises ChordError without torch or a CUDA device."""
    try:
        import torch
    except ModuleNotFoundError:
        raise ChordError("this command needs torch: pip install 'chord-registry[torch]'") from None
    if not torch.cuda.is_available():
        raise ChordError("this command needs a CUDA device, torch sees none; `chord doctor` says what is there")


def _saver(folder: Path, part: str = "") -> Callable[[Results], None]:
    """Writes results as they come, so that nothing is lost with the process."""
    from chord.bench.results import file_name, write

    return lambda results: write(results, folder / file_name(results, part))


def _hand_over(tuning: Tuning, folder: Path) -> None:
    """Write what a tuner found and say what it left out; exit 1 when the GPU was lost."""
    from chord.tune.tuning import write_tuned

    path = write_tuned(tuning, folder)
    for problem in tuning.problems:
        errors().print(problem, style="yellow", markup=False, highlight=False, soft_wrap=True)
    if tuning.stopped:
        errors().print(f"ended early: {tuning.stopped}", style="red", markup=False, highlight=False, soft_wrap=True)
    said = "routes written, now run chord build" if tuning.boxes else "no routes written"
    console().print(f"{said}; {len(tuning.results.rows)} rows in {path}", highlight=False, soft_wrap=True)
    if tuning.lost:
        raise typer.Exit(1)


def _write(results: Results, folder: Path, part: str = "") -> None:
    from chord.bench.results import file_name, write

    path = folder / file_name(results, part)
    write(results, path)
    console().print(f"{len(results.rows)} rows in {path}", highlight=False)


def _print_row(row: Row) -> None:
    peers = ", ".join(f"{name} {us:.2f}" for name, us in row.peers.items())
    peers += "".join(f", own {name} {us:.2f}" for name, us in row.chord.items())
    size = "" if row.tokens is None else f"{row.tokens:7} tokens"
    size += "" if row.block_m is None else f"  block_m {row.block_m:3}"
    size += "" if row.rows_per_expert is None else f"{row.rows_per_expert:7} rows an expert"
    what = f"{row.scenario:12} {row.proj or '':8}{size}  {row.us:9.2f} us  {row.program or ''}  {peers}"
    console().print(what, markup=False, highlight=False, soft_wrap=True)
