"""A model as numbers: sublayers, parameters, FLOPs and bytes, without torch.

A recipe gives one `ModelShape` a flavor. The configuration checks, the cost model, the allocator and the runtime's
metrics read it; a test holds it equal to the torchtitan model that the recipe builds.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Grouped-query attention: H query heads, `num_kv_heads` key and value heads, C head dim."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    """Sliding window in tokens; None: full causal attention."""
    qk_norm: bool = False
    bias: bool = False
    sinks: bool = False


@dataclass(frozen=True, kw_only=True)
class DenseFFNShape:
    """A gated feed-forward layer: three matrices D x F."""

    hidden_dim: int


@dataclass(frozen=True, kw_only=True)
class MoEShape:
    """Routed experts (gated, three matrices D x F each) and shared experts."""

    num_experts: int
    top_k: int
    expert_dim: int
    shared_dim: int = 0
    """Hidden size of the shared experts taken together; 0: none."""
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    attention: AttentionShape
    ffn: DenseFFNShape | MoEShape

    @property
    def is_moe(self) -> bool:
        return isinstance(self.ffn, MoEShape)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    name: str
    dim: int
    vocab_size: int
    layers: tuple[LayerShape, ...]
    max_seq_len: int

    @property
    def is_moe_layer(self) -> tuple[bool, ...]:
        return tuple(layer.is_moe for layer in self.layers)
