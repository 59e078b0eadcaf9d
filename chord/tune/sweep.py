"""What a sweep measures, in which order, and what is left out of it. No GPU, no files.

A sweep begins with a coarse grid, where every arm is timed. Between two counts of it an arm is left out that was far
from the fastest at both; so neither what is best for few tokens nor what is best for many is given up too early.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from chord.bench.stats import Summary, summarize
from chord.errors import ChordError
from chord.registry.schema import Program
from chord.tune.routes import Interval, choose

T = TypeVar("T")
SLOW = 1.6
"""An arm this many times slower than the fastest is not expected to win at the counts next to it."""
METHOD = (
    f"; every arm at 1, 4, 16, 64, ... tokens; in between not those that took more than {SLOW} times the fastest one at"
    " both neighbours of that grid (beyond an arm's own limit: at the last two)"
)
DENSE_TO = 32
"""Up to here a thin grid has all counts: arms for one count must be seen beside the others."""


def coarse(counts: Iterable[int]) -> list[int]:
    """The powers of four among the counts, the first count and the last, sorted."""
    ordered = sorted(counts)
    powers = [count for count in ordered if count > 0 and count & (count - 1) == 0 and count.bit_length() % 2 == 1]
    return sorted({*powers, *ordered[:1], *ordered[-1:]})


def in_order(counts: Iterable[int]) -> list[int]:
    """All counts, those of the coarse grid first."""
    first = coarse(counts)
    return [*first, *sorted(set(counts).difference(first))]


def thin(counts: Sequence[int]) -> list[int]:
    """Every other count beyond DENSE_TO, with the coarse grid."""
    sparse = [count for count in sorted(counts) if count > DENSE_TO][::2]
    return sorted({*sparse, *(count for count in counts if count <= DENSE_TO), *coarse(counts)})


def up_to(counts: Sequence[int], most: int | None) -> list[int]:
    """The counts up to `most`, which is one of them then; all for None."""
    return sorted(counts) if most is None else sorted({*(count for count in counts if count < most), most})


def hopeless(arm: str, count: int, times: Mapping[int, Mapping[str, float]], grid: Sequence[int]) -> bool:
    """Whether an arm need not be timed at a count, after the `grid` was: see METHOD.

    times: microseconds by count and arm, of arms that take the number of tokens at run time.
    """
    if count in grid:
        return False
    seen = [place for place in sorted(grid) if arm in times.get(place, {})]
    below, above = [place for place in seen if place < count], [place for place in seen if place > count]
    neighbours = [below[-1], above[0]] if below and above else below[-2:]
    slow = [times[place][arm] > SLOW * min(times[place].values()) for place in neighbours]
    return len(slow) == 2 and all(slow)


class Budget:
    """Seconds that a sweep may take; None: as long as it needs."""

    def __init__(self, limit_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = None if limit_s is None else clock() + limit_s

    def spent(self) -> bool:
        """Whether the time is over."""
        return self._end is not None and self._clock() >= self._end


class GpuLostError(ChordError, RuntimeError):
    """A kernel took the CUDA context down: nothing more can be run in this process."""


def attempt(name: str, work: Callable[[], T], synchronize: Callable[[], object]) -> tuple[T | None, str]:
    """(what `work` gives, "") after it ran to its end on the GPU, or (None, what went wrong with program `name`).

    Raises GpuLostError, which names the program, when the GPU answers nothing any more afterwards.
    """
    try:
        result = work()
        synchronize()
        return result, ""
    except (RuntimeError, ValueError, ChordError) as error:
        problem = (str(error).splitlines() or [type(error).__name__])[0]
    try:
        synchronize()
    except RuntimeError as error:
        raise GpuLostError(
            f"{name} left the CUDA context unusable ({problem}): nothing was timed after it; repair it, or remove its "
            "programs from the table, and run the rest again"
        ) from error
    return None, problem


class NotTimedError(ChordError, RuntimeError):
    """Arms that are right could not be timed at a count."""


class Bench(Protocol):
    """What a sweep measures with: the GPU, or a test's stand-in."""

    def arms(self, count: int) -> Mapping[str, Program]:
        """The program of each arm that admits a count."""

    def time(self, count: int, arms: Sequence[str]) -> tuple[Mapping[str, Sequence[float]], Mapping[str, str]]:
        """(microseconds of each sample by arm, what is wrong with the other arms). Raises NotTimedError."""


class Sweep:
    """Times of the arms of one class of problems, as they come in. `report` is told what is left out."""

    def __init__(self, counts: Sequence[int], bench: Bench, report: Callable[[str], None]) -> None:
        self.counts = in_order(counts)
        self._report = report
        self._wrong: set[str] = set()
        self._grid = coarse(counts)
        self._bench = bench
        self._general: dict[int, dict[str, float]] = {}
        self._exact: dict[int, dict[str, float]] = {}
        self._limits: dict[str, int] = {}

    def measure(self, count: int) -> dict[str, Summary]:
        """Times one count with every arm that may win there, by arm. An arm once wrong is not run again."""
        programs = {
            arm: program
            for arm, program in self._bench.arms(count).items()
            if arm not in self._wrong
            and not (program.num_tokens is None and hopeless(arm, count, self._general, self._grid))
        }
        try:
            times, wrong = self._bench.time(count, list(programs))
        except NotTimedError as error:
            self._report(f"{count} is left out: {error}")
            return {}
        self._wrong.update(wrong)
        for arm, problem in wrong.items():
            self._report(f"{arm} is left out from {count} on: {problem}")
        summaries = {arm: summarize(samples) for arm, samples in times.items()}
        for arm, summary in summaries.items():
            kept = self._general if programs[arm].num_tokens is None else self._exact
            kept.setdefault(count, {})[arm] = summary.median
            limit = programs[arm].limit("num_tokens")
            if programs[arm].num_tokens is None and limit is not None:
                self._limits[arm] = limit
        return summaries

    def intervals(self, first: int, last: int, hysteresis: float) -> list[Interval]:
        """Routes from first to last by the arms that were never wrong. Raises ValueError where `choose` does."""
        general, exact = (
            {count: {arm: us for arm, us in arms.items() if arm not in self._wrong} for count, arms in times.items()}
            for times in (self._general, self._exact)
        )
        return choose(general, exact, first=first, last=last, limits=self._limits, hysteresis=hysteresis)
