"""GPU times: the profiler's timeline or events, a cold L2, subjects interleaved, the board at its working clock.

Every subject is a callable that launches a fixed number of kernels. Before each call the L2 cache is flushed by
READING: a writing flush would leave dirty lines whose write-back the next kernel pays for. Numbers of kernels, not
names, tell which event belongs to whom, and a timeline with an event too few or too many is refused.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch

FLUSH_BYTES = 256 << 20
"""Several times the largest L2 cache (50 MB on an H100 or H200, 126 MB on a B200)."""
ATTEMPTS = 3
_WANTED = ("start_ns", "end_ns", "is_hidden_event")
FLUSHES_BEFORE_A_CALL = (1, 2, 4, 8)
"""Tried in turn until the host stays ahead; one takes some 60 us on an H200."""
LEAST_SHARE = 0.75
"""Of a call's samples that must count."""


class Span(NamedTuple):
    """One GPU activity, microseconds on the profiler's clock."""

    start: float
    end: float


class Subject(NamedTuple):
    """What is measured. "span": first start to last end, for chained kernels; "sum": durations alone, without gaps."""

    call: Callable[[], object]
    measure: Literal["span", "sum"]
    activities: int | None = None
    """How many kernels, copies and fills a call makes. None: counted, which takes a profiler session."""


class TimelineError(RuntimeError):
    """The profiler lost or added events, so that they cannot be told apart."""


def duration(spans: Sequence[Span], measure: Literal["span", "sum"]) -> float:
    """Microseconds of one call."""
    if measure == "span":
        return max(span.end for span in spans) - min(span.start for span in spans)
    return sum(span.end - span.start for span in spans)


def split_timeline(spans: Sequence[Span], counts: Sequence[int], rounds: int) -> list[list[list[Span]]]:
    """Cuts spans, in order of their start, into rounds of len(counts) groups: result[round][group].

    Raises TimelineError when their number is not rounds * sum(counts).
    """
    if len(spans) != rounds * sum(counts):
        raise TimelineError(f"expected {rounds} rounds of {list(counts)} GPU activities, got {len(spans)}")
    ordered = iter(sorted(spans))
    return [[[next(ordered) for _ in range(count)] for count in counts] for _ in range(rounds)]


class ReadFlush:
    """Calling it evicts the L2 cache by reading."""

    def __init__(self) -> None:
        self._buffer = torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")
        self._result = torch.zeros((), dtype=torch.float32, device="cuda")

    def __call__(self) -> None:
        torch.sum(self._buffer, dim=0, out=self._result)


class ColdTimer:
    """Times subjects with a cold L2 cache, turn by turn. `steady_ms`: how long the board is warmed up before a
    measurement.
    """

    def __init__(self, steady_ms: int = 200) -> None:
        self.steady_ms = steady_ms
        self.flush = ReadFlush()
        self.flush()
        self._flush_count = len(_profile(self.flush))

    def measure(self, subjects: Mapping[str, Subject], samples: int) -> dict[str, list[float]]:
        """Microseconds per subject and sample. Raises TimelineError when the profiler keeps losing events."""
        for subject in subjects.values():
            subject.call()
        torch.cuda.synchronize()
        counts = []
        for subject in subjects.values():
            known = subject.activities
            counts += [self._flush_count, len(_profile(subject.call)) if known is None else known]
        self._warm(subjects)
        for attempt in range(ATTEMPTS):
            try:
                rounds = split_timeline(_profile(lambda: self._rounds(subjects, samples)), counts, samples)
                break
            except TimelineError:
                if attempt + 1 == ATTEMPTS:
                    raise
        return {
            name: [duration(groups[2 * place + 1], subject.measure) for groups in rounds]
            for place, (name, subject) in enumerate(subjects.items())
        }

    def _rounds(self, subjects: Mapping[str, Subject], rounds: int) -> None:
        for _ in range(rounds):
            for subject in subjects.values():
                self.flush()
                torch.cuda.synchronize()
                subject.call()
                torch.cuda.synchronize()

    def _warm(self, subjects: Mapping[str, Subject]) -> None:
        end = time.perf_counter() + self.steady_ms / 1e3
        while time.perf_counter() < end:
            self._rounds(subjects, 1)


