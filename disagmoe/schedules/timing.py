"""Time a finished schedule on given costs, to choose among candidates: the simulator's default semantics, bare.

One worker stands for its group. The host issues its program in order and waits for each compute action to end. A
transfer enters its sender's link when it is handed over and its receive is posted; links serve in order, in both
directions; what has arrived is there for good. A test holds this equal to the simulator, which also knows unlike
workers, other hosts and links, and what to report.
"""

from __future__ import annotations

import heapq

from disagmoe.schedules.actions import Action, Kind, Schedule
from disagmoe.schedules.costs import HopTimes, StageTimes

_RESUME, _ENTER, _RECEIVE = 0, 2, 3
_COMPUTE, _SEND, _POST = 0, 1, 2
Leg = tuple[int, float, float]
"""0 for the NIC or 1 for the fabric, time of a sender, time of a receiver."""


def makespan(schedule: Schedule, costs: StageTimes) -> float:
    """The end of the last compute action, in the unit of the costs."""
    return max((time for ends in end_times(schedule, costs) for time in ends[-1:]), default=0.0)


def end_times(schedule: Schedule, costs: StageTimes) -> tuple[tuple[float, ...], ...]:
    """By group: when each action of `schedule.compute` ends. The schedule must be one that `validate` has passed."""
    return _Execution(schedule, costs).run()


class _Execution:
    """Messages are numbered by pass, receiving stage and micro-batch."""

    def __init__(self, schedule: Schedule, costs: StageTimes) -> None:
        self.num_stages, self.count = schedule.num_stages, schedule.num_microbatches
        self.group_of_stage = schedule.group_of_stage
        self.costs = costs
        self.seconds = {
            Kind.FORWARD: costs.forward_s,
            Kind.FULL_BACKWARD: costs.backward_s,
            Kind.BACKWARD_INPUT: costs.backward_input_s,
            Kind.BACKWARD_WEIGHT: costs.backward_weight_s,
        }
        self.programs = [[self._compile(action) for action in program] for program in schedule.programs]
        rows = range(2 * self.num_stages)
        self.legs = [self._legs(self._hop(row)) for row in rows]
        self.latency = [self._hop(row).latency_s for row in rows]
        size = len(rows) * self.count
        self.posted = bytearray(size)
        self.handed = bytearray(size)
        self.missing = [len(self.legs[message // self.count]) for message in range(size)]
        self.arrival = [0.0] * size
        self.blocked = [-1] * schedule.num_groups
        self.position = [0] * schedule.num_groups
        self.free: list[list[float]] = [[0.0] * schedule.num_groups for _ in range(4)]
        """By 2 leg + (0 sending, 1 receiving), then group: when the link is free."""
        self.events: list[tuple[float, int, int, int]] = []
        self.ends: list[list[float]] = [[] for _ in range(schedule.num_groups)]

    def _compile(self, action: Action) -> tuple[int, int, float]:
        """(Operation, message or -1, seconds)."""
        kind, stage, microbatch = action
        last = self.num_stages - 1
        if kind in self.seconds:
            row = stage if kind is Kind.FORWARD else stage + self.num_stages
            waits = stage > 0 if kind is Kind.FORWARD else (stage < last and kind is not Kind.BACKWARD_WEIGHT)
            return _COMPUTE, row * self.count + microbatch if waits else -1, self.seconds[kind][stage]
        if kind is Kind.SEND_F or kind is Kind.SEND_B:
            row = stage + 1 if kind is Kind.SEND_F else self.num_stages + stage - 1
            return _SEND, row * self.count + microbatch, 0.0
        row = stage if kind is Kind.RECV_F else self.num_stages + stage
        return _POST, row * self.count + microbatch, 0.0

    def _hop(self, row: int) -> HopTimes:
        backward, stage = divmod(row, self.num_stages)
        return (self.costs.backward_hop if backward else self.costs.forward_hop)[stage]

    @staticmethod
    def _legs(hop: HopTimes) -> tuple[Leg, ...]:
        legs = ((0, hop.send_s, hop.recv_s), (1, hop.fabric_send_s, hop.fabric_recv_s))
        return tuple(leg for leg in legs if leg[1] or leg[2]) or legs[1:]

    def run(self) -> tuple[tuple[float, ...], ...]:
        events = self.events
        for group in range(len(self.programs)):
            self._advance(group, 0.0)
        while events:
            now, kind, number, leg = heapq.heappop(events)
            if kind == _RESUME:
                self._advance(number, now)
            elif kind == _ENTER:
                self._enter(number, now)
            else:
                self._receive(number, leg, now)
        unfinished = [g for g, program in enumerate(self.programs) if self.position[g] < len(program)]
        assert not unfinished, f"groups {unfinished} wait for ever: the schedule was not validated"
        return tuple(map(tuple, self.ends))

    def _advance(self, group: int, now: float) -> None:
        """Issue the program until it must wait or computes."""
        program, position = self.programs[group], self.position[group]
        while position < len(program):
            operation, message, seconds = program[position]
            if operation == _COMPUTE:
                if message >= 0 and self.missing[message]:
                    self.blocked[group] = message
                    break
                # Delivery is known ahead of time: the payload may still be on its way.
                end = max(now, self.arrival[message] if message >= 0 else 0.0) + seconds
                self.ends[group].append(end)
                heapq.heappush(self.events, (end, _RESUME, group, 0))
                position += 1
                break
            done, other = (self.handed, self.posted) if operation == _SEND else (self.posted, self.handed)
            done[message] = 1
            if other[message]:
                heapq.heappush(self.events, (now, _ENTER, message, 0))
            position += 1
        self.position[group] = position

    def _groups(self, message: int) -> tuple[int, int]:
        backward, stage = divmod(message // self.count, self.num_stages)
        return self.group_of_stage[stage + 1 if backward else stage - 1], self.group_of_stage[stage]

    def _enter(self, message: int, now: float) -> None:
        sender, _ = self._groups(message)
        for index, (leg, send_s, _) in enumerate(self.legs[message // self.count]):
            free = self.free[2 * leg]
            start = max(now, free[sender]) if send_s else now
            if send_s:
                free[sender] = start + send_s
            if start == now:
                self._receive(message, index, now)
            else:
                heapq.heappush(self.events, (start, _RECEIVE, message, index))

    def _receive(self, message: int, index: int, now: float) -> None:
        """`message` begins to be sent: reserve the receiver's time."""
        row = message // self.count
        leg, send_s, recv_s = self.legs[row][index]
        _, receiver = self._groups(message)
        start = now + self.latency[row] + max(0.0, send_s - recv_s)
        if recv_s:
            free = self.free[2 * leg + 1]
            start = max(start, free[receiver])
            free[receiver] = start + recv_s
        self.arrival[message] = max(self.arrival[message], start + recv_s)
        self.missing[message] -= 1
        if not self.missing[message] and self.blocked[receiver] == message:
            self.blocked[receiver] = -1
            heapq.heappush(self.events, (self.arrival[message], _RESUME, receiver, 0))
