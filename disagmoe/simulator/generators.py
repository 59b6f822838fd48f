"""AF-Pipe's schedules by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

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


@dataclass(frozen=True, kw_only=True)
class OrderRequest:
    """A *plain* or *deep* order for trials that nobody executes."""

    layout: Layout
    is_moe_layer: tuple[bool, ...]
    costs: StageCosts
    order: str
    split: bool
    num_microbatches: int
    in_flight: int = 0
    usual: bool = False
    """Without looking for a faster wave than the usual one."""


def af_order(request: OrderRequest) -> tuple[tuple[Action, ...], ...]:
    """By group, its compute actions: much less work than a schedule, enough to see what memory it takes."""
    return _order(_essence(request))


def af_unchecked(request: OrderRequest) -> Schedule:
    """As `af_schedule`, but not validated."""
    return _unchecked(_essence(request))


class _Essence(NamedTuple):
    """What an order depends on."""

    layout: Layout
    is_moe_layer: tuple[bool, ...]
    order: str
    num_microbatches: int
    in_flight: int
    usual: bool
    costs: StageCosts | None
    """Where the backward is split; None: it is not."""


def _essence(request: OrderRequest) -> _Essence:
    return _Essence(
        _one_worker(request.layout),
        request.is_moe_layer,
        request.order,
        request.num_microbatches,
        request.in_flight,
        request.usual,
        request.costs if request.split else None,
    )


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
def _order(of: _Essence) -> tuple[tuple[Action, ...], ...]:
    size = {"num_microbatches": of.num_microbatches, "in_flight": of.in_flight}
    if of.costs is None:
        return make_order(of.layout, of.is_moe_layer, name=of.order, usual=of.usual, **size)
    whole = _order(of._replace(costs=None))
    return split_order(whole, of.layout, of.is_moe_layer, costs=of.costs, **size)


@lru_cache(maxsize=4)
def _unchecked(of: _Essence) -> Schedule:
    return add_transfers(of.order, _order(of), of.layout, of.is_moe_layer, num_microbatches=of.num_microbatches)
