"""The discrete-event engine: executes the programs of a `Schedule`, the object that the runtime executes too.

A worker issues its program in order. Receives and sends take it no time: a receive is *posted*, a send *handed over*.
A compute action occupies the worker's one compute engine; it starts when the actions before it are done and its
payload has arrived. A transfer enters the network when all its receivers have posted and its sender has handed over.

The host is *blocking* by default, as on CPU: it issues what follows a compute action when that has ended. A host that
runs *ahead*, as on CUDA, goes on as soon as the compute action is launched, that is when its payload has arrived; a
send then leaves when the host has reached it and its payload has been computed.

Groups whose workers are alike are simulated by one worker each; with `workers` given, all are, and may differ.
"""

from __future__ import annotations

import gc
import heapq
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from disagmoe.schedules import Action, Kind, Schedule
from disagmoe.schedules.dependencies import Message, group_name
from disagmoe.simulator.costs import StageCosts, Workers
from disagmoe.simulator.network import Event, Fair, InOrder, Network, Route, make_route
from disagmoe.simulator.result import ComputeSpan, Result

_RESUME, _HANDOVER = 0, 1
_COMPUTE, _SEND, _POST = 0, 1, 2
_UNKNOWN = -1.0


class DeadlockError(ValueError):
    """The programs can't finish; the message names the cycle of groups that wait for one another."""

    def __init__(self, message: str, cycle: tuple[int, ...]) -> None:
        super().__init__(message)
        self.cycle = cycle
        """Groups, each waiting for the next and the last for the first; empty where a payload is never sent."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How links and hosts behave."""

    links: Literal["in_order", "fair", "no_contention"] = "in_order"
    """See `network`."""
    host: Literal["blocking", "ahead"] = "blocking"
    record_links: bool = True
    """Keep what occupied the links when, for timelines; their total use is always there."""


