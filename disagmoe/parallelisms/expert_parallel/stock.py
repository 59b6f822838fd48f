"""The routed experts of one layer through a token dispatcher of torchtitan's kind: what its users have.

Dispatch, experts and combine are one autograd graph; every transfer is waited for where it is started, in both passes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from disagmoe.parallelisms.expert_parallel.exchange import Exchange
from disagmoe.parallelisms.expert_parallel.protocol import FORWARD, FULL_BACKWARD, Later, Meter, Wait

_NOT_A_HOP = -1


class DispatcherLike(Protocol):
    """torchtitan's token dispatcher, with its exchanges replaced."""

    def slots_of(self, expert_ids_TK: Tensor) -> tuple[Tensor, Tensor]: ...

    def dispatch(
        self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> tuple[Tensor, Tensor, Any]: ...

    def combine(self, routed_output_RD: Tensor, metadata: Any, x_TD: Tensor) -> Tensor: ...


class DispatcherExchange:
    """The exchanges of one layer, as its dispatcher calls them."""

    def __init__(self, exchange: Exchange, *, layer: int, stage: int) -> None:
        self.exchange, self.layer, self.stage = exchange, layer, stage
        self.microbatch = 0

    def counts(self, counts_NE: Tensor) -> Tensor:
        here_NE = torch.empty_like(counts_NE)
        own = self.exchange.group.own
        here_NE[own].copy_(counts_NE[own])
        name = f"counts of layer {self.layer}, micro-batch {self.microbatch}"
        self.exchange.wait(self.exchange.start(name, (_NOT_A_HOP, False), counts_NE.unbind(0), here_NE.unbind(0)))
        return here_NE

    def rows(self, rows_RD: Tensor, *, send: list[int], receive: list[int], back: bool) -> Tensor:
        what, hop = ("combine", self.stage) if back else ("dispatch", self.stage - 1)
        name = f"of layer {self.layer}, micro-batch {self.microbatch}"
        return cast(Tensor, _Rows.apply(rows_RD, self.exchange, send, receive, (what, name, hop)))


class _Rows(torch.autograd.Function):
    """An exchange of rows; its backward is the opposite one."""

    @staticmethod
    def forward(
        ctx: Any, rows_RD: Tensor, exchange: Exchange, send: list[int], receive: list[int], names: tuple[str, str, int]
    ) -> Tensor:
        ctx.exchange, ctx.send, ctx.receive, ctx.names = exchange, send, receive, names
        what, name, hop = names
        return _exchanged(exchange, rows_RD, send, receive, f"{what} {name}", (hop, False))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        what, name, hop = ctx.names
        grad = _exchanged(ctx.exchange, grads[0], ctx.receive, ctx.send, f"{what} gradient {name}", (hop, True))
        return grad, None, None, None, None


def _exchanged(
    exchange: Exchange, rows_RD: Tensor, send: list[int], receive: list[int], name: str, hop: tuple[int, bool]
) -> Tensor:
    out_RD = rows_RD.new_empty(sum(receive), rows_RD.shape[1])
    going, coming = rows_RD.contiguous().split(send), out_RD.split(receive)
    own = exchange.group.own
    coming[own].copy_(going[own])
    exchange.wait(exchange.start(name, hop, going, coming))
    return out_RD


class StockExperts:
    """A layer's routed experts on one worker; implements `protocol.RoutedExperts` without ever yielding.

    Args:
        stage: index of the layer's expert stage in the chain of stages.
    """

    def __init__(
        self,
        *,
        part: nn.Module,
        dispatcher: DispatcherLike,
        exchange: DispatcherExchange,
        meter: Meter,
        recompute: bool,
        num_experts: int,
    ) -> None:
        self._part, self._dispatcher, self._exchange, self._meter = part, dispatcher, exchange, meter
        self._recompute, self._num_experts = recompute, num_experts
        self._kept: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self.num_rows = 0

    def clear(self) -> None:
        self._kept.clear()

    def forward(
        self, microbatch: int, n_TD: Tensor, weights_TK: Tensor, expert_ids_TK: Tensor, meanwhile: Callable[[], None]
    ) -> Generator[Wait, None, Tensor]:
        self.num_rows += expert_ids_TK.numel()
        self._exchange.microbatch = microbatch
        layer, stage = self._exchange.layer, self._exchange.stage
        with self._meter.time(FORWARD, stage, microbatch, f"experts {layer}"):
            n_TD, weights_TK = n_TD.requires_grad_(), weights_TK.requires_grad_()
            slots_TK, counts_E = self._dispatcher.slots_of(expert_ids_TK)
            x_QD, counts_e, metadata = self._dispatcher.dispatch(n_TD, weights_TK, slots_TK, counts_E)
            counts_e = counts_e[: self._num_experts]
            if self._recompute:
                y_QD = checkpoint(self._part, x_QD, counts_e, use_reentrant=False, preserve_rng_state=False)
            else:
                y_QD = self._part(x_QD, counts_e)
            out_TD = self._dispatcher.combine(y_QD, metadata, n_TD)
        self._kept[microbatch] = (n_TD, weights_TK, out_TD)
        meanwhile()
        yield from ()
        return out_TD.detach()

    def backward(
        self,
        microbatch: int,
        grad_TD: Tensor,
        meanwhile: Callable[[], None],
        later: Later | None,
    ) -> Generator[Wait, None, tuple[Tensor, Tensor]]:
        del later  # autograd computes everything at once
        meanwhile()
        n_TD, weights_TK, out_TD = self._kept.pop(microbatch)
        stage = self._exchange.stage
        with self._meter.time(FULL_BACKWARD, stage, microbatch, f"experts back {self._exchange.layer}"):
            out_TD.backward(grad_TD)
        yield from ()
        assert n_TD.grad is not None and weights_TK.grad is not None
        return n_TD.grad, weights_TK.grad
