"""A decoder cut into attention parts and expert parts: what one stage computes on one worker.

A MoE block  x' = x + attention(attention_norm(x));  y = x' + experts(ffn_norm(x')) + shared(ffn_norm(x'))  is cut
after x': the attention part yields x' and the routing of ffn_norm(x'), the expert part receives rows of x' and returns
rows of y. The residual and the shared experts ride along with each token's *primary* row, so a token's rows returned
by all F-workers simply add up to y. `ffn_norm` is in both parts.

Parts are single-device modules whose parameters keep the unsplit model's names. How rows travel is no concern of
theirs.

Suffixes: B batch, L sequence, D model, E experts, K top-k, T tokens (B L), R rows received, Q (row, expert) pairs,
P primary rows, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.models.common.decoder import Decoder, TransformerBlock
from torchtitan.models.common.moe import MoE
from torchtitan.ops.scatter_add import deterministic_scatter_add
from torchtitan.protocols.module import Module, ModuleDict

from disagmoe.layout import Role, Stage
from disagmoe.models.attention import Masks, mask_for


@dataclass
class Routing:
    """Where the tokens of a micro-batch go, with which weights."""

    weights_TK: Tensor
    """float32, differentiable: router scores of the chosen experts after normalisation and scaling."""
    expert_ids_TK: Tensor
    """int64, global ids."""
    scores_TE: Tensor
    """float32, detached: all router probabilities, for metrics."""


class _RouterHalf(Module):
    """The part of a MoE layer that stays with the attention: the router and its load-balancing state."""

    def __init__(self, config: MoE.Config) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.load_balance_coeff = config.load_balance_coeff
        self.router = config.router.build()
        bias = None if config.load_balance_coeff is None else torch.zeros(config.num_experts, dtype=torch.float32)
        self.register_buffer("expert_bias_E", bias, persistent=True)
        counts = torch.zeros(config.num_experts, dtype=torch.float32)
        self.register_buffer("tokens_per_expert_E", counts, persistent=False)

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        for buffer in self.buffers(recurse=False):
            buffer.zero_()


class AttentionHalf(Module):
    """The attention sublayer of a MoE block, with the router on its result."""

    def __init__(self, config: TransformerBlock.Config) -> None:
        super().__init__()
        assert config.moe is not None
        self.config = config
        self.attention_norm = config.attention_norm.build()
        self.attention = config.attention.build()
        self.ffn_norm = config.ffn_norm.build()
        self.moe = _RouterHalf(config.moe)

    def forward(self, x_BLD: Tensor, positions_BL: Tensor, masks: Masks) -> tuple[Tensor, Routing]:
        mask = mask_for(self.config.attention, masks)
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), mask, positions_BL)
        weights, expert_ids, scores = self.moe.router(self.ffn_norm(x_BLD), self.moe.expert_bias_E)
        routing = Routing(
            weights_TK=weights.flatten(0, 1),
            expert_ids_TK=expert_ids.flatten(0, 1),
            scores_TE=scores.detach().flatten(0, 1),
        )
        return x_BLD, routing


class AttentionPart(nn.Module):
    """What one A-stage computes: [embedding,] dense blocks, then a MoE block's attention half or the head."""

    def __init__(self, model_config: Decoder.Config, stage: Stage) -> None:
        super().__init__()
        assert stage.role is Role.ATTN, f"stage {stage.index} ({stage}) is not an A-stage"
        self.stage = stage
        self.tok_embeddings = model_config.tok_embeddings.build() if stage.has_embedding else None
        self.layers = ModuleDict()
        for index in stage.dense_layers:
            self.layers[str(index)] = model_config.layers[index].build()
        if stage.moe_layer is not None:
            self.layers[str(stage.moe_layer)] = AttentionHalf(model_config.layers[stage.moe_layer])
        self.norm = model_config.norm.build() if stage.has_head else None
        self.lm_head = model_config.lm_head.build() if stage.has_head else None

    @property
    def router_state(self) -> _RouterHalf | None:
        """Router, `expert_bias_E` and `tokens_per_expert_E` of this stage; None for the last A-stage.

        The forward pass does not count tokens: the caller does, from `Routing.expert_ids_TK`, outside recomputation.
        """
        return None if self.stage.moe_layer is None else self.layers[str(self.stage.moe_layer)].moe

    def forward(self, hidden_or_tokens: Tensor, positions_BL: Tensor, masks: Masks) -> tuple[Tensor, Routing] | Tensor:
        """One A-stage of one micro-batch.

        Args:
            hidden_or_tokens: [B, L, D], or int64 [B, L] in the stage that has the embedding. B >= 1.
            positions_BL: int64 [B, L].
            masks: from `attention_masks`.

        Returns: (hidden [B, L, D], routing of its B L tokens), or logits [B, L, V] in the stage that has the head.
        """
        x_BLD = hidden_or_tokens if self.tok_embeddings is None else self.tok_embeddings(hidden_or_tokens)
        for index in self.stage.dense_layers:
            x_BLD = self.layers[str(index)](x_BLD, masks, positions_BL)
        if self.stage.moe_layer is not None:
            return self.layers[str(self.stage.moe_layer)](x_BLD, positions_BL, masks)
        assert self.norm is not None and self.lm_head is not None
        return self.lm_head(self.norm(x_BLD))


