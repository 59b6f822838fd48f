"""Overlap within one MoE operator, as times of a closed form: how long a layer's dispatch, experts and combine take."""

from __future__ import annotations

from typing import NamedTuple

from disagmoe.simulator.costs import Hop


class Overlapped(NamedTuple):
    """A stage that communicates while it computes."""

    total_s: float
    exposed_s: float
    """Part of it in which nothing is computed."""


def chunked(dispatch: Hop, compute_s: float, combine: Hop, *, pieces: int) -> Overlapped:
    """Tutel-like (arXiv 2206.03382): tokens in equal pieces, a piece's experts run while others travel.

    The NICs serve all dispatches, then combines as they become ready; each piece pays the latency.

    >>> chunked(Hop(send_s=2.0, recv_s=2.0), 4.0, Hop(send_s=2.0, recv_s=2.0), pieces=1)
    Overlapped(total_s=8.0, exposed_s=4.0)
    >>> chunked(Hop(send_s=2.0, recv_s=2.0), 4.0, Hop(send_s=2.0, recv_s=2.0), pieces=2)
    Overlapped(total_s=6.0, exposed_s=2.0)
    """
    sending = (dispatch.alone_s - dispatch.latency_s) / pieces
    returning = (combine.alone_s - combine.latency_s) / pieces
    link = engine = 0.0
    computed = []
    for _ in range(pieces):
        link += sending
        engine = max(engine, link + dispatch.latency_s) + compute_s / pieces
        computed.append(engine)
    for ready in computed:
        link = max(link, ready) + returning
    total = link + combine.latency_s
    return Overlapped(total, total - compute_s)


def best_chunked(dispatch: Hop, compute_s: float, combine: Hop, *, most: int = 8) -> Overlapped:
    """With the best of 1, 2, 4 ... `most` pieces, which Tutel searches for."""
    pieces = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
    return min(chunked(dispatch, compute_s, combine, pieces=count) for count in pieces)


def fine_grained(
    dispatch: Hop, compute_s: float, combine: Hop, *, first_share: float = 2 / 3, tiles: int = 16
) -> Overlapped:
    """Comet-like (arXiv 2502.19811): dispatch overlaps the first matrix product tile by tile, combine the second.

    Args:
        first_share: the first product's share of the compute: two of three matrices.
        tiles: steps in which rows become available; the first dispatch and the last combine step stay exposed.

    >>> fine_grained(Hop(send_s=1.6, recv_s=1.6), 4.5, Hop(send_s=1.6, recv_s=1.6)).total_s
    4.7
    """
    sending, returning = dispatch.alone_s - dispatch.latency_s, combine.alone_s - combine.latency_s
    inner = 1 - 1 / tiles
    first = max(first_share * compute_s, sending * inner)
    second = max((1 - first_share) * compute_s, returning * inner)
    total = dispatch.latency_s + sending / tiles + first + second + returning / tiles + combine.latency_s
    return Overlapped(total, total - compute_s)
