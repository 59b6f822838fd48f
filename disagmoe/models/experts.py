"""Grouped experts that compute in the dtype of their input, and fast on CPU.

torchtitan's grouped experts cast to bfloat16, which hides errors that an exact test must see. These subclasses keep
its parameters and its call, so that they replace it in a model config.

Suffixes: E experts (the local ones of a shard), R rows sorted by expert, D model, F expert hidden, G = 2 F.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, swiglu

from disagmoe.models.deferred import WeightGradients, active, add_to_grad


class _GroupedLinear(torch.autograd.Function):
    """`grouped_linear` as one matrix product an expert, without a graph node for each.

    One node instead of E slices and products: on CPU with small experts the bookkeeping would cost more than the
    arithmetic. Weight gradients are written into one buffer, zeros for experts without rows. Where the weight is a
    parameter, `owed` may take them over (see `disagmoe.models.deferred`), or they are added to its `.grad` in place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_RI: Tensor,
        weight_EOI: Tensor,
        bias_EO: Tensor | None,
        counts: Sequence[int],
        owed: WeightGradients | None,
        in_place: bool,
    ) -> Tensor:
        out_RO = x_RI.new_empty(x_RI.shape[0], weight_EOI.shape[1])
        start = 0
        for expert, count in enumerate(counts):
            rows = slice(start, start + count)
            start += count
            if bias_EO is None:
                torch.mm(x_RI[rows], weight_EOI[expert].t(), out=out_RO[rows])
            else:
                torch.addmm(bias_EO[expert], x_RI[rows], weight_EOI[expert].t(), out=out_RO[rows])
        out_RO[start:].zero_()
        ctx.save_for_backward(x_RI)
        ctx.weight_EOI = weight_EOI
        ctx.counts, ctx.has_bias, ctx.owed, ctx.in_place = counts, bias_EO is not None, owed, in_place
        return out_RO

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        (grad_RO,) = grads
        (x_RI,) = ctx.saved_tensors
        weight_EOI = ctx.weight_EOI
        grad_x = torch.empty_like(x_RI) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.owed is not None:
            counts = ctx.counts
            ctx.owed.owe(lambda: _add_grouped_outer(weight_EOI, grad_RO, x_RI, counts))
        elif ctx.in_place:
            _add_grouped_outer(weight_EOI, grad_RO, x_RI, ctx.counts)
        elif ctx.needs_input_grad[1]:
            grad_weight = _grouped_outer(grad_RO, x_RI, weight_EOI, ctx.counts)
        grad_bias = weight_EOI.new_empty(weight_EOI.shape[:2]) if ctx.has_bias else None
        start = 0
        for expert, count in enumerate(ctx.counts):
            rows = slice(start, start + count)
            start += count
            if grad_x is not None:
                torch.mm(grad_RO[rows], weight_EOI[expert], out=grad_x[rows])
            if grad_bias is not None:
                torch.sum(grad_RO[rows], dim=0, out=grad_bias[expert])
        if grad_x is not None:
            grad_x[start:].zero_()
        return grad_x, grad_weight, grad_bias, None, None, None


@torch.no_grad()
def _grouped_outer(grad_RO: Tensor, x_RI: Tensor, like_EOI: Tensor, counts: Sequence[int]) -> Tensor:
    """The weight gradient [E, O, I]: for each expert, grad^T x over its rows; zeros for an expert without rows."""
    grad_weight = torch.empty_like(like_EOI)
    start = 0
    for expert, count in enumerate(counts):
        rows = slice(start, start + count)
        start += count
        torch.mm(grad_RO[rows].t(), x_RI[rows], out=grad_weight[expert])
    return grad_weight


@torch.no_grad()
def _add_grouped_outer(weight_EOI: Tensor, grad_RO: Tensor, x_RI: Tensor, counts: Sequence[int]) -> None:
    """`_grouped_outer` into the weight's `.grad`: added there by the products themselves if there is one already."""
    total_EOI = weight_EOI.grad
    if total_EOI is None:
        weight_EOI.grad = _grouped_outer(grad_RO, x_RI, weight_EOI, counts)
        return
    start = 0
    for expert, count in enumerate(counts):
        rows = slice(start, start + count)
        start += count
        if count:
            total_EOI[expert].addmm_(grad_RO[rows].t(), x_RI[rows])


class _FusedGroupedLinear(torch.autograd.Function):
    """torch's grouped product with its weight gradient put off."""

    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, weight_EOI: Tensor, offsets_E: Tensor, owed: WeightGradients) -> Tensor:
        ctx.save_for_backward(x_RI, offsets_E)
        ctx.weight_EOI, ctx.owed = weight_EOI, owed
        return torch._grouped_mm(x_RI, weight_EOI.transpose(-2, -1), offs=offsets_E)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        grad_RO = grads[0].contiguous()
        x_RI, offsets_E = ctx.saved_tensors
        weight_EOI = ctx.weight_EOI

        def weight_gradient() -> None:
            with torch.no_grad():
                add_to_grad(weight_EOI, torch._grouped_mm(grad_RO.t(), x_RI, offs=offsets_E))

        ctx.owed.owe(weight_gradient)
        grad_x = torch._grouped_mm(grad_RO, weight_EOI, offs=offsets_E) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, None


