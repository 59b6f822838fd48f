"""AF-Pipe's schedules by name, and weight gradients put off into waits."""

from __future__ import annotations

import heapq
import inspect
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from disagmoe.layout import Layout
from disagmoe.schedules import Action, Kind, Schedule, make_schedule, peak_in_flight, validate
from disagmoe.schedules.dependencies import Message, input_of, output_of
from disagmoe.schedules.lower import lower
from disagmoe.simulator.costs import StageCosts


def af_schedule(
    layout: Layout,
    is_moe_layer: Sequence[bool],
    *,
    costs: StageCosts,
    order: str,
    split: bool,
    num_microbatches: int,
    in_flight: int = 0,
    hoist: int = 8,
    send_after: int = 0,
) -> Schedule:
    """`make_schedule`, for `fitted` on these costs; with `split`, weight gradients put off.

    Raises:
        ValueError: a value out of range, or an order that does not exist.
    """
    if order == "fitted" and not fitted_exists():
        raise ValueError('schedule = "fitted": there is no such generator yet; use plain or deep')
    numbers = (num_microbatches, in_flight, hoist, send_after)
    if order == "fitted":
        return _make(layout, tuple(is_moe_layer), order, *numbers, costs=costs, split_backward=split)
    # Their order depends on neither costs nor the number of workers, and many runs differ in these only.
    one = replace(layout, attn_workers=1, ffn_workers=1, rank_order="paired")
    schedule = _make_once(one, tuple(is_moe_layer), order, *numbers)
    return put_off_weights(schedule, costs, hoist=hoist, send_after=send_after) if split else schedule


def _make(
    layout: Layout,
    is_moe_layer: tuple[bool, ...],
    name: str,
    num_microbatches: int,
    in_flight: int,
    hoist: int,
    send_after: int,
    **costs: Any,
) -> Schedule:
    return make_schedule(
        layout,
        is_moe_layer,
        name=name,
        num_microbatches=num_microbatches,
        in_flight=in_flight,
        hoist=hoist,
        send_after=send_after,
        **costs,
    )


_make_once = lru_cache(maxsize=64)(_make)


def fitted_exists() -> bool:
    """Whether `make_schedule` can fit an order to costs."""
    return {"costs", "split_backward"} <= set(inspect.signature(make_schedule).parameters)


def put_off_weights(schedule: Schedule, costs: StageCosts, *, hoist: int = 8, send_after: int = 0) -> Schedule:
    """`schedule` with every backward in two halves: the input half in its place, the weight half where its group waits.

    The order is played on `costs` (transfers alone on their links). A group never keeps more activations than before:
    where a forward would be one too many, weight halves that are due come first.
    """
    compute = tuple(tuple(order) for order in _Player(schedule, costs).play())
    split = replace(
        schedule,
        name=f"{schedule.name}-split",
        compute=compute,
        programs=lower(
            compute,
            stages=schedule.stages,
            group_of_stage=schedule.group_of_stage,
            hoist=hoist,
            send_after=send_after,
        ),
    )
    validate(split)
    return split


class _Player:
    """Plays fixed orders of forwards and input halves; weight halves fill the waits."""

    def __init__(self, schedule: Schedule, costs: StageCosts) -> None:
        self.schedule = schedule
        self.costs = costs
        self.orders = [
            [a._replace(kind=Kind.BACKWARD_INPUT) if a.kind is Kind.FULL_BACKWARD else a for a in order]
            for order in schedule.compute
        ]
        self.cap = peak_in_flight(schedule)
        self.alive = [0] * schedule.num_groups
        self.position = [0] * schedule.num_groups
        self.weights: list[deque[Action]] = [deque() for _ in self.orders]
        self.arrived: dict[Message, float] = {}
        self.played: list[list[Action]] = [[] for _ in self.orders]
        self.waiting: list[bool] = [False] * schedule.num_groups
        self.events: list[tuple[float, int]] = [(0.0, group) for group in range(schedule.num_groups)]
        """(Time, group that may go on)."""

    def play(self) -> list[list[Action]]:
        while self.events:
            now, group = heapq.heappop(self.events)
            free_at = self._decide(group, now)
            if free_at is not None:
                heapq.heappush(self.events, (free_at, group))
        assert all(len(order) == at for order, at in zip(self.orders, self.position, strict=True)), (
            "the order deadlocks"
        )
        return self.played

    def _decide(self, group: int, now: float) -> float | None:
        """Start an action; returns when the group may go on, None: when its payload has arrived."""
        if self.position[group] == len(self.orders[group]):
            return self._run(group, self.weights[group].popleft(), now) if self.weights[group] else None
        action = self.orders[group][self.position[group]]
        full = action.kind is Kind.FORWARD and self.alive[group] >= self.cap[group]
        needed = input_of(action, self.schedule.num_stages)
        arrival = 0.0 if needed is None else self.arrived.get(needed)
        if self.weights[group] and (full or arrival is None or arrival > now):
            return self._run(group, self.weights[group].popleft(), now)
        if arrival is None:
            self.waiting[group] = True
            return None
        if arrival > now:
            return arrival
        self.position[group] += 1
        return self._run(group, action, now)

    def _run(self, group: int, action: Action, now: float) -> float:
        end = now + self.costs.seconds(action.kind)[action.stage]
        self.played[group].append(action)
        if action.kind is Kind.FORWARD:
            self.alive[group] += 1
        elif action.kind is Kind.BACKWARD_INPUT:
            self.weights[group].append(action._replace(kind=Kind.BACKWARD_WEIGHT))
        else:
            self.alive[group] -= 1
        made = output_of(action, self.schedule.num_stages)
        if made is not None:
            hop = (self.costs.backward_hop if made.backward else self.costs.forward_hop)[made.stage]
            self.arrived[made] = end + hop.alone_s
            receiver = self.schedule.group_of_stage[made.stage]
            if self.waiting[receiver]:
                self.waiting[receiver] = False
                heapq.heappush(self.events, (self.arrived[made], receiver))
        return end