class _RoutedShard(Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.inner_experts = config.build()


class _MoEShard(Module):
    """The part of a MoE layer that an F-worker holds: some routed experts, all shared experts."""

    def __init__(self, config: MoE.Config, num_experts: int) -> None:
        super().__init__()
        self.routed_experts = _RoutedShard(
            dataclasses.replace(config.routed_experts.inner_experts, num_experts=num_experts)
        )
        self.shared_experts = None if config.shared_experts is None else config.shared_experts.build()


class ExpertHalf(Module):
    """The expert sublayer of a MoE block, for a contiguous range of its experts."""

    def __init__(self, config: TransformerBlock.Config, num_experts: int) -> None:
        super().__init__()
        assert config.moe is not None
        self.num_experts = num_experts
        self.ffn_norm = config.ffn_norm.build()
        self.moe = _MoEShard(config.moe, num_experts)

    def forward(
        self, rows_RD: Tensor, weights_Q: Tensor, pair_row_Q: Tensor, pair_expert_Q: Tensor, primary_P: Tensor
    ) -> Tensor:
        normed_RD = self.ffn_norm(rows_RD)
        # One stable sort puts the pairs in expert order; within an expert they keep theirs, so sums are reproducible.
        sorted_experts_Q, order_Q = torch.sort(pair_expert_Q, stable=True)
        edges = torch.arange(self.num_experts + 1, device=rows_RD.device, dtype=sorted_experts_Q.dtype)
        counts_E = torch.searchsorted(sorted_experts_Q, edges).diff()
        row_Q = pair_row_Q.index_select(0, order_Q)
        out_QD = self.moe.routed_experts.inner_experts(normed_RD.index_select(0, row_Q), counts_E)
        out_QD = out_QD.float() * weights_Q.index_select(0, order_Q).unsqueeze(1)
        all_primary = primary_P.numel() == rows_RD.shape[0]  # as with one F-worker: nothing to pick
        own_PD = (rows_RD if all_primary else rows_RD.index_select(0, primary_P)).float()
        if self.moe.shared_experts is not None:
            shared_in_PD = normed_RD if all_primary else normed_RD.index_select(0, primary_P)
            own_PD = own_PD + self.moe.shared_experts(shared_in_PD).float()
        if all_primary:
            return _add_rows(own_PD, row_Q, out_QD).to(rows_RD.dtype)
        out_RD = torch.zeros(rows_RD.shape, dtype=torch.float32, device=rows_RD.device)
        out_RD = _add_rows(out_RD, row_Q, out_QD)
        return _add_rows(out_RD, primary_P, own_PD).to(rows_RD.dtype)


def _add_rows(out_RD: Tensor, index_Q: Tensor, rows_QD: Tensor) -> Tensor:
    """out[index_q] += rows_q, in the order of q on every device (torch's `index_add` is so only on CPU)."""
    if out_RD.device.type == "cpu":
        return out_RD.index_add(0, index_Q, rows_QD)
    return deterministic_scatter_add(out_RD, index_Q.long().unsqueeze(1).expand_as(rows_QD), rows_QD)


class ExpertPart(nn.Module):
    """What one F-stage computes on one worker: a contiguous range of a layer's experts."""

    def __init__(self, model_config: Decoder.Config, stage: Stage, experts: range) -> None:
        super().__init__()
        assert stage.role is Role.FFN and stage.moe_layer is not None, f"stage {stage.index} ({stage}) is no F-stage"
        config = model_config.layers[stage.moe_layer]
        if experts.step != 1 or experts.start < 0 or experts.stop > config.moe.num_experts:
            raise ValueError(f"experts = {experts}: must be a contiguous part of range({config.moe.num_experts})")
        self.stage = stage
        self.experts = experts
        self.layers = ModuleDict({str(stage.moe_layer): ExpertHalf(config, len(experts))})

    def forward(
        self, rows_RD: Tensor, weights_Q: Tensor, pair_row_Q: Tensor, pair_expert_Q: Tensor, primary_P: Tensor
    ) -> Tensor:
        """One F-stage of one micro-batch on one worker. Deterministic; R = 0, Q = 0 and P = 0 are normal.

        out[r] = sum over pairs q of row r of weights_q expert_q(ffn_norm(rows_r)),
        plus rows_r + shared(ffn_norm(rows_r)) where r is primary. Sums are in float32.

        Args:
            rows_RD: hidden states received, not normed.
            weights_Q: float32, differentiable.
            pair_row_Q: int, index into the rows.
            pair_expert_Q: int, *local* expert id (0 is `experts.start`).
            primary_P: int, indices of the rows that are their token's primary row, each at most once.

        Returns: [R, D] in the rows' dtype. Rows, weights and every parameter get a gradient, zeros where nothing came.
        """
        half = self.layers[str(self.stage.moe_layer)]
        return half(rows_RD, weights_Q, pair_row_Q, pair_expert_Q, primary_P)


def build_attention_part(model_config: Decoder.Config, stage: Stage) -> AttentionPart:
    """The module of an A-stage, uninitialised, on the current default device.

    Args:
        model_config: from `make_portable`.
        stage: an A-stage of `build_stages`.
    """
    return AttentionPart(model_config, stage)


def build_expert_part(model_config: Decoder.Config, stage: Stage, experts: range) -> ExpertPart:
    """The module of an F-stage on one worker, uninitialised, on the current default device.

    Args:
        model_config: from `make_portable`.
        stage: an F-stage of `build_stages`.
        experts: global ids of this worker's experts, contiguous; may be empty.

    Raises:
        ValueError: `experts` is not a contiguous part of the layer's.
    """
    return ExpertPart(model_config, stage, experts)
