"""Prove that a schedule can run, before any process starts.

`validate` checks, in this order: every action is there once and on its stage's group; a group's own order is possible
(receive, then compute, then send; forward before backward); sends and receives of an edge come in the same order, so
that communicators without tags match them; nothing deadlocks when sends never block, nor when each send blocks until
its receive is posted; memory stays within the caps. Time is linear in the number of actions.

Not covered: bytes (a memory cap is a number of micro-batches, or of stage activations) and durations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from disagmoe.schedules.actions import Action, Kind, Schedule
from disagmoe.schedules.dependencies import (
    EdgeKey,
    Message,
    edge_of,
    group_name,
    input_of,
    message_of,
)
from disagmoe.schedules.errors import ScheduleError

_SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
_RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})


def validate(schedule: Schedule, *, in_flight: int = 0, activations: int | Sequence[int] = 0) -> None:
    """Raise `ScheduleError` unless `schedule` is proved to complete.

    in_flight: most micro-batches between first forward and last backward; 0: any number.
    activations: most (stage, micro-batch) activations alive on a group, one number or one a group; 0: any number.
    """
    check_complete(schedule)
    check_local_order(schedule)
    check_edge_order(schedule)
    check_deadlock_free(schedule, blocking_sends=False)
    check_deadlock_free(schedule, blocking_sends=True)
    check_memory(schedule, in_flight=in_flight, activations=activations)


def check_complete(schedule: Schedule) -> None:
    """Every (stage, micro-batch) has its forward, its backward (full, or both halves) and its transfers, once each."""
    _check_shape(schedule)
    where: dict[Action, int] = {}
    names = [_name(schedule, group) for group in range(schedule.num_groups)]
    for group, action in schedule.actions():
        name = names[group]
        if not (0 <= action.stage < schedule.num_stages and 0 <= action.microbatch < schedule.num_microbatches):
            raise ScheduleError(
                f"{name}: {action} does not exist: there are {schedule.num_stages} stages and "
                f"{schedule.num_microbatches} micro-batches"
            )
        if schedule.group_of_stage[action.stage] != group:
            owner = _name(schedule, schedule.group_of_stage[action.stage])
            raise ScheduleError(f"{name}: {action} belongs to {owner}, which has stage {action.stage}")
        if action in where:
            raise ScheduleError(f"{name}: {action} occurs twice")
        where[action] = group
    for group, order in enumerate(schedule.compute):
        issued = tuple(action for action in schedule.programs[group] if action.kind.is_compute)
        if issued != tuple(order):
            raise ScheduleError(f"{_name(schedule, group)}: `compute` differs from the compute actions of `programs`")
    expected = 0
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            for action in _required(schedule, where, stage, microbatch):
                expected += 1
                if action not in where:
                    raise ScheduleError(f"{names[schedule.group_of_stage[stage]]}: {action} is missing")
    if expected != len(where):
        wanted = {
            action
            for stage in range(schedule.num_stages)
            for microbatch in range(schedule.num_microbatches)
            for action in _required(schedule, where, stage, microbatch)
        }
        extra = next(action for action in where if action not in wanted)
        raise ScheduleError(f"{_name(schedule, where[extra])}: {extra} has no place in this schedule")


def _check_shape(schedule: Schedule) -> None:
    if schedule.num_microbatches < 1:
        raise ScheduleError(f"num_microbatches = {schedule.num_microbatches}: must be at least 1")
    if len(schedule.group_of_stage) != schedule.num_stages:
        raise ScheduleError(f"{len(schedule.group_of_stage)} groups given for {schedule.num_stages} stages")
    for field in ("programs", "compute"):
        if len(getattr(schedule, field)) != schedule.num_groups:
            raise ScheduleError(
                f"{field} has {len(getattr(schedule, field))} entries for {schedule.num_groups} groups: one a group"
            )


def _required(schedule: Schedule, where: dict[Action, int], stage: int, microbatch: int) -> Iterator[Action]:
    """The actions that (stage, microbatch) must have. Backward is split if either half occurs."""
    halves = [Action(kind, stage, microbatch) for kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)]
    yield Action(Kind.FORWARD, stage, microbatch)
    if any(half in where for half in halves):
        yield from halves
    else:
        yield Action(Kind.FULL_BACKWARD, stage, microbatch)
    if stage > 0:
        yield Action(Kind.RECV_F, stage, microbatch)
        yield Action(Kind.SEND_B, stage, microbatch)
    if stage < schedule.num_stages - 1:
        yield Action(Kind.SEND_F, stage, microbatch)
        yield Action(Kind.RECV_B, stage, microbatch)


def check_local_order(schedule: Schedule) -> None:
    """Within each group: a receive is posted before its compute action, a send follows it, backward follows forward.

    A gradient's receive follows the stage's forward, from which its size is known.
    """
    for group, program in enumerate(schedule.programs):
        done: set[Action] = set()
        for action in program:
            for before in _local_dependencies(action, schedule.num_stages, done):
                if before not in done:
                    raise ScheduleError(f"{_name(schedule, group)}: {action} comes before {before}, which it needs")
            done.add(action)


def _local_dependencies(action: Action, num_stages: int, done: set[Action]) -> Iterator[Action]:
    """What must precede `action` in its own group's program."""
    kind, stage, microbatch = action
    if kind is Kind.RECV_F:
        return
    if kind in (Kind.SEND_F, Kind.RECV_B):
        yield Action(Kind.FORWARD, stage, microbatch)
    elif kind is Kind.SEND_B:
        half = Action(Kind.BACKWARD_INPUT, stage, microbatch)
        yield half if half in done else Action(Kind.FULL_BACKWARD, stage, microbatch)
    elif kind is Kind.BACKWARD_WEIGHT:
        yield Action(Kind.BACKWARD_INPUT, stage, microbatch)
    else:
        needed = input_of(action, num_stages)
        if needed is not None:
            yield needed.receive
        if kind is not Kind.FORWARD:
            yield Action(Kind.FORWARD, stage, microbatch)


