"""Meshes and process groups of a layout, made by every rank in one global order.

Two DeviceMeshes over disjoint ranks: attention (replica, attn_group, attn_dp) and FFN (replica, ffn_group, ep). What
torch applies by mesh uses these. Transfers have groups of their own: one for each edge of the pipeline, replica and
pass, plus a host group for the counts; so have the gradients of tied parameters, which live on both sides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from disagmoe.layout import Edge, Layout, Role, Stage, Worker
from disagmoe.parallelisms.transfer.channel import ChannelGroups

_EDGE_LIMIT_S = 24 * 3600.0
"""Limit that the backends put on transfers. The channels have limits of their own, which say more; and a receive may be
posted long before it is due."""


class EdgeKey(NamedTuple):
    """One edge of the pipeline, in one pass; the sender is the A-group on M2N, the F-group on N2M."""

    edge: Edge
    attn_group: int
    ffn_group: int
    backward: bool

    @property
    def name(self) -> str:
        """E.g. `M2N forward A0 -> F1`."""
        ends = (f"A{self.attn_group}", f"F{self.ffn_group}")
        sender, receiver = ends if self.edge is Edge.M2N else ends[::-1]
        return f"{self.edge.name} {'backward' if self.backward else 'forward'} {sender} -> {receiver}"


def hop_edge(stages: Sequence[Stage], hop: int, *, backward: bool) -> EdgeKey:
    """The edge over which hop `hop` (between stages `hop` and `hop + 1`) goes in a pass.

    >>> from disagmoe.layout import build_stages
    >>> layout = Layout(attn_depth=2, ffn_depth=1, attn_workers=1, ffn_workers=1)
    >>> hop_edge(build_stages(layout, [True, True]), 1, backward=False).name
    'N2M forward F0 -> A1'
    """
    ends = {s.role: s.group for s in (stages[hop], stages[hop + 1])}
    sender = stages[hop + 1] if backward else stages[hop]
    edge = Edge.M2N if sender.role is Role.ATTN else Edge.N2M
    return EdgeKey(edge, ends[Role.ATTN], ends[Role.FFN], backward)


@dataclass(kw_only=True)
class Meshes:
    """Every group that this process belongs to. Build with `make_meshes`; end with `destroy`."""

    layout: Layout
    rank: int
    attn: DeviceMesh
    """(replica, attn_group, attn_dp)"""
    ffn: DeviceMesh
    """(replica, ffn_group, ep)"""
    edges: dict[EdgeKey, tuple[dist.ProcessGroup, dist.ProcessGroup | None]] = field(default_factory=dict)
    """Payload group and (in forward) counts group of each edge of this process."""
    attn_sync: dist.ProcessGroup | None = None
    """All workers of this process's A-group, over the replicas."""
    ffn_sync: dist.ProcessGroup | None = None
    """All workers of this process's F-group, over the replicas."""
    expert_sync: dist.ProcessGroup | None = None
    """The workers that hold the same experts: this one's counterparts in the other replicas."""
    tied_sync: dict[tuple[int, int], dist.ProcessGroup] = field(default_factory=dict)
    """By (A-group, F-group) that share a layer: both groups' workers, over the replicas."""

    def channel_groups(self, key: EdgeKey, worker: Worker) -> ChannelGroups:
        """Groups and far-end ranks of an edge, seen from `worker`."""
        far_role, far_group = (Role.FFN, key.ffn_group) if worker.role is Role.ATTN else (Role.ATTN, key.attn_group)
        peers = self.layout.group_ranks(far_role, far_group, worker.replica)
        payload, counts = self.edges[key]
        return ChannelGroups(payload=payload, counts=counts, peers=peers)

    def destroy(self) -> None:
        """Destroy the process groups, the meshes' included."""
        groups = [g for pair in self.edges.values() for g in pair if g is not None]
        groups += [g for g in (self.attn_sync, self.ffn_sync, self.expert_sync) if g is not None]
        groups += list(self.tied_sync.values())
        for mesh in {id(self.attn): self.attn, id(self.ffn): self.ffn}.values():
            if mesh.get_coordinate() is not None:
                groups += [mesh.get_group(i) for i in range(mesh.ndim)]
        for group in groups:
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        self.edges.clear()
        self.tied_sync.clear()


def mesh_ranks(layout: Layout, role: Role) -> torch.Tensor:
    """Global ranks [replica, group, worker] of a role; colocated, all groups of a replica are one."""
    if layout.colocate:
        return torch.arange(layout.replicas).view(layout.replicas, 1, 1)
    return torch.tensor(
        [
            [list(layout.group_ranks(role, group, replica)) for group in range(layout.depth_of(role))]
            for replica in range(layout.replicas)
        ]
    )


