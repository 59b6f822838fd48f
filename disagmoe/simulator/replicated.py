"""Parameters that several workers hold alike: the bytes of their state, and the time to sum their gradients.

Gradients are summed once a step, after the last backward (nothing overlaps it), hierarchically: reduce-scatter within
each node over its fabric, ring all-reduce of the shards between nodes over the NICs, all-gather within each node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from disagmoe.cluster import Cluster


class Replicated(NamedTuple):
    """Parameters of one worker and the ranks of all workers that hold them too, itself included."""

    params: float
    ranks: Sequence[int]


def state_bytes(parts: Iterable[Replicated], *, param: int, grad: int, optimizer: int) -> float:
    """Parameters, gradients and optimizer state, the latter sharded over all holders; bytes a parameter each."""
    return sum(part.params * (param + grad + optimizer / len(part.ranks)) for part in parts)


def sync_s(parts: Iterable[Replicated], cluster: Cluster, *, grad: int) -> float:
    """Seconds to sum the gradients of all parts, one after the other."""
    return sum(_all_reduce_s(part.params * grad, part.ranks, cluster) for part in parts)


def _all_reduce_s(size: float, ranks: Sequence[int], cluster: Cluster) -> float:
    if len(ranks) < 2:
        return 0.0
    places = [cluster.place(rank) for rank in ranks]
    pools = {pool.name: pool for pool, _ in places}.values()
    in_node = min(Counter(node for _, node in places).values())
    nodes = len({node for _, node in places})
    fabric = min(pool.fabric.bytes_per_s * pool.efficiency.fabric for pool in pools)
    nic = min(pool.nic_bytes_per_s_per_gpu * pool.efficiency.nic for pool in pools)
    return 2 * (in_node - 1) / in_node * size / fabric + 2 * (nodes - 1) / nodes * size / in_node / nic
