"""Where a step's time goes on one process.

Three sums, defined alike for every system that the trainer runs:

- `compute_s`: inside forward and backward actions, waiting excluded;
- `exposed_comm_s`: waiting for a payload from the moment the last sender handed it to the network until it is here;
- `idle_s`: the wait before that (upstream is late: a bubble, or imbalance).

On CUDA the host runs ahead of the device, so events on the compute stream are what is timed. When a sender's device
handed a payload over is not known there: the whole wait for it counts as `exposed_comm_s`, an upper bound.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

EventPair = tuple[torch.cuda.Event, torch.cuda.Event]


@dataclass(frozen=True)
class Span:
    """One bar of a timeline; times are of `time.monotonic` on this process."""

    category: str
    name: str
    start_s: float
    end_s: float


@dataclass(kw_only=True)
class CostSamples:
    """What single actions and transfers took on one process, step after step."""

    actions_s: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    """By (kind of action, stage): seconds of the compute thread, waits excluded."""
    transfers: dict[tuple[int, bool], list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    """By (hop, backward): bytes received over the network, and seconds from the last hand-over to arrival, less the
    time in which an earlier transfer of the same edge was still arriving."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Default factories can't be pickled.
        return _restore_samples, (dict(self.actions_s), dict(self.transfers))


def _restore_samples(
    actions_s: dict[tuple[str, int], list[float]], transfers: dict[tuple[int, bool], list[tuple[float, float]]]
) -> CostSamples:
    return CostSamples(actions_s=actions_s, transfers=transfers)


class StepClock:
    """Adds up one process's step; keeps the single spans too while `recording`, and costs if `samples` is set."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._on_cuda = device is not None and device.type == "cuda"
        self._base: torch.cuda.Event | None = None
        self._base_s = 0.0
        self._on_device: list[tuple[str, str, EventPair]] = []
        self.recording = False
        self.spans: list[Span] = []
        self.samples: CostSamples | None = None
        self.reset()

    def reset(self) -> None:
        """Start a new step."""
        self.compute_s = 0.0
        self.exposed_comm_s = 0.0
        self.idle_s = 0.0
        self.transfer_s = 0.0
        """CPU: payloads' times from the last hand-over, or the end of the transfer before, to arrival."""
        self._on_device.clear()
        if self._on_cuda:
            # The device has nothing to do between steps, so this is executed as soon as it is recorded.
            self._base = _event()
            self._base_s = time.monotonic()

    @contextmanager
    def span(self, category: str, name: str, sample: tuple[str, int] | None = None) -> Iterator[None]:
        """Time a block. Category `compute` counts as compute, less the waits inside it.

        sample: what this is a sample of, see `CostSamples`.
        """
        if self._on_cuda and category == "compute":
            start_event = _event()
            yield
            self._on_device.append((category, name, (start_event, _event())))
            return
        waited = self.exposed_comm_s + self.idle_s
        start = time.monotonic()
        yield
        end = time.monotonic()
        net = end - start - (self.exposed_comm_s + self.idle_s - waited)
        if category == "compute":
            self.compute_s += net
        if self.samples is not None and sample is not None and not self._on_cuda:
            self.samples.actions_s[sample].append(net)
        if self.recording:
            self.spans.append(Span(category, name, start, end))

    def waited(
        self, name: str, start_s: float, end_s: float, sent_at_s: float, stream_wait: EventPair | None = None
    ) -> None:
        """Book a wait that ended with the arrival of a payload.

        Args:
            sent_at_s: When it was handed over; 0: nothing was sent.
            stream_wait: CUDA: what bounds the wait of the compute stream, which counts instead of the host's.
        """
        if stream_wait is not None:
            self._on_device.append(("exposed communication", name, stream_wait))
            return
        exposed = max(0.0, end_s - max(start_s, sent_at_s)) if sent_at_s else 0.0
        exposed = min(exposed, end_s - start_s)
        self.exposed_comm_s += exposed
        self.idle_s += end_s - start_s - exposed
        if self.recording:
            if end_s - exposed > start_s:
                self.spans.append(Span("idle", name, start_s, end_s - exposed))
            if exposed:
                self.spans.append(Span("exposed communication", name, end_s - exposed, end_s))

    def settle(self) -> None:
        """End of a step: wait for the device, and add up what its events say. Does nothing on CPU."""
        if self._base is None:
            return
        torch.cuda.current_stream().synchronize()
        for category, name, (start, end) in self._on_device:
            seconds = start.elapsed_time(end) / 1e3
            if category == "compute":
                self.compute_s += seconds
            else:  # waits lie inside the compute spans
                self.exposed_comm_s += seconds
                self.compute_s -= seconds
            if self.recording:
                start_s = self._base_s + self._base.elapsed_time(start) / 1e3
                self.spans.append(Span(category, name, start_s, start_s + seconds))
        self._on_device.clear()


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
