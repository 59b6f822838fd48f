"""What a schedule's stages and hops cost: plain numbers, from a roofline, a measured profile or a test.

Costs are those of an average worker of a group. `Workers` says how many there are and how they differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from disagmoe.schedules import Kind, Schedule


class Hop(NamedTuple):
    """One transfer between two consecutive stages, as seen by one sender and one receiver.

    The two legs run at the same time, the payload has arrived when both have: the network (NICs) and the fabric
    between the GPUs of a node. Seconds are those of the link at its achieved rate, alone.
    """

    send_s: float = 0.0
    """A sender's NIC, sending direction."""
    recv_s: float = 0.0
    """A receiver's NIC, receiving direction."""
    fabric_send_s: float = 0.0
    fabric_recv_s: float = 0.0
    latency_s: float = 0.0
    send_bytes: float = 0.0
    """Over a sender's NIC."""
    recv_bytes: float = 0.0
    """Over a receiver's NIC."""

    @property
    def alone_s(self) -> float:
        """Time from hand-over to arrival when no other transfer is under way."""
        return self.latency_s + max(self.send_s, self.recv_s, self.fabric_send_s, self.fabric_recv_s)


NO_HOP = Hop()


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Costs of one micro-batch, by stage. A full backward costs its two halves together unless said otherwise."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    """Full backward."""
    backward_input_s: tuple[float, ...]
    backward_weight_s: tuple[float, ...]
    forward_hop: tuple[Hop, ...]
    """The transfer *into* each stage in the forward pass; `NO_HOP` for the first."""
    backward_hop: tuple[Hop, ...]
    """The transfer of the gradient *into* each stage; `NO_HOP` for the last."""
    activation_bytes: tuple[float, ...] = ()
    """Kept on a worker between forward and the end of backward; empty: unknown, peaks are reported as 0."""
    inner_comm_forward_s: tuple[float, ...] = ()
    """Part of `forward_s` in which the compute engine waits for transfers inside the stage (systems that overlap
    within an operator); empty: none."""
    inner_comm_backward_s: tuple[float, ...] = ()
    """The same part of `backward_s`, or of `backward_input_s` where the backward is split."""
    inner_nic_forward_s: tuple[float, ...] = ()
    """Time that transfers inside a stage's forward occupy each NIC direction; for the NIC's use only."""
    inner_nic_backward_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        size = len(self.forward_s)
        for name, values in vars(self).items():
            if len(values) != size and not (len(values) == 0 and (name == "activation_bytes" or name[:5] == "inner")):
                raise ValueError(f"{name} has {len(values)} entries for {size} stages: one a stage")
            lowest = min((min(v) if isinstance(v, Hop) else v for v in values), default=0.0)
            if not lowest >= 0:
                raise ValueError(f"{name} contains {lowest}: costs must be at least 0")

    @property
    def num_stages(self) -> int:
        return len(self.forward_s)

    @property
    def has_inner(self) -> bool:
        """Whether there is communication inside stages."""
        return any(
            (self.inner_comm_forward_s, self.inner_comm_backward_s, self.inner_nic_forward_s, self.inner_nic_backward_s)
        )

    def seconds(self, kind: Kind) -> tuple[float, ...]:
        """Durations of a compute kind, by stage."""
        return {
            Kind.FORWARD: self.forward_s,
            Kind.FULL_BACKWARD: self.backward_s,
            Kind.BACKWARD_INPUT: self.backward_input_s,
            Kind.BACKWARD_WEIGHT: self.backward_weight_s,
        }[kind]

    def inner(self, kind: Kind) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(Exposed communication, NIC time) inside actions of `kind`, by stage; empty where there is none."""
        if kind is Kind.FORWARD:
            return self.inner_comm_forward_s, self.inner_nic_forward_s
        if kind is Kind.BACKWARD_WEIGHT:
            return (), ()
        return self.inner_comm_backward_s, self.inner_nic_backward_s

    def work_s(self, schedule: Schedule) -> tuple[float, ...]:
        """By group: time of all its compute actions, without the communication inside them."""
        work = [0.0] * schedule.num_groups
        for group, order in enumerate(schedule.compute):
            for kind, stage, _ in order:
                inner = self.inner(kind)[0]
                work[group] += self.seconds(kind)[stage] - (inner[stage] if inner else 0.0)
        return tuple(work)


def uniform_costs(
    num_stages: int,
    *,
    forward_s: float | Sequence[float] = 1.0,
    backward_factor: float = 2.0,
    hop_s: float = 0.0,
    head_s: float | None = None,
    activation_bytes: float = 1.0,
) -> StageCosts:
    """Equal stages and hops, as in closed formulas. Halves of a backward take half of it each.

    Args:
        forward_s: of every stage, or by stage.
        hop_s: a transfer occupies the sender's and the receiver's NIC for this long.
        head_s: forward of the last stage (default: as all).
    """
    forward = [forward_s] * num_stages if isinstance(forward_s, float | int) else list(forward_s)
    if head_s is not None:
        forward[-1] = head_s
    hop = Hop(send_s=hop_s, recv_s=hop_s)
    backward = [backward_factor * seconds for seconds in forward]
    return StageCosts(
        forward_s=tuple(forward),
        backward_s=tuple(backward),
        backward_input_s=tuple(seconds / 2 for seconds in backward),
        backward_weight_s=tuple(seconds / 2 for seconds in backward),
        forward_hop=(NO_HOP, *[hop] * (num_stages - 1)),
        backward_hop=(*[hop] * (num_stages - 1), NO_HOP),
        activation_bytes=(activation_bytes,) * num_stages,
    )


@dataclass(frozen=True, kw_only=True)
class Workers:
    """All workers of every group, for the full simulation: how many, how slow, and with which share of the rows."""

    count: tuple[int, ...]
    """By group."""
    slowdown: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """(group, worker) to a factor on its compute times; 1 where missing. A straggler has more."""
    share: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    """Group to its workers' rows (F) or samples (A) relative to the group's average, for compute and for transfers;
    1 where missing."""

    def check(self, num_groups: int) -> None:
        """Raise ValueError where the numbers contradict each other."""
        if len(self.count) != num_groups or min(self.count) < 1:
            raise ValueError(f"count = {self.count}: must have one number a group ({num_groups}), each at least 1")
        for (group, worker), factor in self.slowdown.items():
            if not (0 <= group < num_groups and 0 <= worker < self.count[group]):
                raise ValueError(f"slowdown of ({group}, {worker}): there is no such worker")
            if factor <= 0:
                raise ValueError(f"slowdown of ({group}, {worker}) = {factor}: must be above 0")
        for group, shares in self.share.items():
            if not 0 <= group < num_groups or len(shares) != self.count[group]:
                raise ValueError(f"share of group {group} has {len(shares)} entries: must be one a worker")
            if min(shares) < 0 or abs(sum(shares) - len(shares)) > 1e-6 * len(shares):
                raise ValueError(f"share of group {group}: must be at least 0 and 1 on average, got {shares}")

    def share_of(self, group: int) -> tuple[float, ...]:
        return self.share.get(group, (1.0,) * self.count[group])
