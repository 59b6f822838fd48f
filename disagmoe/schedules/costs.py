"""What an order is fitted to: times of stages and hops, by stage. The simulator's costs have this form too.

Hops are seen by one average sender and one average receiver (see `HopTimes`). Activations are what one worker keeps of
one micro-batch between a stage's forward and the end of its backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from disagmoe.layout import Layout, Stage


class HopTimes(Protocol):
    """One transfer over two kinds of links at the same time; it has arrived when both parts have."""

    @property
    def send_s(self) -> float:
        """Time it occupies the sender's NIC; likewise the next three."""

    @property
    def recv_s(self) -> float: ...

    @property
    def fabric_send_s(self) -> float: ...

    @property
    def fabric_recv_s(self) -> float: ...

    @property
    def latency_s(self) -> float: ...


class StageTimes(Protocol):
    """Costs of one micro-batch, by stage."""

    @property
    def forward_s(self) -> Sequence[float]: ...

    @property
    def backward_s(self) -> Sequence[float]:
        """Full backward."""

    @property
    def backward_input_s(self) -> Sequence[float]: ...

    @property
    def backward_weight_s(self) -> Sequence[float]: ...

    @property
    def forward_hop(self) -> Sequence[HopTimes]:
        """The transfer *into* each stage in the forward pass; the first one is not used."""

    @property
    def backward_hop(self) -> Sequence[HopTimes]:
        """The transfer of the gradient *into* each stage; the last one is not used."""

    @property
    def activation_bytes(self) -> Sequence[float]:
        """Empty: unknown, each counts as 1."""


class OrderHop(NamedTuple):
    """`HopTimes` as plain numbers."""

    send_s: float = 0.0
    recv_s: float = 0.0
    fabric_send_s: float = 0.0
    fabric_recv_s: float = 0.0
    latency_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class OrderCosts:
    """`StageTimes` as plain numbers."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    backward_input_s: tuple[float, ...]
    backward_weight_s: tuple[float, ...]
    forward_hop: tuple[OrderHop, ...]
    backward_hop: tuple[OrderHop, ...]
    activation_bytes: tuple[float, ...] = ()


def simple_costs(
    forward: Sequence[float],
    *,
    hop: float,
    backward_factor: float = 2.0,
    activation_bytes: Sequence[float] = (),
) -> OrderCosts:
    """Backward a multiple of forward, its halves equal; every hop occupies a sender and a receiver for `hop`."""
    num_stages = len(forward)
    nothing, transfer = OrderHop(), OrderHop(send_s=hop, recv_s=hop)
    return OrderCosts(
        forward_s=tuple(forward),
        backward_s=tuple(backward_factor * f for f in forward),
        backward_input_s=tuple(backward_factor / 2 * f for f in forward),
        backward_weight_s=tuple(backward_factor / 2 * f for f in forward),
        forward_hop=(nothing, *[transfer] * (num_stages - 1)),
        backward_hop=(*[transfer] * (num_stages - 1), nothing),
        activation_bytes=tuple(activation_bytes),
    )


ASSUMED_HOP = 0.7
"""Transfer time a hop in forwards of an average stage, where no costs are known."""


def assumed_stage_times(layout: Layout, stages: Sequence[Stage]) -> OrderCosts:
    """Costs where none are known: all groups equally loaded, a head of half a stage, hops of `ASSUMED_HOP`.

    A role with fewer groups has shorter stages, because a good allocation gives all groups the same load. Unit: an
    average stage's forward.
    """
    mean = (layout.attn_depth + layout.ffn_depth) / 2
    forward = [layout.depth_of(stage.role) / mean for stage in stages]
    forward[-1] /= 2
    return simple_costs(forward, hop=ASSUMED_HOP)
