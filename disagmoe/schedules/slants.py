"""Plays without rounds: micro-batches enter one by one, first densely, then as fast as groups can keep up.

Best for heavy heads, through which a round would have to queue, and where memory is short. Two kinds: `slanted_plays`
keep to their order of acquisitions or use what memory a window of micro-batches leaves; `guarded_plays` go out of turn
as far as a `Slant` allows, and good ones are varied.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from disagmoe.schedules.dispatch import Play, Rule
from disagmoe.schedules.guarded import GuardedPlay
from disagmoe.schedules.problem import Problem

SEED = 2
POOL = 8
"""Slants that are varied."""
AHEAD = (0.0, 0.1, 0.3, 0.6, 1.0, 2.0, 4.0, 8.0)
PATIENCE = (0.0, 0.25, 0.5, 0.75, 1.0)
HEAVY = 4
"""Times the mean forward of its group that the last stage takes to be heavy."""


class Slant(NamedTuple):
    """When micro-batches enter, and how far others may go ahead of them. Times in shares of a micro-batch's work on the
    busiest group."""

    dense: int
    """Micro-batches that enter `first` after one another, then `middle` ones with `second`, then with `then` each."""
    first: float
    middle: int
    second: float
    then: float
    end: int
    """The last ones, with `last`."""
    last: float
    forward: float
    """How much longer than alone a micro-batch is taken to be on its way forwards."""
    backward: float
    window: float
    """A micro-batch enters when that share of those that fit entirely are before it on their way forwards; 0: at its
    time."""
    ahead: float
    """See `GuardedPlay`."""
    eager: bool
    """See `Rule.eager_weights`; of no effect on whole backwards."""
    eager_head: bool = True
    patience: float = 0.0
    mixed: bool = False
    """See `GuardedPlay`."""

    @classmethod
    def of_two(cls, first: float, dense: int, then: float, stretch: float, window: float) -> Slant:
        """One of two densities."""
        return cls(dense, first, 0, then, then, 0, then, stretch, stretch, window, 0.0, False)

    def entries(self, problem: Problem, longest: int) -> list[float]:
        """By micro-batch, when it is to enter."""
        count = problem.num_microbatches
        window = self.window_of(problem)
        way = self.forward * earliest_starts(problem)[problem.num_stages]
        entry = [0.0] * count
        for i in range(1, count):
            gap = self.first if i < self.dense else self.second if i < self.dense + self.middle else self.then
            gap = self.last if i >= max(self.dense + self.middle, count - self.end) else gap
            entry[i] = entry[i - 1] + longest * gap
            if i >= window:
                entry[i] = max(entry[i], entry[i - window] + way)
        return entry

    def window_of(self, problem: Problem) -> int:
        """In micro-batches."""
        return max(1, round(self.window * most_whole(problem))) if self.window else problem.num_microbatches

    def keys(self, problem: Problem, longest: int) -> list[float]:
        """By operation, when it is to start."""
        stages, count = problem.num_stages, problem.num_microbatches
        ready, entry = earliest_starts(problem), self.entries(problem, longest)
        key = []
        for position in range(problem.num_operations // count):
            # A weight operation comes right behind its input half.
            chain = position if position < 2 * stages else 4 * stages - 1 - position
            there, back = ready[min(chain, stages)], ready[max(chain, stages)] - ready[stages]
            offset = self.forward * there + self.backward * back + (position >= 2 * stages)
            key += [time + offset for time in entry]
        return key

    def play(self, problem: Problem) -> Play:
        """May not be complete."""
        longest = longest_work(problem)
        rule = Rule(eager_weights=self.eager, patient_head=has_heavy_head(problem))
        play = GuardedPlay(
            problem,
            self.keys(problem, longest),
            rule,
            ahead=self.ahead * longest,
            patience=self.patience,
            mixed=self.mixed,
            eager_head=self.eager_head,
        ).run()
        if not (self.patience and play.is_complete):
            return play
        # Waits on purpose are not in an order: as executed it is another play, and that one counts.
        return Play(problem, play.order, play.key, Rule(), fixed=True).run()

    def vary(self, rng: random.Random) -> Slant:
        """One near it."""
        fields = self._asdict()
        for name in rng.choices(list(fields), k=rng.choice((1, 1, 2, 3))):
            value = fields[name]
            if isinstance(value, bool):
                fields[name] = not value
            elif isinstance(value, int):
                fields[name] = max(0, value + rng.choice((-2, -1, 1, 2)))
            elif name == "window":
                fields[name] = rng.choice((0.0, rng.uniform(0.5, 1.4), value * rng.lognormvariate(0, 0.1)))
            elif name == "ahead":
                fields[name] = rng.choice(AHEAD)
            elif name == "patience":
                fields[name] = rng.choice(PATIENCE)
            else:
                fields[name] = value * rng.lognormvariate(0, 0.15)
        return Slant(**fields)


SLANTS = (
    # (first, dense, then, stretch, window)
    (0.3, 4, 0.5, 1.6, 0.0),
    (0.3, 20, 0.5, 2.0, 0.0),
    (0.3, 6, 0.8, 1.3, 1.0),
    (0.5, 4, 0.8, 1.3, 0.67),
    (0.2, 12, 0.3, 1.6, 0.0),
    (0.3, 7, 0.5, 1.3, 1.25),
    (0.5, 12, 0.5, 1.6, 0.95),
    (0.3, 4, 0.5, 1.0, 0.67),
    (0.2, 4, 0.8, 1.4, 0.0),
    (0.3, 4, 0.8, 1.6, 1.0),
    (0.2, 4, 0.8, 2.0, 0.0),
    (0.5, 6, 0.8, 1.6, 0.67),
    (0.2, 32, 0.3, 1.2, 0.0),
    (0.3, 7, 0.5, 1.6, 1.25),
    (0.2, 8, 0.3, 1.2, 0.0),
    (0.35, 4, 0.5, 1.4, 0.0),
    (0.1, 6, 0.8, 1.0, 1.0),
    (0.3, 12, 0.5, 1.6, 0.0),
    (0.2, 4, 0.65, 1.2, 0.0),
    (0.5, 9, 0.5, 1.3, 0.72),
    (0.2, 16, 0.5, 1.4, 0.0),
    (0.7, 8, 0.8, 1.4, 0.0),
    (0.1, 4, 0.65, 1.6, 0.0),
    (0.3, 12, 0.8, 2.6, 0.0),
    (0.4, 6, 1.0, 1.6, 1.1),
    (0.6, 3, 0.5, 1.0, 0.67),
    (0.7, 16, 1.05, 2.0, 0.0),
    (0.3, 7, 0.5, 1.3, 1.0),
    (0.3, 3, 0.9, 1.15, 0.75),
    (0.6, 12, 0.7, 1.15, 1.0),
)
"""Arguments of `Slant.of_two`."""


def slanted_plays(problem: Problem) -> Iterator[Play]:
    """Plays of `SLANTS` that complete within the caps."""
    stages, count, longest = problem.num_stages, problem.num_microbatches, longest_work(problem)
    most = most_whole(problem)
    for arguments in SLANTS:
        slant = Slant.of_two(*arguments)
        key, window = slant.keys(problem, longest), slant.window_of(problem)
        acquires: list[list[int]] = [[] for _ in range(problem.num_groups)]
        for operation in sorted(range(stages * count), key=key.__getitem__):
            acquires[problem.group_of(operation)].append(operation)
        # Only a window that fits entirely is sure to leave memory for others.
        spare = spare_memory(problem, window) if window < most else None
        for eager in (False, True) if problem.weight else (False,):
            rule = Rule(eager_weights=eager, patient_head=has_heavy_head(problem))
            play = Play(problem, acquires, key, rule, spare=spare).run()
            if play.is_complete:
                yield play


GUARDED = (
    Slant(3, 0.429, 8, 0.601, 1.083, 11, 0.618, 1.131, 2.226, 0.818, 2.0, False, True, 0.75),
    Slant(11, 0.328, 6, 0.364, 0.392, 6, 0.604, 0.856, 1.686, 0.792, 0.3, False, True, 0.5),
    Slant(5, 0.439, 14, 0.535, 0.551, 4, 0.412, 1.1, 0.836, 0.932, 0.0, False),
    Slant(6, 0.545, 7, 0.594, 0.955, 13, 0.585, 1.211, 1.801, 0.889, 2.0, False, True, 0.5),
    Slant(2, 0.305, 14, 0.813, 0.525, 0, 1.164, 1.243, 0.965, 1.27, 4.0, True, False, 0.25, True),
    Slant(5, 0.473, 9, 0.717, 1.083, 15, 0.697, 1.26, 1.801, 0.889, 2.0, True, False, 0.75, True),
    Slant(11, 0.318, 7, 0.296, 0.396, 8, 0.776, 1.069, 1.965, 0.792, 0.6, True, True, 1.0),
    Slant(5, 0.473, 8, 0.594, 1.083, 11, 0.697, 1.211, 1.801, 0.889, 2.0, False),
    Slant(5, 0.443, 14, 0.471, 0.37, 6, 0.443, 1.1, 1.432, 0.974, 0.0, False),
    Slant(4, 0.429, 8, 0.594, 1.083, 11, 0.733, 1.131, 2.667, 0.818, 2.0, False),
    Slant(4, 0.291, 2, 0.249, 0.996, 2, 0.548, 1.185, 1.269, 0.0, 1.0, False),
    Slant(11, 0.376, 7, 0.296, 0.396, 8, 0.677, 1.069, 1.965, 0.792, 0.6, False),
    Slant(3, 0.359, 11, 1.072, 0.393, 0, 1.104, 1.371, 1.856, 0.812, 4.0, False),
    Slant(11, 0.561, 11, 0.26, 0.956, 10, 0.475, 1.071, 1.338, 0.812, 2.0, True),
)


def improve(problem: Problem, slants: Iterable[Slant], plays: int, floor: int) -> list[Play]:
    """Different plays, the best first: of `slants`, and of `plays` in all made by varying the best ones of these."""
    rng = random.Random(SEED)
    pool: dict[int, tuple[Play, Slant]] = {}

    def add(slant: Slant) -> None:
        play = slant.play(problem)
        if play.is_complete and play.makespan not in pool:
            pool[play.makespan] = play, slant
            if len(pool) > POOL:
                del pool[max(pool)]

    first = list(itertools.islice(slants, plays))
    for slant in first:
        add(slant)
    for _ in range(plays - len(first)):
        if not pool or min(pool) <= floor:
            break
        add(rng.choice(list(pool.values()))[1].vary(rng))
    return [pool[makespan][0] for makespan in sorted(pool)]


def longest_work(problem: Problem) -> int:
    """A micro-batch's work on the busiest group."""
    work = [0] * problem.num_groups
    for operation in range(0, problem.num_operations, problem.num_microbatches):
        work[problem.group_of(operation)] += problem.duration_of(operation)
    return max(work)


def earliest_starts(problem: Problem) -> list[int]:
    """By position, when a micro-batch alone reaches it."""
    ready = [0]
    for q in range(2 * problem.num_stages - 1):
        ready.append(ready[q] + problem.duration[q] + problem.arrival(q))
    return ready


def spare_memory(problem: Problem, length: int) -> list[int]:
    """By group, memory that `length` micro-batches leave."""
    return [c - length * m for c, m in zip(problem.capacity, problem.memory_of_group, strict=True)]


def most_whole(problem: Problem) -> int:
    """Micro-batches whose activations fit at the same time."""
    most = min(problem.num_microbatches, problem.in_flight)
    for capacity, one in zip(problem.capacity, problem.memory_of_group, strict=True):
        most = min(most, capacity // one) if one else most
    assert most >= 1, "caps that do not hold one micro-batch are refused earlier"
    return most


def has_heavy_head(problem: Problem) -> bool:
    """Whether others of its group should go ahead of the last stage's backward, which would hold them up for long."""
    last = problem.num_stages - 1
    others = [problem.duration[q] for q in range(last) if problem.group[q] == problem.group[last]]
    return bool(others) and problem.duration[last] + problem.duration[last + 1] > HEAVY * sum(others) / len(others)
