"""Pipeline stages: one sublayer on one worker, between two hops.

The autograd graph of a stage ends at its boundary (DESIGN "Outside autograd"): an A-stage maps a hidden state [B, L, D]
to a hidden state and router weights [T, K]; an F-stage maps received rows [R, D] and pair weights [Q] to rows [R, D].
Gathering rows into messages and summing returned rows, and the two backward mirrors, happen here, outside the graph.

Shape suffixes: B sequences of this worker's slice, L sequence length, D model dim, T = B*L tokens, K top-k,
R rows received, Q (token, expert) pairs received.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.utils.checkpoint import checkpoint

from disagmoe.layout import Stage
from disagmoe.parallelisms.clock import StepClock
from disagmoe.parallelisms.transfer.channel import Arrival, Channel
from disagmoe.parallelisms.transfer.plan import DispatchPlan, PlanDraft, draft_plan
from disagmoe.parallelisms.transfer.wire import Counts


class RoutingLike(Protocol):
    """What an attention sublayer says about its tokens."""

    weights_TK: Tensor
    """fp32, differentiable."""
    expert_ids_TK: Tensor
    """int64, global."""
    scores_TE: Tensor
    """fp32, detached: router scores, for the entropy metric."""


@dataclass(kw_only=True)
class MicrobatchInput:
    """One A-worker's slice of a micro-batch; B may be 0."""

    tokens_BL: Tensor
    labels_BL: Tensor
    positions_BL: Tensor
    masks: Any = None
    """What the model's attention takes; made once, used by every A-stage."""


@dataclass(kw_only=True)
class StageLinks:
    """The channels at a stage's boundary; None at the ends of the pipeline."""

    forward_in: Channel | None = None
    forward_out: Channel | None = None
    backward_in: Channel | None = None
    backward_out: Channel | None = None

    def all(self) -> list[Channel]:
        return [c for c in (self.forward_in, self.forward_out, self.backward_in, self.backward_out) if c is not None]


@dataclass(kw_only=True)
class RouterStats:
    """Sums over the tokens of a step, read and reset by the trainer."""

    tokens_per_expert_E: Tensor
    entropy_sum: Tensor
    num_tokens: int = 0
    num_rows: int = 0

    def add(self, expert_ids_TK: Tensor, scores_TE: Tensor) -> None:
        """Count a micro-batch's tokens and the entropy (nats) of their normalised router scores."""
        ones = torch.ones_like(expert_ids_TK, dtype=torch.float32).flatten()
        self.tokens_per_expert_E.scatter_add_(0, expert_ids_TK.flatten(), ones)
        share_TE = scores_TE / scores_TE.sum(-1, keepdim=True).clamp(min=1e-20)
        self.entropy_sum += torch.special.entr(share_TE).sum()
        self.num_tokens += expert_ids_TK.shape[0]

    def reset(self) -> None:
        self.tokens_per_expert_E.zero_()
        self.entropy_sum.zero_()
        self.num_tokens = self.num_rows = 0


