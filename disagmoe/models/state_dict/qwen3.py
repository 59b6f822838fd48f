"""Qwen3-MoE as transformers' Qwen3MoeForCausalLM has it, in files (expert by expert) or in memory (stacked)."""

from __future__ import annotations

from disagmoe.models.state_dict.maps import ParameterMap, gated, gated_experts, trunk, whole
from disagmoe.shapes import DenseFFNShape, ModelShape


def parameters(shape: ModelShape) -> list[ParameterMap]:
    """Every parameter of the unsplit model."""
    found = list(trunk(shape))
    for i, layer in enumerate(shape.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}.mlp"
        if isinstance(layer.ffn, DenseFFNShape):
            found += gated(f"{ours}.feed_forward", theirs, shape.dim, layer.ffn.hidden_dim)
            continue
        moe = layer.ffn
        experts = f"{ours}.moe.routed_experts.inner_experts"
        found.append(whole(f"{ours}.moe.router.gate.weight", (moe.num_experts, shape.dim), f"{theirs}.gate.weight"))
        found += gated_experts(experts, f"{theirs}.experts", shape.dim, moe.expert_dim, moe.num_experts)
    return found
