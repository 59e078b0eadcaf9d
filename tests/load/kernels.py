"""The GPU's part of the load: every thread launches the operators on a stream of its own and compares every bit."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from cases.operators import CASES, Arguments, Case, Outputs, same_bits
from load.hammer import is_victim

from chord import _runtime
from chord.errors import VerificationError

TOKENS = (1, 17, 64)
PATIENCE_S = 30.0
"""A damaged cubin is good again after milliseconds, on a busy machine a little later."""

T = TypeVar("T")


class Kernels:
    """Inputs by operator and size, with the results that they gave when the process was alone with them."""

    def __init__(self, root: Path, threads: int) -> None:
        assert _runtime.registry().root == root
        torch.set_num_threads(1)  # there are as many processes as cores
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.streams = [torch.cuda.Stream(self.device) for _ in range(threads)]
        self.work: list[tuple[Case, Arguments, Outputs]] = []
        self.refused = 0
        self._wrong: set[str] = set()
        for case in CASES:
            for tokens in TOKENS:
                given = self._load(lambda case=case, tokens=tokens: case.make(tokens, self.device))
                result = self._load(lambda case=case, given=given: case.call(**given))
                if tokens == 17:
                    self._wrong.update(
                        f"{case.operator} {case.name}: {found}" for found in case.problems(given, result)
                    )
                self.work.append((case, given, [out.clone() for out in case.outputs(given, result)]))
        torch.cuda.synchronize()

    def _load(self, call: Callable[[], T]) -> T:
        """What a first use gives, which is refused as long as the cubin holds damaged bytes."""
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                return call()
            except VerificationError as error:
                damaged = re.search(r"([0-9a-f]{64})\.cubin", str(error))
                if damaged is None or not is_victim(damaged[1]) or time.monotonic() > end:
                    raise
                self.refused += 1
                time.sleep(0.005)

    def launch(self, thread: int, draw: random.Random) -> int:
        """A few launches on the thread's stream; how many."""
        chosen = draw.sample(self.work, 8)
        with torch.cuda.stream(self.streams[thread]):
            results = [case.call(**given) for case, given, _ in chosen]
            for (case, given, want), result in zip(chosen, results, strict=True):
                if not same_bits(case.outputs(given, result), want):
                    self._wrong.add(f"{case.operator} {case.name}: other bits under load than before")
        return len(chosen)

    def faults(self) -> list[str]:
        """What was ever wrong, each once."""
        return sorted(self._wrong)
