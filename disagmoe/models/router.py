"""A router whose gate is computed in float32 whatever the dtype of model and input."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import TokenChoiceTopKRouter


class Float32Gate(Linear):
    """A linear layer computed in float32; its parameters keep the model's dtype."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: Tensor) -> Tensor:
        """[..., D] in any float dtype -> [..., E] float32."""
        bias = None if self.bias is None else self.bias.float()
        return F.linear(input.float(), self.weight.float(), bias)


class Float32Router(TokenChoiceTopKRouter):
    """torchtitan's top-k router on a `Float32Gate`.

    The stock router asks autocast for float32, which does nothing on CPU: near-ties would then be decided by bfloat16
    rounding, differently from how CUDA decides them.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        pass

    def forward(self, x_BLD: Tensor, expert_bias_E: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """x_BLD: [B, L, D]; expert_bias_E: added to the scores for the choice only.

        Returns: weights [B, L, K] float32, expert ids [B, L, K] int64, all scores [B, L, E] float32.
        """
        scores = self.gate(x_BLD)
        scores = torch.sigmoid(scores) if self.score_func == "sigmoid" else F.softmax(scores, dim=-1)
        choice = scores if expert_bias_E is None else scores + expert_bias_E
        if self.num_expert_groups is not None:
            choice = self._get_node_limited_routing_scores(choice)
        expert_ids = torch.topk(choice.detach(), k=self.top_k, dim=-1, sorted=False).indices
        weights = scores.gather(dim=-1, index=expert_ids)
        if self._debug_force_load_balance:
            expert_ids, weights = self._debug_force_load_balance_routing(scores)
        if self.route_norm:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * self.route_scale, expert_ids, scores


def float32_router(config: TokenChoiceTopKRouter.Config) -> Float32Router.Config:
    """The float32 counterpart of a torchtitan router config, with the same fields."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    gate = config.gate
    if not isinstance(gate, Float32Gate.Config):
        values["gate"] = Float32Gate.Config(**{f.name: getattr(gate, f.name) for f in dataclasses.fields(gate)})
    return Float32Router.Config(**values)
