"""Fitted schedules and split backward: complete within every cap, never slower than simpler ones, near the optimum."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagmoe.layout import build_stages
from disagmoe.schedules import Action, Kind, Schedule, make_fitted, make_schedule, peak_microbatches, validate
from disagmoe.schedules.costs import OrderCosts, OrderHop, simple_costs
from disagmoe.schedules.dispatch import Rule
from disagmoe.schedules.guarded import GuardedPlay
from disagmoe.schedules.problem import Problem, build_problem, order_fits
from disagmoe.schedules.slants import GUARDED
from disagmoe.schedules.timing import end_times, makespan
from disagmoe.simulator.bounds import lower_bounds
from disagmoe.simulator.chain import Chain
from disagmoe.simulator.costs import Hop, StageCosts
from disagmoe.simulator.engine import simulate
from disagmoe.simulator.exact import one_machine_bound, optimum
from disagmoe.simulator.flow import flow_bound

from .helpers import Case, cases, execute, make_layout

LITTLE = 2000
"""Effort that leaves little but the first plays."""


def groups_of(case: Case) -> tuple[int, ...]:
    layout = make_layout(case.attn_depth, case.ffn_depth, colocate=case.colocate)
    return tuple(layout.pipeline_group(s.role, s.group) for s in build_stages(layout, case.is_moe_layer))


def random_costs(num_stages: int, seed: int) -> OrderCosts:
    rng = random.Random(seed)

    def hop() -> OrderHop:
        return OrderHop(*(rng.choice((0.0, rng.uniform(0, 2))) for _ in range(4)), rng.choice((0.0, 0.3)))

    def times() -> tuple[float, ...]:
        return tuple(rng.choice((0.0, 0.5, 1.0, rng.uniform(0.1, 3))) for _ in range(num_stages))

    return OrderCosts(
        forward_s=times(),
        backward_s=times(),
        backward_input_s=times(),
        backward_weight_s=times(),
        forward_hop=tuple(hop() for _ in range(num_stages)),
        backward_hop=tuple(hop() for _ in range(num_stages)),
        activation_bytes=tuple(rng.uniform(0.1, 2.0) for _ in range(num_stages)),
    )


def fits(problem: Problem, schedule: Schedule) -> bool:
    return all(
        order_fits(problem, group, [problem.operation(action) for action in order])
        for group, order in enumerate(schedule.compute)
    )


def check_complete(schedule: Schedule, *, split: bool, in_flight: int, seed: int) -> None:
    validate(schedule, in_flight=in_flight)
    stages, count = schedule.num_stages, schedule.num_microbatches
    assert sum(len(order) for order in schedule.compute) == (3 if split else 2) * stages * count
    back = Kind.BACKWARD_INPUT if split else Kind.FULL_BACKWARD
    for blocking in (False, True):
        step = {a: i for i, (_, a) in enumerate(execute(schedule, blocking=blocking, seed=seed))}
        for microbatch in range(count):
            chain = [step[Action(Kind.FORWARD, s, microbatch)] for s in range(stages)]
            chain += [step[Action(back, s, microbatch)] for s in reversed(range(stages))]
            assert chain == sorted(chain)
            for stage in range(stages) if split else ():
                weight = step[Action(Kind.BACKWARD_WEIGHT, stage, microbatch)]
                assert weight > step[Action(back, stage, microbatch)]
    for order in schedule.compute:  # Logits of one micro-batch only.
        of_head = [action.microbatch for action in order if action.stage == stages - 1]
        each = 3 if split else 2
        assert all(len(set(of_head[i : i + each])) == 1 for i in range(0, len(of_head), each))


def check_fitted(case: Case, *, seed: int, cap: int, split: bool) -> None:
    groups = groups_of(case)
    costs = random_costs(len(groups), seed)
    options = {"costs": costs, "cap": cap, "in_flight": case.in_flight, "split_backward": split}
    schedule = make_fitted(
        make_layout(case.attn_depth, case.ffn_depth, colocate=case.colocate),
        case.is_moe_layer,
        num_microbatches=case.num_microbatches,
        hoist=case.hoist,
        send_after=case.send_after,
        effort=LITTLE,
        **options,
    )
    check_complete(schedule, split=split, in_flight=case.in_flight, seed=seed)
    assert not case.in_flight or peak_microbatches(schedule) <= case.in_flight
    cap = cap or case.in_flight or 2 * (case.attn_depth + case.ffn_depth) + 2
    problem = build_problem(
        costs,
        groups,
        num_groups=schedule.num_groups,
        num_microbatches=case.num_microbatches,
        split_backward=split,
        cap=cap,
        in_flight=case.in_flight,
    )
    assert fits(problem, schedule)
    end = makespan(schedule, costs)
    assert end >= lower_bounds(problem).best_s * (1 - 1e-5) - 1e-9


@given(case=cases, seed=st.integers(0, 1 << 30), cap=st.integers(0, 12), split=st.booleans())
@settings(max_examples=25, deadline=None)
def test_any_layout_costs_and_caps(case: Case, seed: int, cap: int, split: bool) -> None:
    check_fitted(replace(case, num_microbatches=min(case.num_microbatches, 12)), seed=seed, cap=cap, split=split)


@pytest.mark.full
@given(case=cases, seed=st.integers(0, 1 << 30), cap=st.integers(0, 40), split=st.booleans())
@settings(max_examples=1000, deadline=None)
def test_any_layout_costs_and_caps_wide(case: Case, seed: int, cap: int, split: bool) -> None:
    check_fitted(case, seed=seed, cap=cap, split=split)


@given(case=cases)
@settings(max_examples=20, deadline=None)
def test_simple_orders_split(case: Case) -> None:
    options = {"num_microbatches": case.num_microbatches, "in_flight": case.in_flight, "hoist": case.hoist}
    layout = make_layout(case.attn_depth, case.ffn_depth, colocate=case.colocate)
    whole = make_schedule(layout, case.is_moe_layer, name=case.name, **options)
    split = make_schedule(layout, case.is_moe_layer, name=case.name, split_backward=True, **options)
    check_complete(split, split=True, in_flight=case.in_flight, seed=case.num_microbatches)
    for before, after in zip(whole.compute, split.compute, strict=True):
        assert [a for a in before if a.kind is Kind.FORWARD] == [a for a in after if a.kind is Kind.FORWARD]
        assert peak(after) <= peak(before)


def peak(order: Sequence[Action]) -> int:
    """Activations alive at a time."""
    steps = {Kind.FORWARD: 1, Kind.FULL_BACKWARD: -1, Kind.BACKWARD_WEIGHT: -1, Kind.BACKWARD_INPUT: 0}
    alive = highest = 0
    for action in order:
        alive += steps[action.kind]
        highest = max(highest, alive)
    return highest


@pytest.mark.parametrize("depths", [(2, 2), (1, 2), (3, 2)])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("in_flight", [3, 8])
def test_never_slower_than_simpler_ones(depths: tuple[int, int], split: bool, in_flight: int) -> None:
    layout, layers = make_layout(*depths), [True] * 7
    costs = simple_costs([1.0] * 14 + [0.7], hop=0.6)
    common = {"num_microbatches": 12, "in_flight": in_flight, "split_backward": split}
    fitted = make_fitted(layout, layers, costs=costs, effort=50_000, **common)
    for name in ("plain", "deep"):
        simple = make_schedule(layout, layers, name=name, costs=costs, **common)
        assert makespan(fitted, costs) <= makespan(simple, costs) + 1e-9


def test_bytes_a_worker() -> None:
    layout = make_layout(1, 1)
    costs = simple_costs([1.0] * 9, hop=0.5, activation_bytes=[100.0, 40.0] * 4 + [10.0])
    common = {"costs": costs, "num_microbatches": 10, "effort": LITTLE}
    ends = []
    for limit in (450.0, 900.0, 4000.0):
        schedule = make_fitted(layout, [True] * 4, memory_bytes=limit, **common)
        for order in schedule.compute:
            held = highest = 0.0
            for kind, stage, _ in order:
                held += costs.activation_bytes[stage] * (1 if kind is Kind.FORWARD else -1)
                highest = max(highest, held)
            assert highest <= limit
        ends.append(makespan(schedule, costs))
    assert ends == sorted(ends, reverse=True) and ends[0] > ends[-1]
    with pytest.raises(ValueError, match="memory_bytes = 300: the activations of one micro-batch on group 0 alone"):
        make_fitted(layout, [True] * 4, memory_bytes=300.0, **common)
    with pytest.raises(ValueError, match="memory_bytes has 3 entries for 2 groups"):
        make_fitted(layout, [True] * 4, memory_bytes=[500.0] * 3, **common)
    with pytest.raises(ValueError, match="costs are for 9 stages, the model has 11"):
        make_fitted(layout, [True] * 5, **common)
    with pytest.raises(ValueError, match=r"cap = 0.5: must be at least 1"):
        make_fitted(layout, [True] * 4, cap=0.5, **common)


@given(case=cases, seed=st.integers(0, 1 << 30), split=st.booleans())
@settings(max_examples=20, deadline=None)
def test_timing_is_the_simulators(case: Case, seed: int, split: bool) -> None:
    case = replace(case, num_microbatches=min(case.num_microbatches, 12))
    costs = random_costs(len(groups_of(case)), seed)
    schedule = make_schedule(
        make_layout(case.attn_depth, case.ffn_depth, colocate=case.colocate),
        case.is_moe_layer,
        name=case.name,
        num_microbatches=case.num_microbatches,
        hoist=case.hoist,
        send_after=case.send_after,
        split_backward=split,
    )
    both = StageCosts(
        **{
            **vars(costs),
            "forward_hop": tuple(Hop(*hop) for hop in costs.forward_hop),
            "backward_hop": tuple(Hop(*hop) for hop in costs.backward_hop),
        }
    )
    result = simulate(schedule, both)
    for mine, spans in zip(end_times(schedule, costs), result.compute_spans, strict=True):
        assert mine == pytest.approx([span.end_s for span in spans], abs=1e-9)


@pytest.mark.parametrize(("cap", "head"), [(2, 0.0), (3, 0.0), (3, 1.0)])
def test_near_the_optimum(cap: int, head: float) -> None:
    layout, layers = make_layout(2, 2), [True] * 4
    costs = simple_costs([1.0] * 8 + [head], hop=0.5)
    groups = tuple(layout.pipeline_group(s.role, s.group) for s in build_stages(layout, layers))
    problem = build_problem(costs, groups, num_groups=4, num_microbatches=4, cap=cap, split_backward=True, ticks=10)
    best = optimum(problem, limit_s=60)
    assert best.status == "optimal"
    fitted = make_fitted(layout, layers, costs=costs, num_microbatches=4, cap=cap, split_backward=True)
    assert best.makespan_s - 1e-9 <= makespan(fitted, costs) <= 1.03 * best.makespan_s
    assert lower_bounds(problem).best_s <= best.makespan_s + 1e-9
    assert 0 < flow_bound(problem, steps=60) <= best.makespan_s + 1e-9
    for group in range(4):
        assert one_machine_bound(problem, group, limit_s=2).bound_s <= best.makespan_s + 1e-9


@pytest.mark.parametrize("split", [False, True])
def test_flow_is_a_bound_and_can_be_better_than_area(split: bool) -> None:
    layout, layers = make_layout(2, 2), [True] * 6
    costs = simple_costs([1.0] * 12 + [0.5], hop=0.6)
    groups = tuple(layout.pipeline_group(s.role, s.group) for s in build_stages(layout, layers))
    better = []
    for cap in (1, 2, 3):
        common = {"num_microbatches": 12, "cap": cap, "split_backward": split}
        problem = build_problem(costs, groups, num_groups=4, **common)
        end = makespan(make_fitted(layout, layers, costs=costs, effort=LITTLE, **common), costs)
        flow = flow_bound(problem, steps=100)
        assert flow <= end + 1e-9
        better.append(flow > lower_bounds(problem).best_s)
    assert any(better)
    assert flow_bound(build_problem(costs, groups, num_groups=4, num_microbatches=12), steps=100) == 0


def test_flow_is_a_bound_on_random_costs() -> None:
    rng, found = random.Random(1), 0
    for seed in range(12):
        layout, layers = make_layout(rng.randint(1, 3), rng.randint(1, 3)), [True] * rng.randint(2, 6)
        groups = tuple(layout.pipeline_group(s.role, s.group) for s in build_stages(layout, layers))
        common = {"num_microbatches": rng.randint(4, 12), "cap": rng.randint(1, 3), "split_backward": bool(seed % 2)}
        costs = random_costs(len(groups), seed)
        problem = build_problem(costs, groups, num_groups=layout.num_groups, **common)
        flow = flow_bound(problem, steps=60)
        found += flow > 0
        end = makespan(make_fitted(layout, layers, costs=costs, effort=LITTLE, **common), costs)
        assert flow <= end * (1 + 1e-5)
    assert found >= 6


@pytest.mark.parametrize("split", [False, True])
def test_guarded_plays_keep_the_caps_and_complete(split: bool) -> None:
    rng, complete = random.Random(0), 0
    for seed in range(20):
        layout, layers = make_layout(rng.randint(1, 3), rng.randint(1, 3)), [True] * rng.randint(1, 6)
        groups = tuple(layout.pipeline_group(s.role, s.group) for s in build_stages(layout, layers))
        problem = build_problem(
            random_costs(len(groups), seed),
            groups,
            num_groups=layout.num_groups,
            num_microbatches=rng.randint(1, 10),
            cap=rng.randint(1, 5),
            split_backward=split,
        )
        slant = rng.choice(GUARDED)
        for _ in range(5):
            slant = slant.vary(rng)
            play = slant.play(problem)
            if play.is_complete:
                complete += 1
                assert all(order_fits(problem, group, order) for group, order in enumerate(play.order))
                assert play.makespan * problem.tick_s >= lower_bounds(problem).best_s * (1 - 1e-5)
    assert complete >= 60


def test_a_patient_play_expects_what_arrives_soon() -> None:
    costs = simple_costs([1.0] * 5, hop=1.0)
    problem = build_problem(costs, (0, 1, 0, 1, 0), num_groups=2, num_microbatches=2, split_backward=True)
    play = GuardedPlay(problem, [0.0] * problem.num_operations, Rule(), ahead=0.0, patience=0.5)
    backward, forward = 6 * problem.num_microbatches, 2 * problem.num_microbatches
    play.coming = [[(10, backward), (15, backward)], [(15, forward)]]
    assert play._expects(0, 12, 8) and not play._expects(0, 12, 6) and play._expects(1, 12, 8)
    assert play.coming[0] == [(15, backward)], "what has arrived is not expected"
    play.room[1] = 0
    assert not play._expects(1, 12, 8), "what does not fit is not expected"
    assert not GuardedPlay(problem, play.key, Rule(), ahead=0.0)._expects(0, 12, 8)


def test_a_guarded_play_takes_nothing_that_would_block_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for one micro-batch: while it is with the experts, the next one could start, and then neither could end."""
    costs = simple_costs([1.0] * 5, hop=1.0)
    problem = build_problem(costs, (0, 1, 0, 1, 0), num_groups=2, num_microbatches=2, cap=1)
    key = [float(operation // 2) for operation in range(problem.num_operations)]
    assert GuardedPlay(problem, key, Rule(), ahead=100.0).run().is_complete
    monkeypatch.setattr(GuardedPlay, "_can_end", lambda *_: True)
    assert not GuardedPlay(problem, key, Rule(), ahead=100.0).run().is_complete


def test_bounds_by_hand() -> None:
    """One layer, two micro-batches, f = 1, c = 0.5: the experts' group waits 1.5, works 6, and 0.5 + 2 follow."""
    layout = make_layout(1, 1)
    costs = simple_costs([1.0, 1.0, 0.0], hop=0.5)
    problem = build_problem(costs, (0, 1, 0), num_groups=2, num_microbatches=2)
    bounds = lower_bounds(problem)
    assert bounds.critical_path_s == pytest.approx(1 + 0.5 + 1 + 0.5 + 0.5 + 2 + 0.5 + 2)
    assert bounds.work_s == pytest.approx(1.5 + 6 + 2.5)
    schedule = make_fitted(layout, [True], costs=costs, num_microbatches=2)
    assert makespan(schedule, costs) == pytest.approx(bounds.best_s)


@pytest.mark.parametrize("split", [False, True])
def test_bounds_know_that_the_head_holds_one_micro_batch(split: bool) -> None:
    """Forward, backward and weights of the head of one micro-batch after another; then the way back of the last one."""
    layout = make_layout(1, 1)
    costs = simple_costs([0.1, 3.0, 2.0], hop=0.0)
    common = {"num_microbatches": 4, "split_backward": split}
    problem = build_problem(costs, (0, 1, 0), num_groups=2, **common)
    chain = Chain(problem)
    head = round(6.0 / problem.tick_s)
    assert chain.head_ticks == pytest.approx(head, abs=3)
    reached = chain.arrivals(3)
    assert [time - reached[0] for time in reached] == pytest.approx([0, head, 2 * head, 3 * head], abs=20)
    best = optimum(build_problem(costs, (0, 1, 0), num_groups=2, ticks=60, **common), limit_s=20)
    assert best.status == "optimal"
    assert lower_bounds(problem).best_s <= best.makespan_s * (1 + 1e-5)
    assert makespan(make_fitted(layout, [True], costs=costs, **common), costs) >= best.makespan_s * (1 - 1e-5)


def test_memory_elsewhere_holds_up_forwards_too() -> None:
    """Group 0 has room for two micro-batches: group 1, where nearly all work is, soon has nothing to do."""
    layout, layers = make_layout(2, 1), [True] * 2
    costs = simple_costs([0.1, 1.0, 0.1, 1.0, 0.0], hop=1.5, activation_bytes=[1.0, 0.1, 0.1, 0.1, 0.0])
    groups = tuple(layout.pipeline_group(s.role, s.group) for s in build_stages(layout, layers))
    common = {"num_microbatches": 8, "memory_bytes": [2.2, 100.0, 100.0]}
    bounds = lower_bounds(build_problem(costs, groups, num_groups=3, **common))
    assert bounds.ramp_s > bounds.work_s + 0.5
    assert makespan(make_fitted(layout, layers, costs=costs, **common), costs) >= bounds.best_s * (1 - 1e-5)
    assert lower_bounds(build_problem(costs, groups, num_groups=3, num_microbatches=8)).ramp_s == 0


def test_others_go_between_a_heavy_heads_forward_and_backward() -> None:
    """Three times 8 f in one go would hold up the layers beside it."""
    layout, layers = make_layout(2, 2), [True] * 8
    costs = simple_costs([1.0] * 16 + [8.0], hop=0.5)
    schedule = make_fitted(layout, layers, costs=costs, num_microbatches=12, cap=5, split_backward=True)
    check_complete(schedule, split=True, in_flight=0, seed=0)
    order = next(order for order in schedule.compute if any(action.stage == 16 for action in order))
    place = {action: index for index, action in enumerate(order)}
    apart = [
        place[Action(Kind.BACKWARD_WEIGHT, 16, m)] - place[Action(Kind.FORWARD, 16, m)] > 2
        for m in range(schedule.num_microbatches)
    ]
    assert any(apart)


def test_the_same_input_gives_the_same_schedule() -> None:
    def make() -> Schedule:
        return make_schedule(make_layout(2, 3), [True] * 6, name="fitted", num_microbatches=7, split_backward=True)

    assert make() == make()
