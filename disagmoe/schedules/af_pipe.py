"""AF-Pipe's schedules *plain* and *deep* (paper section 3.2; DESIGN: "Schedule and runtime").

The p_A + p_F groups form a ring: A0 F0 A1 F1 ... A0 F0 ... Micro-batches go round it in rounds, and once the first
gradient is back, a group takes one forward and one backward in turn.

*plain* is interleaved 1F1B over the groups: a round has G = p_A + p_F micro-batches, just enough to keep a group busy
while the first one goes round the ring *if transfers take no time*. With a transfer time of c a hop, each turn of
the ring ends G c late while the pipeline fills, and again while it drains.

*deep* has rounds of 2 G, so that a turn has G (f + c) of time for G hops as long as c < f: one transfer hides behind
every forward. What remains is the fill and drain of the ring itself, (2p - 1)(3f + 2c) for p_A = p_F = p. The price
is warm-up twice as long, and about 4p micro-batches of activations instead of about 2p.

Forwards are wanted in the order of a *wave*: micro-batch i of a round of R reaches layer l at time l R + i max(p_A,
p_F), where a layer on the role with d groups takes d units of time (all groups are equally loaded then). With p_A =
p_F this is the usual order, a whole round on a group's one stage before the next. With p_A != p_F it is not: one
A-group before three F-groups must interleave three layers to keep all three busy. For coprime depths and R = p_A +
p_F the wave gives every group exactly one action at a time. Backwards are wanted in the mirror image of the wave.
The last stage (head and loss) stands outside: its forward goes first and its backward follows at once, so that the
logits of one micro-batch only are alive.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from disagmoe.layout import Layout, Stage, split_evenly
from disagmoe.schedules.actions import Action
from disagmoe.schedules.list_schedule import Costs, ListSchedule, Policy

ROUND_FACTOR = {"plain": 1, "deep": 2}
"""Length of a round in units of p_A + p_F micro-batches."""
ASSUMED_HOP = 2
"""Transfer time a hop assumed while merging, in halves of an average forward (see `assumed_costs`). An order made for
c = f is good for shorter transfers too; one made for c = 0 is not good for any other."""
SPARES = {"plain": (2, 0.1, 0.2), "deep": (4, 0.1, 0.2)}
"""Values of `Wave.spare` to try, in this order. Two is what the way to the head and back takes."""
WORTHWHILE = 0.01
"""Share of the makespan for which a wave that needs more memory is taken."""


def ring_order(
    layout: Layout,
    stages: Sequence[Stage],
    group_of_stage: Sequence[int],
    *,
    name: str,
    num_microbatches: int,
    in_flight: int = 0,
    usual: bool = False,
) -> tuple[tuple[Action, ...], ...]:
    """By group, its forwards and full backwards in the order of `plain` or `deep`.

    in_flight: most micro-batches between first forward and last backward; 0: as many as the schedule likes. Rounds
        are cut to fit, so that any number >= 1 completes.
    usual: take the first wave and try no other: a sixth of the work, for a look at memory.
    """
    waves = list(candidate_waves(layout, name=name, num_microbatches=num_microbatches, in_flight=in_flight))
    return best_order(
        layout,
        stages,
        group_of_stage,
        waves[:1] if usual else waves,
        name=name,
        in_flight=in_flight or num_microbatches,
    )


@dataclass(frozen=True, kw_only=True)
class Wave:
    """How micro-batches are cut into rounds, and how far groups may run ahead."""

    rounds: tuple[range, ...]
    overlap: bool
    """Whether the next round may start before this one's last forwards."""
    spare: float
    """Forwards that a group may be ahead on top of what the wave needs; below 1: that share of what it needs."""


