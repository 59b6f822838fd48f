"""Real stages of one layer on any number of A- and F-workers in one process, over a network that is a dictionary.

Every buffer is full of NaN before it is used, so whatever was not written on purpose spoils the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from disagmoe.layout import Layout, build_stages, split_evenly
from disagmoe.models.split import Routing
from disagmoe.parallelisms.attention_stage import AttentionStage
from disagmoe.parallelisms.clock import StepClock
from disagmoe.parallelisms.expert_stage import ExpertStage
from disagmoe.parallelisms.stage import DisagStage, MicrobatchInput, RouterStats, StageLinks
from disagmoe.parallelisms.transfer.channel import Arrival
from disagmoe.parallelisms.transfer.wire import BufferPool, Counts, MessageKind, WireFormat

DIM = 4
CPU = torch.device("cpu")


class GarbagePool(BufferPool):
    """Hands out buffers of NaN bytes (in float32 and bfloat16; as int32: -1, which is no row of anything)."""

    def take(self, num_bytes: int) -> Tensor:
        return super().take(num_bytes).fill_(0xFF)

    def give(self, view: Tensor, **kwargs: Any) -> None:
        view.fill_(0xFF)
        super().give(view, **kwargs)


class Wires:
    """Messages under way, by kind, hop, micro-batch and (A-worker, F-worker)."""

    def __init__(self) -> None:
        self.messages: dict[tuple[Any, ...], tuple[Counts, Tensor]] = {}
        self.pool = GarbagePool(CPU)
        self.format = WireFormat(dim=DIM, row_dtype=torch.float32)


class LocalChannel:
    """In place of `Channel`: one end at worker `own`, whose peers are workers 0 .. num_peers - 1 of the other role."""

    def __init__(self, wires: Wires, kind: MessageKind, own: int, num_peers: int) -> None:
        self.name = kind.value
        self._wires, self._kind, self._own, self._num_peers = wires, kind, own, num_peers
        self._posted: dict[tuple[int, int], Sequence[Counts] | None] = {}

    def send(
        self, key: tuple[int, int], counts: Sequence[Counts], pack: Callable[[int, dict[str, Tensor]], None]
    ) -> None:
        assert len(counts) == self._num_peers
        for peer, count in enumerate(counts):
            buffer = self._wires.pool.take(self._wires.format.num_bytes(self._kind, count))
            if count.num_rows:
                views = self._wires.format.views(self._kind, count, buffer)
                pack(peer, views)
                views["header"].fill_(time.monotonic())
            self._wires.messages[self._kind, key, self._own, peer] = (count, buffer)

    def made(self, key: tuple[int, int]) -> None:
        """Nothing here overlaps, so it does not matter when a message was ready."""

    def post(
        self, key: tuple[int, int], what: str, counts: Sequence[Counts] | None = None, most: Counts | None = None
    ) -> None:
        assert key not in self._posted and what and most is None
        self._posted[key] = counts

    def take(self, key: tuple[int, int]) -> Arrival:
        known = self._posted.pop(key)
        received = [self._wires.messages.pop((self._kind, key, peer, self._own)) for peer in range(self._num_peers)]
        counts = [count for count, _ in received]
        if known is not None:
            # Sizes that are known from forward must be the senders'; pairs are of no account where none travel.
            assert [c.num_rows for c in known] == [c.num_rows for c in counts]
            counts = list(known)
        views = [
            self._wires.format.views(self._kind, count, buffer) if count.num_rows else {}
            for count, (_, buffer) in zip(counts, received, strict=True)
        ]
        return Arrival(counts=counts, views=views, buffers=[buffer for _, buffer in received])

    def release(self, arrival: Arrival) -> None:
        arrival.views.clear()
        for buffer in arrival.buffers:
            self._wires.pool.give(buffer)


class ToyAttention(nn.Module):
    """A table of hidden states and router weights by token id: its gradients are those of the boundary."""

    def __init__(self, hidden_SD: Tensor, weights_SK: Tensor, expert_ids_SK: Tensor, num_experts: int) -> None:
        super().__init__()
        self.hidden_SD, self.weights_SK = nn.Parameter(hidden_SD.clone()), nn.Parameter(weights_SK.clone())
        self._expert_ids_SK, self._num_experts = expert_ids_SK, num_experts

    def forward(self, tokens_BL: Tensor, positions_BL: Tensor, masks: Any) -> tuple[Tensor, Routing]:
        token_T = tokens_BL.flatten()
        scores_TE = torch.ones(len(token_T), self._num_experts) / self._num_experts
        routing = Routing(
            weights_TK=self.weights_SK[token_T], expert_ids_TK=self._expert_ids_SK[token_T], scores_TE=scores_TE
        )
        return self.hidden_SD[tokens_BL], routing


class ToyHead(nn.Module):
    """The hidden states themselves are the logits."""

    def forward(self, hidden_BLD: Tensor, positions_BL: Tensor, masks: Any) -> Tensor:
        return hidden_BLD * 1.0


class ToyExperts(nn.Module):
    """Expert e: tanh(x) W_e; shared: tanh(x) S; both as `ExpertPart` applies them."""

    def __init__(self, experts_eDD: Tensor, shared_DD: Tensor) -> None:
        super().__init__()
        self.experts_eDD, self.shared_DD = nn.Parameter(experts_eDD.clone()), nn.Parameter(shared_DD.clone())

    def forward(
        self, rows_RD: Tensor, weights_Q: Tensor, pair_row_Q: Tensor, pair_expert_Q: Tensor, primary_P: Tensor
    ) -> Tensor:
        acted_RD = torch.tanh(rows_RD)
        out_QD = (acted_RD[pair_row_Q].unsqueeze(1) @ self.experts_eDD[pair_expert_Q]).squeeze(1)
        out_RD = torch.zeros_like(rows_RD).index_add(0, pair_row_Q, out_QD * weights_Q.unsqueeze(1))
        return out_RD.index_add(0, primary_P, rows_RD[primary_P] + acted_RD[primary_P] @ self.shared_DD)


@dataclass(kw_only=True)
class Problem:
    """A layer's routing: slices of tokens by [micro-batch][A-worker], and everything a dense layer needs."""

    slices: list[list[int]]
    """Number of tokens of each A-worker in each micro-batch."""
    expert_ids_SK: Tensor
    """int64 [S, K] over all tokens of all micro-batches."""
    num_experts: int
    num_ffn_workers: int
    hidden_SD: Tensor = field(init=False)
    weights_SK: Tensor = field(init=False)
    experts_EDD: Tensor = field(init=False)
    shared_DD: Tensor = field(init=False)
    loss_SD: Tensor = field(init=False)
    """The loss is the sum of the outputs weighed by this."""

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        tokens, top_k = self.expert_ids_SK.shape

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.hidden_SD, self.loss_SD = draw(tokens, DIM), draw(tokens, DIM)
        self.weights_SK = torch.rand(tokens, top_k, generator=generator)
        self.experts_EDD, self.shared_DD = draw(self.num_experts, DIM, DIM), draw(DIM, DIM)

    def dense(self) -> dict[str, Tensor]:
        """Outputs and gradients, every expert applied to every token."""
        sources = (self.hidden_SD, self.weights_SK, self.experts_EDD, self.shared_DD)
        leaves = [source.clone().requires_grad_() for source in sources]
        hidden_SD, weights_SK, experts_EDD, shared_DD = leaves
        acted_SD = torch.tanh(hidden_SD)
        gate_SE = torch.zeros(len(hidden_SD), self.num_experts).scatter_add(1, self.expert_ids_SK, weights_SK)
        everything_SED = torch.einsum("sd,edf->sef", acted_SD, experts_EDD)
        out_SD = hidden_SD + acted_SD @ shared_DD + torch.einsum("se,sed->sd", gate_SE, everything_SED)
        (out_SD * self.loss_SD).sum().backward()
        names = ("hidden", "weights", "experts", "shared")
        grads = {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in zip(names, leaves, strict=True)}
        return {"out": out_SD.detach(), **grads}

    def transferred(self) -> dict[str, Tensor]:
        """The same through stages, plan, wire and combination; all micro-batches in flight at once."""
        stages = _build(self)
        stage: DisagStage
        rounds = range(len(self.slices))
        out_SD = torch.full_like(self.hidden_SD, float("nan"))
        losses: dict[tuple[int, int], Tensor] = {}
        for microbatch in rounds:
            for attention in stages.first:
                attention.forward(microbatch)
                attention.send_forward(microbatch)
            for stage in stages.experts:
                stage.post_forward_receive(microbatch)
                stage.forward(microbatch)
                stage.send_forward(microbatch)
            for i, head in enumerate(stages.last):
                head.post_forward_receive(microbatch)
                logits_BLD = head.forward(microbatch)
                if logits_BLD is not None:
                    token_T = stages.inputs[i][microbatch].tokens_BL.flatten()
                    out_SD[token_T] = logits_BLD.detach().flatten(0, 1)
                    losses[i, microbatch] = (logits_BLD.flatten(0, 1) * self.loss_SD[token_T]).sum()
        for microbatch in reversed(rounds):
            for i, head in enumerate(stages.last):
                head.backward(microbatch, loss=losses.get((i, microbatch)), full=True)
                head.send_backward(microbatch)
            for stage in (*stages.experts, *stages.first):
                stage.post_backward_receive(microbatch)
                stage.backward(microbatch, loss=None, full=True)
                if isinstance(stage, ExpertStage):
                    stage.send_backward(microbatch)
        assert not stages.wires.messages, "messages that nobody took"
        return {"out": out_SD, **_gradients(stages)}


