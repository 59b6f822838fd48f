"""An A-stage: from returned rows to a hidden state, through attention and router, to dispatched rows.

Shape suffixes as in `stage`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from disagmoe.parallelisms.stage import DisagStage, RouterState, RouterStats
from disagmoe.parallelisms.transfer.plan import DispatchPlan, PlanDraft, draft_plan
from disagmoe.parallelisms.transfer.wire import Counts


@dataclass(kw_only=True)
class _Sent:
    """An A-stage's output between its forward and its backward."""

    hidden_TD: Tensor | None
    draft: PlanDraft
    host_counts: Tensor
    counts_ready: torch.cuda.Event | None
    weights_TK: Tensor | None
    plan: DispatchPlan | None = None

    def complete_plan(self) -> DispatchPlan:
        """The plan, once its sizes are on the host."""
        if self.plan is None:
            if self.counts_ready is not None:
                self.counts_ready.synchronize()
            self.plan = self.draft.complete(self.host_counts.tolist())
        return self.plan


class AttentionStage(DisagStage):
    """[embedding], [dense layers], attention sublayer and router of one layer; or the last stage, with the head."""

    def __init__(
        self,
        *,
        experts_by_peer: Sequence[range],
        stats: RouterStats | None,
        router: RouterState | None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.router = router
        self._experts_by_peer = experts_by_peer
        self.stats = stats
        self._token_by_peer: dict[int, list[Tensor]] = {}
        self._combine_counts: dict[int, list[Counts]] = {}
        self._sent: dict[int, _Sent] = {}
        self._num_outputs = 4

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        self._token_by_peer.clear()
        self._combine_counts.clear()
        self._sent.clear()

    def _compute(self, microbatch: int, *args: Tensor) -> tuple[Tensor, ...]:
        inputs = self._inputs[microbatch]
        result = self.submod(args[0], inputs.positions_BL, inputs.masks)
        if self.is_last:
            return (result,)
        hidden_BLD, routing = result
        return hidden_BLD, routing.weights_TK, routing.expert_ids_TK, routing.scores_TE

    def _take_input(self, microbatch: int) -> tuple[Tensor, ...] | None:
        tokens_BL = self._inputs[microbatch].tokens_BL
        if self.links.forward_in is None:
            if tokens_BL.numel():
                return (tokens_BL,)
            self._keep_nothing(microbatch)
            return None
        arrival = self._receive(self.links.forward_in, (self.spec.index - 1, microbatch))
        hidden_TD = torch.zeros(tokens_BL.numel(), self._dim, dtype=torch.float32, device=self.device)
        tokens: list[Tensor] = []
        for views in arrival.views:
            if views:
                token_R = views["token"].long()
                hidden_TD.index_add_(0, token_R, views["rows"].to(torch.float32))
                tokens.append(token_R)
            else:
                tokens.append(torch.empty(0, dtype=torch.int64, device=self.device))
        self._token_by_peer[microbatch] = tokens
        self._combine_counts[microbatch] = arrival.counts
        self.links.forward_in.release(arrival)
        if not tokens_BL.numel():
            self._keep_nothing(microbatch)
            return None
        hidden_BLD = hidden_TD.to(self._row_dtype).view(*tokens_BL.shape, self._dim)
        return (hidden_BLD.requires_grad_(),)

    def _keep_nothing(self, microbatch: int) -> None:
        if not self.is_last:
            no_ids = torch.empty(0, 1, dtype=torch.int64, device=self.device)
            self._keep_plan(microbatch, None, None, no_ids)

    def _keep_output(self, microbatch: int, outputs: tuple[Tensor, ...]) -> None:
        if self.is_last:
            return
        hidden_BLD, weights_TK, expert_ids_TK, scores_TE = outputs
        self._keep_plan(microbatch, hidden_BLD.detach().flatten(0, 1), weights_TK.detach(), expert_ids_TK)
        if self.stats is not None:
            self.stats.add(expert_ids_TK, scores_TE)

    def _keep_plan(
        self, microbatch: int, hidden_TD: Tensor | None, weights_TK: Tensor | None, expert_ids_TK: Tensor
    ) -> None:
        draft = draft_plan(expert_ids_TK, self._experts_by_peer)
        ready = None
        counts = draft.counts_3N
        if counts.is_cuda:
            # Queued behind this forward and before the next compute launch: the host need not wait for the latter.
            counts = torch.empty_like(counts, device="cpu", pin_memory=True).copy_(counts, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        self._sent[microbatch] = _Sent(
            hidden_TD=hidden_TD, draft=draft, host_counts=counts, counts_ready=ready, weights_TK=weights_TK
        )

    def send_forward(self, microbatch: int) -> None:
        sent = self._sent[microbatch]
        plan = sent.complete_plan()
        if self.stats is not None:
            self.stats.num_rows += plan.num_rows
        hidden_TD, weights_TK = sent.hidden_TD, sent.weights_TK

        def pack(peer: int, views: dict[str, Tensor]) -> None:
            assert hidden_TD is not None and weights_TK is not None
            part = plan.peers[peer]
            torch.index_select(hidden_TD, 0, part.token_R, out=views["rows"])
            views["token"].copy_(part.token_R)
            views["pair_row"].copy_(part.pair_row_Q)
            views["pair_expert"].copy_(part.pair_expert_Q)
            torch.index_select(weights_TK.flatten(), 0, part.pair_slot_Q, out=views["weights"])

        assert self.links.forward_out is not None
        self.links.forward_out.send((self.spec.index, microbatch), _counts_of(plan), pack)
        sent.hidden_TD = sent.weights_TK = None

    def _gradient_counts(self, microbatch: int) -> list[Counts]:
        return _counts_of(self._sent[microbatch].complete_plan())

    def _take_gradient(self, microbatch: int) -> tuple[Tensor, ...]:
        assert self.links.backward_in is not None
        arrival = self._receive(self.links.backward_in, (self.spec.index, microbatch))
        plan = self._sent.pop(microbatch).complete_plan()
        grad_TD = torch.zeros(plan.num_tokens, self._dim, dtype=torch.float32, device=self.device)
        grad_weights = torch.zeros(plan.num_tokens * plan.top_k, dtype=torch.float32, device=self.device)
        for part, views in zip(plan.peers, arrival.views, strict=True):
            if views:
                grad_TD.index_add_(0, part.token_R, views["rows"].to(torch.float32))
                grad_weights[part.pair_slot_Q] = views["weights"]
        self.links.backward_in.release(arrival)
        shape = (*self._inputs[microbatch].tokens_BL.shape, self._dim)
        return grad_TD.to(self._row_dtype).view(shape), grad_weights.view(plan.num_tokens, plan.top_k)

    def send_backward(self, microbatch: int) -> None:
        grads = self.bwd_cache.pop(microbatch, None)
        tokens = self._token_by_peer.pop(microbatch)
        counts = self._combine_counts.pop(microbatch)
        grad_TD = None if grads is None or grads[0] is None else grads[0].flatten(0, 1)

        def pack(peer: int, views: dict[str, Tensor]) -> None:
            assert grad_TD is not None
            torch.index_select(grad_TD, 0, tokens[peer], out=views["rows"])

        assert self.links.backward_out is not None
        self.links.backward_out.send((self.spec.index - 1, microbatch), counts, pack)


def _counts_of(plan: DispatchPlan) -> list[Counts]:
    return [Counts(p.num_rows, p.num_primary, p.num_pairs) for p in plan.peers]
