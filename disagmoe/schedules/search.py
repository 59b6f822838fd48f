"""Search for a good order: first plays from rounds, then improvement by playing backwards and forwards in time.

Backwards and forwards ("justification" in project scheduling): the problem is played from its end, each group
preferring what ended last before, then forwards again, preferring what came out first. Every play packs its end of the
pipeline tightly and keeps what the one before found out about the other end. It completes within the caps because its
acquisitions come in the order of a play that did (see `dispatch`). Once that stops helping, keys are perturbed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from disagmoe.layout import split_evenly
from disagmoe.schedules.dispatch import Play, Rule
from disagmoe.schedules.problem import Problem
from disagmoe.schedules.slants import (
    GUARDED,
    earliest_starts,
    has_heavy_head,
    improve,
    most_whole,
    slanted_plays,
    spare_memory,
)
from disagmoe.schedules.swaps import Annealing

BY_KEY = Rule(by_key=True)
FEWEST = 6
"""First plays that are made in any case, besides given ones."""
KEPT = 4
"""First plays that are improved."""
PATIENCE = 3
"""Rounds of backwards and forwards without gain before another start is taken."""
NOISE = (0.0, 0.3, 1.0, 3.0, 10.0)
"""Standard deviations to perturb keys with, in mean durations."""
JITTER = (0.0, 0.0, 0.1, 0.3, 0.6)
"""Shares by which durations are off while an order is made."""
STRETCH = (1.0, 1.0, 0.5, 1.5, 2.5)
"""Factors of hops while an order is made."""
ACCEPTED = (0.0, 0.0, 0.01, 0.03)
"""Shares of the makespan that a step may lose."""
GUARDED_PLAYS = range(60, 2000)
"""Numbers of plays for which half as many guarded ones are made besides: fewer leave no time to vary them, and problems
that allow more are small, where `Annealing` finds more."""
MANY = 300
"""Plays left from which on half of them go to `Annealing`; below, it would hardly start."""
SEED = 0

Orders = list[list[int]]


def search(problem: Problem, given: Sequence[Play], *, effort: int) -> Play:
    """The best play found.

    given: plays to start from besides those from rounds.
    effort: about how many operations may be scheduled, over all plays; first plays are always made, and guarded
        ones come on top (see `GUARDED_PLAYS`).
    """
    plays = max(0, effort // max(1, problem.num_operations))
    floor = shortest_possible(problem)
    first = [*given, *itertools.islice(_in_turn(first_plays(problem), slanted_plays(problem)), max(FEWEST, plays // 2))]
    if plays in GUARDED_PLAYS and min(play.makespan for play in first) > floor:
        first += improve(problem, GUARDED, plays // 2, floor)
    best = min(first, key=lambda play: play.makespan)
    left = max(4, plays - len(first))
    turns = _Turns(problem)
    starts: dict[int, Play] = {}
    for play in sorted(first, key=lambda play: play.makespan):
        starts.setdefault(play.makespan, play)
    for start in list(starts.values())[:KEPT]:
        current, unchanged = start, 0
        while unchanged < PATIENCE and left >= 2 and best.makespan > floor:
            left -= 2
            following = turns.back_and_forth(current)
            unchanged = unchanged + 1 if following.makespan >= current.makespan else 0
            current = following
            best = min(best, current, key=lambda play: play.makespan)
    moves = left // 2 if left >= MANY else 0
    best = _Walk(turns, best, floor).run(left - moves)
    return Annealing(problem, best).run(moves, floor)


def shortest_possible(problem: Problem) -> int:
    """No schedule is shorter: by group, the earliest start, all the work, and what must follow the last of it."""
    positions = 2 * problem.num_stages
    ready, after = earliest_starts(problem), [0] * positions
    for q in range(positions - 1, -1, -1):
        weight = problem.weight[positions - 1 - q] if problem.weight and q >= problem.num_stages else 0
        following = problem.arrival(q) + problem.duration[q + 1] + after[q + 1] if q + 1 < positions else 0
        after[q] = max(weight, following)
    shortest = max(ready[q] + problem.duration[q] + after[q] for q in range(positions))
    for group in set(problem.group):
        mine = [q for q in range(positions) if problem.group[q] == group]
        work = sum(problem.duration[q] for q in mine)
        work += sum(w for stage, w in enumerate(problem.weight) if problem.group[stage] == group)
        end = 0 if problem.weight else min(after[q] for q in mine)
        shortest = max(shortest, min(ready[q] for q in mine) + work * problem.num_microbatches + end)
    return shortest


def first_plays(problem: Problem) -> Iterator[Play]:
    """Plays from rounds of several lengths, the most promising first.

    A round of R micro-batches, layer by layer, needs the memory of R micro-batches at most, so it fits if they do.
    """
    ring = problem.num_groups
    most = most_whole(problem)
    lengths = [most, ring, 2 * ring, 3 * most // 4, most // 2, 3 * ring // 2, most // 3]
    whole = [Funnel(length, 0, length) for length in dict.fromkeys(min(n, most) for n in lengths if n >= 1)]
    for shape in (*whole[:3], *funnels(problem, most), *whole[3:]):
        length = min(shape.wide, most)
        spare = spare_memory(problem, length)
        rounds = split_evenly(problem.num_microbatches, -(-problem.num_microbatches // shape.wide))
        acquires = funnel_orders(problem, rounds, shape)
        by_round = round_keys(problem, rounds)
        by_microbatch = [
            float(operation % problem.num_microbatches * 4 * problem.num_stages - operation // problem.num_microbatches)
            for operation in range(problem.num_operations)
        ]
        # Out of turn: what a round leaves of the memory fills waits with what comes later.
        loans = (None, spare) if shape.turns == 0 and max(spare) > 0 else (None,)
        for loan, key, rule in itertools.product(loans, (by_microbatch, by_round), _rules(problem, shape.wide)):
            play = Play(problem, acquires, key, rule, spare=loan).run()
            if not play.is_complete:
                break
            yield play


def _rules(problem: Problem, length: int) -> list[Rule]:
    ring = problem.num_groups
    rules = [Rule(lead=None), Rule(lead=[problem.num_operations] * ring)]
    rules[1:1] = [Rule(lead=leads(problem, min(length, factor * ring), factor)) for factor in (2, 1)]
    if problem.weight:
        rules = [rule for r in rules for rule in (r, replace(r, eager_weights=True))]
    return [replace(rule, patient_head=True) for rule in rules] if has_heavy_head(problem) else rules


def _in_turn(*sources: Iterator[Play]) -> Iterator[Play]:
    """One of each, until all are exhausted."""
    for plays in itertools.zip_longest(*sources):
        yield from (play for play in plays if play is not None)


class Funnel(NamedTuple):
    """Rounds of `wide` micro-batches on the first `turns` turns of the ring, cut into `narrow` ones on the others."""

    wide: int
    turns: int
    narrow: int


def funnels(problem: Problem, most: int) -> Iterator[Funnel]:
    """Those whose memory is about that of `most` micro-batches. More of them start, and fewer are near their end.

    Not all complete within the caps, which a play finds out.
    """
    turns = max(1, problem.num_stages // problem.num_groups)
    for first in dict.fromkeys((turns // 2, 1, turns - 1)):
        for narrow in dict.fromkeys((2 * most // 3, most // 2, most // 3)):
            for spare in (0, 1) if first else ():
                wide = (most * turns - narrow * (turns - first)) // first + spare
                wide = min(wide, problem.num_microbatches, problem.in_flight)
                if wide > most and narrow >= 1:
                    yield Funnel(wide, first, narrow)


def leads(problem: Problem, length: int, ways: int) -> list[int]:
    """By group, forwards before the first backward in rounds of `length` (see `af_pipe`), for a ring of stages.

    A round on each of the group's stages but the last, and `ways` for each hop from there to the end and back.
    """
    last_stage = {problem.group[stage]: stage for stage in range(problem.num_stages)}
    held = [0] * problem.num_groups
    for stage in range(problem.num_stages):
        held[problem.group[stage]] += 1
    return [
        max(0, held[group] - 1) * length + 2 * ways * (problem.num_stages - 1 - last_stage.get(group, 0)) + 1
        for group in range(problem.num_groups)
    ]


def funnel_orders(problem: Problem, rounds: Sequence[range], shape: Funnel) -> Orders:
    """By group, its forwards: round by round, stage by stage."""
    orders: Orders = [[] for _ in range(problem.num_groups)]
    neck = min(shape.turns * problem.num_groups, problem.num_stages)
    for microbatches in rounds:
        parts = [(range(neck), microbatches)] if neck else []
        for part in split_evenly(len(microbatches), -(-len(microbatches) // shape.narrow)):
            parts.append((range(neck, problem.num_stages), microbatches[part.start : part.stop]))
        for stages, part in parts:
            for stage in stages:
                first = stage * problem.num_microbatches
                orders[problem.group[stage]] += [first + microbatch for microbatch in part]
    return orders


def round_keys(problem: Problem, rounds: Sequence[range]) -> list[float]:
    """Keys of releases: round by round, later stages first."""
    round_of = [index for index, microbatches in enumerate(rounds) for _ in microbatches]
    stages, count = problem.num_stages, problem.num_microbatches
    keys = []
    for operation in range(problem.num_operations):
        position, microbatch = divmod(operation, count)
        from_end = position - stages if position < 2 * stages else 3 * stages - 1 - position
        keys.append(float((round_of[microbatch] * 2 * stages + from_end) * count + microbatch))
    return keys


def turned_orders(play: Play, turned: Sequence[int]) -> Orders:
    """By group, the acquisitions of the mirrored problem in the order of the releases of `play`, from its end."""
    half = play.problem.num_stages * play.problem.num_microbatches
    # In a mirrored problem weight operations acquire, and forwards release.
    first = 2 * half if play.problem.weight and not play.problem.mirrored else 0
    last = first + half
    return [[o for o in map(turned.__getitem__, reversed(order)) if first <= o < last] for order in play.order]


class _Turns:
    """Plays a problem backwards and forwards, as it is or with durations changed."""

    def __init__(self, problem: Problem) -> None:
        self.turned = problem.mirror_operations()
        self.problem = problem
        self.mirror = problem.mirror()
        sizes = [problem.duration_of(operation) for operation in range(problem.num_operations)]
        self.mean = sum(sizes) / max(1, len(sizes))

    def back_and_forth(self, play: Play) -> Play:
        """Two plays, the second one on the problem itself."""
        return self.turn(self.problem, self.turn(self.mirror, play))

    def turn(
        self, target: Problem, play: Play, noise: Callable[[int], float] | None = None, *, reorder: bool = False
    ) -> Play:
        """Play `target`, mirrored unlike `play`'s problem; what ended last there comes first, give or take `noise`.

        `reorder`: acquisitions too, after which the play may not complete.
        """
        time = [0.0] * len(play.start)
        source, count, start = play.problem, play.problem.num_microbatches, play.start
        lengths = (*source.duration, *source.weight)
        for operation, other in enumerate(self.turned):
            time[other] = -float(start[operation] + lengths[operation // count])
        key = time if noise is None else [value + noise(operation) for operation, value in enumerate(time)]
        acquires = turned_orders(play, self.turned)
        if reorder:
            acquires = [sorted(order, key=key.__getitem__) for order in acquires]
        return Play(target, acquires, key, BY_KEY).run()


class _Walk:
    """Back and forth with random changes, from good play to good play.

    Keys are perturbed, and durations are changed while an order is made, after which it is timed as it is. The latter
    finds orders in which a group waits although it could work, which no play makes by itself.
    """

    def __init__(self, turns: _Turns, best: Play, floor: int) -> None:
        self.turns = turns
        self.problem = turns.problem
        self.best = self.current = best
        self.floor = floor
        self.rng = random.Random(SEED)

    def run(self, plays: int) -> Play:
        for _ in range(plays // 3):
            if self.best.makespan <= self.floor:
                break
            following = self._step()
            if following is None:
                continue
            if following.makespan <= self.current.makespan * (1 + self.rng.choice(ACCEPTED)):
                self.current = following
            if following.makespan < self.best.makespan:
                self.best = following
            elif self.current.makespan > self.best.makespan * (1 + max(ACCEPTED)):
                self.current = self.best
        return self.best

    def _step(self) -> Play | None:
        rng = self.rng
        changed = self._change(rng.choice(JITTER), rng.choice(STRETCH))
        reorder = rng.random() < 0.5
        backwards = self.turns.turn(changed.mirror(), self.current, self._noise(), reorder=reorder)
        if not backwards.is_complete:
            return None
        forwards = self.turns.turn(changed, backwards)
        return Play(self.problem, forwards.order, forwards.key, BY_KEY, fixed=True).run()

    def _noise(self) -> Callable[[int], float]:
        """Noise of operations, of micro-batches, and of micro-batches on one turn of the ring of groups."""
        rng, mean = self.rng, self.turns.mean
        each, whole, turn = (rng.choice(NOISE) * mean for _ in range(3))
        count = self.problem.num_microbatches
        operations_a_turn = count * self.problem.num_groups
        num_turns = -(-self.problem.num_operations // operations_a_turn)
        of_whole = [rng.gauss(0.0, whole) for _ in range(count)]
        of_turn = [[offset + rng.gauss(0.0, turn) for offset in of_whole] for _ in range(num_turns)]
        if not each:
            return lambda operation: of_turn[operation // operations_a_turn][operation % count]
        return lambda operation: of_turn[operation // operations_a_turn][operation % count] + rng.gauss(0.0, each)

    def _change(self, jitter: float, stretch: float) -> Problem:
        """The problem with durations off by a share of up to `jitter`, and hops `stretch` times as long."""
        if jitter == 0 and stretch == 1:
            return self.problem
        problem, rng = self.problem, self.rng
        return replace(
            problem,
            duration=tuple(round(d * (1 + rng.uniform(-jitter, jitter))) for d in problem.duration),
            weight=tuple(round(d * (1 + rng.uniform(-jitter, jitter))) for d in problem.weight),
            latency=tuple(
                max(0, round(problem.latency[q] + (stretch - 1) * problem.arrival(q))) for q in range(len(problem.send))
            ),
        )