def candidate_waves(layout: Layout, *, name: str, num_microbatches: int, in_flight: int) -> Iterator[Wave]:
    """The waves worth playing, the usual one first. All complete within `in_flight` (0: any number).

    Rounds are of equal length, differing by at most one: *plain* has none shorter than G (a short one would stall
    the ring), *deep* none longer than 2 G (memory). A round must fit into `in_flight`; half as long, the next one can
    fill the pipeline while it drains. Rounds that overlap need room for three and only help unequal depths. More
    `spare` costs memory and helps mostly *plain* and unequal depths, and not where `in_flight` limits.
    """
    round_length = ROUND_FACTOR[name] * (layout.attn_depth + layout.ffn_depth)
    cap = in_flight or num_microbatches
    fewest = num_microbatches // round_length
    counts = [max(1, fewest) if name == "plain" else -(-num_microbatches // round_length)]
    if in_flight and cap < 2 * round_length:
        longest = cap if name == "plain" else min(cap, round_length)
        counts += [-(-num_microbatches // max(1, length)) for length in (longest, cap // 2, cap // 3)]
    for count in dict.fromkeys(counts):
        rounds = tuple(split_evenly(num_microbatches, count))
        longest = len(rounds[0])
        if longest > cap:
            continue
        room = not in_flight or 3 * longest <= cap
        overlaps = (False, True) if layout.attn_depth != layout.ffn_depth and count > 1 and room else (False,)
        for overlap, spare in itertools.product(overlaps, SPARES[name][:1] if len(counts) > 1 else SPARES[name]):
            yield Wave(rounds=rounds, overlap=overlap, spare=spare)


def best_order(
    layout: Layout,
    stages: Sequence[Stage],
    group_of_stage: Sequence[int],
    waves: Sequence[Wave],
    *,
    name: str,
    in_flight: int,
) -> tuple[tuple[Action, ...], ...]:
    """Play every wave on assumed costs and keep the order that ends first: a later one if it gains `WORTHWHILE`."""
    costs = assumed_costs(layout, stages, hop=ASSUMED_HOP)
    best: ListSchedule | None = None
    for wave in waves:
        policy = wave_policy(layout, group_of_stage, wave, name=name, in_flight=in_flight)
        played = ListSchedule(group_of_stage, layout.num_groups, costs, policy).play()
        if played.lead != policy.lead:
            # Everybody has waited until some lead was raised. Known from the start, it costs no time.
            policy = replace(policy, lead=played.lead)
            played = ListSchedule(group_of_stage, layout.num_groups, costs, policy).play()
        if best is None or played.makespan < best.makespan * (1 - WORTHWHILE):
            best = played
    assert best is not None, "no wave fits into in_flight, although rounds of one micro-batch always do"
    return best.orders()


def wave_policy(layout: Layout, group_of_stage: Sequence[int], wave: Wave, *, name: str, in_flight: int) -> Policy:
    """Orders and warm-up of one wave. Times are integers: units of 1 / `scale` of a layer's share of a round."""
    scale = 4 * (layout.attn_depth + layout.ffn_depth)
    num_stages, num_layers = len(group_of_stage), len(group_of_stage) // 2
    slot = scale * max(layout.attn_depth, layout.ffn_depth)
    # Where in its layer's turn an F-stage starts: after the A-stage, and after half of what deep adds to a turn.
    half_layer = 4 * layout.attn_depth if name == "plain" else 2 * layout.attn_depth + scale // 4

    def arrival(stage: int, length: int) -> int:
        """Time from a round's start to the arrival of its first micro-batch at `stage`."""
        return length * (stage // 2 * scale + stage % 2 * half_layer)

    longest = len(wave.rounds[0])
    span = arrival(num_stages - 1, longest) + slot * (longest - 1) + 1
    forwards: list[tuple[int, int, int, int]] = []
    backwards: list[tuple[int, int, int, int]] = []
    start = 0
    for index, microbatches in enumerate(wave.rounds):
        length, order = len(microbatches), 0 if wave.overlap else index
        for stage in range(num_stages):
            forward = start + arrival(stage, length)
            backward = start + arrival(num_stages - 1, length) - arrival(stage, length)
            for i, microbatch in enumerate(microbatches):
                forwards.append((order, forward + i * slot, stage, microbatch))
                backwards.append((order, backward + i * slot, -stage, microbatch))
        # At most two rounds overlap in each direction: three in flight (see `candidate_waves`).
        start += max(length * num_layers * scale, -(-span // 2))
    # Forwards before the first backward, plus one: those of the wave until the first micro-batch reaches the last
    # stage (deep, whose wave takes two slots a hop), and while its gradient comes back (plain, one slot a hop each
    # way). With p_A = p_F: a round on each stage but the last, and two a hop from there to the pipeline's end.
    full_round = ROUND_FACTOR[name] * (layout.attn_depth + layout.ffn_depth)
    ways = 2 if name == "plain" else 1
    until = [0] * layout.num_groups
    for stage, group in enumerate(group_of_stage):
        to_end = arrival(num_stages - 1, full_round) - arrival(stage, full_round)
        until[group] = arrival(stage, longest) + ways * to_end
    lead = [0] * layout.num_groups
    for _, time, stage, _ in forwards:
        lead[group_of_stage[stage]] += time <= until[group_of_stage[stage]]
    return Policy(
        forwards=[(stage, microbatch) for _, _, stage, microbatch in sorted(forwards)],
        backwards=[(-stage, microbatch) for _, _, stage, microbatch in sorted(backwards)],
        lead=[max(1, count + int(wave.spare if wave.spare >= 1 else wave.spare * count)) for count in lead],
        in_flight=in_flight,
    )


def assumed_costs(layout: Layout, stages: Sequence[Stage], *, hop: int) -> Costs:
    """Costs to merge by when none are measured: groups equally loaded, backward twice forward, a light head.

    A role with fewer groups has shorter stages, because a good allocation gives all groups the same load. The head
    is assumed to take an eighth of a stage: an order for a light head is still good when it is heavy, but not the
    reverse. Unit: an eighth of an average stage's forward, times half the sum of depths (so that all are integers).
    """
    forward = [8 * layout.depth_of(stage.role) for stage in stages]
    forward[-1] //= 8
    backward = tuple(2 * cost for cost in forward)
    return Costs(forward=tuple(forward), backward=backward, hop=2 * hop * (layout.attn_depth + layout.ffn_depth))
