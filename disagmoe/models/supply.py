"""A decoder as a supplier of parts, whatever the cut: what each cut's own supplier begins with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn
from torchtitan.models.common.decoder import Decoder

from disagmoe.models.deferred import WeightGradients
from disagmoe.models.experts import add_gradients_in_place
from disagmoe.models.init import init_parameters, materialize

AnyPart = TypeVar("AnyPart", bound=nn.Module)


class PartSupply:
    """Builds parts of one decoder: each on the meta device first, so that no process ever holds the whole model.

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
        """Experts a token of a MoE layer goes to."""
        return int(self.model_config.layers[layer].moe.router.top_k)

    def weight_gradients(self) -> WeightGradients:
        return WeightGradients()

    def _supply(self, build: Callable[[], AnyPart], first_expert: int = 0) -> AnyPart:
        """What `build` makes, with weights; its experts are the unsplit layer's from `first_expert` on."""
        with torch.device("meta"):
            part = build()
        materialize(part, device=self._device, dtype=self.row_dtype)
        init_parameters(part, self.model_config, self._seed, first_expert)
        add_gradients_in_place(part)
        return part
