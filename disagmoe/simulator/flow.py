"""A lower bound under tight memory, by linear programming: how many micro-batches can flow through a group in a time.

*Area* (`bounds`) lets a group be full of activations from its first forward to its last release. But micro-batches
reach their late stages, where they hold most, only after the way there, and leave the same way. Here N_q(t) counts the
micro-batches that have started position q of the chain by time t, for the positions of one group that acquire or
release activations. Every schedule has

- N_q(t) from 0 to M, never falling, and N_r(t + ready[r] - ready[q]) <= N_q(t) for r after q,
- at most 1 + u / d starts of the group's first position until u after `ready`, d the longest duration before,
- activations within the capacity at each t: sum of memory_s (N_forward(t) - N_backward(t - duration - weight)).

Each N_q is kept at the times ready[q] + j step, so the second line holds without rounding; the third uses the sample
before for forwards and the one after for backwards, which loses up to two steps of each activation's life. Turns of the
ring are alike, so there are steps that divide their lengths almost, and with the right times for the third line hardly
anything is lost: `Grid` looks for them. Where not even fractions of micro-batches (real N_q) let all M pass in a time,
no schedule can. The time is found by halving.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from disagmoe.schedules.problem import Problem
from disagmoe.simulator.bounds import area_of, lower_bounds
from disagmoe.simulator.chain import Chain

STEPS = 360
"""Samples in the time of the bound without solver."""
TRIED = 150
"""Steps that are tried up to a quarter below and above the wanted one."""
SPREAD = 1.3
"""The bound is looked for up to that many times the one without solver."""
SLACK = 1e-4
"""Of a micro-batch: the solver's rounding."""
UNIT = 1e-6
"""Of memory and capacity, to have numbers around 1."""


def flow_bound(problem: Problem, *, steps: int = STEPS) -> float:
    """Lower bound of the makespan in the unit of the costs; 0 where no group's memory binds. Seconds of a core.

    Only the group with the largest *area* bound is looked at.
    """
    chain = Chain(problem)
    areas = {group: area_of(chain, group) for group in range(problem.num_groups) if chain.positions_of(group)}
    group = max(areas, key=lambda g: areas[g])
    if not areas[group]:
        return 0.0
    return problem.tick_s * _Flow(chain, group, lower_bounds(problem).best_s / problem.tick_s, steps).bound()


class Grid(NamedTuple):
    """In ticks."""

    step: int
    time: int
    """Memory is looked at that long after multiples of a step."""


class _Flow:
    """Flow through `group`."""

    def __init__(self, chain: Chain, group: int, least: float, steps: int) -> None:
        problem = self.problem = chain.problem
        self.chain = chain
        last = problem.num_stages - 1
        self.stages = [s for s in range(last) if problem.group[s] == group and problem.memory[s]]
        self.capacity = problem.capacity[group] * UNIT
        self.points = [*self.stages, *(chain.last - s for s in reversed(self.stages))]
        self.grid = self._best_grid(max(1, int(least / steps)))
        self.step = self.grid.step
        self.least = least
        final = self.points[-1]
        self.end = chain.ready[final] + problem.duration[final] + chain.after[final]
        """The makespan where the last micro-batch is at its last point as early as the first one can be there."""
        before = self.points[0]
        self.come = max([1, *problem.duration[: before + 1], *problem.send[:before]])

    def _released(self, stage: int) -> int:
        """When the activations of `stage` are released at the earliest."""
        release = self.chain.last - stage
        return self.chain.ready[release] + self.problem.duration[release] + self.chain.weight(release)

    def _best_grid(self, around: int) -> Grid:
        """Of steps near `around` and times in them, those that lose the least of the lives of all activations."""
        chain, memory = self.chain, self.problem.memory
        lives = [(chain.ready[s], self._released(s), memory[s]) for s in self.stages]
        best: tuple[int, Grid] | None = None
        for i in range(-TRIED, TRIED + 1):
            step = max(1, around + around * i // (4 * TRIED))
            for time in {0, *(start % step for start, _, _ in lives), *(end % step for _, end, _ in lives)}:
                lost = sum(size * ((time - start) % step + (end - time) % step) for start, end, size in lives)
                if best is None or lost < best[0]:
                    best = lost, Grid(step, time)
        assert best is not None, "the group holds activations"
        return best[1]

    def bound(self) -> int:
        """The largest makespan found, in steps after `end`, in which not all micro-batches pass."""
        low = -1
        high = max(0, int((SPREAD * self.least - self.end) // self.step)) + 1
        while high - low > 1:
            middle = (low + high) // 2
            if self.passing(middle) < self.problem.num_microbatches - SLACK:
                low = middle
            else:
                high = middle
        return self.end + low * self.step if low >= 0 else 0

    def passing(self, samples: int) -> float:
        """Most micro-batches through all points in a makespan of `end` + `samples` steps."""
        # Loaded only here: schedules and their costs do without.
        from ortools.linear_solver import pywraplp

        solver: Any = pywraplp.Solver.CreateSolver("GLOP")
        count = self.problem.num_microbatches
        passed = [[solver.NumVar(0, count, "") for _ in range(samples + 1)] for _ in self.points]
        for j, first in enumerate(passed[0]):
            first.SetUb(min(count, 1 + j * self.step / self.come))
        for mine, following in zip(passed, [*passed[1:], None], strict=True):
            for j in range(samples):
                solver.Add(mine[j] <= mine[j + 1])
            for now, later in zip(mine, following or (), strict=False):
                solver.Add(later <= now)
        self._add_memory(solver, dict(zip(self.points, passed, strict=True)), samples)
        solver.Maximize(passed[-1][samples])
        status = solver.Solve()
        return float(solver.Objective().Value()) if status == solver.OPTIMAL else float("inf")

    def _add_memory(self, solver: Any, passed: dict[int, list[Any]], samples: int) -> None:
        problem, chain, step = self.problem, self.chain, self.step
        begin = chain.ready[self.points[0]]
        begin += (self.grid.time - begin) % step
        until = max(chain.ready[q] + problem.duration[q] + chain.weight(q) for q in self.points) + samples * step
        for time in range(begin, until, step):
            within = solver.Constraint(-solver.infinity(), self.capacity)
            for stage in self.stages:
                release = chain.last - stage
                released = time - self._released(stage)
                started = (time - chain.ready[stage]) // step
                if started < 0:
                    continue
                memory = problem.memory[stage] * UNIT
                within.SetCoefficient(passed[stage][min(started, samples)], memory)
                after = -(-released // step)
                if after >= 0:
                    # After the last sample everything may be released at once.
                    within.SetCoefficient(passed[release][min(after, samples)], -memory)
