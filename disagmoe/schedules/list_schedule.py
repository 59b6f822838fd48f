"""Merge per-group preference orders of forwards and backwards into one static order, by dependencies.

Closed formulas for pipeline orders ("w forwards, then one forward and one backward in turn") deadlock as soon as
groups own different numbers of stages or micro-batches are few. So an order is *played* here on assumed costs: whenever
a group is free, it takes the next forward or the next backward of its own two lists, if that one's inputs have
arrived. What was played is by construction an order that completes.

Costs only shape the order; the order holds for any costs. Forward and backward lists are fixed, so what can be tuned
is their order, how far forwards may run ahead in each group (`lead`), and the costs. The last stage stands outside
the lists: its forward goes first, and its backward follows at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from disagmoe.schedules.actions import Action, Kind


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Assumed durations, in any one unit; integers make the order independent of rounding."""

    forward: tuple[float, ...]
    """By stage."""
    backward: tuple[float, ...]
    """By stage."""
    hop: float
    """A transfer between two consecutive stages, hidden or not."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Which work a group prefers, and how much of it may be open at a time."""

    forwards: Sequence[tuple[int, int]]
    """All (stage, microbatch) in the order in which forwards are wanted, a stage after the one before it. A group
    takes its own ones in this order."""
    backwards: Sequence[tuple[int, int]]
    """The same for backwards, a stage after the one behind it."""
    lead: list[int]
    """By group: most forwards that may be ahead of backwards, raised where nothing else could go on."""
    in_flight: int
    """Most micro-batches between first forward and last backward, never exceeded. The forward order must allow it: the
    micro-batches admitted before some forward, less those that can retire without that forward, are never more."""


