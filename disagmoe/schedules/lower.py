"""Add sends and receives to a compute order.

Both steps *run* the compute order without times: a group goes on until something it waits for is missing. Such a run
ends in the same state whichever group is tried first, so "everybody waits" means a true dependency, and just one send
or one receive has to move forward for it.

Not covered: sizes. A receive is posted at its exact size when its row counts are in, which is the runtime's matter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from disagmoe.layout import Stage
from disagmoe.schedules.actions import Action, Kind
from disagmoe.schedules.dependencies import EdgeKey, Message, edge_of, input_of, message_of, output_of
from disagmoe.schedules.errors import ScheduleError

Program = list[Action]


def lower(
    compute: Sequence[Sequence[Action]],
    *,
    stages: Sequence[Stage],
    group_of_stage: Sequence[int],
    hoist: int,
    send_after: int,
) -> tuple[tuple[Action, ...], ...]:
    """The program of each group: `compute` (by group) with a send and a receive for every hop between stages.

    A send follows the action that makes its payload (`send_after` = 0), or the group's next compute action
    (`send_after` = 1: on CUDA the host then launches that one before it handles the transfer), unless that action
    could never start without the send. A receive is posted `hoist` compute actions before the one that waits for it,
    or before a receive that its edge's order puts behind it, and earlier still where blocking sends would deadlock;
    but a gradient's receive never before the stage's forward of that micro-batch, which alone knows its size.
    """
    if hoist < 0:
        raise ValueError(f"hoist = {hoist}: must be 0 (post a receive where it is needed) or more")
    if send_after not in (0, 1):
        raise ValueError(f"send_after = {send_after}: must be 0 (send at once) or 1 (after the next compute action)")
    with_sends = _SendPlacement(compute, group_of_stage, send_after).run()
    return _ReceivePlacement(with_sends, stages, group_of_stage, hoist).run()


class _SendPlacement:
    """Run the compute order with transfers that never block, holding each send back for one compute action."""

    def __init__(self, compute: Sequence[Sequence[Action]], group_of_stage: Sequence[int], send_after: int) -> None:
        self.compute = compute
        self.group_of_stage = group_of_stage
        self.num_stages = len(group_of_stage)
        self.delay = send_after == 1
        self.position = [0] * len(compute)
        self.held: list[Message | None] = [None] * len(compute)
        self.sent: set[Message] = set()
        self.waiting: dict[Message, int] = {}
        self.runnable = deque(range(len(compute)))
        self.programs: list[Program] = [[] for _ in compute]

    def run(self) -> list[Program]:
        while True:
            while self.runnable:
                self._advance(self.runnable.popleft())
            if not self.waiting:
                return self.programs
            self._send(self._held_back())

    def _advance(self, group: int) -> None:
        order, program = self.compute[group], self.programs[group]
        while self.position[group] < len(order):
            action = order[self.position[group]]
            needed = input_of(action, self.num_stages)
            if needed is not None and needed not in self.sent:
                self.waiting[needed] = group
                return
            program.append(action)
            self.position[group] += 1
            self._release(group)
            self.held[group] = output_of(action, self.num_stages)
            if not self.delay or self.position[group] == len(order):
                self._release(group)

    def _release(self, group: int) -> None:
        held = self.held[group]
        if held is not None:
            self._send(held)

    def _send(self, message: Message) -> None:
        group = self.group_of_stage[message.sender]
        self.programs[group].append(message.send)
        self.held[group] = None
        self.sent.add(message)
        waiter = self.waiting.pop(message, None)
        if waiter is not None:
            self.runnable.append(waiter)

    def _held_back(self) -> Message:
        """The held message that the groups, all waiting, wait for in the end."""
        needed_by = {group: message for message, group in self.waiting.items()}
        group = min(needed_by)
        for _ in range(len(self.compute) + 1):
            needed = needed_by[group]
            group = self.group_of_stage[needed.sender]
            if self.held[group] == needed:
                return needed
            if group not in needed_by:
                raise ScheduleError(f"the compute order never makes the input that {needed.receive} is to receive")
        raise ScheduleError(
            "the compute order deadlocks: "
            + "; ".join(
                f"group {g} waits at {self.compute[g][self.position[g]]} for {m.send}" for g, m in needed_by.items()
            )
        )


class _ReceivePlacement:
    """Run the programs with sends that block until their receive is posted, posting more only when all wait."""

    def __init__(
        self, programs: list[Program], stages: Sequence[Stage], group_of_stage: Sequence[int], hoist: int
    ) -> None:
        self.source = programs
        self.stages = stages
        self.group_of_stage = group_of_stage
        self.num_stages = len(stages)
        self.position = [0] * len(programs)
        self.computed = [0] * len(programs)
        self.posted: set[Message] = set()
        self.sent: set[Message] = set()
        self.waiting: dict[Message, int] = {}
        """Group that waits for a message to be sent (at a compute action) or to be posted (at a send)."""
        self.runnable = deque(range(len(programs)))
        self.programs: list[Program] = [[] for _ in programs]
        self.deadline: dict[Message, int] = {}
        self.due: list[list[list[Message]]] = []
        self._plan(hoist)

    def _plan(self, hoist: int) -> None:
        """`due[group][i]`: the receives to post before compute action i, per edge in the order of the sends."""
        needed_at: dict[Message, int] = {}
        forward_at: dict[tuple[int, int], int] = {}
        self.due = []
        for program in self.source:
            compute = [action for action in program if action.kind.is_compute]
            for index, action in enumerate(compute):
                needed = input_of(action, self.num_stages)
                if needed is not None:
                    needed_at[needed] = index
                if action.kind is Kind.FORWARD:
                    forward_at[action.stage, action.microbatch] = index
            self.due.append([[] for _ in compute])
        by_edge: dict[EdgeKey, list[Message]] = {}
        for program in self.source:
            for action in program:
                if not action.kind.is_compute:
                    message = message_of(action)
                    by_edge.setdefault(edge_of(message, self.stages, self.group_of_stage), []).append(message)
        for key, messages in by_edge.items():
            latest = len(self.due[key.receiving_group])
            for message in reversed(messages):
                latest = min(latest, needed_at[message])
                self.deadline[message] = latest
            place = 0
            for message in messages:
                place = max(place, self.deadline[message] - hoist)
                if message.receive.kind is Kind.RECV_B:
                    place = max(place, forward_at[message.stage, message.microbatch] + 1)
                self.due[key.receiving_group][place].append(message)
        for due_of_group in self.due:
            for due in due_of_group:
                due.sort(key=lambda message: self.deadline[message])

    def run(self) -> tuple[tuple[Action, ...], ...]:
        for group in range(len(self.source)):
            self._post_due(group)
        while True:
            while self.runnable:
                self._advance(self.runnable.popleft())
            blocked = [message for message in self.waiting if message not in self.posted]
            if not blocked:
                assert not self.waiting, "all groups wait for payloads although sends were placed by a complete run"
                return tuple(tuple(program) for program in self.programs)
            # The receive that is nearest to its place anyway; the message itself breaks ties.
            self._post(min(blocked, key=lambda message: (self._distance(message), message)))

    def _distance(self, message: Message) -> int:
        return self.deadline[message] - self.computed[self.group_of_stage[message.stage]]

    def _advance(self, group: int) -> None:
        source, program = self.source[group], self.programs[group]
        while self.position[group] < len(source):
            action = source[self.position[group]]
            if action.kind.is_compute:
                message = input_of(action, self.num_stages)
                blocked = message is not None and message not in self.sent
            else:
                message = message_of(action)
                blocked = message not in self.posted
            if blocked:
                assert message is not None
                self.waiting[message] = group
                return
            program.append(action)
            self.position[group] += 1
            if action.kind.is_compute:
                self.computed[group] += 1
                self._post_due(group)
            else:
                assert message is not None
                self.sent.add(message)
                self._wake(message)

    def _post_due(self, group: int) -> None:
        if self.computed[group] < len(self.due[group]):
            for message in self.due[group][self.computed[group]]:
                if message not in self.posted:
                    self._post(message)

    def _post(self, message: Message) -> None:
        self.programs[self.group_of_stage[message.stage]].append(message.receive)
        self.posted.add(message)
        self._wake(message)

    def _wake(self, message: Message) -> None:
        waiter = self.waiting.get(message)
        if waiter is None:
            return
        # A group at a send waits for the post, a group at a compute action for the send.
        if self.source[waiter][self.position[waiter]].kind.is_compute and message not in self.sent:
            return
        del self.waiting[message]
        self.runnable.append(waiter)