def make_meshes(layout: Layout, stages: Sequence[Stage], *, device_type: str, backend: str, timeout_s: float) -> Meshes:
    """Make the meshes and groups of a layout. Collective: every rank of the world calls it, with equal arguments.

    Args:
        backend: Of payloads and gradients, `gloo` or `nccl`; counts always travel over gloo.
    """
    rank = dist.get_rank()
    attn = DeviceMesh(device_type, mesh_ranks(layout, Role.ATTN), mesh_dim_names=("replica", "attn_group", "attn_dp"))
    ffn = (
        attn
        if layout.colocate
        else DeviceMesh(device_type, mesh_ranks(layout, Role.FFN), mesh_dim_names=("replica", "ffn_group", "ep"))
    )
    meshes = Meshes(layout=layout, rank=rank, attn=attn, ffn=ffn)

    def group_of(ranks: Sequence[int], kind: str = backend, limit_s: float = timeout_s) -> dist.ProcessGroup | None:
        # Every rank calls, members or not: torch names a group that only its members make after the number of groups
        # that each of them has, and those numbers differ between ranks.
        members = sorted(set(ranks))
        group = dist.new_group(members, timeout=timedelta(seconds=limit_s), backend=kind)
        return group if rank in members else None

    replicas = range(layout.replicas)
    for role, attribute in ((Role.ATTN, "attn_sync"), (Role.FFN, "ffn_sync")):
        for group_index in range(1 if layout.colocate else layout.depth_of(role)):
            ranks = [r for replica in replicas for r in layout.group_ranks(role, group_index, replica)]
            made = group_of(ranks)
            if made is not None:
                setattr(meshes, attribute, made)
    if layout.replicas > 1:
        for group_index in range(1 if layout.colocate else layout.ffn_depth):
            for i in range(layout.ffn_workers):
                made = group_of([layout.group_ranks(Role.FFN, group_index, r)[i] for r in replicas])
                if made is not None:
                    meshes.expert_sync = made
    if not layout.colocate:
        _make_edge_groups(meshes, stages, group_of)
    return meshes


def _make_edge_groups(
    meshes: Meshes, stages: Sequence[Stage], group_of: Callable[..., dist.ProcessGroup | None]
) -> None:
    layout = meshes.layout
    keys = {hop_edge(stages, h, backward=b) for h in range(len(stages) - 1) for b in (False, True)}
    for key in sorted(keys, key=lambda k: (k.edge.value, k.attn_group, k.ffn_group, k.backward)):
        for replica in range(layout.replicas):
            ranks = layout.group_ranks(Role.ATTN, key.attn_group, replica)
            ranks += layout.group_ranks(Role.FFN, key.ffn_group, replica)
            payload = group_of(ranks, limit_s=_EDGE_LIMIT_S)
            counts = None if key.backward else group_of(ranks, "gloo", _EDGE_LIMIT_S)
            if payload is not None:
                meshes.edges[key] = (payload, counts)
                if payload.name() == "nccl":
                    _warm(payload, key, layout, replica)
    pairs = {(a.group, f.group) for a, f in pairwise(stages) if f.role is Role.FFN}
    for attn_group, ffn_group in sorted(pairs):
        ranks = ()
        for replica in range(layout.replicas):
            ranks += layout.group_ranks(Role.ATTN, attn_group, replica)
            ranks += layout.group_ranks(Role.FFN, ffn_group, replica)
        made = group_of(ranks)
        if made is not None:
            meshes.tied_sync[attn_group, ffn_group] = made


def _warm(group: dist.ProcessGroup, key: EdgeKey, layout: Layout, replica: int) -> None:
    """Make the edge's NCCL communicator by the call that training uses.

    All members must take part in a communicator's first call, but a transfer without rows is not sent. Edges are warmed
    in the order in which they are made, which is the same on all ranks, so nobody waits in a circle.
    """
    attn = layout.group_ranks(Role.ATTN, key.attn_group, replica)
    ffn = layout.group_ranks(Role.FFN, key.ffn_group, replica)
    senders, receivers = (attn, ffn) if key.edge is Edge.M2N else (ffn, attn)
    sends = dist.get_rank() in senders
    message = torch.zeros(1, dtype=torch.uint8, device="cuda")
    operation, peers = (dist.isend, receivers) if sends else (dist.irecv, senders)
    for work in dist.batch_isend_irecv([dist.P2POp(operation, message.clone(), peer, group) for peer in peers]):
        work.wait()
    torch.cuda.synchronize()


def estimate_clock_offsets(rank: int, world_size: int, *, rounds: int = 5) -> dict[int, float]:
    """By rank: what to add to that rank's `time.monotonic` to get this process's, in seconds.

    Collective. Rank 0 exchanges a few messages with every rank and keeps the round trip with the least delay; every
    process then gets all offsets to rank 0. On one host they come out as ~0, since the clock is the host's.
    """
    offset_to_zero = 0.0
    message = torch.zeros(1, dtype=torch.float64)
    for other in range(1, world_size):
        if rank not in (0, other):
            continue
        best = (float("inf"), 0.0)
        for _ in range(rounds):
            if rank == 0:
                dist.recv(message, other)
                message[0] = time.monotonic()
                dist.send(message, other)
            else:
                sent = time.monotonic()
                dist.send(message, 0)
                dist.recv(message, 0)
                received = time.monotonic()
                # The reply was stamped about half a round trip ago.
                best = min(best, (received - sent, float(message[0]) - (sent + received) / 2))
        if rank == other:
            offset_to_zero = best[1]
    offsets: list[float | None] = [None] * world_size
    if world_size == 1:
        return {0: 0.0}
    dist.all_gather_object(offsets, offset_to_zero)
    return {r: (o or 0.0) - offset_to_zero for r, o in enumerate(offsets)}