class DisagStage(_PipelineStageBase):
    """Common part of both kinds of stage.

    Derives from torch's stage base for its forward and backward of one micro-batch (autograd across the boundary,
    split backward); receives, sends and their sizes are ours.
    """

    def __init__(
        self,
        *,
        spec: Stage,
        submodule: nn.Module,
        num_stages: int,
        pipeline_group: int,
        num_groups: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
        links: StageLinks,
        clock: StepClock,
        dim: int,
        row_dtype: torch.dtype,
        recompute: bool,
    ) -> None:
        # The base refuses a world with more ranks than stages, but our pipeline rank is the component group.
        super().__init__(submodule, spec.index, max(num_stages, dist.get_world_size(group)), device, group)
        self.num_stages = num_stages
        self.group_rank, self.group_size = pipeline_group, num_groups
        self.spec, self.links, self.clock = spec, links, clock
        self._dim, self._row_dtype, self._recompute = dim, row_dtype, recompute
        self.has_backward = True
        self._inputs: Sequence[MicrobatchInput] = ()
        self._empty: set[int] = set()
        """Micro-batches of which this worker has nothing: no compute, no gradient, empty messages."""
        self._num_outputs = 1

    # -- torch's stage interface ---------------------------------------------------------------------------------

    def _prepare_forward_infra(self, num_microbatches: int, *_args: Any, **_kwargs: Any) -> None:
        self.chunks = num_microbatches

    def _prepare_backward_infra(self, num_microbatches: int, *_args: Any, **_kwargs: Any) -> None:
        self.chunks = num_microbatches

    def _create_grad_recv_info(self, act_send_info: dict[int, Any]) -> tuple[Any, ...]:
        del act_send_info
        return ()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        if self._recompute:
            return checkpoint(self._compute, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
        return self._compute(*args, **kwargs)

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        self.bwd_cache.clear()
        self._empty.clear()

    # -- one step ------------------------------------------------------------------------------------------------

    def start_step(self, inputs: Sequence[MicrobatchInput], num_microbatches: int) -> None:
        """Take the slices of a step's micro-batches (F-stages read none of them)."""
        self.clear_runtime_states()
        self.chunks = num_microbatches
        self._inputs = inputs

    def forward(self, microbatch: int) -> Tensor | None:
        """Wait for the input, compute; returns the logits [B, L, V] in the last stage."""
        args = self._take_input(microbatch)
        if args is None:
            self._empty.add(microbatch)
            return None
        self._microbatch = microbatch
        self._stage_meta.inputs = (None,) * len(args)
        self._args = args
        outputs = self.forward_one_chunk(microbatch, args, save_forward_output=False)
        self._keep_output(microbatch, outputs)
        return outputs[0] if self.is_last else None

    def backward(self, microbatch: int, *, loss: Tensor | None, full: bool) -> None:
        """Wait for the output gradient (unless this is the last stage), then back-propagate."""
        if microbatch in self._empty:
            if not self.is_last:
                self._take_gradient(microbatch)
            return
        self.backward_one_chunk(microbatch, loss=loss, full_backward=full)

    def backward_weight(self, microbatch: int) -> None:
        if microbatch not in self._empty:
            self.backward_weight_one_chunk(microbatch)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        del fwd_chunk_id
        return self._args

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        grads = self._take_gradient(bwd_chunk_id)
        return (*grads, *([None] * (self._num_outputs - len(grads))))

    def _receive(self, channel: Channel, key: tuple[int, int]) -> Arrival:
        """`channel.take`, with the wait booked on the clock."""
        arrival = channel.take(key)
        self.clock.waited(
            f"{channel.name} {self.spec} mb {key[1]}", arrival.wait_from_s, arrival.wait_to_s, arrival.sent_at_s
        )
        return arrival

    def post_forward_receive(self, microbatch: int) -> None:
        assert self.links.forward_in is not None
        self.links.forward_in.post((self.spec.index - 1, microbatch), f"the input of {self.spec}, micro-batch {microbatch}")

    def post_backward_receive(self, microbatch: int) -> None:
        assert self.links.backward_in is not None
        self.links.backward_in.post(
            (self.spec.index, microbatch),
            f"the output gradient of {self.spec}, micro-batch {microbatch}",
            counts=self._gradient_counts(microbatch),
        )

    @abstractmethod
    def _compute(self, *args: Tensor) -> tuple[Tensor, ...]: ...

    @abstractmethod
    def _take_input(self, microbatch: int) -> tuple[Tensor, ...] | None:
        """Autograd leaves of the stage; None if there is nothing to compute."""

    @abstractmethod
    def _keep_output(self, microbatch: int, outputs: tuple[Tensor, ...]) -> None: ...

    @abstractmethod
    def _take_gradient(self, microbatch: int) -> tuple[Tensor, ...]: ...

    @abstractmethod
    def _gradient_counts(self, microbatch: int) -> list[Counts]: ...

    @abstractmethod
    def send_forward(self, microbatch: int) -> None: ...

    @abstractmethod
    def send_backward(self, microbatch: int) -> None: ...


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

    def __init__(self, *, experts_by_peer: Sequence[range], stats: RouterStats | None, **common: Any) -> None:
        super().__init__(**common)
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

    def _compute(self, *args: Tensor) -> tuple[Tensor, ...]:
        inputs = self._inputs[self._microbatch]
        result = self.submod(args[0], inputs.positions_BL, inputs.masks)
        if self.is_last:
            return (result,)
        hidden_BLD, routing = result
        return hidden_BLD, routing.weights_TK, routing.expert_ids_TK, routing.scores_TE

    def _take_input(self, microbatch: int) -> tuple[Tensor, ...] | None:
        tokens_BL = self._inputs[microbatch].tokens_BL
        if self.links.forward_in is None:
            return (tokens_BL,) if tokens_BL.numel() else self._keep_nothing(microbatch)
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
            return self._keep_nothing(microbatch)
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


@dataclass(kw_only=True)
class _Received:
    """What an F-stage knows of its rows between receiving them and sending their gradient."""

    counts: list[Counts]
    token_by_peer: list[Tensor]
    pair_row_Q: Tensor
    pair_expert_Q: Tensor
    primary_P: Tensor
    out_RD: Tensor | None = field(default=None)


class ExpertStage(DisagStage):
    """ffn_norm, this worker's experts and (for primary rows) shared experts and residual of one layer."""

    def __init__(self, **common: Any) -> None:
        super().__init__(**common)
        self._received: dict[int, _Received] = {}

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        self._received.clear()

    def _compute(self, *args: Tensor) -> tuple[Tensor, ...]:
        meta = self._received[self._microbatch]
        return (self.submod(args[0], args[1], meta.pair_row_Q, meta.pair_expert_Q, meta.primary_P),)

    def _take_input(self, microbatch: int) -> tuple[Tensor, ...] | None:
        assert self.links.forward_in is not None
        arrival = self._receive(self.links.forward_in, (self.spec.index - 1, microbatch))
        num_rows = sum(c.num_rows for c in arrival.counts)
        rows_RD = torch.empty(num_rows, self._dim, dtype=self._row_dtype, device=self.device)
        tokens, pair_rows, pair_experts, weights, primaries = [], [], [], [], []
        start = 0
        for count, views in zip(arrival.counts, arrival.views, strict=True):
            if not views:
                tokens.append(torch.empty(0, dtype=torch.int32, device=self.device))
                continue
            rows_RD[start : start + count.num_rows] = views["rows"]
            tokens.append(views["token"].clone())
            pair_rows.append(views["pair_row"].long() + start)
            pair_experts.append(views["pair_expert"].long())
            weights.append(views["weights"])
            primaries.append(torch.arange(start, start + count.num_primary, device=self.device))
            start += count.num_rows
        received = _Received(
            counts=arrival.counts,
            token_by_peer=tokens,
            pair_row_Q=_cat(pair_rows, torch.int64, self.device),
            pair_expert_Q=_cat(pair_experts, torch.int64, self.device),
            primary_P=_cat(primaries, torch.int64, self.device),
        )
        weights_Q = _cat(weights, torch.float32, self.device)
        self._received[microbatch] = received
        self.links.forward_in.release(arrival)
        if num_rows == 0:
            return None
        return rows_RD.requires_grad_(), weights_Q.requires_grad_()

    def _keep_output(self, microbatch: int, outputs: tuple[Tensor, ...]) -> None:
        self._received[microbatch].out_RD = outputs[0].detach()

    def send_forward(self, microbatch: int) -> None:
        received = self._received[microbatch]
        pack = self._pack_slices(received.counts, received.out_RD, received.token_by_peer)
        counts = [Counts(c.num_rows, c.num_primary, 0) for c in received.counts]
        assert self.links.forward_out is not None
        self.links.forward_out.send((self.spec.index, microbatch), counts, pack)
        received.out_RD = None

    def _gradient_counts(self, microbatch: int) -> list[Counts]:
        return self._received[microbatch].counts

    def _take_gradient(self, microbatch: int) -> tuple[Tensor, ...]:
        assert self.links.backward_in is not None
        arrival = self._receive(self.links.backward_in, (self.spec.index, microbatch))
        rows = [views["rows"] for views in arrival.views if views]
        grad_RD = torch.cat(rows) if rows else torch.empty(0, self._dim, dtype=self._row_dtype, device=self.device)
        self.links.backward_in.release(arrival)
        return (grad_RD,)

    def send_backward(self, microbatch: int) -> None:
        received = self._received.pop(microbatch)
        grads = self.bwd_cache.pop(microbatch, None)
        grad_RD, grad_Q = grads if grads is not None else (None, None)
        pack_rows = self._pack_slices(received.counts, grad_RD, None)
        starts = _starts(c.num_pairs for c in received.counts)

        def pack(peer: int, views: dict[str, Tensor]) -> None:
            assert grad_Q is not None
            pack_rows(peer, views)
            views["weights"].copy_(grad_Q[starts[peer] : starts[peer] + received.counts[peer].num_pairs])

        assert self.links.backward_out is not None
        self.links.backward_out.send((self.spec.index - 1, microbatch), received.counts, pack)

    @staticmethod
    def _pack_slices(
        counts: Sequence[Counts], rows_RD: Tensor | None, tokens: Sequence[Tensor] | None
    ) -> Callable[[int, dict[str, Tensor]], None]:
        starts = _starts(c.num_rows for c in counts)

        def pack(peer: int, views: dict[str, Tensor]) -> None:
            assert rows_RD is not None
            views["rows"].copy_(rows_RD[starts[peer] : starts[peer] + counts[peer].num_rows])
            if tokens is not None:
                views["token"].copy_(tokens[peer])

        return pack


def _counts_of(plan: DispatchPlan) -> list[Counts]:
    return [Counts(p.num_rows, p.num_primary, p.num_pairs) for p in plan.peers]


def _starts(sizes: Any) -> list[int]:
    starts, total = [], 0
    for size in sizes:
        starts.append(total)
        total += size
    return starts


def _cat(parts: list[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Concatenate; always a new tensor, so that the buffers behind `parts` can be given back."""
    if not parts:
        return torch.empty(0, dtype=dtype, device=device)
    return torch.cat(parts) if len(parts) > 1 else parts[0].clone()