def check_edge_order(schedule: Schedule) -> None:
    """On every edge and pass, receives are posted in the order in which the sends are issued."""
    sends, receives = edge_sequences(schedule, _SENDS), edge_sequences(schedule, _RECEIVES)
    for key, sent in sends.items():
        for position, (send, receive) in enumerate(zip(sent, receives.get(key, []), strict=True)):
            if send != receive:
                raise ScheduleError(
                    f"edge {key}: transfer {position} is {send.send} for the sender but {receive.receive} for "
                    f"the receiver; receives must be posted in the order of the sends"
                )


def edge_sequences(schedule: Schedule, kinds: frozenset[Kind]) -> dict[EdgeKey, list[Message]]:
    """The messages of the actions of `kinds` (sends or receives), by edge, in program order."""
    sequences: dict[EdgeKey, list[Message]] = {}
    for _, action in schedule.actions():
        if action.kind in kinds:
            message = message_of(action)
            key = edge_of(message, schedule.stages, schedule.group_of_stage)
            sequences.setdefault(key, []).append(message)
    return sequences


def check_deadlock_free(schedule: Schedule, *, blocking_sends: bool) -> None:
    """Run the programs without times: compute waits for its payload and, with `blocking_sends`, a send for its post."""
    position = [0] * schedule.num_groups
    happened: set[Action] = set()
    waiting: dict[Action, int] = {}
    runnable = list(range(schedule.num_groups))
    while runnable:
        group = runnable.pop()
        program = schedule.programs[group]
        while position[group] < len(program):
            action = program[position[group]]
            needed = _remote_dependency(action, schedule.num_stages, blocking_sends)
            if needed is not None and needed not in happened:
                waiting[needed] = group
                break
            position[group] += 1
            if not action.kind.is_compute:
                happened.add(action)
                if action in waiting:
                    runnable.append(waiting.pop(action))
    if waiting:
        raise ScheduleError(_describe_deadlock(schedule, position, waiting, blocking_sends))


def _remote_dependency(action: Action, num_stages: int, blocking_sends: bool) -> Action | None:
    """The send or receive, of any group, that must have been issued before `action` can complete."""
    if action.kind.is_compute:
        needed = input_of(action, num_stages)
        return None if needed is None else needed.send
    if blocking_sends and action.kind in _SENDS:
        return message_of(action).receive
    return None


def _describe_deadlock(schedule: Schedule, position: list[int], waiting: dict[Action, int], blocking: bool) -> str:
    """The cycle of groups that wait for one another. Each waits for an action that a waiting group has yet to issue."""
    needed_by = {group: needed for needed, group in waiting.items()}
    group, path = min(needed_by), []
    while group not in path:
        path.append(group)
        group = schedule.group_of_stage[needed_by[group].stage]
    cycle = path[path.index(group) :]
    links = [
        f"{_name(schedule, g)} at {schedule.programs[g][position[g]]} waits for {needed_by[g]} "
        f"of {_name(schedule, schedule.group_of_stage[needed_by[g].stage])}"
        for g in cycle
    ]
    return f"deadlock with sends that {'block' if blocking else 'do not block'}: " + "; ".join(links)


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """By group: most (stage, micro-batch) activations alive at a time, from FORWARD to the end of their backward."""
    return tuple(_peak(program, None) for program in schedule.compute)


def peak_microbatches(schedule: Schedule) -> int:
    """Most micro-batches at a time between their first forward and their last backward, both on stage 0."""
    return _peak(schedule.compute[schedule.group_of_stage[0]], 0)


def _peak(compute: Sequence[Action], stage: int | None) -> int:
    """Most activations of `stage` (None: of all) alive at a time. A split backward frees with its weight half."""
    alive = peak = 0
    for action in compute:
        if stage is not None and action.stage != stage:
            continue
        if action.kind is Kind.FORWARD:
            alive += 1
            peak = max(peak, alive)
        elif action.kind is not Kind.BACKWARD_INPUT:
            alive -= 1
    return peak


def check_memory(schedule: Schedule, *, in_flight: int = 0, activations: int | Sequence[int] = 0) -> None:
    """Peaks within caps; see `validate` for their meaning."""
    peak = peak_microbatches(schedule)
    if in_flight and peak > in_flight:
        raise ScheduleError(f"{peak} micro-batches are in flight at a time, in_flight = {in_flight} allows fewer")
    caps = [activations] * schedule.num_groups if isinstance(activations, int) else list(activations)
    if len(caps) != schedule.num_groups:
        raise ScheduleError(f"activations has {len(caps)} caps for {schedule.num_groups} groups: one a group")
    for group, (alive, cap) in enumerate(zip(peak_in_flight(schedule), caps, strict=True)):
        if cap and alive > cap:
            raise ScheduleError(f"{_name(schedule, group)}: {alive} activations alive at a time, the cap is {cap}")


def _name(schedule: Schedule, group: int) -> str:
    return group_name(group, schedule.stages, schedule.group_of_stage)
