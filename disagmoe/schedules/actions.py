"""The schedule as data: what each component group does, in which order.

A `Schedule` is made by a generator (`plain`, `deep`), proved by `validate`, drawn and timed by the simulator and
executed by the runtime, all from the same object. Nothing here imports torch; the kinds carry the names that
torch.distributed.pipelining gives its computation types, so that the runtime can translate one to one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from disagmoe.layout import Stage


class Kind(Enum):
    """Kind of an action; values are the letters of torch's compact notation."""

    FORWARD = "F"
    FULL_BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"

    def __init__(self, letters: str) -> None:
        self.is_compute = not letters.startswith(("SEND", "RECV"))

    # Enum's own goes by name, in Python: actions are hashed millions of times. Members exist once.
    __hash__ = object.__hash__


class Action(NamedTuple):
    """One step of a group's program.

    RECV_F / RECV_B *post* the receive of the stage's forward input / output gradient; the compute action that uses it
    waits for it. SEND_F / SEND_B hand the stage's forward output / input gradient to the network.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        """Torch's compact notation, e.g. `3F0` or `2RECV_B1`."""
        return f"{self.stage}{self.kind.value}{self.microbatch}"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A complete, static order of work for every component group of one replica."""

    name: str
    num_microbatches: int
    stages: tuple[Stage, ...]
    group_of_stage: tuple[int, ...]
    """Pipeline group (see `Layout.pipeline_group`) of each stage."""
    num_groups: int
    compute: tuple[tuple[Action, ...], ...]
    """By group: compute actions only."""
    programs: tuple[tuple[Action, ...], ...]
    """By group: compute, send and receive actions in the order in which they are issued."""

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def actions(self) -> Iterator[tuple[int, Action]]:
        """All (group, action) pairs, group by group."""
        for group, program in enumerate(self.programs):
            for action in program:
                yield group, action
