"""What an order is searched for: durations, transfers and caps as integers, forwards in time or backwards.

The work of one micro-batch is a *chain* of 2 S positions: positions 0 .. S-1 are the forwards of stages 0 .. S-1,
positions S .. 2 S - 1 the backwards of stages S-1 .. 0. Position q < S acquires its stage's activations, position
2 S - 1 - q releases them. With split backward, positions from S on are the input halves only; each has a *weight
operation* that follows it, and that one releases instead. Seen backwards in time the problem has the same form: the
chain runs from its end, releases become acquisitions, a weight operation precedes its input half.

Operations are numbered q * M + m for chain position q and micro-batch m, and (2 S + stage) * M + m for weight
operations. Times are integer ticks, so that no order depends on rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from disagmoe.schedules.actions import Action, Kind
from disagmoe.schedules.costs import HopTimes, StageTimes

TICKS = 1 << 20
"""Ticks that the longest duration is divided into."""
MEMORY_UNITS = 1 << 20
"""Units that the largest activation is divided into."""
UNLIMITED = 1 << 62


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Costs and caps by chain position, stage or group; see the module's description."""

    num_stages: int
    num_microbatches: int
    num_groups: int
    group: tuple[int, ...]
    """By position."""
    duration: tuple[int, ...]
    """By position."""
    send: tuple[int, ...]
    """Of the transfer out of each position: time on the sender's link; 0 for S-1 (stays) and 2 S - 1 (ends)."""
    recv: tuple[int, ...]
    """Time on the receiver's link."""
    fabric: tuple[bool, ...]
    """Whether it goes over the node's fabric instead of the NIC: links of their own."""
    latency: tuple[int, ...]
    weight: tuple[int, ...]
    """Duration of the weight operation by stage; empty where backward is whole."""
    memory: tuple[int, ...]
    """By stage, in units of its own."""
    capacity: tuple[int, ...]
    """By group, in the units of `memory`."""
    in_flight: int
    """Most micro-batches that stage 0 has acquired and not released."""
    tick_s: float
    """Seconds (or the unit of the costs) a tick."""
    mirrored: bool = False
    """Whether this is a problem seen backwards in time."""

    @property
    def num_operations(self) -> int:
        return (2 * self.num_stages + len(self.weight)) * self.num_microbatches

    @property
    def memory_of_group(self) -> tuple[int, ...]:
        """By group: activations of one micro-batch in all its stages."""
        held = [0] * self.num_groups
        for stage, memory in enumerate(self.memory):
            held[self.group[stage]] += memory
        return tuple(held)

    def arrival(self, position: int) -> int:
        """Time from the end of `position` until its result is at the next one, on idle links."""
        return self.latency[position] + max(self.send[position], self.recv[position])

    def duration_of(self, operation: int) -> int:
        position = operation // self.num_microbatches
        stage = position - 2 * self.num_stages
        return self.weight[stage] if stage >= 0 else self.duration[position]

    def group_of(self, operation: int) -> int:
        return self.group[operation // self.num_microbatches % (2 * self.num_stages)]

    def mirror(self) -> Problem:
        """The same problem backwards in time. Its position q is this one's 2 S - 1 - q."""
        last = 2 * self.num_stages - 1
        # The transfer out of q arrives at q + 1; mirrored it leaves there, so senders and receivers change places.
        out = range(last - 1, -1, -1)
        return Problem(
            num_stages=self.num_stages,
            num_microbatches=self.num_microbatches,
            num_groups=self.num_groups,
            group=self.group[::-1],
            duration=self.duration[::-1],
            send=(*(self.recv[q] for q in out), 0),
            recv=(*(self.send[q] for q in out), 0),
            fabric=(*(self.fabric[q] for q in out), False),
            latency=(*(self.latency[q] for q in out), 0),
            weight=self.weight,
            memory=self.memory,
            capacity=self.capacity,
            in_flight=self.in_flight,
            tick_s=self.tick_s,
            mirrored=not self.mirrored,
        )

    def mirror_operations(self) -> list[int]:
        """By operation, its number in the mirrored problem."""
        chain, count = 2 * self.num_stages * self.num_microbatches, self.num_microbatches
        last = 2 * self.num_stages - 1
        turned = [(last - operation // count) * count + operation % count for operation in range(chain)]
        return turned + list(range(chain, self.num_operations))

    def action(self, operation: int) -> Action:
        """The compute action that `operation` of a problem that is not mirrored stands for."""
        position, microbatch = divmod(operation, self.num_microbatches)
        if position < self.num_stages:
            return Action(Kind.FORWARD, position, microbatch)
        if position >= 2 * self.num_stages:
            return Action(Kind.BACKWARD_WEIGHT, position - 2 * self.num_stages, microbatch)
        kind = Kind.BACKWARD_INPUT if self.weight else Kind.FULL_BACKWARD
        return Action(kind, 2 * self.num_stages - 1 - position, microbatch)

    def operation(self, action: Action) -> int:
        """The inverse of `action`; a full backward stands for its input half where backward is split."""
        kind, stage, microbatch = action
        if kind is Kind.BACKWARD_WEIGHT:
            position = 2 * self.num_stages + stage
        else:
            position = stage if kind is Kind.FORWARD else 2 * self.num_stages - 1 - stage
        return position * self.num_microbatches + microbatch


def build_problem(
    costs: StageTimes,
    group_of_stage: Sequence[int],
    *,
    num_groups: int,
    num_microbatches: int,
    split_backward: bool = False,
    cap: float = 0.0,
    memory_bytes: float | Sequence[float] = 0.0,
    in_flight: int = 0,
    ticks: int = TICKS,
) -> Problem:
    """Costs and caps as integers. Of a hop's two kinds of links the slower one is kept; the other is taken as free.

    cap: a group's activations are at most those of this many micro-batches in all its stages; 0: no such cap.
    memory_bytes: most bytes of activations a worker, one number or one a group; 0: no such cap.
    in_flight: most micro-batches between first forward and last backward; 0: any number.
    ticks: that the longest duration is divided into.

    Raises ValueError for costs of another number of stages, and for caps that not even one micro-batch keeps.
    """
    num_stages = len(group_of_stage)
    if len(costs.forward_s) != num_stages:
        raise ValueError(f"costs are for {len(costs.forward_s)} stages, the model has {num_stages} in this layout")
    backward = costs.backward_input_s if split_backward else costs.backward_s
    seconds = [*costs.forward_s, *reversed(backward)]
    hops: list[HopTimes | None] = [*costs.forward_hop[1:], None, *reversed(costs.backward_hop[:-1]), None]
    weights = costs.backward_weight_s if split_backward else ()
    longest = max(*seconds, *weights, *(max(_link(hop)) for hop in hops)) or 1.0

    def count(time: float) -> int:
        return round(time * ticks / longest)

    held = tuple(costs.activation_bytes) or (1.0,) * num_stages
    unit = (max(held) or 1.0) / MEMORY_UNITS
    memory = tuple(-int(-size // unit) for size in held)
    return Problem(
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_groups=num_groups,
        group=(*group_of_stage, *reversed(group_of_stage)),
        duration=tuple(map(count, seconds)),
        send=tuple(count(_link(hop)[0]) for hop in hops),
        recv=tuple(count(_link(hop)[1]) for hop in hops),
        fabric=tuple(_is_fabric(hop) for hop in hops),
        latency=tuple(count(hop.latency_s) if hop else 0 for hop in hops),
        weight=tuple(map(count, weights)),
        memory=memory,
        capacity=_capacities(memory, unit, group_of_stage, num_groups, cap, memory_bytes),
        in_flight=in_flight or UNLIMITED,
        tick_s=longest / ticks,
    )


def _is_fabric(hop: HopTimes | None) -> bool:
    return hop is not None and max(hop.fabric_send_s, hop.fabric_recv_s) > max(hop.send_s, hop.recv_s)


def _link(hop: HopTimes | None) -> tuple[float, float]:
    """(Time on the sender's link, time on the receiver's) of the slower kind of links."""
    if hop is None:
        return 0.0, 0.0
    return (hop.fabric_send_s, hop.fabric_recv_s) if _is_fabric(hop) else (hop.send_s, hop.recv_s)


def _capacities(
    memory: Sequence[int],
    unit: float,
    group_of_stage: Sequence[int],
    num_groups: int,
    cap: float,
    memory_bytes: float | Sequence[float],
) -> tuple[int, ...]:
    if cap < 0 or (cap and cap < 1):
        raise ValueError(f"cap = {cap}: must be at least 1 (a micro-batch), or 0 for none")
    limits = [memory_bytes] * num_groups if isinstance(memory_bytes, int | float) else list(memory_bytes)
    if len(limits) != num_groups:
        raise ValueError(f"memory_bytes has {len(limits)} entries for {num_groups} groups: one a group, or one number")
    capacities = []
    for group, limit in enumerate(limits):
        one = sum(m for m, owner in zip(memory, group_of_stage, strict=True) if owner == group)
        if limit and one * unit > limit:
            raise ValueError(
                f"memory_bytes = {limit:.6g}: the activations of one micro-batch on group {group} alone take "
                f"{one * unit:.6g}; use more micro-batches, more workers or groups, or recomputation"
            )
        capacity = int(cap * one) if cap else UNLIMITED
        capacities.append(min(capacity, int(limit / unit)) if limit else capacity)
    return tuple(capacities)


def order_fits(problem: Problem, group: int, operations: Sequence[int]) -> bool:
    """Whether `operations`, all those of `group` in this order, stay within its caps, the last stage with one
    micro-batch at a time. Not for a mirrored problem."""
    count, stages = problem.num_microbatches, problem.num_stages
    room, admitted, head = problem.capacity[group], 0, 0
    for operation in operations:
        position = operation // count
        if position < stages:
            room -= problem.memory[position]
            admitted += position == 0
            head += position == stages - 1
            if room < 0 or admitted > problem.in_flight or head > 1:
                return False
        elif position >= 2 * stages or not problem.weight:
            stage = position - 2 * stages if problem.weight else 2 * stages - 1 - position
            room += problem.memory[stage]
            admitted -= stage == 0
            head -= stage == stages - 1
    return True
