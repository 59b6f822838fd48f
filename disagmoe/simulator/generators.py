"""AF-Pipe's schedules by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from disagmoe.layout import Layout
from disagmoe.schedules import Schedule, make_fitted, make_schedule
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
    check: bool = True,
) -> Schedule:
    """`make_schedule` on these costs. What does not depend on costs is made once for many runs.

    `check`: see `make_schedule`.
    `memory_bytes`: by group, what *fitted* may use for activations; it then sets its own micro-batches in flight.

    Raises:
        ValueError: a value out of range, or an order that does not exist.
    """
    # No order depends on the number of workers or on where they are.
    one = replace(layout, attn_workers=1, ffn_workers=1, rank_order="paired")
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
    fits_costs = order == "fitted" or split
    return _make(
        one,
        tuple(is_moe_layer),
        order,
        num_microbatches,
        in_flight,
        hoist,
        send_after,
        split,
        costs if fits_costs else None,
        check,
    )


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
    check: bool,
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
        check=check,
    )