@dataclass(kw_only=True)
class _Stages:
    first: list[AttentionStage]
    experts: list[ExpertStage]
    last: list[AttentionStage]
    inputs: list[list[MicrobatchInput]]
    wires: Wires


def _build(problem: Problem) -> _Stages:
    num_attn = len(problem.slices[0])
    layout = Layout(attn_depth=1, ffn_depth=1, attn_workers=num_attn, ffn_workers=problem.num_ffn_workers)
    first, ffn, last = build_stages(layout, [True])
    wires, inputs = Wires(), _inputs(problem)
    ranges = split_evenly(problem.num_experts, problem.num_ffn_workers)

    def channel(kind: MessageKind, own: int, num_peers: int) -> Any:
        return LocalChannel(wires, kind, own, num_peers)

    def common(spec: Any, module: nn.Module, links: StageLinks) -> dict[str, Any]:
        return {
            "spec": spec,
            "submodule": module,
            "num_stages": 3,
            "pipeline_group": 0,
            "num_groups": 2,
            "device": CPU,
            "group": None,
            "links": links,
            "clock": StepClock(),
            "dim": DIM,
            "row_dtype": torch.float32,
            "recompute": False,
            "weight_gradients": None,
            "most": None,
        }

    made = _Stages(first=[], experts=[], last=[], inputs=inputs, wires=wires)
    peers = problem.num_ffn_workers
    for i in range(num_attn):
        stats = RouterStats(tokens_per_expert_E=torch.zeros(problem.num_experts), entropy_sum=torch.zeros(()))
        toy = ToyAttention(problem.hidden_SD, problem.weights_SK, problem.expert_ids_SK, problem.num_experts)
        links = StageLinks(
            forward_out=channel(MessageKind.DISPATCH, i, peers),
            backward_in=channel(MessageKind.DISPATCH_GRAD, i, peers),
        )
        attention = AttentionStage(experts_by_peer=ranges, stats=stats, router=None, **common(first, toy, links))
        made.first.append(attention)
        links = StageLinks(
            forward_in=channel(MessageKind.COMBINE, i, peers), backward_out=channel(MessageKind.COMBINE_GRAD, i, peers)
        )
        head = AttentionStage(experts_by_peer=ranges, stats=None, router=None, **common(last, ToyHead(), links))
        made.last.append(head)
        for stage in (attention, head):
            stage.start_step(inputs[i], len(problem.slices))
    for n, experts in enumerate(ranges):
        links = StageLinks(
            forward_in=channel(MessageKind.DISPATCH, n, num_attn),
            forward_out=channel(MessageKind.COMBINE, n, num_attn),
            backward_in=channel(MessageKind.COMBINE_GRAD, n, num_attn),
            backward_out=channel(MessageKind.DISPATCH_GRAD, n, num_attn),
        )
        module = ToyExperts(problem.experts_EDD[experts.start : experts.stop], problem.shared_DD)
        made.experts.append(ExpertStage(**common(ffn, module, links)))
        made.experts[-1].start_step([], len(problem.slices))
    return made


def _inputs(problem: Problem) -> list[list[MicrobatchInput]]:
    """By [A-worker][micro-batch]: token ids, each once over everything."""
    inputs: list[list[MicrobatchInput]] = [[] for _ in problem.slices[0]]
    start = 0
    for microbatch in problem.slices:
        for worker, size in enumerate(microbatch):
            tokens_BL = torch.arange(start, start + size).view(1 if size else 0, size)
            inputs[worker].append(MicrobatchInput(tokens_BL=tokens_BL, labels_BL=tokens_BL, positions_BL=tokens_BL))
            start += size
    return inputs


def _gradients(stages: _Stages) -> dict[str, Tensor]:
    """Summed over the workers, as the trainer does; none counts as zeros."""

    def grads(parts: Sequence[DisagStage], name: str) -> list[Tensor]:
        parameters = [cast(nn.Parameter, getattr(stage.submod, name)) for stage in parts]
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]

    return {
        "hidden": torch.stack(grads(stages.first, "hidden_SD")).sum(0),
        "weights": torch.stack(grads(stages.first, "weights_SK")).sum(0),
        "experts": torch.cat(grads(stages.experts, "experts_eDD")),
        "shared": torch.stack(grads(stages.experts, "shared_DD")).sum(0),
    }
