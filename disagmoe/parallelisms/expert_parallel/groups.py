"""Process groups of an expert-parallel layout, made by every rank in one global order."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from disagmoe.layout import ExpertParallelLayout, Role
from disagmoe.parallelisms.expert_parallel.exchange import ExchangeGroup

_EDGE_LIMIT_S = 24 * 3600.0
"""Limit that the backends put on transfers: ours says more and comes first."""


@dataclass(kw_only=True)
class EPGroups:
    """Every group that this process belongs to. Build with `make_groups`; end with `destroy`."""

    layout: ExpertParallelLayout
    exchange: ExchangeGroup
    passes: dict[tuple[int, int, bool], dist.ProcessGroup] = field(default_factory=dict)
    """By sending and receiving pipeline rank and pass: this worker and its counterpart there. Where messages have tags
    all of them are one group."""
    dense_sync: dist.ProcessGroup | None = None
    """All workers of this pipeline rank, over the replicas."""
    expert_sync: dist.ProcessGroup | None = None
    """The workers that hold the same experts."""
    made: list[dist.ProcessGroup] = field(default_factory=list)

    def destroy(self) -> None:
        for group in self.made:
            dist.destroy_process_group(group)
        self.made.clear()


def make_groups(
    layout: ExpertParallelLayout,
    *,
    borders: set[tuple[int, int, bool]],
    backend: str,
    strict_order: bool,
    timeout_s: float,
) -> EPGroups:
    """Make a layout's groups. Collective: every rank of the world calls it, with equal arguments.

    Args:
        borders: (sending pipeline rank, receiving one, backward) of all transfers between chunks.
        backend: of payloads and gradients; counts always travel over gloo.
        strict_order: messages have no tags, as on NCCL.
    """
    worker = layout.workers_on(dist.get_rank())[0]
    ranks = layout.group_ranks(Role.ATTN, worker.group, worker.replica)
    groups = EPGroups(layout=layout, exchange=ExchangeGroup(payload=None, counts=None, ranks=ranks, own=worker.index))
    depth, width = layout.attn_depth, layout.attn_workers

    def group_of(members: list[int], kind: str = backend, limit_s: float = timeout_s) -> dist.ProcessGroup | None:
        # Every rank calls, members or not: see `parallelisms.mesh`.
        group = dist.new_group(sorted(members), timeout=timedelta(seconds=limit_s), backend=kind)
        if dist.get_rank() not in members:
            return None
        groups.made.append(group)
        return group

    by_place = [[list(layout.group_ranks(Role.ATTN, p, r)) for p in range(depth)] for r in range(layout.replicas)]
    payload = counts = None
    for replica in by_place:
        for members in replica if width > 1 else ():
            payload = group_of(members, limit_s=_EDGE_LIMIT_S) or payload
            counts = group_of(members, "gloo", _EDGE_LIMIT_S) or counts
    groups.exchange = ExchangeGroup(payload=payload, counts=counts, ranks=ranks, own=worker.index)
    for replica in by_place:
        for index in range(width):
            column = [members[index] for members in replica]
            if backend == "gloo" and not strict_order:
                column_group = group_of(column, limit_s=_EDGE_LIMIT_S) if depth > 1 else None
                if column_group is not None:
                    groups.passes = dict.fromkeys(borders, column_group)
                continue
            for border in sorted(borders):
                made = group_of([column[border[0]], column[border[1]]], limit_s=_EDGE_LIMIT_S)
                if made is not None:
                    groups.passes[border] = made
    for p in range(depth):
        everyone = [rank for replica in by_place for rank in replica[p]]
        groups.dense_sync = (group_of(everyone) if len(everyone) > 1 else None) or groups.dense_sync
        for index in range(width if layout.replicas > 1 else 0):
            same = [replica[p][index] for replica in by_place]
            groups.expert_sync = group_of(same) or groups.expert_sync
    return groups
