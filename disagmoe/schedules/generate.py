"""All generators by name: *plain* and *deep* (`af_pipe`), *fitted* to given costs (`search`), backward whole or split.

*fitted* plays the pipeline on given costs under caps on activations, many times and in many ways, and keeps the best
order. It starts from the orders of plain and deep too, and falls back to them, so it is never slower than they are
within the same caps. Split backward works for all three: input gradients first, weight gradients where a group would
wait or where the memory they hold is needed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace

from disagmoe.layout import Layout, Stage, build_stages
from disagmoe.schedules.actions import Action, Kind, Schedule
from disagmoe.schedules.af_pipe import ROUND_FACTOR, ring_order
from disagmoe.schedules.costs import StageTimes, assumed_stage_times
from disagmoe.schedules.dispatch import Play
from disagmoe.schedules.lower import lower
from disagmoe.schedules.problem import Problem, build_problem, order_fits
from disagmoe.schedules.search import BY_KEY, search
from disagmoe.schedules.timing import makespan
from disagmoe.schedules.validate import validate

NAMES = ("deep", "fitted", "plain")
Compute = tuple[tuple[Action, ...], ...]
EFFORT = 1_500_000
"""Operations that *fitted* schedules, over all its plays: a few seconds."""
EFFORT_LARGE = 600_000
"""The same for problems of more than `LARGE` operations. A few plays are made whatever that takes."""
LARGE = 10_000
EFFORT_ASSUMED = 100_000
"""The same where costs are only assumed."""
LONGEST_HOIST = 64
HOIST_GAIN = 0.001
"""Share of the makespan for which receives are posted as early as that."""
HOISTED = 0.99
"""Share of receives that are to be posted in time."""


def make_schedule(
    layout: Layout,
    is_moe_layer: Sequence[bool],
    *,
    name: str,
    num_microbatches: int,
    in_flight: int = 0,
    hoist: int = 8,
    send_after: int = 0,
    split_backward: bool = False,
    costs: StageTimes | None = None,
) -> Schedule:
    """A validated schedule for one replica of `layout`, for a model with these layers.

    name: `plain`, `deep` or `fitted`.
    in_flight: most micro-batches between first forward and last backward; 0: as many as the schedule likes.
    hoist, send_after: see `lower`; *fitted* posts receives earlier than `hoist` where that gains time.
    split_backward: input and weight gradients are actions of their own.
    costs: what *fitted*, and the weight gradients of a split backward, are placed for; None: assumed ones.
    Raises ValueError for a value out of range. Works for any depths, layers and number of micro-batches.
    """
    if name not in NAMES:
        raise ValueError(f'schedule = "{name}": must be one of {", ".join(NAMES)}')
    if name == "fitted":
        return make_fitted(
            layout,
            is_moe_layer,
            costs=costs,
            num_microbatches=num_microbatches,
            in_flight=in_flight,
            hoist=hoist,
            send_after=send_after,
            split_backward=split_backward,
        )
    compute = make_order(layout, is_moe_layer, name=name, num_microbatches=num_microbatches, in_flight=in_flight)
    frame = _Frame(layout, is_moe_layer, num_microbatches, in_flight)
    if split_backward:
        compute = frame.split(compute, costs or frame.assumed_costs())
    schedule = frame.finish(name, compute, hoist=hoist, send_after=send_after)
    validate(schedule, in_flight=in_flight)
    return schedule


def make_order(
    layout: Layout,
    is_moe_layer: Sequence[bool],
    *,
    name: str,
    num_microbatches: int,
    in_flight: int = 0,
    usual: bool = False,
) -> Compute:
    """By group, the compute actions of *plain* or *deep* with whole backwards: what decides activations. Arguments as
    of `make_schedule`; usual: see `af_pipe.ring_order`."""
    return _Frame(layout, is_moe_layer, num_microbatches, in_flight).ring_order(name, in_flight, usual=usual)


def split_order(
    compute: Compute,
    layout: Layout,
    is_moe_layer: Sequence[bool],
    *,
    num_microbatches: int,
    costs: StageTimes,
    in_flight: int = 0,
) -> Compute:
    """An order of `make_order` with weight gradients apart, as `make_schedule` puts them."""
    return _Frame(layout, is_moe_layer, num_microbatches, in_flight).split(compute, costs)


def add_transfers(
    name: str,
    compute: Compute,
    layout: Layout,
    is_moe_layer: Sequence[bool],
    *,
    num_microbatches: int,
    hoist: int = 8,
    send_after: int = 0,
) -> Schedule:
    """The schedule with these compute actions; not validated. hoist, send_after: see `lower`."""
    frame = _Frame(layout, is_moe_layer, num_microbatches, 0)
    return frame.finish(name, compute, hoist=hoist, send_after=send_after)


def make_fitted(
    layout: Layout,
    is_moe_layer: Sequence[bool],
    *,
    num_microbatches: int,
    costs: StageTimes | None = None,
    cap: float = 0.0,
    memory_bytes: float | Sequence[float] = 0.0,
    in_flight: int = 0,
    split_backward: bool = False,
    hoist: int = 8,
    send_after: int = 0,
    effort: int = 0,
) -> Schedule:
    """The best order found for `costs` within the caps; validated.

    costs: by stage; None: assumed ones.
    cap: a group's activations are at most those of `cap` micro-batches in all its stages. Without any cap,
        2 (p_A + p_F) + 2, which is what *deep* takes.
    memory_bytes: most bytes of activations a worker, one number or one a group; needs `costs.activation_bytes`.
    in_flight: most micro-batches between first forward and last backward.
    hoist: receives are posted that many compute actions ahead, or 2, 4, ... times as many where transfers would wait.
    effort: operations to schedule over all plays; 0: `EFFORT`.
    Raises ValueError for a value out of range, and for caps that one micro-batch alone breaks.
    """
    frame = _Frame(layout, is_moe_layer, num_microbatches, in_flight)
    if costs is None:
        costs, effort = frame.assumed_costs(), effort or EFFORT_ASSUMED
    has_bytes = any(memory_bytes) if isinstance(memory_bytes, Sequence) else bool(memory_bytes)
    if has_bytes and not any(costs.activation_bytes):
        raise ValueError("memory_bytes is given but costs.activation_bytes is empty: give both, or cap")
    if not (cap or has_bytes):
        cap = in_flight or 2 * (layout.attn_depth + layout.ffn_depth) + 2
    problem = build_problem(
        costs,
        frame.group_of_stage,
        num_groups=layout.num_groups,
        num_microbatches=num_microbatches,
        split_backward=split_backward,
        cap=cap,
        memory_bytes=memory_bytes,
        in_flight=in_flight,
    )
    simple = list(_simple_plays(frame, problem))
    effort = effort or (EFFORT_LARGE if problem.num_operations > LARGE else EFFORT)
    best = search(problem, simple, effort=effort)
    schedule, end = _hoisted(frame, problem, best, costs, hoist=hoist, send_after=send_after)
    for play in simple:
        # Posting receives, and links of two kinds, are known only now.
        if play is not best and play.makespan * problem.tick_s < end:
            other, other_end = _hoisted(frame, problem, play, costs, hoist=hoist, send_after=send_after)
            schedule, end = (other, other_end) if other_end < end else (schedule, end)
    validate(schedule, in_flight=in_flight)
    return schedule


class _Frame:
    """What all orders for one model and layout have in common."""

    def __init__(self, layout: Layout, is_moe_layer: Sequence[bool], num_microbatches: int, in_flight: int) -> None:
        if num_microbatches < 1:
            raise ValueError(f"microbatches = {num_microbatches}: must be at least 1")
        if in_flight < 0:
            raise ValueError(
                f"in_flight = {in_flight}: must be at least 1 (a micro-batch), or 0 for the schedule's own"
            )
        self.layout = layout
        self.num_microbatches = num_microbatches
        self.in_flight = in_flight
        self.stages: tuple[Stage, ...] = build_stages(layout, is_moe_layer)
        self.group_of_stage = tuple(layout.pipeline_group(stage.role, stage.group) for stage in self.stages)

    def assumed_costs(self) -> StageTimes:
        return assumed_stage_times(self.layout, self.stages)

    def ring_order(self, name: str, in_flight: int, *, usual: bool = False) -> Compute:
        return ring_order(
            self.layout,
            self.stages,
            self.group_of_stage,
            name=name,
            num_microbatches=self.num_microbatches,
            in_flight=in_flight,
            usual=usual,
        )

    def split(self, compute: Compute, costs: StageTimes) -> Compute:
        """`compute` with weight gradients apart, within the activations that it has with whole backwards."""
        problem = build_problem(
            costs,
            self.group_of_stage,
            num_groups=self.layout.num_groups,
            num_microbatches=self.num_microbatches,
            split_backward=True,
            in_flight=self.in_flight,
        )
        return compute_orders(problem, play_order(self.within_own_peak(problem, compute), compute))

    @staticmethod
    def within_own_peak(problem: Problem, compute: Compute) -> Problem:
        """`problem` with the activations that `compute` has with whole backwards as its caps."""
        return replace(problem, capacity=tuple(_peak(problem, order) for order in compute))

    def finish(self, name: str, compute: Compute, *, hoist: int, send_after: int) -> Schedule:
        """The schedule, with sends and receives; not validated yet."""
        return Schedule(
            name=name,
            num_microbatches=self.num_microbatches,
            stages=self.stages,
            group_of_stage=self.group_of_stage,
            num_groups=self.layout.num_groups,
            compute=compute,
            programs=lower(
                compute, stages=self.stages, group_of_stage=self.group_of_stage, hoist=hoist, send_after=send_after
            ),
        )


def play_order(problem: Problem, compute: Compute) -> Play:
    """Play an order of whole backwards: as it is, or, where `problem` splits them, its forwards and input halves in
    order with weight halves where a group waits or memory is short."""
    given = [[problem.operation(action) for action in order] for order in compute]
    key = [0.0] * problem.num_operations
    for order in given:
        for place, operation in enumerate(order):
            key[operation] = float(place)
    if not problem.weight:
        return Play(problem, given, key, BY_KEY, fixed=True).run()
    half = problem.num_stages * problem.num_microbatches
    longest = max(len(order) for order in given)
    for operation in range(2 * half, problem.num_operations):
        stage, microbatch = divmod(operation - 2 * half, problem.num_microbatches)
        position = 2 * problem.num_stages - 1 - stage
        key[operation] = longest + key[position * problem.num_microbatches + microbatch]
    return Play(problem, [[o for o in order if o < half] for order in given], key, BY_KEY).run()


def compute_orders(problem: Problem, play: Play) -> Compute:
    return tuple(tuple(problem.action(operation) for operation in order) for order in play.order)


def _peak(problem: Problem, order: Sequence[Action]) -> int:
    """Most activations that an order of whole backwards keeps, in the problem's units."""
    held = peak = 0
    for kind, stage, _ in order:
        held += problem.memory[stage] if kind is Kind.FORWARD else -problem.memory[stage]
        peak = max(peak, held)
    return peak


