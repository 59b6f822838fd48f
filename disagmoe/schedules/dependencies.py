"""What a compute action needs and makes: the messages between consecutive stages, and their edges.

A *message* is one payload: the output of stage s-1 that is stage s's input (forward pass), or the gradient that stage
s+1 has computed for the output of stage s (backward pass). It is named by its receiving stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from disagmoe.layout import Edge, Stage, stage_edge
from disagmoe.schedules.actions import Action, Kind


class Message(NamedTuple):
    """One payload on its way to stage `stage`."""

    backward: bool
    stage: int
    microbatch: int

    @property
    def sender(self) -> int:
        """The stage that makes it."""
        return self.stage + 1 if self.backward else self.stage - 1

    @property
    def send(self) -> Action:
        return Action(Kind.SEND_B if self.backward else Kind.SEND_F, self.sender, self.microbatch)

    @property
    def receive(self) -> Action:
        return Action(Kind.RECV_B if self.backward else Kind.RECV_F, self.stage, self.microbatch)


class EdgeKey(NamedTuple):
    """One sequence of transfers whose sends and receives must come in the same order: an untagged communicator."""

    sending_group: int
    receiving_group: int
    edge: Edge
    backward: bool

    def __str__(self) -> str:
        passed = "backward" if self.backward else "forward"
        return f"{self.edge.value}, {passed}, group {self.sending_group} -> group {self.receiving_group}"


def input_of(action: Action, num_stages: int) -> Message | None:
    """The message that the compute `action` waits for; None: everything it needs is on its own group."""
    kind, stage, microbatch = action
    if kind is Kind.FORWARD:
        return Message(False, stage, microbatch) if stage > 0 else None
    if kind is Kind.BACKWARD_WEIGHT or stage == num_stages - 1:
        return None
    return Message(True, stage, microbatch)


def output_of(action: Action, num_stages: int) -> Message | None:
    """The message that the compute `action` makes; of a split backward, BACKWARD_INPUT makes it."""
    kind, stage, microbatch = action
    if kind is Kind.FORWARD:
        return Message(False, stage + 1, microbatch) if stage < num_stages - 1 else None
    if kind is Kind.BACKWARD_WEIGHT or stage == 0:
        return None
    return Message(True, stage - 1, microbatch)


def message_of(action: Action) -> Message:
    """The message that a send or receive action is about."""
    kind, stage, microbatch = action
    if kind is Kind.SEND_F:
        return Message(False, stage + 1, microbatch)
    if kind is Kind.SEND_B:
        return Message(True, stage - 1, microbatch)
    return Message(kind is Kind.RECV_B, stage, microbatch)


def edge_of(message: Message, stages: Sequence[Stage], group_of_stage: Sequence[int]) -> EdgeKey:
    """The sequence of transfers that `message` belongs to."""
    edge = stage_edge(stages[message.sender], backward=message.backward)
    assert edge is not None, f"{message} leaves the pipeline"
    return EdgeKey(group_of_stage[message.sender], group_of_stage[message.stage], edge, message.backward)


def group_name(group: int, stages: Sequence[Stage], group_of_stage: Sequence[int]) -> str:
    """E.g. `group 2 (F0)`, or `group 0 (A0 F0)` where one group holds several."""
    names: dict[str, None] = {}
    for stage, owner in zip(stages, group_of_stage, strict=True):
        if owner == group:
            names.setdefault(f"{stage.role.letter}{stage.group}")
    return f"group {group} ({' '.join(sorted(names)) or 'no stages'})"
