"""make_schedule: always complete and in order, within its cap, near its bound, fast."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings

from disagmoe.schedules import Kind, make_schedule, peak_in_flight, peak_microbatches, validate

from .helpers import Case, cases, execute, make_layout, pictures

QUICK = settings(max_examples=150, deadline=None)
WIDE = settings(max_examples=2000, deadline=None)


def check(case: Case) -> None:
    schedule = case.make()
    validate(schedule, in_flight=case.in_flight)
    microbatches, stages = case.num_microbatches, 2 * sum(case.is_moe_layer) + 1
    assert schedule.num_stages == stages
    assert sum(len(order) for order in schedule.compute) == 2 * stages * microbatches
    assert sum(len(program) for program in schedule.programs) == 2 * microbatches * (stages + 2 * (stages - 1))
    assert not case.in_flight or peak_microbatches(schedule) <= case.in_flight
    for blocking in (False, True):
        done = [action for _, action in execute(schedule, blocking=blocking, seed=microbatches)]
        step = {action: i for i, action in enumerate(done)}
        for microbatch in range(microbatches):
            forwards = [step[(Kind.FORWARD, s, microbatch)] for s in range(stages)]
            backwards = [step[(Kind.FULL_BACKWARD, s, microbatch)] for s in reversed(range(stages))]
            assert forwards + backwards == sorted(forwards + backwards)


@given(case=cases)
@QUICK
def test_any_layout_completes_in_order_over_untagged_channels(case: Case) -> None:
    check(case)


@pytest.mark.full
@given(case=cases)
@WIDE
def test_any_layout_wide(case: Case) -> None:
    check(case)


def test_the_same_input_gives_the_same_schedule() -> None:
    def make() -> object:
        return make_schedule(make_layout(2, 3), [False, *[True] * 6], name="deep", num_microbatches=11, in_flight=7)

    assert make() == make()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "gpipe"}, 'schedule = "gpipe": must be one of deep, fitted, plain'),
        ({"num_microbatches": 0}, "microbatches = 0: must be at least 1"),
        ({"in_flight": -1}, "in_flight = -1: must be at least 1"),
        ({"hoist": -1}, "hoist = -1: must be 0"),
        ({"send_after": 2}, "send_after = 2: must be 0 .* or 1"),
    ],
)
def test_values_out_of_range_are_refused(arguments: dict[str, object], message: str) -> None:
    defaults: dict[str, object] = {"name": "plain", "num_microbatches": 2}
    with pytest.raises(ValueError, match=message):
        make_schedule(make_layout(1, 1), [True], **{**defaults, **arguments})  # type: ignore[arg-type]


def test_one_layer_two_microbatches_by_hand() -> None:
    schedule = make_schedule(make_layout(1, 1), [True], name="plain", num_microbatches=2, hoist=0)
    attention, experts = (" ".join(str(a) for a in program) for program in schedule.programs)
    assert attention == (
        "0F0 0SEND_F0 0F1 2RECV_F0 0SEND_F1 2F0 2B0 2RECV_F1 2SEND_B0 2F1 2B1 0RECV_B0 2SEND_B1 0B0 0RECV_B1 0B1"
    )
    assert experts == ("1RECV_F0 1F0 1RECV_F1 1SEND_F0 1F1 1RECV_B0 1SEND_F1 1B0 1RECV_B1 1SEND_B0 1B1 1SEND_B1")


def test_no_moe_layer_runs_on_the_first_attention_group_alone() -> None:
    schedule = make_schedule(make_layout(2, 2), [False, False], name="deep", num_microbatches=2)
    assert [[str(a) for a in program] for program in schedule.programs] == [["0F0", "0B0", "0F1", "0B1"], [], [], []]


@pytest.mark.parametrize("name", ["plain", "deep"])
@pytest.mark.parametrize("depths", [(1, 1), (2, 2), (1, 3), (3, 2)])
def test_logits_of_one_microbatch_only_are_alive(name: str, depths: tuple[int, int]) -> None:
    schedule = make_schedule(make_layout(*depths), [True] * 7, name=name, num_microbatches=17)
    last = schedule.num_stages - 1
    for order in schedule.compute:
        for action, following in itertools.pairwise(order):
            if action.stage == last and action.kind is Kind.FORWARD:
                assert following == (Kind.FULL_BACKWARD, last, action.microbatch)


UNIFORM = [(1, 6, 16), (2, 4, 32), (2, 8, 32), (4, 12, 64), (4, 28, 32)]
"""(p_A = p_F, MoE layers, micro-batches)."""


@pytest.mark.parametrize(("depth", "layers", "microbatches"), UNIFORM)
@pytest.mark.parametrize("hop", [0.3, 0.5, 0.8])
def test_deep_reaches_its_bound_and_beats_plain(depth: int, layers: int, microbatches: int, hop: float) -> None:
    """Bubble (2p - 1)(3f + 2c) when the head takes no time and c < f; about 4p micro-batches of activations."""
    durations = pictures.Durations(hop=hop, head=0.0)
    ends = {}
    for name in ("plain", "deep"):
        schedule = make_schedule(make_layout(depth, depth), [True] * layers, name=name, num_microbatches=microbatches)
        ends[name] = pictures.makespan(schedule, durations)
    bound = 3 * microbatches * layers / depth + (2 * depth - 1) * (3 + 2 * hop)
    assert bound - 1e-9 <= ends["deep"] <= 1.02 * bound
    assert ends["deep"] < ends["plain"]
    assert max(peak_in_flight(schedule)) <= (4 * depth + 2) * layers / depth + 4


@pytest.mark.parametrize(("depth", "layers", "microbatches"), UNIFORM)
def test_plain_is_as_good_as_the_closed_formula(depth: int, layers: int, microbatches: int) -> None:
    """Against interleaved 1F1B on the same ring, whose gradients also come two hops late, from the head."""
    schedule = make_schedule(make_layout(depth, depth), [True] * layers, name="plain", num_microbatches=microbatches)
    for hop, factor in ((0.0, 1.03), (0.3, 1.0), (0.5, 1.0), (0.8, 1.0)):
        end = pictures.makespan(schedule, pictures.Durations(hop=hop, head=0.0))
        assert end <= factor * interleaved_makespan(2 * depth, layers // depth, microbatches, hop)


def interleaved_makespan(groups: int, turns: int, microbatches: int, hop: float) -> float:
    """Interleaved 1F1B by its closed formula, after Megatron-LM; a forward takes 1, a backward 2.

    Rounds of `groups` micro-batches; (turns - 1) groups + 2 (groups - g - 1) forwards of warm-up on group g, then one
    forward and one backward in turn.
    """
    total, last = turns * microbatches, groups * turns - 1
    orders: list[list[tuple[bool, int, int]]] = []
    for group in range(groups):
        warm_up = min(total, (turns - 1) * groups + 2 * (groups - group - 1))
        units = [
            (turn * groups + group, microbatch)
            for start in range(0, microbatches, groups)
            for turn in range(turns)
            for microbatch in range(start, start + groups)
        ]
        back = [(last - (stage // groups) * groups - (groups - 1 - group), m) for stage, m in units]
        order = [(False, *unit) for unit in units[:warm_up]]
        for forward, backward in zip(units[warm_up:], back, strict=False):
            order += [(False, *forward), (True, *backward)]
        orders.append(order + [(True, *unit) for unit in back[total - warm_up :]])
    end: dict[tuple[bool, int, int], float] = {}
    free, position = [0.0] * groups, [0] * groups
    while any(position[g] < len(orders[g]) for g in range(groups)):
        for group, order in enumerate(orders):
            while position[group] < len(order):
                backward, stage, m = order[position[group]]
                needed = (True, stage + 1, m) if backward else (False, stage - 1, m)
                if 0 <= needed[1] <= last and needed not in end:
                    break
                turn = end[(False, last, m)] + 2 * hop if backward and stage == last else 0.0
                free[group] = max(free[group], end.get(needed, -hop) + hop, turn) + (2 if backward else 1)
                end[(backward, stage, m)] = free[group]
                position[group] += 1
    return max(free)


@pytest.mark.parametrize("depths", [(1, 2), (1, 3), (3, 1), (2, 3)])
def test_unequal_depths_stay_near_their_bound(depths: tuple[int, int]) -> None:
    """Stages of equal length, so that the shallow role is the bottleneck: nothing else may hold it up for long."""
    schedule = make_schedule(make_layout(*depths), [True] * 12, name="deep", num_microbatches=32)
    end = pictures.makespan(schedule, pictures.Durations(hop=0.5, head=0.0))
    work = 3 * 32 * 12 / min(depths)
    assert end <= 1.06 * work


def test_speed_of_24000_actions() -> None:
    start = time.process_time()
    schedule = make_schedule(make_layout(8, 8), [True] * 96, name="deep", num_microbatches=64)
    assert sum(len(order) for order in schedule.compute) > 24_000
    assert time.process_time() - start <= 5.0
