"""Local search on a finished order: operations on the critical path move ahead of their neighbours.

Only for small problems, where it finds what list scheduling can't: orders in which a group waits on purpose.
"""

from __future__ import annotations

import math
import random

from disagmoe.schedules.dispatch import Play, Rule
from disagmoe.schedules.problem import Problem, order_fits

SEED = 1
HOT, COLD = 0.05, 0.01
"""Share of the makespan that a move loses with probability 1 / e, at the beginning and at the end."""
FARTHEST = 2
"""Places that an operation moves at most."""
RULE = Rule()
Order = list[list[int]]


class Annealing:
    """Moves of operations in their groups' orders."""

    def __init__(self, problem: Problem, best: Play) -> None:
        self.problem = problem
        self.best = best
        self.rng = random.Random(SEED)

    def run(self, plays: int, floor: int) -> Play:
        """The best of `plays` plays; ends early at `floor`."""
        current = self.best
        order = [list(operations) for operations in current.order]
        for step in range(plays):
            if self.best.makespan <= floor:
                break
            heat = HOT * (COLD / HOT) ** (step / plays) * self.best.makespan
            moved = self._move(order, current)
            if moved is None:
                continue
            group, operations = moved
            before, order[group] = order[group], operations
            following = Play(self.problem, order, self.best.key, RULE, fixed=True).run()
            loss = following.makespan - current.makespan
            if following.is_complete and (loss <= 0 or self.rng.random() < math.exp(-loss / heat)):
                current = following
                if current.makespan < self.best.makespan:
                    self.best = current
            else:
                order[group] = before
        return self.best

    def _move(self, order: Order, play: Play) -> tuple[int, list[int]] | None:
        """A group's order in which a critical operation is some places earlier; None: a move that can't be made."""
        pairs = self._critical_pairs(play)
        if not pairs:
            return None
        group, later = self.rng.choice(pairs)
        operations = order[group]
        place = operations.index(later)
        target = max(0, place - self.rng.randint(1, FARTHEST))
        if target == place or any(self._needs(later, operations[i]) for i in range(target, place)):
            return None
        moved = [*operations[:target], later, *operations[target:place], *operations[place + 1 :]]
        return (group, moved) if order_fits(self.problem, group, moved) else None

    def _needs(self, operation: int, other: int) -> bool:
        """Whether `operation` comes after `other` in the same micro-batch, so that it can't overtake it."""
        count, last = self.problem.num_microbatches, 2 * self.problem.num_stages - 1
        if operation % count != other % count:
            return False
        position, before = operation // count, other // count
        # A weight operation follows its input half; nothing follows it.
        return before <= (position if position <= last else last - (position - last - 1))

    def _critical_pairs(self, play: Play) -> list[tuple[int, int]]:
        """(Group, operation) of all critical operations that waited for their group alone."""
        problem, count, start = self.problem, self.problem.num_microbatches, play.start
        previous: dict[int, int] = {}
        for operations in play.order:
            previous.update(zip(operations[1:], operations[:-1], strict=True))
        operation = max(range(len(start)), key=lambda o: start[o] + problem.duration_of(o))
        pairs = []
        while True:
            before = previous.get(operation, -1)
            if before >= 0 and start[before] + problem.duration_of(before) == start[operation]:
                pairs.append((problem.group_of(operation), operation))
                operation = before
            elif operation // count >= 2 * problem.num_stages or operation < count:
                return pairs
            else:
                operation -= count
