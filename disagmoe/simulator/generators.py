"""AF-Pipe's schedules by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from disagmoe.layout import Layout
from disagmoe.schedules import (
    Action,
    Schedule,
    add_transfers,
    make_fitted,
    make_order,
    make_schedule,
    split_order,
)
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
    memory_bytes: tuple[float, ...] = (),
) -> Schedule:
    """`make_schedule` on these costs. What does not depend on costs is made once for many runs.

    `memory_bytes`: by group, what *fitted* may use for activations; it then sets its own micro-batches in flight.

    Raises:
        ValueError: a value out of range, or an order that does not exist.
    """
    one = _one_worker(layout)
    if order == "fitted" and memory_bytes:
        return make_fitted(
            one,
            is_moe_layer,
            costs=costs,
            num_microbatches=num_microbatches,
            memory_bytes=memory_bytes,
            in_flight=in_flight,
            split_backward=split,
            hoist=hoist,
            send_after=send_after,
        )
    known = costs if order == "fitted" or split else None
    return _make(one, tuple(is_moe_layer), order, num_microbatches, in_flight, hoist, send_after, split, known)


def af_order(
    layout: Layout,
    is_moe_layer: Sequence[bool],
    *,
    costs: StageCosts,
    order: str,
    split: bool,
    num_microbatches: int,
    in_flight: int = 0,
) -> tuple[tuple[Action, ...], ...]:
    """By group, the compute actions of *plain* or *deep*: much less work than a schedule, enough to see what memory
    it takes."""
    known = costs if split else None
    return _order(_one_worker(layout), tuple(is_moe_layer), order, num_microbatches, in_flight, split, known)


def af_unchecked(
    layout: Layout,
    is_moe_layer: Sequence[bool],
    *,
    costs: StageCosts,
    order: str,
    split: bool,
    num_microbatches: int,
    in_flight: int = 0,
) -> Schedule:
    """As `af_schedule`, for trials that nobody executes: the schedule is not validated."""
    known = costs if split else None
    return _unchecked(_one_worker(layout), tuple(is_moe_layer), order, num_microbatches, in_flight, split, known)


def _one_worker(layout: Layout) -> Layout:
    """No order depends on the number of workers or on where they are."""
    return replace(layout, attn_workers=1, ffn_workers=1, rank_order="paired")


@lru_cache(maxsize=12)
def _make(
    layout: Layout,
    is_moe_layer: tuple[bool, ...],
    name: str,
    num_microbatches: int,
    in_flight: int,
    hoist: int,
    send_after: int,
    split_backward: bool,
    costs: StageCosts | None,
) -> Schedule:
    return make_schedule(
        layout,
        is_moe_layer,
        name=name,
        num_microbatches=num_microbatches,
        in_flight=in_flight,
        hoist=hoist,
        send_after=send_after,
        split_backward=split_backward,
        costs=costs,
    )


@lru_cache(maxsize=8)
def _order(
    layout: Layout,
    is_moe_layer: tuple[bool, ...],
    name: str,
    num_microbatches: int,
    in_flight: int,
    split_backward: bool,
    costs: StageCosts | None,
) -> tuple[tuple[Action, ...], ...]:
    if split_backward:
        assert costs is not None
        whole = _order(layout, is_moe_layer, name, num_microbatches, in_flight, False, None)
        return split_order(
            whole, layout, is_moe_layer, num_microbatches=num_microbatches, costs=costs, in_flight=in_flight
        )
    return make_order(layout, is_moe_layer, name=name, num_microbatches=num_microbatches, in_flight=in_flight)


@lru_cache(maxsize=4)
def _unchecked(
    layout: Layout,
    is_moe_layer: tuple[bool, ...],
    name: str,
    num_microbatches: int,
    in_flight: int,
    split_backward: bool,
    costs: StageCosts | None,
) -> Schedule:
    compute = _order(layout, is_moe_layer, name, num_microbatches, in_flight, split_backward, costs)
    return add_transfers(name, compute, layout, is_moe_layer, num_microbatches=num_microbatches)