class ListSchedule:
    """One play. All state is by group or by flat index stage * num_microbatches + microbatch."""

    def __init__(self, group_of_stage: Sequence[int], num_groups: int, costs: Costs, policy: Policy) -> None:
        self.group_of_stage = group_of_stage
        self.num_groups = num_groups
        self.num_stages = len(group_of_stage)
        self.costs = costs
        self.policy = policy
        size = len(policy.forwards)
        self.num_microbatches = size // self.num_stages
        self.forward_input = [False] * size
        self.forward_input[: self.num_microbatches] = [True] * self.num_microbatches
        self.output_gradient = [False] * size
        self.forward_done = [False] * size
        self.forwards: list[list[tuple[int, int]]] = [[] for _ in range(num_groups)]
        self.backwards: list[list[tuple[int, int]]] = [[] for _ in range(num_groups)]
        self.rank: list[list[int]] = [[] for _ in range(num_groups)]
        last = self.num_stages - 1
        for rank, (stage, microbatch) in enumerate(policy.forwards):
            if stage != last:
                self.forwards[group_of_stage[stage]].append((stage, microbatch))
                self.rank[group_of_stage[stage]].append(rank)
        for stage, microbatch in policy.backwards:
            if stage != last:
                self.backwards[group_of_stage[stage]].append((stage, microbatch))
        self.heads = [microbatch for stage, microbatch in policy.forwards if stage == last]
        self.next_head = 0
        self.lead = list(policy.lead)
        self.next_forward = [0] * num_groups
        self.next_backward = [0] * num_groups
        self.busy = [False] * num_groups
        self.free_at = [0.0] * num_groups
        self.admitted = 0
        self.retired = 0
        self.orders: list[list[Action]] = [[] for _ in range(num_groups)]
        self.events: list[tuple[float, int, int, int, int]] = []
        self.makespan = 0.0

    def play(self) -> ListSchedule:
        """Play to the end and return self: `orders` (by group), `makespan` and `lead` hold the result."""
        todo = 2 * self.num_stages * self.num_microbatches
        dirty = set(range(self.num_groups))
        now = 0.0
        while True:
            for group in sorted(dirty):
                todo -= self._decide(group, now)
            if not todo:
                break
            if not self.events:
                self._relieve(now)
                todo -= 1
            now = self.events[0][0]
            dirty = set()
            while self.events and self.events[0][0] == now:
                dirty |= self._apply(self.events)
        self.makespan = max((event[0] for event in self.events), default=now)
        return self

    def _apply(self, events: list[tuple[float, int, int, int, int]]) -> set[int]:
        """Pop one event: a group is free again, or a payload has arrived; returns the group concerned."""
        time, what, group, stage, microbatch = heapq.heappop(events)
        index = stage * self.num_microbatches + microbatch
        if what == 0:
            self.busy[group] = self.free_at[group] > time
        elif what == 1:
            self.forward_input[index] = True
        else:
            self.output_gradient[index] = True
        return {group}

    def _has_input(self, stage: int, microbatch: int) -> bool:
        """Whether the forward of (stage, microbatch) could start; a first one only within `in_flight`."""
        if stage == 0 and self.admitted - self.retired >= self.policy.in_flight:
            return False
        return self.forward_input[stage * self.num_microbatches + microbatch]

    def _forward_ready(self, group: int) -> bool:
        position = self.next_forward[group]
        return position < len(self.forwards[group]) and self._has_input(*self.forwards[group][position])

    def _backward_ready(self, group: int) -> bool:
        position = self.next_backward[group]
        if position == len(self.backwards[group]):
            return False
        stage, microbatch = self.backwards[group][position]
        index = stage * self.num_microbatches + microbatch
        return self.forward_done[index] and self.output_gradient[index]

    def _head_ready(self, group: int) -> bool:
        last = self.num_stages - 1
        if self.group_of_stage[last] != group or self.next_head == len(self.heads):
            return False
        return self._has_input(last, self.heads[self.next_head])

    def _decide(self, group: int, now: float) -> int:
        """Start what `group` prefers among what is ready; returns the number of actions started."""
        if self.busy[group]:
            return 0
        may_lead = self.next_forward[group] - self.next_backward[group] < self.lead[group]
        if self._head_ready(group):
            end = self._start_forward(group, self.num_stages - 1, self.heads[self.next_head], now)
            self._start_backward(group, self.num_stages - 1, self.heads[self.next_head], end)
            self.next_head += 1
            return 2
        if may_lead and self._forward_ready(group):
            self._start_next_forward(group, now)
        elif self._backward_ready(group):
            self._start_backward(group, *self.backwards[group][self.next_backward[group]], now)
            self.next_backward[group] += 1
        else:
            return 0
        return 1

    def _relieve(self, now: float) -> None:
        """Every group waits: let the first open forward go ahead, and raise its group's `lead` for good.

        It has its input, because all forwards before it are done. It can be admitted: otherwise one of the
        micro-batches in flight could retire without it (see `Policy.in_flight`), and a backward would be ready.
        """
        ready = [g for g in range(self.num_groups) if self._forward_ready(g)]
        assert ready, "no group can go on: the preference orders contradict the dependencies"
        group = min(ready, key=lambda g: self.rank[g][self.next_forward[g]])
        self.lead[group] += 1
        self._start_next_forward(group, now)

    def _start_next_forward(self, group: int, now: float) -> None:
        stage, microbatch = self.forwards[group][self.next_forward[group]]
        self.next_forward[group] += 1
        self.forward_done[stage * self.num_microbatches + microbatch] = True
        self._start_forward(group, stage, microbatch, now)

    def _start_forward(self, group: int, stage: int, microbatch: int, now: float) -> float:
        """Returns its end."""
        self.admitted += stage == 0
        self.orders[group].append(Action(Kind.FORWARD, stage, microbatch))
        end = self._occupy(group, now + self.costs.forward[stage])
        if stage + 1 < self.num_stages:
            event = (end + self.costs.hop, 1, self.group_of_stage[stage + 1], stage + 1, microbatch)
            heapq.heappush(self.events, event)
        return end

    def _start_backward(self, group: int, stage: int, microbatch: int, now: float) -> None:
        self.retired += stage == 0
        self.orders[group].append(Action(Kind.FULL_BACKWARD, stage, microbatch))
        end = self._occupy(group, now + self.costs.backward[stage])
        if stage > 0:
            event = (end + self.costs.hop, 2, self.group_of_stage[stage - 1], stage - 1, microbatch)
            heapq.heappush(self.events, event)

    def _occupy(self, group: int, until: float) -> float:
        self.busy[group] = True
        self.free_at[group] = until
        heapq.heappush(self.events, (until, 0, group, 0, 0))
        return until
