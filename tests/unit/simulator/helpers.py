"""Small schedules and random instances for the simulator's tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from disagmoe.layout import Layout
from disagmoe.schedules import Action, Schedule, make_schedule
from disagmoe.simulator.costs import NO_HOP, Hop, StageCosts, Workers
from disagmoe.simulator.engine import Options


def af_schedule(
    depths: tuple[int, int], layers: int, microbatches: int, name: str = "deep", hoist: int = 8
) -> Schedule:
    layout = Layout(attn_depth=depths[0], ffn_depth=depths[1], attn_workers=1, ffn_workers=1)
    return make_schedule(layout, [True] * layers, name=name, num_microbatches=microbatches, hoist=hoist)


def with_programs(schedule: Schedule, programs: Sequence[Sequence[Action]]) -> Schedule:
    compute = tuple(tuple(a for a in program if a.kind.is_compute) for program in programs)
    return replace(schedule, programs=tuple(map(tuple, programs)), compute=compute)


@dataclass(frozen=True, kw_only=True)
class Instance:
    schedule: Schedule
    costs: StageCosts
    workers: Workers
    options: Options


@st.composite
def instances(draw: st.DrawFn, *, alike: bool = False) -> Instance:
    """Any schedule, uneven stages and hops; workers alike or with stragglers and uneven rows."""
    depths = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    schedule = af_schedule(
        depths,
        draw(st.integers(1, 5)),
        draw(st.integers(1, 8)),
        draw(st.sampled_from(["plain", "deep"])),
        draw(st.sampled_from([0, 1, 8])),
    )
    # Quarters are exact in binary, so that events that should coincide do, whatever the order of additions.
    seconds = st.integers(0, 12).map(lambda quarter: quarter / 4)
    stages = schedule.num_stages

    def hop() -> Hop:
        return Hop(
            send_s=draw(seconds),
            recv_s=draw(seconds),
            fabric_send_s=draw(st.sampled_from([0.0, 0.0, 0.5])),
            fabric_recv_s=draw(st.sampled_from([0.0, 0.0, 1.0])),
            latency_s=draw(st.sampled_from([0.0, 0.25])),
        )

    halves = [tuple(draw(seconds) for _ in range(stages)) for _ in range(3)]
    costs = StageCosts(
        forward_s=halves[0],
        backward_s=tuple(a + b for a, b in zip(halves[1], halves[2], strict=True)),
        backward_input_s=halves[1],
        backward_weight_s=halves[2],
        forward_hop=(NO_HOP, *(hop() for _ in range(stages - 1))),
        backward_hop=(*(hop() for _ in range(stages - 1)), NO_HOP),
        activation_bytes=tuple(draw(seconds) for _ in range(stages)),
    )
    count = (*[draw(st.sampled_from([1, 2, 4]))] * depths[0], *[draw(st.sampled_from([1, 2, 4]))] * depths[1])
    slowdown: dict[tuple[int, int], float] = {}
    share: dict[int, tuple[float, ...]] = {}
    if not alike:
        slowdown = {(0, 0): draw(st.sampled_from([1.0, 2.5]))}
        if count[-1] > 1:
            share = {len(count) - 1: (1.5, 0.5, *[1.0] * (count[-1] - 2))}
    options = Options(
        links=draw(st.sampled_from(["in_order", "fair", "no_contention"])),
        host=draw(st.sampled_from(["blocking", "ahead"])),
    )
    workers = Workers(count=count, slowdown=slowdown, share=share)
    return Instance(schedule=schedule, costs=costs, workers=workers, options=options)
