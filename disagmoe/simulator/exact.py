"""Bounds and true optima by CP-SAT: a group alone, or all of a small instance.

Same semantics as `bounds`: links serve one transfer at a time in each direction, in any order, activations stay within
the caps, and the last stage holds one micro-batch at a time. Not covered: the in-flight cap. One thread and a fixed
seed, so only the time limit depends on the machine; the status says whether an optimum is proved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

from disagmoe.schedules.problem import Problem
from disagmoe.simulator.bounds import lower_bounds
from disagmoe.simulator.chain import Chain


@dataclass(frozen=True, kw_only=True)
class Solved:
    """What CP-SAT found out."""

    status: str
    """`optimal`, `feasible` (`bound_s` < `makespan_s`) or `unknown` (no solution in time; the bound holds)."""
    makespan_s: float
    bound_s: float
    wall_s: float


def one_machine_bound(problem: Problem, group: int, *, limit_s: float) -> Solved:
    """Group `group` alone; `bound_s` is a lower bound of the whole.

    All its operations, its memory, and the least time between two operations of the same micro-batch, everybody else
    idle and fast; as far as `limit_s` allows.
    """
    model = _Model(problem, groups=[group], links=False)
    return model.solve(limit_s=limit_s, hint=None)


def optimum(problem: Problem, *, limit_s: float, hint: Sequence[int] | None = None) -> Solved:
    """The whole problem. Small instances only: some 100 operations take seconds to minutes.

    hint: start times by operation, from a play.
    """
    model = _Model(problem, groups=range(problem.num_groups), links=True)
    return model.solve(limit_s=limit_s, hint=hint)


class _Model:
    """A CP-SAT model of the problem, or of some of its groups alone."""

    def __init__(self, problem: Problem, *, groups: Sequence[int], links: bool) -> None:
        # Loaded only here: it brings numpy, which schedules and their costs do without.
        from ortools.sat.python import cp_model

        self.cp: Any = cp_model
        self.problem = problem
        self.chain = Chain(problem)
        self.model: Any = cp_model.CpModel()
        self.groups = set(groups)
        self.horizon = self.chain.critical_path * problem.num_microbatches
        self.start: dict[int, Any] = {}
        self.machine: dict[int, list[Any]] = {group: [] for group in groups}
        self.makespan = self.model.new_int_var(self.chain.critical_path, self.horizon, "makespan")
        self._add_operations()
        self._add_order()
        if links:
            self._add_links()
        self._add_memory()
        self._add_head()
        for intervals in self.machine.values():
            self.model.add_no_overlap(intervals)
        bound = lower_bounds(problem)
        self.model.add(self.makespan >= int(bound.best_s / problem.tick_s + 0.5))
        self.model.minimize(self.makespan)

    def _add_operations(self) -> None:
        problem, count = self.problem, self.problem.num_microbatches
        for operation in range(problem.num_operations):
            group, position = problem.group_of(operation), operation // count
            if group not in self.groups:
                continue
            weight = position > self.chain.last
            chain = position if not weight else self.chain.last - (position - 2 * problem.num_stages)
            head = self.chain.ready[chain] + (problem.duration[chain] if weight else 0)
            tail = 0 if weight else self.chain.after[chain]
            length = problem.duration_of(operation)
            start = self.start[operation] = self.model.new_int_var(head, self.horizon, f"s{operation}")
            self.machine[group].append(self.model.new_fixed_size_interval_var(start, length, f"i{operation}"))
            self.model.add(self.makespan >= start + length + tail)

    def _add_order(self) -> None:
        """Least time between consecutive positions that are modelled; micro-batches are alike, so numbered by entry."""
        problem, count = self.problem, self.problem.num_microbatches
        positions = [q for q in range(self.chain.last + 1) if problem.group[q] in self.groups]
        for microbatch in range(count):
            for q, following in pairwise(positions):
                lag = self.chain.ready[following] - self.chain.ready[q]
                self.model.add(self._of(following, microbatch) >= self._of(q, microbatch) + lag)
            for q in positions if problem.weight else ():
                if q >= problem.num_stages:
                    weight = self._of(2 * problem.num_stages + self.chain.last - q, microbatch)
                    self.model.add(weight >= self._of(q, microbatch) + problem.duration[q])
            if microbatch:
                entry = positions[0]
                length = problem.duration[entry]
                self.model.add(self._of(entry, microbatch) >= self._of(entry, microbatch - 1) + length)

    def _of(self, position: int, microbatch: int) -> Any:
        return self.start[position * self.problem.num_microbatches + microbatch]

    def _add_links(self) -> None:
        problem, model = self.problem, self.model
        links = list(product(self.groups, (False, True)))
        sending: dict[tuple[int, bool], list[Any]] = {link: [] for link in links}
        receiving: dict[tuple[int, bool], list[Any]] = {link: [] for link in links}
        for q in range(self.chain.last):
            send, recv = problem.send[q], problem.recv[q]
            if q == problem.num_stages - 1 or not (send or recv):
                continue
            for microbatch in range(problem.num_microbatches):
                name = f"{q}.{microbatch}"
                leave = model.new_int_var(0, self.horizon, f"leave{name}")
                reach = model.new_int_var(0, self.horizon, f"reach{name}")
                model.add(leave >= self._of(q, microbatch) + problem.duration[q])
                model.add(reach >= leave + problem.latency[q] + max(0, send - recv))
                model.add(self._of(q + 1, microbatch) >= reach + recv)
                sender, receiver = ((problem.group[i], problem.fabric[q]) for i in (q, q + 1))
                sending[sender].append(model.new_fixed_size_interval_var(leave, send, f"send{name}"))
                receiving[receiver].append(model.new_fixed_size_interval_var(reach, recv, f"recv{name}"))
        for intervals in (*sending.values(), *receiving.values()):
            model.add_no_overlap(intervals)

    def _add_memory(self) -> None:
        problem, model = self.problem, self.model
        for group in self.groups:
            stages = [s for s in range(problem.num_stages) if problem.group[s] == group and problem.memory[s]]
            total = sum(problem.memory[s] for s in stages) * problem.num_microbatches
            if total <= problem.capacity[group]:
                continue
            lives, sizes = [], []
            for stage in stages:
                release = self.chain.last - stage
                for microbatch in range(problem.num_microbatches):
                    begin = self._of(stage, microbatch)
                    if problem.weight:
                        weight = 2 * problem.num_stages + stage
                        end = self._of(weight, microbatch) + problem.weight[stage]
                    else:
                        end = self._of(release, microbatch) + problem.duration[release]
                    length = model.new_int_var(0, self.horizon, f"life{stage}.{microbatch}")
                    lives.append(model.new_interval_var(begin, length, end, f"alive{stage}.{microbatch}"))
                    sizes.append(problem.memory[stage])
            model.add_cumulative(lives, sizes, problem.capacity[group])

    def _add_head(self) -> None:
        """The last stage holds one micro-batch at a time."""
        head = self.problem.num_stages - 1
        if self.problem.group[head] not in self.groups:
            return
        end_position = 3 * self.problem.num_stages - 1 if self.problem.weight else head + 1
        held = []
        for microbatch in range(self.problem.num_microbatches):
            release = end_position * self.problem.num_microbatches + microbatch
            end = self.start[release] + self.problem.duration_of(release)
            length = self.model.new_int_var(0, self.horizon, f"held{microbatch}")
            held.append(self.model.new_interval_var(self._of(head, microbatch), length, end, f"head{microbatch}"))
        self.model.add_no_overlap(held)

    def solve(self, *, limit_s: float, hint: Sequence[int] | None) -> Solved:
        """One worker and a fixed seed; only `limit_s` depends on the machine."""
        if hint is not None:
            for operation, start in self.start.items():
                self.model.add_hint(start, hint[operation])
        solver = self.cp.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.max_time_in_seconds = limit_s
        status = solver.solve(self.model)
        names = {self.cp.OPTIMAL: "optimal", self.cp.FEASIBLE: "feasible"}
        tick = self.problem.tick_s
        return Solved(
            status=names.get(status, "unknown"),
            makespan_s=solver.objective_value * tick if status in names else float("inf"),
            bound_s=solver.best_objective_bound * tick,
            wall_s=solver.wall_time,
        )
