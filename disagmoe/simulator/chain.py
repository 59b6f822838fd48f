"""What bounds on the makespan have in common: times along the chain of a micro-batch, and one machine by itself.

Notation as in `bounds`. Numbers are in ticks of the problem.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from disagmoe.schedules.problem import Problem

Job = tuple[int, int, int]
"""Release, duration, tail."""


class Chain:
    """`ready` and `after` of all positions."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.last = 2 * problem.num_stages - 1
        size = self.last + 1
        self.ready, self.after = [0] * size, [0] * size
        for q in range(1, size):
            self.ready[q] = self.ready[q - 1] + problem.duration[q - 1] + problem.arrival(q - 1)
        for q in range(self.last, -1, -1):
            following = problem.arrival(q) + problem.duration[q + 1] + self.after[q + 1] if q < self.last else 0
            self.after[q] = max(self.weight(q), following)
        self.critical_path = max(self.ready[q] + problem.duration[q] + self.after[q] for q in range(size))

    def weight(self, position: int) -> int:
        """Duration of the weight operation that follows `position`; 0: none."""
        if position < self.problem.num_stages or not self.problem.weight:
            return 0
        return self.problem.weight[self.last - position]

    @property
    def head_ticks(self) -> int:
        """Time between two micro-batches at the last stage, which holds one at a time."""
        head = self.problem.num_stages - 1
        return self.problem.duration[head] + self.problem.duration[head + 1] + self.weight(head + 1)

    def positions_of(self, group: int) -> list[int]:
        return [q for q, owner in enumerate(self.problem.group) if owner == group]

    def jobs(self, group: int) -> Iterator[Job]:
        """All operations of `group` with heads and tails."""
        problem = self.problem
        for q in self.positions_of(group):
            arrivals, departures = self.arrivals(q), self.departures(q)
            for arrival, departure in zip(arrivals, reversed(departures), strict=True):
                yield arrival, problem.duration[q], departure
            if self.weight(q):
                for arrival in arrivals:
                    yield arrival + problem.duration[q], self.weight(q), 0

    def arrivals(self, position: int) -> list[int]:
        """By number, when that many micro-batches (and one more) can have reached `position` at the earliest."""
        problem, count = self.problem, range(self.problem.num_microbatches)
        before = range(position)
        head = problem.num_stages - 1
        come = max([*problem.duration[:position], *problem.send[:position], *problem.recv[:position]], default=0)
        come = max(come, self.head_ticks) if position >= head else come
        earliest = [self.ready[position] + i * come for i in count]
        for group in {problem.group[q] for q in before}:
            mine = [q for q in before if problem.group[q] == group]
            work = sum(problem.duration[q] for q in mine)
            # From the last of the group's work to here; what it did last may have been farther away.
            rest = self.ready[position] - self.ready[mine[-1]] - problem.duration[mine[-1]]
            first = self.ready[mine[0]] + rest
            # The last stage's weight operation of one micro-batch precedes its forward of the next one.
            between = self.weight(head + 1) if head in mine and position > head else 0
            earliest = [
                max(time, first + (i + 1) * work + i * between) for i, time in zip(count, earliest, strict=True)
            ]
        return earliest

    def departures(self, position: int) -> list[int]:
        """By number, the time to the end when that many micro-batches (and one more) have yet to leave `position`, from
        the end of the first of them there."""
        problem, count = self.problem, range(self.problem.num_microbatches)
        later = range(position + 1, self.last + 1)
        go = max((max(problem.duration[q], problem.send[q - 1], problem.recv[q - 1]) for q in later), default=0)
        head = problem.num_stages - 1
        least = [max(self.after[position], self._chain_after(position) + i * go) for i in count]
        if position <= head:
            least = [max(time, self.after[position] + i * self.head_ticks) for i, time in enumerate(least)]
        for group in {problem.group[q] for q in later}:
            mine = [q for q in later if problem.group[q] == group]
            until = self.ready[mine[0]] - self.ready[position] - problem.duration[position]
            work = sum(problem.duration[q] for q in mine)
            everything = work + sum(self.weight(q) for q in mine)
            end = min(self._chain_after(q) for q in mine)
            between = self.weight(head + 1) if head in mine else 0
            least = [
                max(time, until + (i + 1) * work + i * between + end, until + (i + 1) * everything)
                for i, time in zip(count, least, strict=True)
            ]
        return least

    def _chain_after(self, position: int) -> int:
        """Time from the end of `position` to the chain's, without weight operations."""
        return (
            self.ready[self.last]
            + self.problem.duration[self.last]
            - self.ready[position]
            - (self.problem.duration[position])
        )


def stages_of(chain: Chain, group: int) -> list[int]:
    """Stages of `group` that hold activations, without the last one, whose activations never wait."""
    problem = chain.problem
    return [s for s in range(problem.num_stages - 1) if problem.group[s] == group and problem.memory[s]]


def preemptive(jobs: Sequence[Job]) -> int:
    """Least makespan of one machine that may interrupt (Jackson's rule: of what is released, the longest tail)."""
    waiting: list[tuple[int, int]] = []
    todo = sorted(jobs)
    now = end = place = 0
    while place < len(todo) or waiting:
        if not waiting:
            now = max(now, todo[place][0])
        while place < len(todo) and todo[place][0] <= now:
            _, duration, tail = todo[place]
            heapq.heappush(waiting, (-tail, duration))
            place += 1
        tail, duration = heapq.heappop(waiting)
        until = todo[place][0] if place < len(todo) else now + duration
        part = min(duration, max(0, until - now)) if place < len(todo) else duration
        now += part
        if part < duration:
            heapq.heappush(waiting, (tail, duration - part))
        else:
            end = max(end, now - tail)
    return end
