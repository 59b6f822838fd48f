"""No schedule is shorter than this: lower bounds on the makespan, and true optima of small instances.

All hold for every order of compute and transfers, with links that serve one transfer at a time in each direction, and
with activations within the caps. Notation as in `disagmoe.schedules.problem`: a micro-batch passes the chain's 2 S
positions; `ready[q]` is the earliest start of position q (everything before it on idle groups and links), `after[q]`
the least time from its end to the end of all that depends on it.

- **Critical path**: one micro-batch alone.
- **Work**: on each group, for every subset {release >= r, tail >= t} of its operations: r + their durations + t, the
  largest of which is the preemptive optimum of one machine with heads and tails. The i-th micro-batch to reach a
  position is later than the first by i times the longest duration or transfer before it.
- **Feed**: before the first micro-batch can be at a stage, its group can only have done what earlier stages of its own
  were fed with by the group before it. The rest of that time it idles; with whole backwards likewise at the end.
- **Link**: the same for each direction of each group's link.
- **Memory**, where a group's capacity C allows n activations at most. *Fill*: before its first release can start, a
  group starts at most n forwards, so it idles for the rest of that time; likewise after its last forward it has at most
  n activations to release. *Area*: an activation lives from the start of its forward until its release ends, at least
  as long as the way from there to the last stage and back; all lives together fit under C times the makespan, less the
  two ramps in which activations come and go one at a time.
- **One machine, exactly** (`one_machine_bound`): one group with all its operations, memory, and the least time between
  two operations of the same micro-batch, everybody else idle and fast; solved with CP-SAT as far as time allows.

Not covered: the in-flight cap, which only makes schedules longer. Numbers are in ticks of the problem unless their
name ends in `_s`; rounding durations to ticks moves a bound by less than 1e-6 of itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

from disagmoe.schedules.problem import UNLIMITED, Problem

Job = tuple[int, int, int]
"""Release, duration, tail."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Lower bounds of the makespan by argument, in the unit of the costs."""

    critical_path_s: float
    work_s: float
    feed_s: float
    link_s: float
    fill_s: float
    area_s: float

    @property
    def best_s(self) -> float:
        return max(vars(self).values())

    @property
    def binding(self) -> str:
        """The argument that gives the best bound."""
        return max(vars(self), key=lambda name: vars(self)[name]).removesuffix("_s")


def lower_bounds(problem: Problem) -> Bounds:
    """All bounds that need no solver. Costs n log n for n operations on a group."""
    chain = _Chain(problem)
    groups = range(problem.num_groups)
    held = [group for group in groups if chain.positions_of(group)]
    return Bounds(
        critical_path_s=problem.tick_s * chain.critical_path,
        work_s=problem.tick_s * max(_preemptive(list(chain.jobs(group))) for group in held),
        feed_s=problem.tick_s * max(_feed(chain, group) for group in held),
        link_s=problem.tick_s * max(_preemptive(jobs) for jobs in _link_jobs(chain)),
        fill_s=problem.tick_s * max(_fill_and_drain(chain, group) for group in held),
        area_s=problem.tick_s * max(_area(chain, group) for group in held),
    )


class _Chain:
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

    def positions_of(self, group: int) -> list[int]:
        return [q for q, owner in enumerate(self.problem.group) if owner == group]

    def jobs(self, group: int) -> Iterator[Job]:
        """All operations of `group` with heads and tails, those of equal micro-batches spread as they must be."""
        problem, count = self.problem, self.problem.num_microbatches
        for q in self.positions_of(group):
            come = max([*problem.duration[:q], *problem.send[:q], *problem.recv[:q]], default=0)
            later = range(q + 1, self.last + 1)
            go = max((max(problem.duration[i], problem.send[i - 1], problem.recv[i - 1]) for i in later), default=0)
            for i in range(count):
                # The tail that a weight operation makes is not on the chain, so it does not queue there.
                tail = max(self.after[q], self._chain_after(q) + (count - 1 - i) * go)
                yield self.ready[q] + i * come, problem.duration[q], tail
            weight = self.weight(q)
            if weight:
                for i in range(count):
                    yield self.ready[q] + problem.duration[q] + i * max(come, problem.duration[q]), weight, 0

    def _chain_after(self, position: int) -> int:
        problem = self.problem
        return sum(problem.arrival(q) + problem.duration[q + 1] for q in range(position, self.last))


def _feed(chain: _Chain, group: int) -> int:
    """The bound *feed* of the module's description."""
    problem, count = chain.problem, chain.problem.num_microbatches
    mirror = _Chain(problem.mirror())
    mine = chain.positions_of(group)
    work = count * sum(problem.duration[q] + chain.weight(q) for q in mine)
    longest = 0
    for stage in (q for q in mine if q < problem.num_stages):
        idle = _unfed(chain, group, stage)
        # Weight operations can fill the end; the two idle times are apart, as the way between them is not yet over.
        idle += 0 if problem.weight else _unfed(mirror, group, stage)
        longest = max(longest, work + idle)
    return longest


