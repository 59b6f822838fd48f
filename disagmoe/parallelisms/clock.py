"""Where a step's time goes on one process.

Three sums, defined alike for every system that the trainer runs:

- `compute_s`: inside forward and backward actions, waiting excluded;
- `exposed_comm_s`: waiting for a payload from the moment the last sender handed it to the network until it is here;
- `idle_s`: the wait before that (upstream is late: a bubble, or imbalance).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """One bar of a timeline; times are of `time.monotonic` on this process."""

    category: str
    name: str
    start_s: float
    end_s: float


class StepClock:
    """Adds up one process's step; keeps the single spans too while `recording`."""

    def __init__(self) -> None:
        self.recording = False
        self.spans: list[Span] = []
        self.reset()

    def reset(self) -> None:
        """Start a new step."""
        self.compute_s = 0.0
        self.exposed_comm_s = 0.0
        self.idle_s = 0.0

    @contextmanager
    def span(self, category: str, name: str) -> Iterator[None]:
        """Time a block. Category `compute` counts as compute, less the waits inside it."""
        waited = self.exposed_comm_s + self.idle_s
        start = time.monotonic()
        yield
        end = time.monotonic()
        if category == "compute":
            self.compute_s += end - start - (self.exposed_comm_s + self.idle_s - waited)
        if self.recording:
            self.spans.append(Span(category, name, start, end))

    def waited(self, name: str, start_s: float, end_s: float, sent_at_s: float) -> None:
        """Book a wait that ended with the arrival of a payload handed over at `sent_at_s` (0: nothing was sent)."""
        exposed = max(0.0, end_s - max(start_s, sent_at_s)) if sent_at_s else 0.0
        exposed = min(exposed, end_s - start_s)
        self.exposed_comm_s += exposed
        self.idle_s += end_s - start_s - exposed
        if self.recording:
            if end_s - exposed > start_s:
                self.spans.append(Span("idle", name, start_s, end_s - exposed))
            if exposed:
                self.spans.append(Span("exposed communication", name, end_s - exposed, end_s))