def simulate(
    schedule: Schedule, costs: StageCosts, *, workers: Workers | None = None, options: Options | None = None
) -> Result:
    """Execute every program.

    Args:
        workers: simulate them all; None: one worker a group stands for all of it.

    Raises:
        ValueError: costs or workers do not fit the schedule.
        DeadlockError: the programs can't finish.
    """
    if costs.num_stages != schedule.num_stages:
        raise ValueError(f"costs are for {costs.num_stages} stages, the schedule has {schedule.num_stages}")
    if workers is not None:
        workers.check(schedule.num_groups)
    everybody = workers or Workers(count=(1,) * schedule.num_groups)
    with no_garbage_collection():
        return _Engine(schedule, costs, everybody, options or Options()).run()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Millions of small records are kept and none is part of a cycle: looking for cycles would double the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Engine:
    """Units are workers, numbered group by group. Messages are numbered by pass, receiving stage and micro-batch."""

    def __init__(self, schedule: Schedule, costs: StageCosts, workers: Workers, options: Options) -> None:
        self.schedule = schedule
        self.costs = costs
        self.workers = workers
        self.ahead = options.host == "ahead"
        self.units_of_group: list[range] = []
        self.group_of_unit: list[int] = []
        for group, count in enumerate(workers.count):
            start = len(self.group_of_unit)
            self.units_of_group.append(range(start, start + count))
            self.group_of_unit += [group] * count
        num_units = len(self.group_of_unit)
        share = [s for group in range(schedule.num_groups) for s in workers.share_of(group)]
        self.pace = [
            share[unit] * workers.slowdown.get((group, unit - self.units_of_group[group].start), 1.0)
            for unit, group in enumerate(self.group_of_unit)
        ]
        self.events: list[Event] = []
        common = {
            "route_of": self._route,
            "share": share,
            "events": self.events,
            "deliver": self._deliver,
            "record": options.record_links,
        }
        contention = options.links != "no_contention"
        self.network: Network = Fair(**common) if options.links == "fair" else InOrder(contention=contention, **common)
        self.routes: dict[int, Route] = {}
        self.programs = [self._compile(program) for program in schedule.programs]

        self.unposted = [
            workers.count[group]
            for _ in range(2)
            for group in schedule.group_of_stage
            for _ in range(schedule.num_microbatches)
        ]
        """By message: receivers that have yet to post it."""
        self.handed: dict[int, list[int]] = {}
        """Message to senders that wait for its receives."""
        self.handover_s = [_UNKNOWN] * len(self.unposted)
        """Last sender's hand-over."""
        self.arrived_at: dict[tuple[int, int], float] = {}
        self.position = [0] * num_units
        self.free_at = [0.0] * num_units
        self.made_at: list[dict[int, float]] = [{} for _ in range(num_units)]
        self.blocked: list[int] = [-1] * num_units
        """Message that a unit waits for, or -1."""
        self.spans: list[list[ComputeSpan]] = [[] for _ in range(num_units)]

    def _compile(self, program: tuple[Action, ...]) -> list[tuple[int, int, float, int, Action]]:
        """(operation, message or -1, seconds, message that it makes or -1, action).

        Spelt out, in the sense of `dependencies`: this is a large part of a simulation's time.
        """
        last, count = self.schedule.num_stages - 1, self.schedule.num_microbatches
        backward = (last + 1) * count
        costs = self.costs
        forward_s, backward_s = costs.forward_s, costs.backward_s
        input_s, weight_s = costs.backward_input_s, costs.backward_weight_s
        compiled = []
        for action in program:
            kind, stage, microbatch = action
            into = stage * count + microbatch
            if kind is Kind.FORWARD:
                made = into + count if stage < last else -1
                compiled.append((_COMPUTE, into if stage else -1, forward_s[stage], made, action))
            elif kind is Kind.BACKWARD_WEIGHT:
                compiled.append((_COMPUTE, -1, weight_s[stage], -1, action))
            elif kind is Kind.FULL_BACKWARD or kind is Kind.BACKWARD_INPUT:
                seconds = (backward_s if kind is Kind.FULL_BACKWARD else input_s)[stage]
                needed = backward + into if stage < last else -1
                compiled.append((_COMPUTE, needed, seconds, backward + into - count if stage else -1, action))
            elif kind is Kind.SEND_F:
                compiled.append((_SEND, into + count, 0.0, -1, action))
            elif kind is Kind.SEND_B:
                compiled.append((_SEND, backward + into - count, 0.0, -1, action))
            else:
                compiled.append((_POST, into if kind is Kind.RECV_F else backward + into, 0.0, -1, action))
        return compiled

    def message(self, number: int) -> Message:
        """The message with this number."""
        row, microbatch = divmod(number, self.schedule.num_microbatches)
        backward, stage = divmod(row, self.schedule.num_stages)
        return Message(bool(backward), stage, microbatch)

    def _route(self, number: int) -> Route:
        row = number // self.schedule.num_microbatches
        if row not in self.routes:
            message = self.message(number)
            hop = (self.costs.backward_hop if message.backward else self.costs.forward_hop)[message.stage]
            groups = self.schedule.group_of_stage
            self.routes[row] = make_route(
                self.units_of_group[groups[message.sender]], self.units_of_group[groups[message.stage]], hop
            )
        return self.routes[row]

    def run(self) -> Result:
        for unit in range(len(self.group_of_unit)):
            self._advance(unit, 0.0)
        pop, events, handle = heapq.heappop, self.events, self.network.handle
        while events:
            event = pop(events)
            kind = event[1]
            if kind == _RESUME:
                self._advance(event[2], event[0])
            elif kind == _HANDOVER:
                self._hand_over(event[3], event[4], event[0])
            else:
                handle(event)
        stuck = [u for u, group in enumerate(self.group_of_unit) if self.position[u] < len(self.programs[group])]
        if stuck:
            raise self._deadlock(stuck)
        return Result(
            schedule=self.schedule,
            costs=self.costs,
            workers=self.workers,
            group_of_unit=tuple(self.group_of_unit),
            compute_spans=tuple(map(tuple, self.spans)),
            link_spans=tuple(self.network.spans),
            link_busy_s=tuple(map(tuple, self.network.busy)),
            handover_s=tuple(self.handover_s),
            arrived_at=self.arrived_at,
        )

    def _advance(self, unit: int, now: float) -> None:
        """Issue `unit`'s program from where it stands until it must wait."""
        program = self.programs[self.group_of_unit[unit]]
        position = self.position[unit]
        while position < len(program):
            op, message, seconds, made, action = program[position]
            if op == _POST:
                self._post(message, now)
            elif op == _SEND:
                # Ahead of the engine, the host reaches a send before its payload is there.
                ready = max(now, self.made_at[unit].pop(message, now))
                if ready > now:
                    heapq.heappush(self.events, (ready, _HANDOVER, 0, message, unit))
                else:
                    self._hand_over(message, unit, now)
            else:
                arrival = self.arrived_at.get((message, unit), _UNKNOWN) if message >= 0 else 0.0
                if arrival == _UNKNOWN:
                    self.blocked[unit] = message
                    break
                if self.ahead and arrival > now:
                    heapq.heappush(self.events, (arrival, _RESUME, unit, 0, 0))
                    break
                end = self._compute(unit, action, max(now, arrival, self.free_at[unit]), seconds, message)
                position += 1
                if not self.ahead:
                    heapq.heappush(self.events, (end, _RESUME, unit, 0, 0))
                    break
                if made >= 0:
                    self.made_at[unit][made] = end
                continue
            position += 1
        self.position[unit] = position

    def _compute(self, unit: int, action: Action, start: float, seconds: float, message: int) -> float:
        free = self.free_at[unit]
        exposed = 0.0
        if message >= 0 and start > free:
            exposed = max(0.0, min(start, self.arrived_at[message, unit]) - max(free, self.handover_s[message]))
        end = start + seconds * self.pace[unit]
        self.spans[unit].append(ComputeSpan(action, start, end, exposed, start - free - exposed))
        self.free_at[unit] = end
        return end

    def _post(self, message: int, now: float) -> None:
        self.unposted[message] -= 1
        if self.unposted[message] == 0:
            for unit in self.handed.pop(message, ()):
                self.network.start(message, unit, now)

    def _hand_over(self, message: int, unit: int, now: float) -> None:
        self.handover_s[message] = max(self.handover_s[message], now)
        if self.unposted[message] == 0:
            self.network.start(message, unit, now)
        else:
            self.handed.setdefault(message, []).append(unit)

    def _deliver(self, message: int, unit: int, when: float) -> None:
        """The network knows when all of `message` is at `unit`: at `when`, which is not before now."""
        self.arrived_at[message, unit] = when
        if self.blocked[unit] == message:
            self.blocked[unit] = -1
            heapq.heappush(self.events, (when, _RESUME, unit, 0, 0))

    def _deadlock(self, stuck: list[int]) -> DeadlockError:
        """Follow who waits for whom: a receiver that has not posted, or a sender that has not handed over."""
        schedule = self.schedule

        def name(group: int) -> str:
            return group_name(group, schedule.stages, schedule.group_of_stage)

        waits: dict[int, tuple[Action, Message, int]] = {}
        for unit in stuck:
            number, group = self.blocked[unit], self.group_of_unit[unit]
            message = self.message(number)
            posted = self.unposted[number] == 0 and message.receive in schedule.programs[group]
            other = schedule.group_of_stage[message.sender] if posted else group
            waits.setdefault(group, (schedule.programs[group][self.position[unit]], message, other))
        lines: dict[int, str] = {}
        group = min(waits)
        while group not in lines:
            action, message, other = waits[group]
            wanted = message.receive if other == group else message.send
            lines[group] = f"{name(group)} at {action} waits for {wanted} of {name(other)}"
            if other not in waits or wanted not in schedule.programs[other]:
                return DeadlockError(f"deadlock: {lines[group]}, which never does it", ())
            group = other
        cycle = tuple(lines)[list(lines).index(group) :]
        return DeadlockError("deadlock: " + "; ".join(lines[g] for g in cycle), cycle)
