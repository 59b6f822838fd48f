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
  *Ramp* (`ramp.py`): the work bound again, where the (n + k)-th forward waits for the k-th release at the earliest,
  on the group itself and on those that feed it.

Beside this, what needs a solver: `flow.py` (a stronger *area*), `exact.py` (one group with memory; true optima).

Not covered: the in-flight cap, which only makes schedules longer. Numbers are in ticks of the problem unless their
name ends in `_s`; rounding durations to ticks moves a bound by less than 1e-6 of itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from disagmoe.schedules.problem import UNLIMITED, Problem
from disagmoe.simulator.chain import Chain, Job, preemptive, stages_of
from disagmoe.simulator.ramp import ramp_bound


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
    return Bounds(
        critical_path_s=problem.tick_s * chain.critical_path,
        work_s=problem.tick_s * max(preemptive(list(chain.jobs(group))) for group in held),
        feed_s=problem.tick_s * max(_feed(chain, group) for group in held),
        link_s=problem.tick_s * max(preemptive(jobs) for jobs in _link_jobs(chain)),
        fill_s=problem.tick_s * max(_fill_and_drain(chain, group) for group in held),
        area_s=problem.tick_s * max(area_of(chain, group) for group in held),
        ramp_s=problem.tick_s * ramp_bound(chain),
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


def _fill_and_drain(chain: Chain, group: int) -> int:
    """The bound *fill* of the module's description for a group whose capacity binds; 0 otherwise."""
    problem, count = chain.problem, chain.problem.num_microbatches
    stages, capacity = stages_of(chain, group), problem.capacity[group]
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
    stages, capacity = stages_of(chain, group), problem.capacity[group]
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
