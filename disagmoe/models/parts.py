"""A decoder as a supplier of sublayers: what `disagmoe.parallelisms.apply` asks of a model."""

from __future__ import annotations

from typing import Any

from torch import nn

from disagmoe.layout import Stage
from disagmoe.models.split import AttentionPart, ExpertPart, build_attention_part, build_expert_part
from disagmoe.models.supply import PartSupply


class DecoderParts(PartSupply):
    """Builds the sublayers of one decoder."""

    def attention_part(self, stage: Stage) -> AttentionPart:
        return self._supply(lambda: build_attention_part(self.model_config, stage))

    def expert_part(self, stage: Stage, experts: range) -> ExpertPart:
        return self._supply(lambda: build_expert_part(self.model_config, stage, experts), experts.start)

    def tied_parameters(self, part: nn.Module) -> list[nn.Parameter]:
        """`ffn_norm` of the MoE layer: the router reads it on the A side, the experts on the F side."""
        stage: Stage = part.stage  # type: ignore[assignment]
        if stage.moe_layer is None:
            return []
        return list(part.layers[str(stage.moe_layer)].ffn_norm.parameters())  # type: ignore[index, union-attr]

    def expert_parameters(self, part: nn.Module) -> list[nn.Parameter]:
        assert isinstance(part, ExpertPart)
        return list(part.layers[str(part.stage.moe_layer)].moe.routed_experts.parameters())

    def router_state(self, part: nn.Module) -> Any:
        """The router bias of an A-part; None without a router."""
        return part.router_state if isinstance(part, AttentionPart) else None