def _simple_plays(frame: _Frame, problem: Problem) -> Iterator[Play]:
    """Plays of *plain* and *deep* that fit into the caps, as they like it and with their own cap on micro-batches."""
    held = zip(problem.capacity, problem.memory_of_group, strict=True)
    # Costs need not say what activations take; then memory sets no limit.
    most = min((c // m for c, m in held if m), default=problem.in_flight)
    seen: set[Compute] = set()
    whole = replace(problem, weight=())
    for name in ROUND_FACTOR:
        for in_flight in dict.fromkeys((frame.in_flight, min(most, problem.in_flight))):
            if in_flight > frame.num_microbatches:
                continue
            compute = frame.ring_order(name, in_flight)
            fits = all(
                order_fits(whole, group, [problem.operation(action) for action in order])
                for group, order in enumerate(compute)
            )
            if fits and compute not in seen:
                seen.add(compute)
                yield play_order(problem, compute)
                if problem.weight:
                    # As `make_schedule` splits it: sometimes less memory makes the better order.
                    yield play_order(frame.within_own_peak(problem, compute), compute)


def _hoisted(
    frame: _Frame, problem: Problem, play: Play, costs: StageTimes, *, hoist: int, send_after: int
) -> tuple[Schedule, float]:
    """Receives as late as `hoist` says, or earlier where transfers would wait for them otherwise; with its makespan."""
    compute = compute_orders(problem, play)
    wanted, hoist = _wanted_hoist(problem, play), max(1, hoist)
    while hoist < min(wanted, LONGEST_HOIST):
        hoist *= 2
    best = frame.finish("fitted", compute, hoist=hoist, send_after=send_after)
    end = makespan(best, costs)
    if hoist < LONGEST_HOIST and end > play.makespan * problem.tick_s * (1 + HOIST_GAIN):
        other = frame.finish("fitted", compute, hoist=LONGEST_HOIST, send_after=send_after)
        other_end = makespan(other, costs)
        best, end = (other, other_end) if other_end < end * (1 - HOIST_GAIN) else (best, end)
    return best, end


def _wanted_hoist(problem: Problem, play: Play) -> int:
    """How many compute actions ahead receives must be posted so that hardly a transfer waits for one in `play`."""
    count = problem.num_microbatches
    starts = [[play.start[operation] for operation in order] for order in play.order]
    ahead = []
    for group, order in enumerate(play.order):
        for place, operation in enumerate(order):
            position = operation // count
            if 0 < position < 2 * problem.num_stages and position != problem.num_stages:
                made = play.start[operation - count] + problem.duration[position - 1]
                # The receive is posted when an action ends, just before the next one.
                ahead.append(place - bisect_right(starts[group], made, 0, place) + 1)
    return sorted(ahead)[int(HOISTED * (len(ahead) - 1))] if ahead else 0
