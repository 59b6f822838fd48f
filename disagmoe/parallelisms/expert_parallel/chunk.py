"""One chunk: a run of consecutive layers on one worker, computed in parts that yield where a transfer is needed.

The autograd graph ends at every transfer: a layer's owner part maps its input to h, n = ffn_norm(h) and the routing;
its output h + shared(n) + routed(n) is the next layer's input, a leaf. Suffixes: B batch, L sequence, D model,
T = B L tokens, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from disagmoe.parallelisms.expert_parallel.pass_on import PassOn
from disagmoe.parallelisms.expert_parallel.protocol import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    Filler,
    Later,
    Meter,
    OwnerPartLike,
    RoutedExperts,
    Wait,
)
from disagmoe.parallelisms.runtime import LossFunction
from disagmoe.parallelisms.stage import MicrobatchInput, RouterStats, WeightGradientsLike


@dataclass(kw_only=True)
class Block:
    """A MoE layer on this worker, with the dense layers before it."""

    layer: int
    stage: int
    """Of the owner part in the chain of stages; the experts' is the next."""
    owner: nn.Module
    routed: RoutedExperts
    top_k: int
    stats: RouterStats


@dataclass(kw_only=True)
class Tail:
    """What ends a chunk behind its last MoE layer: dense layers, or the head."""

    stage: int
    part: nn.Module
    has_head: bool


@dataclass(kw_only=True)
class _Layer:
    """A block between forward and backward of one micro-batch."""

    x_BLD: Tensor | None
    """None: no tokens here."""
    outputs: tuple[Tensor, ...] = ()
    """h, n [B, L, D], weights [T, K]."""
    shared_in_BLD: Tensor | None = None
    shared_BLD: Tensor | None = None
    owed: list[Callable[[], None]] = field(default_factory=list)
    """Weight gradients that its backward puts off."""


@dataclass(kw_only=True)
class _Kept:
    """A micro-batch between its forward and the end of its backward."""

    layers: list[_Layer] = field(default_factory=list)
    tail: tuple[Tensor, Tensor] | None = None
    """Input and output of the tail (the loss, with the head)."""
    tail_owed: list[Callable[[], None]] = field(default_factory=list)
    ready: list[Callable[[], None]] = field(default_factory=list)
    """Weight gradients that can be computed."""


