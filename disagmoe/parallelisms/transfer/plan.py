"""The dispatch plan: which rows, experts and weights go to which F-worker. Pure functions of the routing.

Shape suffixes: T tokens (B*L), K top-k, N peers (F-workers of the group), R rows, Q (token, expert) pairs = T*K.

A token that is routed to several experts of one F-worker is *one row* there: its expert outputs are weighted and
summed on the F side, and one row comes back. One of a token's rows is *primary*: there the F-worker also computes the
shared experts and adds the residual. Within a peer's message, primary rows come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

_BALANCE_ROUNDS = 4
_GOLDEN_RATIO = 0.6180339887498949


@dataclass(frozen=True, kw_only=True)
class PeerPlan:
    """What one F-worker gets."""

    token_R: Tensor
    """int64: the token of each row, primary rows first."""
    num_primary: int
    pair_slot_Q: Tensor
    """int64: index into the flattened [T, K] routing of each pair sent there."""
    pair_row_Q: Tensor
    """int32: row (of this peer's message) that the pair applies to."""
    pair_expert_Q: Tensor
    """int32: the peer's *local* id of the pair's expert."""

    @property
    def num_rows(self) -> int:
        return self.token_R.numel()

    @property
    def num_pairs(self) -> int:
        return self.pair_slot_Q.numel()


@dataclass(frozen=True, kw_only=True)
class DispatchPlan:
    """One A-worker's share of one micro-batch of one layer, cut by peer."""

    num_tokens: int
    top_k: int
    peers: tuple[PeerPlan, ...]

    @property
    def num_rows(self) -> int:
        """Rows over all peers; divided by `num_tokens` this is the de-duplicated fan-out of a token."""
        return sum(p.num_rows for p in self.peers)


def choose_primaries(hit_TN: Tensor) -> Tensor:
    """Pick one peer for every token among those that receive it, so that peers get nearly equal shares.

    Each token draws from its peers with probabilities proportional to per-peer weights, by a low-discrepancy sequence
    instead of a random number (deterministic, no host synchronisation); the weights are corrected a few times by how
    far a peer is from an equal share, and the most balanced draw is kept.

    Args:
        hit_TN: bool, whether peer n receives token t; at least one True a row.
    Returns:
        int64 [T].
    """
    num_tokens, num_peers = hit_TN.shape
    if num_tokens == 0:
        return torch.zeros(num_tokens, dtype=torch.int64, device=hit_TN.device)
    hit = hit_TN.to(torch.float32)
    draw_T1 = (torch.arange(num_tokens, device=hit.device, dtype=torch.float64) * _GOLDEN_RATIO % 1.0)[:, None]
    weight_N = torch.ones(num_peers, device=hit.device)
    share = num_tokens / num_peers
    best_T = best_load = None
    for _ in range(_BALANCE_ROUNDS):
        edges_TN = (hit * weight_N).cumsum(1, dtype=torch.float64)
        threshold_T1 = draw_T1 * edges_TN[:, -1:]
        choice_T = (edges_TN <= threshold_T1).sum(1)
        load_N = torch.zeros_like(weight_N).scatter_add_(0, choice_T, torch.ones_like(hit[:, 0]))
        load = load_N.max()
        if best_T is None or best_load is None:
            best_T, best_load = choice_T, load
        else:
            best_T = torch.where(load < best_load, choice_T, best_T)
            best_load = torch.minimum(load, best_load)
        weight_N = weight_N * (share / load_N.clamp(min=0.5)).clamp(0.1, 10.0)
    assert best_T is not None
    return best_T


@dataclass(frozen=True, kw_only=True)
class PlanDraft:
    """A plan whose sizes are still on the device: `complete` it once they are on the host."""

    num_tokens: int
    top_k: int
    counts_3N: Tensor
    """int64: rows, primary rows and pairs a peer; on the host where nothing has to be counted."""
    token_of_row: Tensor
    pair_slot_Q: Tensor
    pair_row_Q: Tensor
    pair_expert_Q: Tensor

    def complete(self, counts: Sequence[Sequence[int]]) -> DispatchPlan:
        """Cut the draft by peer; `counts` is `counts_3N` as lists."""
        rows, primaries, pairs = counts
        cuts = zip(
            self.token_of_row[: sum(rows)].split(list(rows)),
            primaries,
            self.pair_slot_Q.split(list(pairs)),
            self.pair_row_Q.split(list(pairs)),
            self.pair_expert_Q.split(list(pairs)),
            strict=True,
        )
        return DispatchPlan(
            num_tokens=self.num_tokens,
            top_k=self.top_k,
            peers=tuple(
                PeerPlan(token_R=token, num_primary=n, pair_slot_Q=slot, pair_row_Q=row, pair_expert_Q=expert)
                for token, n, slot, row, expert in cuts
            ),
        )


def draft_plan(expert_ids_TK: Tensor, experts_by_peer: Sequence[range]) -> PlanDraft:
    """Cut a routing by F-worker (DESIGN "Rows, not copies"), without waiting for the device.

    Args:
        expert_ids_TK: int64 global expert ids; the K ids of a token are distinct.
        experts_by_peer: contiguous, ascending, non-empty expert ranges of the F-group's workers.
    """
    num_tokens, top_k = expert_ids_TK.shape
    num_peers = len(experts_by_peer)
    device = expert_ids_TK.device
    if num_peers == 1:
        return _draft_for_one(expert_ids_TK, experts_by_peer[0])
    starts_N, stops_N = _edges(tuple(experts_by_peer), device)
    peer_TK = torch.bucketize(expert_ids_TK, stops_N, right=True)
    hit_TN = torch.zeros(num_tokens, num_peers, dtype=torch.bool, device=device).scatter_(1, peer_TK, True)
    primary_TN = torch.zeros_like(hit_TN).scatter_(1, choose_primaries(hit_TN)[:, None], True) & hit_TN

    rows_N, primaries_N = hit_TN.sum(0), primary_TN.sum(0)
    position_TN = torch.where(primary_TN, primary_TN.cumsum(0) - 1, primaries_N + (hit_TN & ~primary_TN).cumsum(0) - 1)
    row_start_N = rows_N.cumsum(0) - rows_N
    # Tokens that a peer does not receive are scattered into one slot past the end.
    capacity = num_tokens * min(num_peers, top_k)
    slot_TN = torch.where(hit_TN, position_TN + row_start_N, capacity)
    token_of_row = torch.empty(capacity + 1, dtype=torch.int64, device=device)
    token_TN = torch.arange(num_tokens, device=device)[:, None].expand(-1, num_peers)
    token_of_row.scatter_(0, slot_TN.reshape(-1), token_TN.reshape(-1))

    peer_Q = peer_TK.reshape(-1)
    pair_slot_Q = torch.argsort(peer_Q, stable=True)
    return PlanDraft(
        num_tokens=num_tokens,
        top_k=top_k,
        counts_3N=torch.stack(
            [rows_N, primaries_N, torch.zeros_like(rows_N).scatter_add_(0, peer_Q, torch.ones_like(peer_Q))]
        ),
        token_of_row=token_of_row,
        pair_slot_Q=pair_slot_Q,
        pair_row_Q=position_TN.gather(1, peer_TK).reshape(-1)[pair_slot_Q].to(torch.int32),
        pair_expert_Q=(expert_ids_TK - starts_N[peer_TK]).reshape(-1)[pair_slot_Q].to(torch.int32),
    )


@lru_cache(maxsize=64)
def _edges(experts_by_peer: tuple[range, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """int64 [N] first expert, and one past the last, of each peer. Kept: copying them to a device waits for it."""
    starts_N = torch.tensor([experts.start for experts in experts_by_peer], device=device)
    return starts_N, torch.tensor([experts.stop for experts in experts_by_peer], device=device)


def _draft_for_one(expert_ids_TK: Tensor, experts: range) -> PlanDraft:
    """Everything goes to the only peer, in the order of the tokens: its sizes are known on the host."""
    num_tokens, top_k = expert_ids_TK.shape
    device = expert_ids_TK.device
    pair_slot_Q = torch.arange(num_tokens * top_k, device=device)
    return PlanDraft(
        num_tokens=num_tokens,
        top_k=top_k,
        counts_3N=torch.tensor([[num_tokens], [num_tokens], [num_tokens * top_k]]),
        token_of_row=torch.arange(num_tokens, device=device),
        pair_slot_Q=pair_slot_Q,
        pair_row_Q=pair_slot_Q.div(top_k, rounding_mode="floor").to(torch.int32),
        pair_expert_Q=(expert_ids_TK.reshape(-1) - experts.start).to(torch.int32),
    )


def make_plan(expert_ids_TK: Tensor, experts_by_peer: Sequence[range]) -> DispatchPlan:
    """`draft_plan`, completed at once (one device-to-host copy of 3 N integers)."""
    draft = draft_plan(expert_ids_TK, experts_by_peer)
    return draft.complete(draft.counts_3N.tolist())
