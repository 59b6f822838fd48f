"""AF-Pipe's schedules *plain* and *deep* (paper section 3.2; DESIGN: "Schedule and runtime").

The p_A + p_F groups form a ring: A0 F0 A1 F1 ... A0 F0 ... Micro-batches go round it in rounds: a group runs all
micro-batches of a round on one of its stages before it goes to its next stage. Once the first gradient is back, a
group takes one forward and one backward in turn.

*plain* is interleaved 1F1B over the groups: a round has G = p_A + p_F micro-batches, just enough to keep a group busy
while the first one goes round the ring *if transfers take no time*. With a transfer time of c a hop, each turn of
the ring ends G c late while the pipeline fills, and again while it drains.

*deep* has rounds of 2 G, so that a turn has G (f + c) of time for G hops as long as c < f: one transfer hides behind
every forward. What remains is the fill and drain of the ring itself, (2p - 1)(3f + 2c) for p_A = p_F = p. The price
is warm-up twice as long, and about 4p micro-batches of activations instead of about 2p.
"""

from __future__ import annotations

from collections.abc import Sequence

from disagmoe.layout import Layout, Stage, build_stages, split_evenly
from disagmoe.schedules.actions import Schedule
from disagmoe.schedules.list_schedule import Costs, ListSchedule, Policy
from disagmoe.schedules.lower import lower
from disagmoe.schedules.validate import validate

ROUND_FACTOR = {"plain": 1, "deep": 2}
"""Length of a round in units of p_A + p_F micro-batches."""
ASSUMED_HOP = {"plain": 1, "deep": 2}
"""Transfer time a hop assumed while merging, in units of half a group's average forward (see `assumed_costs`)."""


def make_schedule(
    layout: Layout,
    is_moe_layer: Sequence[bool],
    *,
    name: str,
    num_microbatches: int,
    in_flight: int = 0,
    hoist: int = 8,
    send_after: int = 0,
) -> Schedule:
    """A validated schedule for one replica of `layout`, for a model with these layers.

    name: `plain` or `deep`.
    in_flight: most micro-batches between first forward and last backward; 0: as many as the schedule likes. Rounds
        are cut to this length, so that any number >= 1 completes.
    hoist, send_after: see `lower`.
    Raises ValueError for a value out of range. Works for any depths, layers and number of micro-batches.
    """
    if name not in ROUND_FACTOR:
        raise ValueError(f'schedule = "{name}": must be one of {", ".join(sorted(ROUND_FACTOR))}')
    if num_microbatches < 1:
        raise ValueError(f"microbatches = {num_microbatches}: must be at least 1")
    if in_flight < 0:
        raise ValueError(f"in_flight = {in_flight}: must be at least 1 (a micro-batch), or 0 for the schedule's own")
    stages = build_stages(layout, is_moe_layer)
    group_of_stage = tuple(layout.pipeline_group(stage.role, stage.group) for stage in stages)
    rounds = cut_rounds(layout, name=name, num_microbatches=num_microbatches, in_flight=in_flight)
    policy = Policy(
        rounds=rounds,
        lead=tuple(_lead(group, group_of_stage, rounds) for group in range(layout.num_groups)),
        in_flight=in_flight or num_microbatches,
    )
    costs = assumed_costs(layout, stages, hop=ASSUMED_HOP[name])
    compute = ListSchedule(group_of_stage, layout.num_groups, costs, policy).play()
    schedule = Schedule(
        name=name,
        num_microbatches=num_microbatches,
        stages=stages,
        group_of_stage=group_of_stage,
        num_groups=layout.num_groups,
        compute=compute,
        programs=lower(compute, stages=stages, group_of_stage=group_of_stage, hoist=hoist, send_after=send_after),
    )
    validate(schedule, in_flight=in_flight)
    return schedule


def cut_rounds(layout: Layout, *, name: str, num_microbatches: int, in_flight: int) -> tuple[range, ...]:
    """Equal rounds (sizes differ by at most one), no longer than the schedule's round and than `in_flight`."""
    longest = ROUND_FACTOR[name] * (layout.attn_depth + layout.ffn_depth)
    if in_flight:
        longest = min(longest, in_flight)
    return tuple(split_evenly(num_microbatches, -(-num_microbatches // longest)))


def _lead(group: int, group_of_stage: Sequence[int], rounds: Sequence[range]) -> int:
    """Forwards that `group` runs before its first backward, plus one.

    As in interleaved 1F1B: a whole round on each of its stages but the last, and two for every hop from its last
    stage to the end of the pipeline (one while the forward goes there, one while the gradient comes back).
    """
    own = [stage for stage, owner in enumerate(group_of_stage) if owner == group]
    if not own:
        return 1
    return (len(own) - 1) * len(rounds[0]) + 2 * (len(group_of_stage) - 1 - own[-1]) + 1


def assumed_costs(layout: Layout, stages: Sequence[Stage], *, hop: int) -> Costs:
    """Costs to merge by when none are measured: groups equally loaded, backward twice forward.

    A role with fewer groups has shorter stages, because a good allocation gives all groups the same load. Unit: half
    a forward of an average stage, times the sum of depths (so that all numbers are integers).
    """
    forward = tuple(4 * layout.depth_of(stage.role) for stage in stages)
    backward = tuple(2 * cost for cost in forward)
    return Costs(forward=forward, backward=backward, hop=hop * (layout.attn_depth + layout.ffn_depth))
