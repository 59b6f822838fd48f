"""Sends and receives: where they are put, and with split backward."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagmoe.schedules import Action, Kind, make_schedule, validate

from .helpers import Case, cases, execute, make_layout, split_backward

SENDS = (Kind.SEND_F, Kind.SEND_B)
RECEIVES = (Kind.RECV_F, Kind.RECV_B)


def compute_behind(program: tuple[Action, ...], action: Action) -> int:
    """Compute actions between the one that makes a send's payload and the send."""
    kinds = (Kind.FORWARD,) if action.kind is Kind.SEND_F else (Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT)
    made = next(i for i, a in enumerate(program) if a[1:] == action[1:] and a.kind in kinds)
    return sum(a.kind.is_compute for a in program[made + 1 : program.index(action)])


def compute_ahead(program: tuple[Action, ...], action: Action) -> int:
    """Compute actions between a receive and the one that waits for it."""
    kinds = (Kind.FORWARD,) if action.kind is Kind.RECV_F else (Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT)
    needed = next(i for i, a in enumerate(program) if a[1:] == action[1:] and a.kind in kinds)
    return sum(a.kind.is_compute for a in program[program.index(action) : needed])


@given(case=cases)
@settings(max_examples=40, deadline=None)
def test_sends_follow_their_compute(case: Case) -> None:
    for program in case.make().programs:
        for action in program:
            if action.kind in SENDS:
                assert compute_behind(program, action) <= case.send_after


@pytest.mark.parametrize("name", ["plain", "deep"])
def test_most_sends_are_held_back_by_one_action(name: str) -> None:
    schedule = make_schedule(make_layout(2, 2), [True] * 6, name=name, num_microbatches=16, send_after=1)
    held = [compute_behind(p, a) for p in schedule.programs for a in p if a.kind in SENDS]
    assert sum(held) > 0.8 * len(held)


@pytest.mark.parametrize("hoist", [4, 8, 16])
def test_receives_are_posted_as_early_as_hoist_says(hoist: int) -> None:
    schedule = make_schedule(make_layout(2, 2), [True] * 6, name="deep", num_microbatches=16, hoist=hoist)
    for program, order in zip(schedule.programs, schedule.compute, strict=True):
        for action in program:
            if action.kind is Kind.RECV_F:
                place = order.index(Action(Kind.FORWARD, action.stage, action.microbatch))
                assert compute_ahead(program, action) >= min(hoist, place)
            if action.kind is Kind.RECV_B:  # Its size is known from the stage's forward.
                forward = Action(Kind.FORWARD, action.stage, action.microbatch)
                assert program.index(forward) < program.index(action)


def test_receives_are_seldom_earlier_than_hoist_says() -> None:
    """Only an edge's order, or a deadlock of blocking sends, posts one earlier."""
    schedule = make_schedule(make_layout(2, 2), [True] * 6, name="plain", num_microbatches=16, hoist=8)
    ahead = [compute_ahead(p, a) for p in schedule.programs for a in p if a.kind in RECEIVES]
    assert sum(n > 8 for n in ahead) <= 0.1 * len(ahead)


@pytest.mark.parametrize("send_after", [0, 1])
def test_colocated_receives_precede_their_sends(send_after: int) -> None:
    layout = make_layout(2, 2, colocate=True)
    schedule = make_schedule(layout, [True] * 4, name="deep", num_microbatches=5, hoist=0, send_after=send_after)
    (program,) = schedule.programs
    for action in program:
        if action.kind is Kind.SEND_F:
            assert program.index(Action(Kind.RECV_F, action.stage + 1, action.microbatch)) < program.index(action)


@given(case=cases, delay=st.integers(0, 6))
@settings(max_examples=60, deadline=None)
def test_split_backward(case: Case, delay: int) -> None:
    schedule = split_backward(case.make(), delay=delay, send_after=case.send_after)
    validate(schedule)
    execute(schedule, blocking=True, seed=delay)
    for program in schedule.programs:
        for action in program:
            if action.kind is Kind.SEND_B:
                half = Action(Kind.BACKWARD_INPUT, action.stage, action.microbatch)
                assert program.index(half) < program.index(action)
                assert compute_behind(program, action) <= case.send_after