def _unfed(chain: _Chain, group: int, position: int) -> int:
    """Time before `ready[position]` in which `group` has nothing to do, at least."""
    problem, count = chain.problem, chain.problem.num_microbatches
    before = [q for q in chain.positions_of(group) if q < position]
    until, done = chain.ready[position], 0
    for feeder in {problem.group[q - 1] for q in before if q}:
        fed = [q for q in before if q and problem.group[q - 1] == feeder]
        shortest = min(problem.duration[q - 1] for q in fed)
        time = until - min(chain.ready[q - 1] + problem.arrival(q - 1) for q in fed)
        visits = len(fed) * count
        if shortest:
            visits = min(visits, max(0, time) // shortest)
        done += visits * max(problem.duration[q] for q in fed)
    done += count * problem.duration[0] if 0 in before else 0
    return max(0, until - done)


def _link_jobs(chain: _Chain) -> Iterator[list[Job]]:
    """By group, kind of link and direction, its transfers. A receiver's time may begin a latency after the sender's."""
    problem = chain.problem
    for group, fabric in product(range(problem.num_groups), (False, True)):
        sends: list[Job] = []
        receives: list[Job] = [(0, 0, 0)]
        for q in range(chain.last):
            if problem.fabric[q] != fabric:
                continue
            leave = chain.ready[q] + problem.duration[q]
            rest = problem.duration[q + 1] + chain.after[q + 1]
            if problem.group[q] == group and problem.send[q]:
                spare = problem.arrival(q) - problem.send[q]
                sends += [(leave, problem.send[q], spare + rest)] * problem.num_microbatches
            if problem.group[q + 1] == group and problem.recv[q]:
                spare = problem.arrival(q) - problem.recv[q]
                receives += [(leave + spare, problem.recv[q], rest)] * problem.num_microbatches
        yield sends or [(0, 0, 0)]
        yield receives


def _preemptive(jobs: Sequence[Job]) -> int:
    """Least makespan of one machine that may interrupt (Jackson's rule: of what is released, the longest tail)."""
    import heapq

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


def _stages_of(chain: _Chain, group: int) -> list[int]:
    """Stages of `group` that hold activations, without the last one, whose activations never wait."""
    problem = chain.problem
    return [s for s in range(problem.num_stages - 1) if problem.group[s] == group and problem.memory[s]]


def _fill_and_drain(chain: _Chain, group: int) -> int:
    """The bound *fill* of the module's description for a group whose capacity binds; 0 otherwise."""
    problem, count = chain.problem, chain.problem.num_microbatches
    stages, capacity = _stages_of(chain, group), problem.capacity[group]
    if not stages or capacity >= problem.memory_of_group[group] * count:
        return 0
    most = capacity // min(problem.memory[s] for s in stages)
    last = problem.num_stages - 1
    if most >= len(stages) * count or problem.group[last] == group:
        # The last stage may run in between; its work is left out of the idle time by counting it as able to fill it.
        extra = problem.duration[last] + problem.duration[last + 1] + chain.weight(last + 1)
    else:
        extra = 0
    longest_forward = max(problem.duration[s] for s in stages)
    release_position = [chain.last - s for s in stages]
    back = max(problem.duration[q] + chain.weight(q) for q in release_position)
    first_release = min(chain.ready[q] for q in release_position)
    first_start = min(chain.ready[s] for s in stages)
    drain = min(chain.after[s] for s in stages)
    idle_before = max(0, first_release - most * longest_forward - extra * count)
    idle_after = max(0, drain - most * back - extra * count)
    idle = idle_before + idle_after if most < len(stages) * count else max(idle_before, idle_after)
    work = sum(problem.duration[q] + chain.weight(q) for q in chain.positions_of(group)) * count
    return work + max(idle, first_start)


def _area(chain: _Chain, group: int) -> int:
    """The bound *area* of the module's description for a group whose capacity binds; 0 otherwise."""
    problem, count = chain.problem, chain.problem.num_microbatches
    stages, capacity = _stages_of(chain, group), problem.capacity[group]
    if not stages or capacity >= UNLIMITED:
        return 0
    need = 0
    for stage in stages:
        release = chain.last - stage
        life = chain.ready[release] + problem.duration[release] + chain.weight(release) - chain.ready[stage]
        need += count * problem.memory[stage] * life
    largest = max(problem.memory[s] for s in stages)
    come = min(problem.duration[s] for s in stages)
    go = min(chain.weight(chain.last - s) or problem.duration[chain.last - s] for s in stages)
    first = min(chain.ready[s] for s in stages)
    end = 0 if problem.weight else min(chain.after[chain.last - s] for s in stages)
    full, part = divmod(min(capacity, sum(problem.memory[s] for s in stages) * count), largest)
    slots = [largest] * full + [part]

    def available(makespan: int) -> int:
        """Slot k opens with the k-th forward at the earliest, and closes k releases before the end at the latest."""
        span = makespan - first - end
        return sum(size * max(0, span - k * (come + go)) for k, size in enumerate(slots))

    low, high = 0, 2 * (first + end + need // max(1, min(capacity, need)) + len(slots) * (come + go)) + 2
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if available(middle) < need else (low, middle)
    return low


@dataclass(frozen=True, kw_only=True)
class Solved:
    """What CP-SAT found out."""

    status: str
    """`optimal`, `feasible` (`bound_s` < `makespan_s`) or `unknown` (no solution in time; the bound holds)."""
    makespan_s: float
    bound_s: float
    wall_s: float


def one_machine_bound(problem: Problem, group: int, *, limit_s: float) -> Solved:
    """The relaxation to one group (see the module's description), as far as `limit_s` allows; `bound_s` counts."""
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
        self.chain = _Chain(problem)
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
