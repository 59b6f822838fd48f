"""A decoder cut for expert parallelism: what a token's owner computes, and what the holder of its experts computes.

A MoE block  h = x + attention(attention_norm(x));  n = ffn_norm(h);  y = h + shared(n) + routed(n)  is cut around
`routed`: the owner of a token computes everything else. Rows that travel are rows of n.

Parts are single-device modules whose parameters keep the unsplit model's names. Suffixes as in `split`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, nn
from torchtitan.models.common.decoder import Decoder, TransformerBlock
from torchtitan.models.common.moe import MoE
from torchtitan.protocols.module import Module, ModuleDict

from disagmoe.layout import ChunkStage
from disagmoe.models.attention import Masks, mask_for
from disagmoe.models.split import AttentionHalf
from disagmoe.models.supply import PartSupply


class OwnerHalf(AttentionHalf):
    """A MoE block without its routed experts."""

    def __init__(self, config: TransformerBlock.Config) -> None:
        super().__init__(config)
        assert config.moe is not None
        shared = config.moe.shared_experts
        self.moe.shared_experts = None if shared is None else shared.build()

    def forward(self, x_BLD: Tensor, positions_BL: Tensor, masks: Masks) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Returns: h [B, L, D], n [B, L, D], weights [T, K], expert ids [T, K], scores [T, E] (detached)."""
        mask = mask_for(self.config.attention, masks)
        h_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), mask, positions_BL)
        n_BLD = self.ffn_norm(h_BLD)
        weights, expert_ids, scores = self.moe.router(n_BLD, self.moe.expert_bias_E)
        return h_BLD, n_BLD, weights.flatten(0, 1), expert_ids.flatten(0, 1), scores.detach().flatten(0, 1)


class OwnerPart(nn.Module):
    """[embedding,] dense blocks, then a MoE block without its routed experts, or the head, or nothing."""

    def __init__(self, model_config: Decoder.Config, stage: ChunkStage) -> None:
        super().__init__()
        self.stage = stage
        self.tok_embeddings = model_config.tok_embeddings.build() if stage.has_embedding else None
        self.layers = ModuleDict()
        for index in stage.dense_layers:
            self.layers[str(index)] = model_config.layers[index].build()
        if stage.layer is not None:
            self.layers[str(stage.layer)] = OwnerHalf(model_config.layers[stage.layer])
        self.norm = model_config.norm.build() if stage.has_head else None
        self.lm_head = model_config.lm_head.build() if stage.has_head else None

    @property
    def router_state(self) -> Any:
        """`expert_bias_E` and `load_balance_coeff` of this part's router; None without one."""
        return None if self.stage.layer is None else self.layers[str(self.stage.layer)].moe

    @property
    def shared_experts(self) -> nn.Module | None:
        """[B, L, D] -> [B, L, D]; None where the layer has none."""
        state = self.router_state
        return None if state is None else state.shared_experts

    def forward(self, hidden_or_tokens: Tensor, positions_BL: Tensor, masks: Masks) -> tuple[Tensor, ...]:
        """What `OwnerHalf.forward` returns; or (logits [B, L, V],), or (hidden [B, L, D],)."""
        x_BLD = hidden_or_tokens if self.tok_embeddings is None else self.tok_embeddings(hidden_or_tokens)
        for index in self.stage.dense_layers:
            x_BLD = self.layers[str(index)](x_BLD, masks, positions_BL)
        if self.stage.layer is not None:
            return self.layers[str(self.stage.layer)](x_BLD, positions_BL, masks)
        if self.norm is None or self.lm_head is None:
            return (x_BLD,)
        return (self.lm_head(self.norm(x_BLD)),)


class _Routed(Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.inner_experts = config.build()


class _RoutedMoE(Module):
    def __init__(self, config: MoE.Config, num_experts: int) -> None:
        super().__init__()
        self.routed_experts = _Routed(dataclasses.replace(config.routed_experts.inner_experts, num_experts=num_experts))


class _RoutedHalf(Module):
    def __init__(self, config: MoE.Config, num_experts: int) -> None:
        super().__init__()
        self.moe = _RoutedMoE(config, num_experts)


class RoutedPart(nn.Module):
    """A contiguous range of a layer's routed experts: the same grouped experts as in AF-Pipe."""

    def __init__(self, model_config: Decoder.Config, layer: int, experts: range) -> None:
        super().__init__()
        self.experts = experts
        """Global ids."""
        self._layer = str(layer)
        self.layers = ModuleDict({self._layer: _RoutedHalf(model_config.layers[layer].moe, len(experts))})

    def forward(self, x_QD: Tensor, counts_E: Tensor) -> Tensor:
        """x_QD: rows sorted by expert, `counts_E[i]` of local expert i. Returns [Q, D], not yet weighted."""
        return self.layers[self._layer].moe.routed_experts.inner_experts(x_QD, counts_E)


class ChunkParts(PartSupply):
    """A decoder as a supplier of expert-parallel parts: what `parallelisms.expert_parallel` asks of a model."""

    def owner_part(self, stage: ChunkStage) -> OwnerPart:
        return self._supply(lambda: OwnerPart(self.model_config, stage))

    def routed_part(self, stage: ChunkStage, experts: range) -> RoutedPart:
        layer = stage.layer
        assert layer is not None
        return self._supply(lambda: RoutedPart(self.model_config, layer, experts), experts.start)