class Chunk:
    """A chunk's forward and backward of one micro-batch.

    Args:
        put_off: where the owner parts' weight gradients go when they are computed behind transfers or later; None:
            they are part of the backward.
    """

    def __init__(
        self,
        *,
        index: int,
        blocks: Sequence[Block],
        tail: Tail | None,
        before: PassOn | None,
        after: PassOn | None,
        loss_fn: LossFunction,
        meter: Meter,
        put_off: Callable[[], WeightGradientsLike] | None,
        filler: Filler,
        recompute: bool,
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.index, self.blocks, self.tail = index, blocks, tail
        self.before, self.after = before, after
        self._loss_fn, self._meter, self._put_off, self._recompute = loss_fn, meter, put_off, recompute
        self._dim, self._dtype, self._device = dim, dtype, device
        self._filler = filler
        self._kind = FULL_BACKWARD if put_off is None else BACKWARD_INPUT
        self._kept: dict[int, _Kept] = {}
        self.losses: dict[int, Tensor] = {}
        self.inputs: Sequence[MicrobatchInput] = ()
        self.loss_scale = 1.0

    def start_step(self, inputs: Sequence[MicrobatchInput], loss_scale: float) -> None:
        self.inputs, self.loss_scale = inputs, loss_scale
        self._kept.clear()
        self.losses = {}
        for block in self.blocks:
            block.routed.clear()

    # -- forward -------------------------------------------------------------------------------------------------

    def forward(self, microbatch: int) -> Generator[Wait, None, None]:
        inputs = self.inputs[microbatch]
        kept = self._kept[microbatch] = _Kept()
        if self.before is None:
            x = inputs.tokens_BL
        else:
            x = yield from self.before.receive(microbatch)
        for block in self.blocks:
            x = yield from self._block_forward(block, kept, microbatch, x)
        if self.tail is not None:
            x = self._tail_forward(self.tail, kept, microbatch, x)
        if self.after is not None:
            self.after.send(microbatch, x)

    def _block_forward(self, block: Block, kept: _Kept, microbatch: int, x: Tensor) -> Generator[Wait, None, Tensor]:
        layer = _Layer(x_BLD=None)
        kept.layers.append(layer)
        if x.numel():
            with self._meter.time(FORWARD, block.stage, microbatch, f"attention {block.layer}"):
                layer.x_BLD = x.requires_grad_() if x.is_floating_point() else x
                h_BLD, n_BLD, weights_TK, expert_ids_TK, scores_TE = self._compute(
                    block.stage, layer.owed, microbatch, block.owner, x
                )
                layer.outputs = (h_BLD, n_BLD, weights_TK)
                block.stats.add(expert_ids_TK, scores_TE)
            n_TD, weights_TK = n_BLD.detach().flatten(0, 1), weights_TK.detach()
        else:
            n_TD = torch.empty(0, self._dim, dtype=self._dtype, device=self._device)
            weights_TK = torch.empty(0, block.top_k, device=self._device)
            expert_ids_TK = torch.empty(0, block.top_k, dtype=torch.int64, device=self._device)
        rows_before = block.routed.num_rows
        routed_TD = yield from block.routed.forward(
            microbatch, n_TD, weights_TK, expert_ids_TK, lambda: self._shared_forward(block, layer, microbatch)
        )
        block.stats.num_rows += block.routed.num_rows - rows_before
        if layer.x_BLD is None:
            return self._or_empty(microbatch, None)
        with self._meter.time(FORWARD, block.stage + 2, microbatch, f"residual {block.layer}"):
            h_BLD = layer.outputs[0].detach()
            total_BLD = h_BLD + routed_TD.view_as(h_BLD)
            if layer.shared_BLD is not None:
                total_BLD = total_BLD + layer.shared_BLD.detach()
            return total_BLD.to(self._dtype)

    def _shared_forward(self, block: Block, layer: _Layer, microbatch: int) -> None:
        shared = cast(OwnerPartLike, block.owner).shared_experts
        if shared is None or layer.x_BLD is None:
            return
        with self._meter.time(FORWARD, block.stage, microbatch, f"shared experts {block.layer}"):
            layer.shared_in_BLD = layer.outputs[1].detach().requires_grad_()
            layer.shared_BLD = self._compute(
                block.stage, layer.owed, microbatch, shared, layer.shared_in_BLD, shared=True
            )

    def _tail_forward(self, tail: Tail, kept: _Kept, microbatch: int, x_BLD: Tensor) -> Tensor:
        if not x_BLD.numel():
            if tail.has_head:
                self.losses[microbatch] = torch.zeros((), device=self._device)
            return x_BLD
        with self._meter.time(FORWARD, tail.stage, microbatch, "head" if tail.has_head else "dense"):
            if x_BLD.is_floating_point():
                x_BLD.requires_grad_()
            (out,) = self._compute(tail.stage, kept.tail_owed, microbatch, tail.part, x_BLD)
            if tail.has_head:
                out = self._loss_fn(out, self.inputs[microbatch].labels_BL) * self.loss_scale
                self.losses[microbatch] = out.detach()
            kept.tail = (x_BLD, out)
        return out.detach()

    def _compute(
        self,
        stage: int,
        later: list[Callable[[], None]],
        microbatch: int,
        part: nn.Module,
        x: Tensor,
        *,
        shared: bool = False,
    ) -> Any:
        """Run a part under its recompute wrapper and, if they are put off, with its weight gradients collected."""
        inputs = self.inputs[microbatch]

        def compute(x: Tensor) -> Any:
            return part(x) if shared else part(x, inputs.positions_BL, inputs.masks)

        run = compute
        if self._put_off is not None:
            owed = self._put_off()

            def run(x: Tensor) -> Any:
                with owed.collect():
                    return compute(x)

            later.append(lambda: self._weight_gradient(stage, microbatch, owed))
        if self._recompute:
            return checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)
        return run(x)

    # -- backward ------------------------------------------------------------------------------------------------

    def backward(self, microbatch: int, *, put_off: bool = False) -> Generator[Wait, None, None]:
        """put_off: leave weight gradients that can wait to `weight_gradients`."""
        kept = self._kept[microbatch]
        grad = None
        if self.after is not None:
            grad = yield from self.after.receive_gradient(microbatch)
        if kept.tail is not None:
            grad = self._tail_backward(kept, microbatch, grad)
            kept.ready += kept.tail_owed
        for block, layer in zip(reversed(self.blocks), reversed(kept.layers), strict=True):
            grad = yield from self._block_backward(block, layer, kept, microbatch, grad, put_off)
            kept.ready += layer.owed
        if self.before is not None:
            self.before.send_gradient(microbatch, self._or_empty(microbatch, grad))
        if not put_off:
            self._filler.take_over(self._kept.pop(microbatch).ready)

    def weight_gradients(self, microbatch: int) -> None:
        """Compute what the backward of a micro-batch has put off."""
        ready = self._kept.pop(microbatch).ready
        while ready:
            ready.pop(0)()

    def _weight_gradient(self, stage: int, microbatch: int, owed: WeightGradientsLike) -> None:
        with self._meter.time(BACKWARD_WEIGHT, stage, microbatch, "weights"):
            owed.run()

    def _tail_backward(self, kept: _Kept, microbatch: int, grad: Tensor | None) -> Tensor | None:
        assert self.tail is not None and kept.tail is not None
        x, out = kept.tail
        kept.tail = None
        with self._meter.time(self._kind, self.tail.stage, microbatch, "head back" if self.tail.has_head else "dense"):
            out.backward(None if self.tail.has_head else grad)
        return x.grad

    def _block_backward(
        self,
        block: Block,
        layer: _Layer,
        kept: _Kept,
        microbatch: int,
        grad_BLD: Tensor | None,
        put_off: bool,
    ) -> Generator[Wait, None, Tensor | None]:
        grad_BLD = self._or_empty(microbatch, grad_BLD)

        def meanwhile() -> None:
            self._shared_backward(block, layer, microbatch, grad_BLD)
            if not put_off:
                self._filler.take_over(kept.ready)

        later: Later | None = None
        if self._put_off is not None:
            later = kept.ready if put_off else self._filler
        grad_n, grad_weights = yield from block.routed.backward(microbatch, grad_BLD.flatten(0, 1), meanwhile, later)
        if layer.x_BLD is None:
            return None
        with self._meter.time(self._kind, block.stage, microbatch, f"attention back {block.layer}"):
            h_BLD, n_BLD, weights_TK = layer.outputs
            grad_n = grad_n.view_as(n_BLD)
            if layer.shared_in_BLD is not None and layer.shared_in_BLD.grad is not None:
                grad_n = grad_n + layer.shared_in_BLD.grad
            torch.autograd.backward([h_BLD, n_BLD, weights_TK], [grad_BLD, grad_n.to(self._dtype), grad_weights])
            layer.outputs = ()
            return layer.x_BLD.grad

    def _shared_backward(self, block: Block, layer: _Layer, microbatch: int, grad_BLD: Tensor) -> None:
        if layer.shared_BLD is None:
            return
        with self._meter.time(self._kind, block.stage, microbatch, f"shared experts back {block.layer}"):
            layer.shared_BLD.backward(grad_BLD)
            layer.shared_BLD = None

    def _or_empty(self, microbatch: int, grad_BLD: Tensor | None) -> Tensor:
        if grad_BLD is not None:
            return grad_BLD
        shape = self.inputs[microbatch].tokens_BL.shape
        return torch.zeros(*shape, self._dim, dtype=self._dtype, device=self._device)
