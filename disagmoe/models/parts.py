"""A decoder as a supplier of sublayers: what `disagmoe.parallelisms.apply` asks of a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchtitan.models.common.decoder import Decoder

from disagmoe.layout import Stage
from disagmoe.models.deferred import WeightGradients
from disagmoe.models.init import init_parameters, materialize
from disagmoe.models.split import AttentionPart, ExpertPart, build_attention_part, build_expert_part


class DecoderParts:
    """Builds the parts of one decoder: each on the meta device first, so that no process ever holds the whole model.

    Args:
        model_config: from `make_portable`.
        seed: of the initial weights; any set of parts starts from the unsplit model's weights. None: they are undefined
            until they are loaded.
        device: where the parts go.
        dtype: of parameters and rows.
    """

    def __init__(
        self, model_config: Decoder.Config, *, seed: int | None, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.model_config = model_config
        self.dim: int = model_config.dim
        self.row_dtype = dtype
        self.is_moe_layer = tuple(layer.moe is not None for layer in model_config.layers)
        self._seed, self._device = seed, device

    def num_experts(self, layer: int) -> int:
        moe = self.model_config.layers[layer].moe
        return 0 if moe is None else int(moe.num_experts)

    def top_k(self, layer: int) -> int:
        return int(self.model_config.layers[layer].moe.router.top_k)

    def attention_part(self, stage: Stage) -> AttentionPart:
        with torch.device("meta"):
            part = build_attention_part(self.model_config, stage)
        self._fill(part, 0)
        return part

    def expert_part(self, stage: Stage, experts: range) -> ExpertPart:
        with torch.device("meta"):
            part = build_expert_part(self.model_config, stage, experts)
        self._fill(part, experts.start)
        return part

    def _fill(self, part: nn.Module, expert_offset: int) -> None:
        materialize(part, device=self._device, dtype=self.row_dtype)
        init_parameters(part, self.model_config, self._seed, expert_offset)

    def tied_parameters(self, part: nn.Module) -> list[nn.Parameter]:
        """`ffn_norm` of the MoE layer: the router reads it on the A side, the experts on the F side."""
        stage: Stage = part.stage  # type: ignore[assignment]
        if stage.moe_layer is None:
            return []
        return list(part.layers[str(stage.moe_layer)].ffn_norm.parameters())  # type: ignore[index, union-attr]

    def expert_parameters(self, part: nn.Module) -> list[nn.Parameter]:
        assert isinstance(part, ExpertPart)
        return list(part.layers[str(part.stage.moe_layer)].moe.routed_experts.parameters())

    def weight_gradients(self) -> WeightGradients:
        return WeightGradients()

    def router_state(self, part: nn.Module) -> Any:
        """The router bias of an A-part; None without a router."""
        return part.router_state if isinstance(part, AttentionPart) else None
