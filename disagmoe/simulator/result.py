"""What a simulation yields: spans, and what can be told from them.

Waiting is defined as in the runtime: *exposed communication* is the part of a compute engine's wait after the last
sender has handed its payload over, *idle* the rest (upstream late, warm-up, drain).
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from disagmoe.schedules import Action, Kind, Schedule
from disagmoe.schedules.dependencies import group_name, input_of
from disagmoe.simulator.costs import StageCosts, Workers
from disagmoe.simulator.network import LinkSpan


class ComputeSpan(NamedTuple):
    """One compute action, and the wait of the engine before it."""

    action: Action
    start_s: float
    end_s: float
    exposed_comm_s: float
    idle_s: float


@dataclass(frozen=True, kw_only=True)
class WorkerUse:
    """How one worker spent the step. compute_s + exposed_comm_s + idle_s is the makespan."""

    name: str
    """E.g. `group 2 (F0)`, with ` worker 3` where all workers are simulated."""
    group: int
    compute_s: float
    exposed_comm_s: float
    """Waits for payloads under way, also inside stages that overlap within an operator."""
    idle_s: float
    nic_send_s: float
    nic_recv_s: float
    fabric_send_s: float
    fabric_recv_s: float
    peak_activation_bytes: float


class PathSegment(NamedTuple):
    """A piece of the critical path."""

    kind: Literal["compute", "transfer"]
    label: str
    unit: int
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished simulation."""

    schedule: Schedule
    costs: StageCosts
    workers: Workers
    group_of_unit: tuple[int, ...]
    compute_spans: tuple[tuple[ComputeSpan, ...], ...]
    """By unit, in order."""
    link_spans: tuple[LinkSpan, ...]
    link_busy_s: tuple[tuple[float, ...], ...]
    """By NIC sending, NIC receiving, fabric sending, fabric receiving; then unit."""
    handover_s: tuple[float, ...]
    """By message number (pass, receiving stage, micro-batch): the last sender's hand-over."""
    arrived_at: Mapping[tuple[int, int], float]
    """(message number, unit) to arrival."""

    @cached_property
    def makespan_s(self) -> float:
        return max((spans[-1].end_s for spans in self.compute_spans if spans), default=0.0)

    @cached_property
    def uses(self) -> tuple[WorkerUse, ...]:
        """By unit."""
        return tuple(self._use(unit) for unit in range(len(self.group_of_unit)))

    @property
    def bubble_s(self) -> float:
        """Makespan without the compute time of the worker that has most of it."""
        return self.makespan_s - max((use.compute_s for use in self.uses), default=0.0)

    @property
    def compute_share(self) -> float:
        """Average share of the makespan that compute engines compute."""
        return self._share("compute_s")

    @property
    def exposed_share(self) -> float:
        return self._share("exposed_comm_s")

    @property
    def idle_share(self) -> float:
        return self._share("idle_s")

    def _share(self, field: str) -> float:
        if not self.makespan_s:
            return 0.0
        return sum(getattr(use, field) for use in self.uses) / len(self.uses) / self.makespan_s

    @property
    def peak_activation_bytes(self) -> float:
        """Of the worker that needs most."""
        return max((use.peak_activation_bytes for use in self.uses), default=0.0)

    def unit_name(self, unit: int) -> str:
        group = self.group_of_unit[unit]
        name = group_name(group, self.schedule.stages, self.schedule.group_of_stage)
        first = self.group_of_unit.index(group)
        return name if self.workers.count[group] == 1 else f"{name} worker {unit - first}"

    def _use(self, unit: int) -> WorkerUse:
        spans = self.compute_spans[unit]
        busy = sum(span.end_s - span.start_s for span in spans)
        group = self.group_of_unit[unit]
        share = self.workers.share_of(group)[unit - self.group_of_unit.index(group)]
        inner = nic = 0.0
        for span in spans if self.costs.has_inner else ():
            exposed, used = self.costs.inner(span.action.kind)
            inner += exposed[span.action.stage] * share if exposed else 0.0
            nic += used[span.action.stage] * share if used else 0.0
        exposed_s = inner + sum(span.exposed_comm_s for span in spans)
        return WorkerUse(
            name=self.unit_name(unit),
            group=group,
            compute_s=busy - inner,
            exposed_comm_s=exposed_s,
            idle_s=self.makespan_s - (busy - inner) - exposed_s,
            nic_send_s=self.link_busy_s[0][unit] + nic,
            nic_recv_s=self.link_busy_s[1][unit] + nic,
            fabric_send_s=self.link_busy_s[2][unit],
            fabric_recv_s=self.link_busy_s[3][unit],
            peak_activation_bytes=share * _peak_bytes(spans, self.costs.activation_bytes),
        )

    def critical_path(self) -> tuple[PathSegment, ...]:
        """The chain of compute actions and transfers that ends last, from its start.

        Backwards from the last action: if the engine was free before the action's payload had arrived, the transfer
        comes before it, and the action that its sender had finished when handing over; otherwise the action before.
        """
        unit = max(range(len(self._ends)), key=lambda u: self._ends[u][-1] if self._ends[u] else 0.0)
        index = len(self.compute_spans[unit]) - 1
        path: list[PathSegment] = []
        while index >= 0:
            span = self.compute_spans[unit][index]
            path.append(PathSegment("compute", str(span.action), unit, span.start_s, span.end_s))
            if span.exposed_comm_s + span.idle_s <= 0:
                index -= 1
                continue
            needed = input_of(span.action, self.schedule.num_stages)
            if needed is None:
                break
            row = needed.stage + (self.schedule.num_stages if needed.backward else 0)
            handed = self.handover_s[row * self.schedule.num_microbatches + needed.microbatch]
            path.append(PathSegment("transfer", str(needed.send), unit, handed, span.start_s))
            group = self.schedule.group_of_stage[needed.sender]
            unit, index = self._finished_at(group, handed)
        return tuple(reversed(path))

    def _finished_at(self, group: int, when: float) -> tuple[int, int]:
        """The compute action of `group` that ended last until `when`, as (unit, index); index -1: none."""
        best = (-1.0, 0, -1)
        for unit, of in enumerate(self.group_of_unit):
            if of == group:
                ends = self._ends[unit]
                index = bisect.bisect_right(ends, when) - 1
                best = max(best, (ends[index] if index >= 0 else -1.0, unit, index))
        return best[1], best[2]

    @cached_property
    def _ends(self) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(span.end_s for span in spans) for spans in self.compute_spans)


def _peak_bytes(spans: tuple[ComputeSpan, ...], size: tuple[float, ...]) -> float:
    """Most activation bytes alive at a time; a split backward frees with its weight half."""
    if not size:
        return 0.0
    alive = peak = 0.0
    for (kind, stage, _), *_ in spans:
        if kind is Kind.FORWARD:
            alive += size[stage]
            peak = max(peak, alive)
        elif kind is not Kind.BACKWARD_INPUT:
            alive -= size[stage]
    return peak
