"""The GPU's part of the load: every thread launches the operators on a stream of its own and compares every bit."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import torch
from cases.operators import CASES, outputs_of

from chord import _runtime

TOKENS = (1, 3, 17, 64, 300, 1024)


class Kernels:
    """Inputs by operator and size, with the results that they gave when the process was alone with them."""

    def __init__(self, root: Path, threads: int) -> None:
        assert _runtime.registry().root == root
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.streams = [torch.cuda.Stream(self.device) for _ in range(threads)]
        self.work = []
        for case in CASES:
            for tokens in TOKENS:
                arguments = case.make(tokens, self.device)
                cpu = case.expected(arguments) if tokens <= 64 else None
                self.work.append((case, arguments, [out.clone() for out in outputs_of(case.call(**arguments))], cpu))
        torch.cuda.synchronize()
        self._wrong: list[str] = []
        self._lock = threading.Lock()

    def launch(self, thread: int, draw: random.Random) -> int:
        """A few launches; how many."""
        chosen = draw.sample(self.work, 4)
        with torch.cuda.stream(self.streams[thread]):
            found = [outputs_of(case.call(**arguments)) for case, arguments, _, _ in chosen]
            same = [
                torch.stack(
                    [(a.view(torch.uint8) == b.view(torch.uint8)).all() for a, b in zip(outs, want, strict=True)]
                )
                for outs, (_, _, want, _) in zip(found, chosen, strict=True)
            ]
            right = [bool(flags.all()) for flags in same]
        for good, (case, _, _, _) in zip(right, chosen, strict=True):
            if not good:
                with self._lock:
                    self._wrong.append(f"{case.operator} {case.name}: other bits under load than before")
        return len(chosen)

    def faults(self) -> list[str]:
        """Wrong results, each once, and those that were never right."""
        return sorted({*self._wrong, *(f"{c.operator} {c.name}: {cpu}" for c, _, _, cpu in self.work if cpu)})
