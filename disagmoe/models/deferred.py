"""Weight gradients put off: the part of a backward that nobody else waits for, to be done later.

A split backward first computes what the upstream stage waits for (input gradients) and does the weight gradients in a
bubble. torch's own split walks the autograd graph once more for every weight, and recomputes a checkpointed stage each
time. Here the large matrix products (linear layers, grouped experts) are replaced, while a forward runs under
`WeightGradients.collect`, by functions whose backward returns the input gradient and leaves the product for the weight
in a list; `run` does them all. Small parameters (norms, biases, sinks, embeddings) get their gradients at once.

Not covered: torch.compile, which does not see the replacement; the configuration refuses the combination.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_ACTIVE: ContextVar[WeightGradients | None] = ContextVar("active weight gradients", default=None)


class WeightGradients:
    """The weight gradients that one stage owes for one micro-batch."""

    def __init__(self) -> None:
        self._pending: list[Callable[[], None]] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Forward passes in here put their weight gradients off. Re-entered when a checkpoint recomputes."""
        token = _ACTIVE.set(self)
        try:
            with _LinearMode(self):
                yield
        finally:
            _ACTIVE.reset(token)

    def owe(self, weight_gradient: Callable[[], None]) -> None:
        """Add one product. Called in backward, maybe on an autograd thread."""
        self._pending.append(weight_gradient)

    def run(self) -> None:
        """Compute what is owed, accumulating into the parameters' `.grad`; frees what the products hold."""
        pending, self._pending = self._pending, []
        pending.reverse()
        while pending:
            pending.pop()()


def active() -> WeightGradients | None:
    """Where weight gradients of the forward that is running go; None: they are computed in backward, as usual."""
    return _ACTIVE.get()


def add_to_grad(parameter: Tensor, value: Tensor) -> None:
    """`parameter.grad += value`."""
    if parameter.grad is None:
        parameter.grad = value
    else:
        parameter.grad += value


class _LinearMode(TorchFunctionMode):
    """Replaces `F.linear` on a parameter by `_DeferredLinear`."""

    def __init__(self, owed: WeightGradients) -> None:
        super().__init__()
        self._owed = owed

    def __torch_function__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ):
        kwargs = kwargs or {}
        if func is F.linear and not kwargs and torch.is_grad_enabled():
            x, weight = args[0], args[1]
            if weight.is_leaf and weight.requires_grad:
                bias = args[2] if len(args) > 2 else None
                return _DeferredLinear.apply(x, weight, bias, self._owed)
        return func(*args, **kwargs)


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, owed: WeightGradients) -> Tensor:
        ctx.save_for_backward(x)
        # Not saved as a tensor: under a checkpoint that would come back as an alias, which has no `.grad` to add to.
        ctx.weight_OI = weight_OI
        ctx.owed, ctx.has_bias = owed, bias_O is not None
        return F.linear(x, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        (grad,) = grads
        (x,) = ctx.saved_tensors
        weight_OI = ctx.weight_OI
        x_TI, grad_TO = x.flatten(0, -2), grad.flatten(0, -2)

        def weight_gradient() -> None:
            with torch.no_grad():
                if weight_OI.grad is None:
                    weight_OI.grad = grad_TO.t() @ x_TI
                else:
                    weight_OI.grad.addmm_(grad_TO.t(), x_TI)

        ctx.owed.owe(weight_gradient)
        grad_x = grad @ weight_OI if ctx.needs_input_grad[0] else None
        return grad_x, None, grad_TO.sum(0) if ctx.has_bias else None, None
