"""Plays whose acquisitions may be out of order, as far as all that is in flight can still come to its end.

A group that acquires in a fixed order waits for the next of it even where others are ready; one that takes whatever is
ready fills its memory with what should have come later, and everything takes longer. Between the two a group takes
what is at most `ahead` behind its next acquisition, by key.

Nor does it always help to do what can be done: a weight operation that begins just before an input arrives holds that
up, which lengthens the lives of activations elsewhere. With `patience` a group waits for what is about to arrive.

**Why memory never blocks a play.** An acquisition is made only if the micro-batches in flight could afterwards be
completed one by one, in the order in which they entered, each with what the ones before it have given back: the
banker's rule, checked on the group that acquires. The others' memory has not changed, and a new micro-batch is
the last in that order, when everything is given back. A play can still end early, where a group waits for a
micro-batch that does not enter before others are done (`Play.is_complete`).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from disagmoe.schedules.dispatch import Play, Rule
from disagmoe.schedules.problem import Problem


class GuardedPlay(Play):
    """One play of a problem that is not mirrored. Releases go before acquisitions."""

    def __init__(
        self,
        problem: Problem,
        key: Sequence[float],
        rule: Rule,
        *,
        ahead: float,
        patience: float = 0.0,
        mixed: bool = False,
        eager_head: bool = True,
    ) -> None:
        """
        key: by operation; of what may be taken the smallest is.
        rule: what else decides; not `by_key`, no `lead`.
        ahead: how much larger than the next acquisition's key another's may be to be taken instead.
        patience: a weight operation does not start if an input that can be used arrives within this share of its
            duration.
        mixed: an acquisition goes before releases of larger keys.
        eager_head: whether `rule.eager_weights` holds on the group of the last stage too.
        """
        assert not (problem.mirrored or rule.by_key or rule.lead), "not with these"
        groups, count = range(problem.num_groups), problem.num_microbatches
        self.ahead, self.patience, self.mixed = ahead, patience, mixed
        head_group = problem.group[problem.num_stages - 1]
        self.eager = [rule.eager_weights and (eager_head or group != head_group) for group in groups]
        self.waiting: list[list[tuple[float, int]]] = [[] for _ in groups]
        """By group: acquisitions with their inputs here."""
        self.held = [[0] * count for _ in groups]
        self.need = [[one] * count for one in problem.memory_of_group]
        """By group and micro-batch, memory: taken, and still to be taken."""
        self.in_flight: list[int] = []
        """Micro-batches in the order in which they entered."""
        by_group: list[list[int]] = [[] for _ in groups]
        for operation in sorted(range(problem.num_stages * count), key=key.__getitem__):
            by_group[problem.group_of(operation)].append(operation)
        super().__init__(problem, by_group, key, rule)
        if patience and problem.weight:
            self.coming = [[] for _ in groups]

    def _arrive(self, operation: int, heaps: list[list[tuple[float, int]]] | None = None) -> None:
        if operation >= self.half:
            super()._arrive(operation, heaps)
            return
        self.arrived[operation] = 1
        group = self.problem.group[operation // self.problem.num_microbatches]
        heapq.heappush(self.waiting[group], (self.key[operation], operation))

    def _decide(self, group: int, now: int) -> None:
        ready, weights, head, eager = self.ready[group], self.weights[group], self.head[group], self.eager[group]
        acquire = -1 if ready and not (self.mixed or (weights and eager)) else self._choose(group)
        if acquire >= 0 and (not ready or (self.mixed and self.key[acquire] < ready[0][0])):
            self._acquire(acquire, group, now)
            return
        urgent = eager and acquire < 0 and bool(self.waiting[group])
        if weights and (urgent or not (ready or head)):
            if urgent or not self._expects(group, now, self.problem.duration_of(weights[0][1])):
                self._start(heapq.heappop(weights)[1], group, now)
        elif ready:
            self._start(heapq.heappop(ready)[1], group, now)
        elif head:
            self._start(heapq.heappop(head)[1], group, now)

    def _expects(self, group: int, now: int, duration: int) -> bool:
        """Whether an input arrives so soon that an operation of this duration had better not start."""
        if self.coming is None:
            return False
        coming = self.coming[group]
        while coming and coming[0][0] <= now:
            heapq.heappop(coming)
        count, memory, until = self.problem.num_microbatches, self.problem.memory, now + self.patience * duration
        return any(
            time < until and (operation >= self.half or memory[operation // count] <= self.room[group])
            for time, operation in coming
        )

    def _choose(self, group: int) -> int:
        """The acquisition to make now; -1: none."""
        waiting, order, place = self.waiting[group], self.acquires[group], self.next[group]
        if not waiting:
            return -1
        while self.start[order[place]] >= 0:
            place += 1
        self.next[group] = place
        limit = self.key[order[place]] + self.ahead
        for key, operation in sorted(waiting):
            if key > limit:
                return -1
            if self._fits(operation, group) and self._can_end(operation, group):
                return operation
        return -1

    def _can_end(self, operation: int, group: int) -> bool:
        """Whether all in flight could be completed one by one after this acquisition."""
        stage, microbatch = divmod(operation, self.problem.num_microbatches)
        memory = self.problem.memory[stage]
        held, need = self.held[group], self.need[group]
        left = self.room[group] - memory
        for other in self.in_flight:
            mine = memory if other == microbatch else 0
            if need[other] - mine > left:
                return False
            left += held[other] + mine
        return True

    def _acquire(self, operation: int, group: int, now: int) -> None:
        waiting = self.waiting[group]
        if waiting[0][1] == operation:
            heapq.heappop(waiting)
        else:
            waiting.remove((self.key[operation], operation))
            heapq.heapify(waiting)
        stage, microbatch = divmod(operation, self.problem.num_microbatches)
        if stage == 0:
            self.in_flight.append(microbatch)
        memory = self.problem.memory[stage]
        self.held[group][microbatch] += memory
        self.need[group][microbatch] -= memory
        self.open[group] += 1
        self.room[group] -= memory
        self.admitted += stage == 0
        self.head_is_free = self.head_is_free and stage < self.problem.num_stages - 1
        self._start(operation, group, now)

    def _release(self, stage: int, group: int, microbatch: int) -> None:
        super()._release(stage, group, microbatch)
        self.held[group][microbatch] -= self.problem.memory[stage]
        if stage == 0:
            self.in_flight.remove(microbatch)