class _Groups:
    """Rows of each expert, in the form that the device's kernel wants."""

    def __init__(self, counts_E: Tensor, num_rows: int, dtype: torch.dtype, in_place: bool) -> None:
        self.num_rows = num_rows
        self.in_place = in_place
        self.counts_E = counts_E
        # torch's grouped product on CUDA is for bfloat16 and some rows; float32 is for tests, where the host may wait.
        self.fused = counts_E.device.type == "cuda" and dtype == torch.bfloat16 and num_rows > 0
        self.counts: list[int] = []
        if not self.fused:
            self.counts = counts_E.tolist() if num_rows else [0] * counts_E.numel()
        self.offsets_E = torch.cumsum(counts_E, dim=0, dtype=torch.int32) if self.fused else None

    def linear(self, x_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None = None) -> Tensor:
        """Row r of expert e: x_r weight_e^T + bias_e.

        Rows past the last expert's are never part of a sum; in the output they are zero (fused kernel: undefined).
        """
        weight_EOI = weight_EOI.to(x_RI.dtype)
        bias_EO = None if bias_EO is None else bias_EO.to(x_RI.dtype)
        is_trained = weight_EOI.is_leaf and weight_EOI.requires_grad and torch.is_grad_enabled()
        owed = active() if is_trained else None
        if not self.fused:
            return _GroupedLinear.apply(x_RI, weight_EOI, bias_EO, self.counts, owed, self.in_place and is_trained)
        assert self.offsets_E is not None
        if owed is not None:
            out_RO = _FusedGroupedLinear.apply(x_RI, weight_EOI, self.offsets_E, owed)
        else:
            out_RO = torch._grouped_mm(x_RI, weight_EOI.transpose(-2, -1), offs=self.offsets_E)
        if bias_EO is None:
            return out_RO
        tail = (self.num_rows - self.offsets_E[-1:]).to(self.counts_E.dtype)
        padded = torch.cat([bias_EO, bias_EO.new_zeros(1, bias_EO.shape[1])])
        return out_RO + padded.repeat_interleave(
            torch.cat([self.counts_E, tail]).long(), dim=0, output_size=self.num_rows
        )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class PortableGroupedExperts(GroupedExperts):
    """w2 (silu(w1 x) * w3 x) for each expert."""

    in_place = False
    """See `add_gradients_in_place`."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """x_RD: rows sorted by expert, the first `num_tokens_per_expert_E[0]` of expert 0 and so on.

        Returns [R, D] in the dtype of `x_RD`. Every parameter gets a gradient, zeros for experts without rows.
        """
        groups = _Groups(num_tokens_per_expert_E, x_RD.shape[0], x_RD.dtype, self.in_place)
        gate_RF = groups.linear(x_RD, _local(self.w1_EFD))
        up_RF = groups.linear(x_RD, _local(self.w3_EFD))
        return groups.linear(F.silu(gate_RF) * up_RF, _local(self.w2_EDF))


class PortableGptOssGroupedExperts(GptOssGroupedExperts):
    """GPT-OSS's experts: interleaved, clamped gate and up rows, biases."""

    in_place = False
    """See `add_gradients_in_place`."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        pass

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """As `PortableGroupedExperts.forward`."""
        groups = _Groups(num_tokens_per_expert_E, x_RD.shape[0], x_RD.dtype, self.in_place)
        h_RG = groups.linear(x_RD, _local(self.mlp1_weight_EGD), _local(self.mlp1_bias_EG))
        h_RF = swiglu(h_RG, limit=self.swiglu_limit)
        return groups.linear(h_RF, _local(self.mlp2_weight_EDF), _local(self.mlp2_bias_ED))


def add_gradients_in_place(module: nn.Module) -> None:
    """From now on the experts in `module` add weight gradients to `.grad` themselves, where autograd would make a new
    tensor of every weight for each micro-batch and add that: a tenth of an F-stage's time with few rows an expert.

    For training loops that read `.grad`: neither `torch.autograd.grad` nor gradient hooks see these gradients. Without
    effect on torch's own grouped product (CUDA, bfloat16), which can't add.
    """
    for part in module.modules():
        if isinstance(part, (PortableGroupedExperts, PortableGptOssGroupedExperts)):
            part.in_place = True


def portable_experts(config: GroupedExperts.Config) -> GroupedExperts.Config:
    """The portable counterpart of a torchtitan grouped-experts config, with the same fields.

    Raises:
        ValueError: an unknown kind of experts (e.g. quantised ones).
    """
    if isinstance(config, (PortableGroupedExperts.Config, PortableGptOssGroupedExperts.Config)):
        return config
    kinds: dict[type, type] = {
        GroupedExperts.Config: PortableGroupedExperts.Config,
        GptOssGroupedExperts.Config: PortableGptOssGroupedExperts.Config,
    }
    if type(config) not in kinds:
        raise ValueError(
            f"experts {type(config).__qualname__}: only GroupedExperts and GptOssGroupedExperts have a portable form"
        )
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return kinds[type(config)](**fields)