class EventTimer:
    """Times calls of tens of microseconds and more by CUDA events, with a cold L2 cache, turn by turn, on a board that
    has worked for `steady_ms`. Nothing waits in between: the flushes give the host time to stay ahead of the GPU.

    A sample counts only if the GPU had not reached its first event when the host was through with the call: else the
    GPU may have waited for launches, and the host's time would be taken for the kernels'.
    """

    def __init__(self, steady_ms: int = 200) -> None:
        self.steady_ms = steady_ms
        self.flush = ReadFlush()

    def measure(self, calls: Mapping[str, Callable[[], object]], samples: int) -> dict[str, list[float]]:
        """Microseconds by call, of each sample that counts.

        Calls that the host launches too slowly, so that fewer than LEAST_SHARE of their samples count with any number
        of flushes, are left out with a warning. Raises TimelineError when the first call is one of them.
        """
        for call in calls.values():
            call()
        torch.cuda.synchronize()
        self._warm(calls)
        times: dict[str, list[float]] = {}
        late: list[str] = []
        for flushes in FLUSHES_BEFORE_A_CALL:
            times = self._record(calls, samples, flushes)
            late = [name for name, found in times.items() if len(found) < LEAST_SHARE * samples]
            if not late:
                return times
        problem = (
            f"the host launched {', '.join(late)} more slowly than the GPU ran, with up to "
            f"{FLUSHES_BEFORE_A_CALL[-1]} cache flushes before each: its gaps would be measured"
        )
        if next(iter(calls)) in late:
            raise TimelineError(problem)
        warnings.warn(f"left out: {problem}", stacklevel=2)
        return {name: found for name, found in times.items() if name not in late}

    def _record(self, calls: Mapping[str, Callable[[], object]], samples: int, flushes: int) -> dict[str, list[float]]:
        """Microseconds by call, of those samples whose launches were all in the queue before the GPU got to them."""
        pairs = {name: [(_event(), _event()) for _ in range(samples)] for name in calls}
        ahead: dict[str, list[bool]] = {name: [] for name in calls}
        for turn in range(samples):
            for name, call in calls.items():
                for _ in range(flushes):
                    self.flush()
                start, end = pairs[name][turn]
                start.record()
                call()
                end.record()
                ahead[name].append(not start.query())  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        return {
            name: [a.elapsed_time(b) * 1e3 for (a, b), counts in zip(found, ahead[name], strict=True) if counts]
            for name, found in pairs.items()
        }

    def _warm(self, calls: Mapping[str, Callable[[], object]]) -> None:
        end = time.perf_counter() + self.steady_ms / 1e3
        while time.perf_counter() < end:
            for call in calls.values():
                self.flush()
                call()
            torch.cuda.synchronize()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _profile(call: Callable[[], object]) -> list[Span]:
    """All GPU activities of a call."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return gpu_spans(profiler)


def gpu_spans(profiler: torch.profiler.profile, device: str = "CUDA") -> list[Span]:
    """What ran on a kind of device while a profiler was on, in microseconds.

    Read from the profiler's own list where torch shows it: its table of events costs tens of microseconds for each
    call of the CUDA runtime, which for a sweep adds up to minutes.
    """
    results = getattr(profiler.profiler, "kineto_results", None)
    if results is None or not all(hasattr(torch._C._autograd._KinetoEvent, name) for name in _WANTED):
        events = profiler.events() or ()  # type: ignore[no-untyped-call]
        return [
            Span(event.time_range.start, event.time_range.end) for event in events if event.device_type.name == device
        ]
    origin = results.trace_start_ns()  # a float holds no nanoseconds since 1970
    return [
        Span((event.start_ns() - origin) / 1e3, (event.end_ns() - origin) / 1e3)
        for event in results.events()
        if event.device_type().name == device and not event.is_hidden_event()
    ]
