"""List scheduling of a `Problem`, forwards in time or backwards (see `problem`).

Whenever a group is free it takes something that is ready and fits, so nobody waits who could work. Links serve first
come, first served, in both directions, as the simulator's do; receives are taken as posted in time.

The last stage (head and loss) holds one micro-batch at a time, so that the logits of one only are alive: its forward
waits for the backward of the one before it. In between the group may do other things.

**Why no play deadlocks.** A group acquires in a given order (`acquires`); everything else is chosen as the play goes.
If the given orders are those of any schedule that completes within the caps, every play completes: take the earliest
operation of that schedule that is not done yet. What it needs is done; its group has acquired exactly what it had
acquired there, and released at least what it had released there. So it can go. A first schedule comes from rounds that
fit into the caps, for which the same argument holds with micro-batches instead of operations.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from disagmoe.schedules.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a free group takes, among what is ready and fits."""

    by_key: bool = False
    """The smaller key; otherwise as follows."""
    lead: Sequence[int] | None = None
    """By group: an acquisition goes first while fewer than this many are open; None: a release always goes first."""
    patient_head: bool = False
    """The last stage's backward goes after whatever else is ready."""
    eager_weights: bool = False
    """A weight operation goes before an input half where an acquisition waits for nothing but memory."""


class Play:
    """One play. Its result: `order` (operations by group), `start` (by operation) and `makespan`, in ticks."""

    def __init__(
        self,
        problem: Problem,
        acquires: Sequence[Sequence[int]],
        key: Sequence[float],
        rule: Rule,
        *,
        fixed: bool = False,
        spare: Sequence[int] | None = None,
    ) -> None:
        """
        acquires: by group, its acquiring operations in order (see the module's description).
        key: by operation; the smallest is taken first among releases and chain operations, and among weights.
        fixed: `acquires` holds *all* operations of each group, in the order of a schedule that completes within the
            caps; they are only timed.
        spare: by group, memory that `acquires` completes without. Acquisitions may be made out of turn in it, as long
            as those before them have not been made. Not for a mirrored problem.
        """
        self.problem = problem
        self.acquires = acquires
        self.key = key
        self.rule = rule
        self.fixed = fixed
        self.spare = None if spare is None else list(spare)
        num_groups, count = problem.num_groups, problem.num_microbatches
        self.half = problem.num_stages * count
        self.chain = 2 * self.half
        self.weights_first = problem.mirrored and bool(problem.weight)
        self.weights_last = not problem.mirrored and bool(problem.weight)
        self.start = [-1] * problem.num_operations
        self.order: list[list[int]] = [[] for _ in range(num_groups)]
        self.arrived = bytearray(self.chain)
        self.next = [0] * num_groups
        self.room = list(problem.capacity)
        self.open = [0] * num_groups
        self.admitted = 0
        self.ready: list[list[tuple[float, int]]] = [[] for _ in range(num_groups)]
        self.weights: list[list[tuple[float, int]]] = [[] for _ in range(num_groups)]
        self.free_at = [0] * num_groups
        # By group, then by group for links of the other kind.
        self.send_free = [0] * (2 * num_groups)
        self.recv_free = [0] * (2 * num_groups)
        self.link = [num_groups if fabric else 0 for fabric in problem.fabric]
        self.taken: set[int] = set()
        """Acquisitions out of turn that count against `spare`."""
        self.early: list[list[tuple[int, int]]] = [[] for _ in range(num_groups)]
        self.rank: dict[int, int] = {}
        if spare is not None:
            self.rank = {operation: rank for order in acquires for rank, operation in enumerate(order)}
        self.head: list[list[tuple[float, int]]] = [[] for _ in range(num_groups)]
        """By group: what is left of the last stage, where that can wait (see `Rule.patient_head`)."""
        self.head_is_free = True
        """Whether no micro-batch's logits are alive."""
        self.events: list[tuple[int, int, int]] = []
        self.coming: list[list[tuple[int, int]]] | None = None
        """By group, (time, operation) of inputs on their way; None: not needed."""
        self.makespan = 0
        for operation in range(count):
            self._arrive(operation)

    def run(self) -> Play:
        """Play to the end."""
        events, pop, push = self.events, heapq.heappop, heapq.heappush
        count, group_of = self.problem.num_microbatches, self.problem.group
        send, recv, latency, link = self.problem.send, self.problem.recv, self.problem.latency, self.link
        recv_free, free_at, coming = self.recv_free, self.free_at, self.coming
        dirty = list(range(self.problem.num_groups))
        decide, arrive = self._follow if self.fixed else self._decide, self._arrive
        now = 0
        while True:
            for group in dirty:
                if free_at[group] <= now:
                    decide(group, now)
            if not events:
                break
            dirty = []
            now = events[0][0]
            while events and events[0][0] == now:
                _, what, number = pop(events)
                if what == 0:  # Operation `number` begins to send: reserve the receiver's time.
                    position = number // count
                    group = group_of[position + 1] + link[position]
                    mine, sent = recv[position], send[position]
                    begin = now + latency[position] + (sent - mine if sent > mine else 0)
                    if begin < recv_free[group]:
                        begin = recv_free[group]
                    recv_free[group] = begin + mine
                    push(events, (begin + mine, 1, number + count))
                    if coming is not None:
                        push(coming[group_of[position + 1]], (begin + mine, number + count))
                    continue
                if what == 1:
                    arrive(number)
                    number = group_of[number // count]
                if number not in dirty:
                    dirty.append(number)
        self.makespan = max(free_at)
        return self

    @property
    def is_complete(self) -> bool:
        """False where `acquires` was an order that doesn't complete within the caps."""
        return min(self.start) >= 0

    def _arrive(self, operation: int, heaps: list[list[tuple[float, int]]] | None = None) -> None:
        self.arrived[operation] = 1
        if self.spare is not None and operation < self.half:
            group = self.problem.group[operation // self.problem.num_microbatches]
            heapq.heappush(self.early[group], (self.rank[operation], operation))
        if operation >= self.half or (self.weights_first and self.start[self.chain + operation] >= 0):
            group = self.problem.group[operation // self.problem.num_microbatches]
            heapq.heappush((heaps or self.ready)[group], (self.key[operation], operation))

    def _is_input_here(self, acquire: int) -> bool:
        # A mirrored weight operation has no input of its own.
        return self.weights_first or bool(self.arrived[acquire])

    def _fits(self, operation: int, group: int) -> bool:
        stage = operation // self.problem.num_microbatches
        if self.weights_first:
            stage -= 2 * self.problem.num_stages
        if self.problem.memory[stage] > self.room[group]:
            return False
        if stage == self.problem.num_stages - 1 and not self.head_is_free:
            return False
        return stage > 0 or self.admitted < self.problem.in_flight

    def _decide(self, group: int, now: int) -> None:
        """Start what `group` prefers among what is ready."""
        ready, weights, rule = self.ready[group], self.weights[group], self.rule
        order, place = self.acquires[group], self.next[group]
        acquire = -1
        waits_for_room = False
        if place < len(order):
            acquire = order[place]
            if not self._is_input_here(acquire):
                acquire = self._out_of_turn(group) if self.spare is not None else -1
            elif not self._fits(acquire, group):
                acquire, waits_for_room = -1, True
        if rule.by_key:
            best = self.key[acquire] if acquire >= 0 else float("inf")
            heap = None
            if ready and ready[0][0] < best:
                best, heap = ready[0][0], ready
            if weights and weights[0][0] < best:
                heap = weights
            if heap is not None:
                self._start(heapq.heappop(heap)[1], group, now)
            elif acquire >= 0:
                self._acquire(acquire, group, now)
            return
        first = acquire >= 0 and rule.lead is not None and self.open[group] < rule.lead[group]
        if first or (acquire >= 0 and not ready):
            self._acquire(acquire, group, now)
        elif weights and (not (ready or self.head[group]) or (rule.eager_weights and waits_for_room)):
            self._start(heapq.heappop(weights)[1], group, now)
        elif ready:
            self._start(heapq.heappop(ready)[1], group, now)
        elif self.head[group]:
            self._start(heapq.heappop(self.head[group])[1], group, now)

    def _follow(self, group: int, now: int) -> None:
        """Start what is next of all operations of `group`, if it is ready."""
        order, place = self.acquires[group], self.next[group]
        if place < len(order) and (order[place] >= self.chain or self.arrived[order[place]]):
            self.next[group] += 1
            self._start(order[place], group, now)

    def _out_of_turn(self, group: int) -> int:
        """The first acquisition that is ready and fits into what is spare; -1: none."""
        early, start, problem = self.early[group], self.start, self.problem
        assert self.spare is not None
        while early and start[early[0][1]] >= 0:
            heapq.heappop(early)
        if not early:
            return -1
        operation = early[0][1]
        stage = operation // problem.num_microbatches
        if stage == 0 and problem.in_flight < problem.num_microbatches:
            return -1
        if stage == problem.num_stages - 1 and not self.head_is_free:
            return -1
        return operation if problem.memory[stage] <= min(self.spare[group], self.room[group]) else -1

    def _acquire(self, operation: int, group: int, now: int) -> None:
        order, memory = self.acquires[group], self.problem.memory
        if operation == order[self.next[group]]:
            self.next[group] += 1
            while self.spare is not None and self.next[group] < len(order) and self.start[order[self.next[group]]] >= 0:
                self._in_turn(order[self.next[group]], group)
                self.next[group] += 1
        else:
            assert self.spare is not None
            self.taken.add(operation)
            self.spare[group] -= memory[operation // self.problem.num_microbatches]
        self.open[group] += 1
        stage = operation // self.problem.num_microbatches
        if self.weights_first:
            stage -= 2 * self.problem.num_stages
        self.room[group] -= self.problem.memory[stage]
        self.admitted += stage == 0
        self.head_is_free = self.head_is_free and stage < self.problem.num_stages - 1
        self._start(operation, group, now)

    def _in_turn(self, operation: int, group: int) -> None:
        """What was acquired out of turn is released, or its turn has come: it no longer counts as such."""
        if operation in self.taken and self.spare is not None:
            self.taken.remove(operation)
            self.spare[group] += self.problem.memory[operation // self.problem.num_microbatches]

    def _start(self, operation: int, group: int, now: int) -> None:
        """Occupy `group`, send what the operation makes, release what it holds."""
        problem, count = self.problem, self.problem.num_microbatches
        self.start[operation] = now
        self.order[group].append(operation)
        if operation >= self.chain:
            stage = (operation - self.chain) // count
            end = now + problem.weight[stage]
            if self.weights_last:
                self._release(stage, group, operation % count)
            elif self.arrived[operation - self.chain]:
                heapq.heappush(self.ready[group], (self.key[operation - self.chain], operation - self.chain))
        else:
            position = operation // count
            end = now + problem.duration[position]
            if position >= problem.num_stages:
                stage = 2 * problem.num_stages - 1 - position
                if self.weights_last:
                    weight = self.chain + stage * count + operation % count
                    heap = self.weights
                    if position == problem.num_stages and not self.rule.by_key:
                        # Urgent: until then no other micro-batch can be at the last stage.
                        heap = self.head if self.rule.patient_head else self.ready
                    heapq.heappush(heap[group], (self.key[weight], weight))
                else:
                    self._release(stage, group, operation % count)
            if position == problem.num_stages - 1:
                self._arrive(operation + count, self.head if self.rule.patient_head else self.ready)
            elif position < 2 * problem.num_stages - 1:
                link = group + self.link[position]
                begin = end if end > self.send_free[link] else self.send_free[link]
                self.send_free[link] = begin + problem.send[position]
                heapq.heappush(self.events, (begin, 0, operation))
        self.free_at[group] = end
        heapq.heappush(self.events, (end, 2, group))

    def _release(self, stage: int, group: int, microbatch: int) -> None:
        if self.taken:
            self._in_turn(stage * self.problem.num_microbatches + microbatch, group)
        self.room[group] += self.problem.memory[stage]
        self.open[group] -= 1
        self.admitted -= stage == 0
        self.head_is_free = self.head_is_free or stage == self.problem.num_stages - 1
