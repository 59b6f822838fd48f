"""validate: broken schedules are refused, with the action, the group and what is missing."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagmoe.schedules import Action, Kind, Schedule, ScheduleError, make_schedule, peak_in_flight, validate
from disagmoe.schedules.validate import check_deadlock_free

from .helpers import Case, cases, make_layout, rebuild, split_backward

F, B, SEND_F, RECV_F, RECV_B = Kind.FORWARD, Kind.FULL_BACKWARD, Kind.SEND_F, Kind.RECV_F, Kind.RECV_B


def example(*, hoist: int = 2) -> Schedule:
    """A0: stages 0, 2, 4; F0: stages 1, 3."""
    return make_schedule(make_layout(1, 1), [True, True], name="plain", num_microbatches=3, hoist=hoist)


def with_program(schedule: Schedule, group: int, program: list[Action]) -> Schedule:
    programs = list(schedule.programs)
    programs[group] = tuple(program)
    compute = tuple(tuple(a for a in p if a.kind.is_compute) for p in programs)
    return replace(schedule, programs=tuple(programs), compute=compute)


def moved(program: tuple[Action, ...], action: Action, place: int) -> list[Action]:
    rest = [a for a in program if a != action]
    rest.insert(place, action)
    return rest


@pytest.mark.parametrize("action", [Action(F, 2, 1), Action(SEND_F, 2, 1), Action(RECV_F, 2, 1), Action(B, 4, 0)])
def test_dropped(action: Action) -> None:
    schedule = example()
    broken = with_program(schedule, 0, [a for a in schedule.programs[0] if a != action])
    with pytest.raises(ScheduleError, match=rf"group 0 \(A0\): {action} is missing"):
        validate(broken)


def test_doubled() -> None:
    schedule = example()
    broken = with_program(schedule, 1, [*schedule.programs[1], Action(B, 3, 2)])
    with pytest.raises(ScheduleError, match=r"group 1 \(F0\): 3B2 occurs twice"):
        validate(broken)


def test_on_the_wrong_group() -> None:
    schedule = example()
    broken = with_program(schedule, 1, [*schedule.programs[1], Action(F, 2, 0)])
    with pytest.raises(ScheduleError, match=r"group 1 \(F0\): 2F0 belongs to group 0 \(A0\), which has stage 2"):
        validate(broken)


def test_outside() -> None:
    schedule = example()
    broken = with_program(schedule, 0, [*schedule.programs[0], Action(F, 0, 3)])
    with pytest.raises(ScheduleError, match="0F3 does not exist: there are 5 stages and 3 micro-batches"):
        validate(broken)


def test_full_and_split_backward_of_the_same_thing() -> None:
    schedule = example()
    broken = with_program(schedule, 0, [*schedule.programs[0], Action(Kind.BACKWARD_WEIGHT, 2, 0)])
    with pytest.raises(ScheduleError, match="2I0 is missing"):
        validate(broken)


def test_receive_of_the_first_stage() -> None:
    schedule = example()
    broken = with_program(schedule, 0, [Action(RECV_F, 0, 0), *schedule.programs[0]])
    with pytest.raises(ScheduleError, match="0RECV_F0 has no place in this schedule"):
        validate(broken)


def test_backward_before_forward() -> None:
    schedule = example()
    program = schedule.programs[0]
    broken = with_program(schedule, 0, moved(program, Action(B, 4, 1), program.index(Action(F, 4, 1))))
    with pytest.raises(ScheduleError, match=r"group 0 \(A0\): 4B1 comes before 4F1, which it needs"):
        validate(broken)


def test_gradient_receive_before_forward() -> None:
    schedule = example()
    broken = with_program(schedule, 0, moved(schedule.programs[0], Action(RECV_B, 2, 0), 0))
    with pytest.raises(ScheduleError, match=r"group 0 \(A0\): 2RECV_B0 comes before 2F0, which it needs"):
        validate(broken)


def test_send_before_its_payload() -> None:
    schedule = example()
    broken = with_program(schedule, 0, moved(schedule.programs[0], Action(SEND_F, 0, 2), 0))
    with pytest.raises(ScheduleError, match="0SEND_F2 comes before 0F2"):
        validate(broken)


def test_late_receive() -> None:
    schedule = example()
    broken = with_program(schedule, 0, moved(schedule.programs[0], Action(RECV_F, 4, 2), len(schedule.programs[0]) - 1))
    with pytest.raises(ScheduleError, match="4F2 comes before 4RECV_F2"):
        validate(broken)


def test_receives_out_of_order() -> None:
    schedule = example()
    program = list(schedule.programs[1])
    one, two = program.index(Action(RECV_F, 1, 0)), program.index(Action(RECV_F, 1, 1))
    program[one], program[two] = program[two], program[one]
    early = moved(tuple(program), Action(RECV_F, 1, 0), 1)
    with pytest.raises(
        ScheduleError,
        match=r"edge m2n, forward, group 0 -> group 1: transfer 0 is 0SEND_F0 for the sender but 1RECV_F1 for",
    ):
        validate(with_program(schedule, 1, early))


def test_compute_deadlock_prints_its_cycle() -> None:
    """F0 wants the gradient of micro-batch 0 before it computes stage 1 of micro-batch 1, on which A0 waits first."""
    schedule = make_schedule(make_layout(1, 1), [True], name="plain", num_microbatches=2, hoist=9)
    attention = [Action(RECV_F, 2, 0), Action(RECV_F, 2, 1)]
    for stage in (0, 2):
        for m in (0, 1):
            attention += [Action(F, stage, m)]
            attention += [Action(SEND_F, 0, m), Action(RECV_B, 0, m)] if stage == 0 else []
    for stage in (2, 0):
        for m in (0, 1):
            attention += [Action(B, stage, m)] + ([Action(Kind.SEND_B, 2, m)] if stage == 2 else [])
    experts = [Action(RECV_F, 1, 0), Action(RECV_F, 1, 1)]
    for m in (0, 1):
        experts += [Action(F, 1, m), Action(SEND_F, 1, m), Action(RECV_B, 1, m), Action(B, 1, m)]
        experts += [Action(Kind.SEND_B, 1, m)]
    broken = with_program(with_program(schedule, 0, attention), 1, experts)
    with pytest.raises(
        ScheduleError,
        match=r"deadlock with sends that do not block: group 0 \(A0\) at 2F1 waits for 1SEND_F1 of group 1 \(F0\); "
        r"group 1 \(F0\) at 1B0 waits for 2SEND_B0 of group 0 \(A0\)",
    ):
        validate(broken)


def test_deadlock_of_blocking_sends_only() -> None:
    """Receives posted just before use: both groups send, and neither posts."""
    schedule = example(hoist=0)
    programs = []
    for program in schedule.programs:
        order = [a for a in program if a.kind not in (RECV_F, RECV_B)]
        placed: list[Action] = []
        for action in order:
            receive = {F: RECV_F, B: RECV_B}.get(action.kind)
            wanted = None if receive is None else Action(receive, action.stage, action.microbatch)
            placed += [wanted] if wanted in program else []  # type: ignore[list-item]
            placed.append(action)
        programs.append(tuple(placed))
    broken = replace(schedule, programs=tuple(programs))
    check_deadlock_free(broken, blocking_sends=False)
    with pytest.raises(ScheduleError, match=r"deadlock with sends that block: group 0 .* waits for \dRECV_[FB]\d of"):
        validate(broken)


def test_caps() -> None:
    schedule = make_schedule(make_layout(1, 1), [True] * 3, name="deep", num_microbatches=8)
    peaks = peak_in_flight(schedule)
    validate(schedule, activations=peaks)
    with pytest.raises(ScheduleError, match=rf"group 1 \(F0\): {peaks[1]} activations alive .* cap is {peaks[1] - 1}"):
        validate(schedule, activations=(peaks[0], peaks[1] - 1))
    with pytest.raises(ScheduleError, match="micro-batches are in flight at a time, in_flight = 1 allows fewer"):
        validate(schedule, in_flight=1)
    with pytest.raises(ScheduleError, match="3 caps for 2 groups"):
        validate(schedule, activations=(1, 2, 3))


def test_a_split_backward_frees_with_its_weight_half() -> None:
    schedule = make_schedule(make_layout(1, 1), [True] * 2, name="plain", num_microbatches=4, in_flight=1)
    late = split_backward(schedule, delay=3)
    validate(late)
    assert max(peak_in_flight(late)) > max(peak_in_flight(schedule))


@given(case=cases, seed=st.integers(0, 2**16))
@settings(max_examples=150, deadline=None)
def test_random_damage_is_refused(case: Case, seed: int) -> None:
    """Dropping, doubling or moving a random action behind the program's end never passes; nor does an early compute."""
    rng = random.Random(seed)
    schedule = case.make()
    group = rng.choice([g for g, program in enumerate(schedule.programs) if program])
    program = list(schedule.programs[group])
    index = rng.randrange(len(program))
    damage = rng.choice(["drop", "double", "first"])
    if damage == "drop":
        del program[index]
    elif damage == "double":
        program.insert(rng.randrange(len(program)), program[index])
    else:
        index = program.index(rng.choice([a for a in program if a.kind is B]))
        program.insert(0, program.pop(index))
    with pytest.raises(ScheduleError):
        validate(with_program(schedule, group, program))


@given(case=cases, seed=st.integers(0, 2**16))
@settings(max_examples=100, deadline=None)
def test_swapped_receives_are_refused(case: Case, seed: int) -> None:
    schedule = case.make()
    for group, program in enumerate(schedule.programs):
        receives = [i for i, a in enumerate(program) if a.kind is RECV_F and a.stage == 1]
        if len(receives) < 2:
            continue
        one, two = sorted(random.Random(seed).sample(receives, 2))
        changed = list(program)
        changed[one], changed[two] = changed[two], changed[one]
        with pytest.raises(ScheduleError):
            validate(with_program(schedule, group, changed))


def test_compute_that_differs_from_the_programs() -> None:
    schedule = example()
    with pytest.raises(ScheduleError, match="`compute` differs from the compute actions of `programs`"):
        validate(replace(schedule, compute=(schedule.compute[0][::-1], schedule.compute[1])))


def test_lowering_a_compute_order_that_deadlocks() -> None:
    schedule = example()
    with pytest.raises(ScheduleError, match="the compute order deadlocks: group 0 waits at"):
        rebuild(schedule, (schedule.compute[0][::-1], schedule.compute[1]))
