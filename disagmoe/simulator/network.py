"""Links between workers, driven by the engine's clock.

Every worker has a sending and a receiving direction on its NIC and on its node's fabric. A transfer between groups of
M and N workers is M N flows: sender i spreads its bytes over all receivers, in proportion to their shares.

`InOrder` (the default) serves each direction in order: a transfer enters the sending direction's queue when its
payload is handed over and its receive is posted, and occupies it for its own sending time. Bytes pass through to the
receivers at once; a receiving direction serves what reaches it in the order in which it was sent, so that a transfer
has arrived when its last byte was sent and the direction, once free, has had its own receiving time. The switch
buffers: a busy receiver does not hold up the sender's later transfers. With `contention` off no transfer waits for
another one.

`Fair` divides every direction equally among the flows under way; a flow runs at the lesser of its two shares, and what
it leaves of the other one is not given to its neighbours.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from disagmoe.simulator.costs import Hop

NIC, FABRIC = 0, 1
LEG_NAMES = ("nic", "fabric")
ENTER, RECEIVE, FINISH = 2, 3, 4
"""Kinds of events, after those of the engine (0 and 1), which come first at equal times."""
Event = tuple[float, int, int, int, int]
"""Time, kind, then by kind: message and leg and worker, or flow and version."""


class LinkSpan(NamedTuple):
    """One direction of one worker's link, occupied by a message."""

    leg: int
    sending: bool
    unit: int
    message: int
    start_s: float
    end_s: float


class Route(NamedTuple):
    """Who takes part in a message, and what each leg costs an average one."""

    senders: range
    """Units: numbers of workers through all groups."""
    receivers: range
    legs: tuple[tuple[int, float, float], ...]
    """(NIC or FABRIC, seconds of a sender, seconds of a receiver)."""
    latency_s: float


def make_route(senders: range, receivers: range, hop: Hop) -> Route:
    """Legs that carry nothing are left out, unless all are: a message has at least one."""
    legs = [(NIC, hop.send_s, hop.recv_s), (FABRIC, hop.fabric_send_s, hop.fabric_recv_s)]
    used = tuple(leg for leg in legs if leg[1] or leg[2]) or (legs[1],)
    return Route(senders, receivers, used, hop.latency_s)


class Network:
    """What both kinds share: routes, shares, deliveries, and the record of what was occupied."""

    def __init__(
        self,
        *,
        route_of: Callable[[int], Route],
        share: Sequence[float],
        events: list[Event],
        deliver: Callable[[int, int, float], None],
        record: bool,
    ) -> None:
        """`share`: of each unit, relative to its group's average; `deliver(message, unit, time)`: once a receiver."""
        self.route_of = route_of
        self.share = share
        self.events = events
        self.deliver = deliver
        self.record = record
        self.spans: list[LinkSpan] = []
        self.busy = [[0.0] * len(share) for _ in range(4)]
        """Seconds by 2 leg + (0 sending, 1 receiving), then unit."""
        self.pending: dict[tuple[int, int], list[float]] = {}
        """(message, receiver): parts still missing, and the latest arrival so far."""

    def start(self, message: int, unit: int, now: float) -> None:
        """Sender `unit` has handed over its part, and the receivers have posted theirs."""
        heapq.heappush(self.events, (now, ENTER, message, 0, unit))

    def handle(self, event: Event) -> None:
        raise NotImplementedError

    def _arrive(self, message: int, route: Route, receiver: int, parts: int, when: float) -> None:
        """`parts` (sender, leg) parts of `message` are at `receiver`; the last ones complete it."""
        expected = len(route.senders) * len(route.legs)
        if parts == expected:
            self.deliver(message, receiver, when)
            return
        state = self.pending.setdefault((message, receiver), [expected, 0.0])
        state[0] -= parts
        state[1] = max(state[1], when)
        if state[0] == 0:
            del self.pending[message, receiver]
            self.deliver(message, receiver, state[1])

    def _occupy(self, leg: int, sending: bool, unit: int, message: int, start: float, end: float) -> None:
        if end > start:
            self.busy[2 * leg + (not sending)][unit] += end - start
            if self.record:
                self.spans.append(LinkSpan(leg, sending, unit, message, start, end))

    def _same(self, event: Event, length: int) -> list[int]:
        """Units of all events that agree with `event` in their first `length` entries; takes them from the heap."""
        units = [event[4]]
        while self.events and self.events[0][:length] == event[:length]:
            units.append(heapq.heappop(self.events)[4])
        return units


