"""Gradients of replicated, sharded and tied parameters; the global norm; the router bias.

Which copies of a parameter must stay equal, and so which gradients are summed (DESIGN "Training semantics"):

| parameters | summed over |
|---|---|
| of an A-stage | the A-group's workers, all replicas |
| of an F-stage: shared experts | the F-group's workers, all replicas |
| of an F-stage: routed experts | replicas |
| tied (`ffn_norm`: used by the router on the A side and by the experts on the F side) | both groups, all replicas |

One all-reduce gives every member the same bits, so copies that start equal stay equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

_BUCKET_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class SyncGroup:
    """Parameters whose gradients are summed over one process group."""

    group: dist.ProcessGroup | None
    """None: this process is the only member."""
    copies: tuple[tuple[nn.Parameter, ...], ...]
    """By parameter: its copies on this process; several when both homes of a tied parameter are here."""


class GradientSync:
    """Sums gradients over their homes, then measures and clips their global norm.

    Args:
        groups: In an order that is the same on every rank for the groups that they share.
        counted: Parameters that this process contributes to the global norm, so that each counts once over the world.
        world: Group of all processes; None when this is the only one.
    """

    def __init__(
        self, *, groups: Sequence[SyncGroup], counted: Sequence[nn.Parameter], world: dist.ProcessGroup | None
    ) -> None:
        self._groups, self._counted, self._world = groups, counted, world

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum every gradient over its group. A parameter that got no gradient counts as zero and gets one."""
        for sync in self._groups:
            for copies in sync.copies:
                _merge_local(copies)
            if sync.group is None or dist.get_world_size(sync.group) == 1:
                continue
            for bucket in _buckets(sync.copies):
                flat = torch.cat([copies[0].grad.flatten().to(torch.float32) for copies in bucket])  # type: ignore[union-attr]
                dist.all_reduce(flat, group=sync.group)
                _scatter_back(flat, bucket)

    @torch.no_grad()
    def clip(self, max_norm: float) -> float:
        """Global 2-norm of all gradients; they are scaled by min(1, max_norm / (norm + 1e-6)). 0: measure only."""
        device = self._counted[0].device if self._counted else torch.device("cpu")
        grads = [p.grad for p in self._counted if p.grad is not None]
        square = torch.zeros((), dtype=torch.float64, device=device)
        if grads:
            square = torch.stack([n.to(torch.float64) for n in torch._foreach_norm(grads)]).square().sum()
        # On the host, where it is needed: all ranks then use the same backend, with or without parameters of their own.
        square = square.cpu()
        if self._world is not None:
            dist.all_reduce(square, group=self._world)
        norm = float(square.sqrt())
        if max_norm > 0 and norm + 1e-6 > max_norm:
            scaled = [p.grad for sync in self._groups for copies in sync.copies for p in copies if p.grad is not None]
            torch._foreach_mul_(scaled, max_norm / (norm + 1e-6))
        return norm


def _merge_local(copies: tuple[nn.Parameter, ...]) -> None:
    """Give every copy the sum of the copies' gradients."""
    for p in copies:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    if len(copies) > 1:
        total = torch.stack([p.grad for p in copies if p.grad is not None]).sum(0)
        for p in copies:
            p.grad.copy_(total)  # type: ignore[union-attr]


def _buckets(copies: Iterable[tuple[nn.Parameter, ...]]) -> list[list[tuple[nn.Parameter, ...]]]:
    buckets: list[list[tuple[nn.Parameter, ...]]] = []
    room = 0
    for entry in copies:
        size = entry[0].numel() * 4
        if not buckets or size > room:
            buckets.append([])
            room = max(_BUCKET_BYTES, size)
        buckets[-1].append(entry)
        room -= size
    return buckets


def _scatter_back(flat: Tensor, bucket: list[tuple[nn.Parameter, ...]]) -> None:
    parts = flat.split([copies[0].numel() for copies in bucket])
    for copies, part in zip(bucket, parts, strict=True):
        for p in copies:
            p.grad.copy_(part.view_as(p))  # type: ignore[union-attr]


@torch.no_grad()
def update_router_bias(bias_E: Tensor, tokens_per_expert_E: Tensor, coeff: float) -> None:
    """One step of auxiliary-loss-free load balancing (arXiv 2408.15664, in torchtitan's zero-mean form), in place.

    Args:
        bias_E: float32, added to the router's scores when it chooses (not when it weighs).
        tokens_per_expert_E: float32, tokens of the whole optimizer step, over all workers and replicas.
    """
    delta_E = coeff * torch.sign(tokens_per_expert_E.mean() - tokens_per_expert_E)
    bias_E += delta_E - delta_E.mean()
