"""No schedule is shorter than this: lower bounds on the makespan that need no solver.

All hold for every order of compute and transfers, with links that serve one transfer at a time in each direction, and
with activations within the caps. Notation as in `disagmoe.schedules.problem`: a micro-batch passes the chain's 2 S
positions; `ready[q]` is the earliest start of position q (everything before it on idle groups and links), `after[q]`
the least time from its end to the end of all that depends on it.

- **Critical path**: one micro-batch alone.
- **Work**: on each group, for every subset {release >= r, tail >= t} of its operations: r + their durations + t, the
  largest of which is the preemptive optimum of one machine with heads and tails. When the i-th micro-batch reaches a
  position, every group has done for i micro-batches what comes before it there (`Chain.arrivals`); likewise what comes
  after it is still to be done for those that leave it last (`Chain.departures`).
- **Feed**: before the first micro-batch can be at a stage, its group can only have done what earlier stages of its own
  were fed with by the group before it. The rest of that time it idles; with whole backwards likewise at the end.
- **Link**: the same for each direction of each group's link.
- **Memory**, where a group's capacity C allows n activations at most. *Fill*: before its first release can start, a
  group starts at most n forwards, so it idles for the rest of that time; likewise after its last forward it has at most
  n activations to release. *Area*: an activation lives from the start of its forward until its release ends, at least
  as long as the way from there to the last stage and back; all lives together fit under C times the makespan, less the
  two ramps in which activations come and go one at a time.
  *Ramp*: the work bound again, where the (n + k)-th forward waits for the k-th release at the earliest.

Beside this, what needs a solver: `flow.py` (a stronger *area*), `exact.py` (one group with memory; true optima).

Not covered: the in-flight cap, which only makes schedules longer. Numbers are in ticks of the problem unless their
name ends in `_s`; rounding durations to ticks moves a bound by less than 1e-6 of itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

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
    ramp_s: float

    @property
    def best_s(self) -> float:
        return max(vars(self).values())

    @property
    def binding(self) -> str:
        """The argument that gives the best bound."""
        return max(vars(self), key=lambda name: vars(self)[name]).removesuffix("_s")


def lower_bounds(problem: Problem) -> Bounds:
    """All bounds that need no solver. Costs n log n for n operations on a group."""
    chain = Chain(problem)
    groups = range(problem.num_groups)
    held = [group for group in groups if chain.positions_of(group)]
    # Backwards in time the problem has the same form only if backwards are whole.
    sides = [chain] if problem.weight else [chain, Chain(problem.mirror())]
    return Bounds(
        critical_path_s=problem.tick_s * chain.critical_path,
        work_s=problem.tick_s * max(_preemptive(list(chain.jobs(group))) for group in held),
        feed_s=problem.tick_s * max(_feed(chain, group) for group in held),
        link_s=problem.tick_s * max(_preemptive(jobs) for jobs in _link_jobs(chain)),
        fill_s=problem.tick_s * max(_fill_and_drain(chain, group) for group in held),
        area_s=problem.tick_s * max(area_of(chain, group) for group in held),
        ramp_s=problem.tick_s * max(_ramp(side, group) for side in sides for group in held),
    )


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
        come = max([*problem.duration[:position], *problem.send[:position], *problem.recv[:position]], default=0)
        earliest = [self.ready[position] + i * come for i in count]
        for group in {problem.group[q] for q in before}:
            mine = [q for q in before if problem.group[q] == group]
            work = sum(problem.duration[q] for q in mine)
            # From the last of the group's work to here; what it did last may have been farther away.
            rest = self.ready[position] - self.ready[mine[-1]] - problem.duration[mine[-1]]
            first = self.ready[mine[0]] + rest
            earliest = [max(time, first + (i + 1) * work) for i, time in zip(count, earliest, strict=True)]
        return earliest

    def departures(self, position: int) -> list[int]:
        """By number, the time to the end when that many micro-batches (and one more) have yet to leave `position`, from
        the end of the first of them there."""
        problem, count = self.problem, range(self.problem.num_microbatches)
        later = range(position + 1, self.last + 1)
        go = max((max(problem.duration[q], problem.send[q - 1], problem.recv[q - 1]) for q in later), default=0)
        least = [max(self.after[position], self._chain_after(position) + i * go) for i in count]
        for group in {problem.group[q] for q in later}:
            mine = [q for q in later if problem.group[q] == group]
            until = self.ready[mine[0]] - self.ready[position] - problem.duration[position]
            work = sum(problem.duration[q] for q in mine)
            everything = work + sum(self.weight(q) for q in mine)
            end = min(self._chain_after(q) for q in mine)
            least = [
                max(time, until + (i + 1) * work + end, until + (i + 1) * everything)
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


def _feed(chain: Chain, group: int) -> int:
    """The bound *feed* of the module's description."""
    problem, count = chain.problem, chain.problem.num_microbatches
    mirror = Chain(problem.mirror())
    mine = chain.positions_of(group)
    work = count * sum(problem.duration[q] + chain.weight(q) for q in mine)
    longest = 0
    for stage in (q for q in mine if q < problem.num_stages):
        idle = _unfed(chain, group, stage)
        # Weight operations can fill the end; the two idle times are apart, as the way between them is not yet over.
        idle += 0 if problem.weight else _unfed(mirror, group, stage)
        longest = max(longest, work + idle)
    return longest


def _unfed(chain: Chain, group: int, position: int) -> int:
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


def _link_jobs(chain: Chain) -> Iterator[list[Job]]:
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


def _stages_of(chain: Chain, group: int) -> list[int]:
    """Stages of `group` that hold activations, without the last one, whose activations never wait."""
    problem = chain.problem
    return [s for s in range(problem.num_stages - 1) if problem.group[s] == group and problem.memory[s]]


def _fill_and_drain(chain: Chain, group: int) -> int:
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


def area_of(chain: Chain, group: int) -> int:
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


def _ramp(chain: Chain, group: int) -> int:
    """The bound *ramp* of the module's description for a group whose capacity binds; 0 otherwise."""
    problem, count = chain.problem, chain.problem.num_microbatches
    stages, capacity = _stages_of(chain, group), problem.capacity[group]
    if not stages or capacity >= problem.memory_of_group[group] * count:
        return 0
    most = capacity // min(problem.memory[s] for s in stages)
    shortest = min(problem.duration[s] for s in stages)
    tail = min(chain.after[s] for s in stages)
    forwards: list[int] = []
    releases: list[int] = []
    jobs: list[Job] = []
    for q in chain.positions_of(group):
        ready = chain.arrivals(q)
        if q in stages:
            forwards += ready
            # What is longer than the shortest forward may be done at any time.
            jobs += [(0, problem.duration[q] - shortest, 0)] * count
            continue
        tails = reversed(chain.departures(q))
        jobs += [(time, problem.duration[q], after) for time, after in zip(ready, tails, strict=True)]
        weight = chain.weight(q)
        jobs += [(time + problem.duration[q], weight, 0) for time in ready if weight]
        if chain.last - q in stages:
            releases += [time + problem.duration[q] + weight for time in ready]
    forwards.sort()
    releases.sort()
    for place, time in enumerate(forwards):
        jobs.append((max(time, releases[place - most]) if place >= most else time, shortest, tail))
    return _preemptive(jobs)
