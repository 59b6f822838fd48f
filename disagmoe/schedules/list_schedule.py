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
    """One play. All state is by group or by flat index stage * num_microbatches + microbatch.

    What is played is kept as `index` for a forward and ~index for a backward: actions are made of the best play only.
    """

    def __init__(self, group_of_stage: Sequence[int], num_groups: int, costs: Costs, policy: Policy) -> None:
        self.group_of_stage = group_of_stage
        self.num_groups = num_groups
        self.num_stages = len(group_of_stage)
        self.costs = costs
        self.policy = policy
        size = len(policy.forwards)
        count = self.num_microbatches = size // self.num_stages
        self.last = self.num_stages - 1
        self.head_group = group_of_stage[self.last]
        self.forward_input = bytearray(size)
        self.forward_input[:count] = bytes([1]) * count
        self.output_gradient = bytearray(size)
        self.forward_done = bytearray(size)
        self.forwards: list[list[int]] = [[] for _ in range(num_groups)]
        self.backwards: list[list[int]] = [[] for _ in range(num_groups)]
        self.rank: list[list[int]] = [[] for _ in range(num_groups)]
        for rank, (stage, microbatch) in enumerate(policy.forwards):
            if stage != self.last:
                self.forwards[group_of_stage[stage]].append(stage * count + microbatch)
                self.rank[group_of_stage[stage]].append(rank)
        for stage, microbatch in policy.backwards:
            if stage != self.last:
                self.backwards[group_of_stage[stage]].append(stage * count + microbatch)
        self.heads = [self.last * count + microbatch for stage, microbatch in policy.forwards if stage == self.last]
        self.next_head = 0
        self.lead = list(policy.lead)
        self.next_forward = [0] * num_groups
        self.next_backward = [0] * num_groups
        self.free_at = [0.0] * num_groups
        self.admitted = 0
        self.retired = 0
        self.played: list[list[int]] = [[] for _ in range(num_groups)]
        self.events: list[tuple[float, int, int]] = []
        """Time, what (0: a group is free; 1: a forward's input; 2: a gradient), group or index."""
        self.makespan = 0.0

    def play(self) -> ListSchedule:
        """Play to the end and return self: `orders`, `makespan` and `lead` hold the result."""
        todo = 2 * self.num_stages * self.num_microbatches
        events, free_at, count, group_of_stage = self.events, self.free_at, self.num_microbatches, self.group_of_stage
        dirty = set(range(self.num_groups))
        now = 0.0
        while True:
            for group in sorted(dirty) if len(dirty) > 1 else dirty:
                if free_at[group] <= now:
                    todo -= self._decide(group, now)
            if not todo:
                break
            if not events:
                self._relieve(now)
                todo -= 1
            now = events[0][0]
            dirty = set()
            while events and events[0][0] == now:
                _, what, number = heapq.heappop(events)
                if what == 0:
                    dirty.add(number)
                    continue
                (self.forward_input if what == 1 else self.output_gradient)[number] = 1
                dirty.add(group_of_stage[number // count])
        self.makespan = max((event[0] for event in events), default=now)
        return self

    def orders(self) -> tuple[tuple[Action, ...], ...]:
        """By group, its actions in the order in which they were played."""
        count = self.num_microbatches
        return tuple(
            tuple(
                Action(Kind.FORWARD, *divmod(index, count))
                if index >= 0
                else Action(Kind.FULL_BACKWARD, *divmod(~index, count))
                for index in played
            )
            for played in self.played
        )

    def _has_input(self, index: int) -> bool:
        """Whether the forward `index` could start; a first one only within `in_flight`."""
        if index < self.num_microbatches and self.admitted - self.retired >= self.policy.in_flight:
            return False
        return bool(self.forward_input[index])

    def _forward_ready(self, group: int) -> bool:
        position, forwards = self.next_forward[group], self.forwards[group]
        return position < len(forwards) and self._has_input(forwards[position])

    def _backward_ready(self, group: int) -> bool:
        position, backwards = self.next_backward[group], self.backwards[group]
        if position == len(backwards):
            return False
        index = backwards[position]
        return bool(self.forward_done[index] and self.output_gradient[index])

    def _decide(self, group: int, now: float) -> int:
        """Start what `group`, which is free, prefers among what is ready; returns the number of actions started."""
        if group == self.head_group and self.next_head < len(self.heads):
            head = self.heads[self.next_head]
            if self._has_input(head):
                end = self._start_forward(group, head, now)
                self._start_backward(group, head, end)
                self.next_head += 1
                return 2
        place = self.next_backward[group]
        if self.next_forward[group] - place < self.lead[group] and self._forward_ready(group):
            self._start_next_forward(group, now)
        elif self._backward_ready(group):
            self.next_backward[group] += 1
            self._start_backward(group, self.backwards[group][place], now)
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
        index = self.forwards[group][self.next_forward[group]]
        self.next_forward[group] += 1
        self.forward_done[index] = 1
        self._start_forward(group, index, now)

    def _start_forward(self, group: int, index: int, now: float) -> float:
        """Returns its end."""
        stage = index // self.num_microbatches
        if stage == 0:
            self.admitted += 1
        self.played[group].append(index)
        end = self.free_at[group] = now + self.costs.forward[stage]
        heapq.heappush(self.events, (end, 0, group))
        if stage < self.last:
            heapq.heappush(self.events, (end + self.costs.hop, 1, index + self.num_microbatches))
        return end

    def _start_backward(self, group: int, index: int, now: float) -> None:
        stage = index // self.num_microbatches
        self.played[group].append(~index)
        end = self.free_at[group] = now + self.costs.backward[stage]
        heapq.heappush(self.events, (end, 0, group))
        if stage > 0:
            heapq.heappush(self.events, (end + self.costs.hop, 2, index - self.num_microbatches))
        else:
            self.retired += 1
