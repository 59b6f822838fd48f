"""Which rows an owner sends to the holders of its tokens' experts, and how a holder reads them. Pure functions.

Suffixes: T tokens of a piece, K top-k, E experts, e experts of one worker, N workers that share the experts, R rows,
Q (token, expert) pairs, S slots of a send or receive buffer (rows, and room for what accompanies them), D model.

A buffer is one [S, D] tensor, cut by worker. *Pairs*: a row for each of a token's K experts, as torchtitan sends them;
nothing accompanies them. *De-duplicated*: one row for each worker that has experts for the token; behind a worker's
rows, in slots of the same width, come each pair's row (int32) and weight (float32). Pairs are in the order of experts,
so that the numbers of pairs by expert, which travel ahead, say which expert a pair is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PAIR_BYTES = 8
"""An int32 row and a float32 weight (forward) or a weight's gradient (backward, half of it used)."""


class Shares:
    """Who holds which experts of a layer."""

    def __init__(self, experts_by_worker: Sequence[range], device: torch.device) -> None:
        self.experts_by_worker = tuple(experts_by_worker)
        self.num_experts = experts_by_worker[-1].stop
        sizes = torch.tensor([len(held) for held in experts_by_worker])
        self.worker_E = torch.arange(len(experts_by_worker)).repeat_interleave(sizes).to(device)
        """int64: the worker of each expert."""

    @property
    def num_workers(self) -> int:
        return len(self.experts_by_worker)


def metadata_slots(num_pairs: int, row_bytes: int) -> int:
    """Slots that accompany so many pairs.

    >>> metadata_slots(0, 64), metadata_slots(8, 64), metadata_slots(9, 64)
    (0, 1, 2)
    """
    return -(-num_pairs * PAIR_BYTES // row_bytes)


@dataclass(frozen=True, kw_only=True)
class SendPlan:
    """What an owner sends for one piece of its tokens in one layer."""

    num_tokens: int
    top_k: int
    slot_of_pair_Q: Tensor
    """int64: index into the flattened [T, K] routing of each pair, in the order of experts."""
    token_S: Tensor
    """int64: the token of each slot; `num_tokens` where a slot holds no row."""
    source_S: Tensor
    """The same with an existing token everywhere, to gather by."""
    pair_row_Q: Tensor | None
    """int32, de-duplicated: the row of each pair within its worker's part."""
    rows: tuple[int, ...]
    pairs: tuple[int, ...]
    slots: tuple[int, ...]
    """By worker."""
    counts: tuple[Tensor, ...]
    """By worker, int64 [1 + e]: rows, then pairs by expert: what travels ahead."""


def plan_send(expert_ids_TK: Tensor, shares: Shares, *, own: int, deduplicate: bool, row_bytes: int) -> SendPlan:
    """Plan a piece.

    Args:
        expert_ids_TK: int64 global ids; the K ids of a token are distinct.
        own: this worker; its part has no metadata, since it does not travel.
    """
    num_tokens, top_k = expert_ids_TK.shape
    device, workers = expert_ids_TK.device, shares.num_workers
    ids_Q = expert_ids_TK.flatten()
    slot_of_pair_Q = torch.argsort(ids_Q, stable=True)
    pairs_E = torch.bincount(ids_Q, minlength=shares.num_experts)
    pair_counts = pairs_E.split([len(held) for held in shares.experts_by_worker])
    pairs_N = torch.stack([c.sum() for c in pair_counts])
    if not deduplicate:
        pairs = tuple(pairs_N.tolist())
        token_S = slot_of_pair_Q // top_k
        return SendPlan(
            num_tokens=num_tokens,
            top_k=top_k,
            slot_of_pair_Q=slot_of_pair_Q,
            token_S=token_S,
            source_S=token_S,
            pair_row_Q=None,
            rows=pairs,
            pairs=pairs,
            slots=pairs,
            counts=_with_rows(pairs_N, pair_counts),
        )
    worker_TK = shares.worker_E[expert_ids_TK]
    hit_NT = torch.zeros(num_tokens, workers, dtype=torch.bool, device=device).scatter_(1, worker_TK, True).t()
    hit_NT = hit_NT.contiguous()
    rows_N = hit_NT.sum(1)
    token_R = hit_NT.nonzero()[:, 1]
    row_NT = hit_NT.cumsum(1) - 1
    token_Q = slot_of_pair_Q // top_k
    pair_row_Q = row_NT[worker_TK.flatten()[slot_of_pair_Q], token_Q].to(torch.int32)
    rows, pairs = tuple(rows_N.tolist()), tuple(pairs_N.tolist())
    extra = [0 if n == own else metadata_slots(pairs[n], row_bytes) for n in range(workers)]
    slots = tuple(r + m for r, m in zip(rows, extra, strict=True))
    token_S = torch.full((sum(slots),), num_tokens, dtype=torch.int64, device=device)
    shift = torch.tensor([sum(extra[:n]) for n in range(workers)], device=device).repeat_interleave(rows_N)
    token_S[torch.arange(token_R.numel(), device=device) + shift] = token_R
    return SendPlan(
        num_tokens=num_tokens,
        top_k=top_k,
        slot_of_pair_Q=slot_of_pair_Q,
        token_S=token_S,
        source_S=token_S.clamp(max=max(num_tokens - 1, 0)),
        pair_row_Q=pair_row_Q,
        rows=rows,
        pairs=pairs,
        slots=slots,
        counts=_with_rows(rows_N, pair_counts),
    )


def _with_rows(rows_N: Tensor, pair_counts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """On the host."""
    host = torch.cat([torch.cat([rows_N[n : n + 1], c]) for n, c in enumerate(pair_counts)]).cpu()
    return host.split([1 + c.numel() for c in pair_counts])


@dataclass(frozen=True, kw_only=True)
class ReceivePlan:
    """What a holder of experts receives for one piece in one layer; parts in the order of workers."""

    rows: tuple[int, ...]
    pairs: tuple[int, ...]
    slots: tuple[int, ...]
    counts_e: Tensor
    """int64 [e]: pairs of each of this worker's experts."""
    order_Q: Tensor
    """int64: arrival index of each pair, sorted by expert, then worker."""

    @property
    def num_slots(self) -> int:
        return sum(self.slots)


def plan_receive(counts: Sequence[Tensor], *, own: int, deduplicate: bool, row_bytes: int) -> ReceivePlan:
    """From the counts that all workers, this one included, have sent (int64 [1 + e], on the host)."""
    table = torch.stack(list(counts))
    rows = tuple(table[:, 0].tolist())
    pairs_Ne = table[:, 1:]
    pairs = tuple(pairs_Ne.sum(1).tolist())
    slots = tuple(
        r + (metadata_slots(q, row_bytes) if deduplicate and n != own else 0)
        for n, (r, q) in enumerate(zip(rows, pairs, strict=True))
    )
    num_workers, local = pairs_Ne.shape
    expert_Q = torch.arange(local).repeat(num_workers).repeat_interleave(pairs_Ne.flatten())
    return ReceivePlan(
        rows=rows,
        pairs=pairs,
        slots=slots,
        counts_e=pairs_Ne.sum(0),
        order_Q=torch.argsort(expert_Q, stable=True),
    )


def starts_of(sizes: Sequence[int]) -> list[int]:
    """Where each part begins.

    >>> starts_of([2, 0, 3])
    [0, 2, 2]
    """
    starts, total = [], 0
    for size in sizes:
        starts.append(total)
        total += size
    return starts