class InOrder(Network):
    """First come, first served, in every direction. Senders of a message that start together are served together."""

    def __init__(self, *, contention: bool = True, **common: object) -> None:
        super().__init__(**common)  # type: ignore[arg-type]
        self.contention = contention
        self.free = [[0.0] * len(self.share) for _ in range(4)]

    def handle(self, event: Event) -> None:
        now, kind, message, leg_index, _ = event
        route = self.route_of(message)
        if kind == RECEIVE:
            self._receive(message, route, leg_index, self._same(event, 4), now)
            return
        units = self._same(event, 3)
        for index, (leg, send_s, _) in enumerate(route.legs):
            free = self.free[2 * leg]
            at_once = []
            for unit in units:
                start = max(now, free[unit]) if send_s and self.contention else now
                end = start + send_s * self.share[unit]
                if send_s and self.contention:
                    free[unit] = end
                self._occupy(leg, True, unit, message, start, end)
                if start == now:
                    at_once.append(unit)
                else:
                    heapq.heappush(self.events, (start, RECEIVE, message, index, unit))
            if at_once:
                self._receive(message, route, index, at_once, now)

    def _receive(self, message: int, route: Route, leg_index: int, units: list[int], now: float) -> None:
        """`units` have begun to send: reserve the receivers' time."""
        leg, send_s, recv_s = route.legs[leg_index]
        all_senders = len(units) == len(route.senders)
        part = 1.0 if all_senders else sum(self.share[u] for u in units) / sum(self.share[u] for u in route.senders)
        sent = send_s * max(self.share[u] for u in units)
        free = self.free[2 * leg + 1]
        for receiver in route.receivers:
            mine = recv_s * self.share[receiver] * part
            # The last byte can't be here before it was sent; up to then the direction may serve others.
            start = now + route.latency_s + max(0.0, sent - mine)
            if mine and self.contention:
                start = max(start, free[receiver])
                free[receiver] = start + mine
            self._occupy(leg, False, receiver, message, start, start + mine)
            self._arrive(message, route, receiver, len(units), start + mine)


@dataclass(kw_only=True, slots=True)
class _Flow:
    """Part of a message from one sender to one receiver on one leg."""

    message: int
    leg: int
    sender: int
    receiver: int
    need: tuple[float, float]
    """Seconds of the sender's and of the receiver's direction."""
    start: float
    latency_s: float
    since: float
    """When `left` was true."""
    left: float = 1.0
    """Part still to be sent."""
    rate: float = 0.0
    """Parts a second."""
    version: int = 0
    """Of `rate`: an event that foresaw the end at an older rate is void."""


class Fair(Network):
    """Equal shares, updated whenever a flow begins or ends."""

    def __init__(self, **common: object) -> None:
        super().__init__(**common)  # type: ignore[arg-type]
        self.flows: list[_Flow] = []
        self.active: list[list[dict[int, _Flow]]] = [[{} for _ in self.share] for _ in range(4)]
        """By 2 leg + direction, then unit: flows under way, by number."""

    def handle(self, event: Event) -> None:
        now, kind, first, _, second = event
        if kind == FINISH:
            flow = self.flows[first]
            if flow.version == second:
                self._finish(first, flow, now)
            return
        for unit in self._same(event, 3):
            self._begin(first, unit, now)

    def _begin(self, message: int, sender: int, now: float) -> None:
        route = self.route_of(message)
        senders = sum(self.share[u] for u in route.senders)
        receivers = sum(self.share[u] for u in route.receivers)
        begun = []
        for leg, send_s, recv_s in route.legs:
            for receiver in route.receivers:
                part = self.share[sender] * self.share[receiver]
                need = (send_s * part / receivers, recv_s * part / senders)
                flow = _Flow(
                    message=message,
                    leg=leg,
                    sender=sender,
                    receiver=receiver,
                    need=need,
                    start=now,
                    latency_s=route.latency_s,
                    since=now,
                )
                if max(need) == 0:
                    self._arrive(message, route, receiver, 1, now + route.latency_s)
                    continue
                number = len(self.flows)
                self.flows.append(flow)
                begun.append(number)
                self.active[2 * leg][sender][number] = flow
                self.active[2 * leg + 1][receiver][number] = flow
        self._update(begun, now)

    def _finish(self, number: int, flow: _Flow, now: float) -> None:
        del self.active[2 * flow.leg][flow.sender][number]
        del self.active[2 * flow.leg + 1][flow.receiver][number]
        self._update_beside([flow], now)
        for sending, unit, need in ((True, flow.sender, flow.need[0]), (False, flow.receiver, flow.need[1])):
            self.busy[2 * flow.leg + (not sending)][unit] += need
            if self.record and need:
                self.spans.append(LinkSpan(flow.leg, sending, unit, flow.message, flow.start, now))
        self._arrive(flow.message, self.route_of(flow.message), flow.receiver, 1, now + flow.latency_s)

    def _update(self, begun: list[int], now: float) -> None:
        self._update_beside([self.flows[number] for number in begun], now)

    def _update_beside(self, changed: list[_Flow], now: float) -> None:
        """New rates for all flows that share a direction with one of `changed`."""
        touched: dict[int, _Flow] = {}
        for flow in changed:
            touched.update(self.active[2 * flow.leg][flow.sender])
            touched.update(self.active[2 * flow.leg + 1][flow.receiver])
        for number, flow in sorted(touched.items()):
            flow.left -= (now - flow.since) * flow.rate
            flow.since = now
            shares = (
                1 / len(self.active[2 * flow.leg][flow.sender]),
                1 / len(self.active[2 * flow.leg + 1][flow.receiver]),
            )
            rate = min(share / need for share, need in zip(shares, flow.need, strict=True) if need)
            if rate == flow.rate:
                continue
            flow.rate = rate
            flow.version += 1
            heapq.heappush(self.events, (now + max(0.0, flow.left) / rate, FINISH, number, 0, flow.version))
