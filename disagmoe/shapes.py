"""A model as numbers: sublayers, parameters, FLOPs and bytes, without torch.

A recipe gives one `ModelShape` a flavor. The configuration checks, the cost model, the allocator and the runtime's
metrics read it; a test holds it equal to the torchtitan model that the recipe builds.

Symbols: D model dim, H query heads, G key/value heads, C head dim, F hidden dim of a feed-forward layer or of one
expert, S hidden dim of the shared experts together, E experts, K top-k, V vocabulary, s sequence length, w window.

FLOPs are those of matrix products, two a multiply-add, of a *forward* pass; a training step takes three times as many
(four with full recomputation). Norms, activations, softmax, rotary embeddings and look-ups are left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Grouped-query attention: H query heads, `num_kv_heads` key and value heads, C head dim."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    """Sliding window in tokens, the token itself included; None: full causal attention."""
    qk_norm: bool = False
    bias: bool = False
    sinks: bool = False

    @property
    def qkv_dim(self) -> int:
        """(H + 2 G) C: width of the fused query, key and value projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def out_dim(self) -> int:
        """H C: width of the heads' output together."""
        return self.num_heads * self.head_dim

    def num_params(self, dim: int) -> int:
        """D (H + 2 G) C + H C D, biases (H + 2 G) C + D, query and key norms 2 C, sinks H; no layer norm."""
        count = dim * self.qkv_dim + self.out_dim * dim
        count += (self.qkv_dim + dim) if self.bias else 0
        count += 2 * self.head_dim if self.qk_norm else 0
        return count + (self.num_heads if self.sinks else 0)

    def projection_flops(self, dim: int) -> int:
        """FLOPs a token of the four projections: 2 D (H + 2 G) C + 2 H C D."""
        return 2 * dim * self.qkv_dim + 2 * self.out_dim * dim

    def score_pairs(self, seq_len: int, *, causal: bool = True) -> int:
        """(Query, key) pairs of one sequence of one head.

        Causal: s (s + 1) / 2; with a window w < s: w (w + 1) / 2 + (s - w) w. `causal=False`: s^2, which is what an
        implementation that masks but does not skip computes (and what torch's FLOP counter reports for it).
        """
        if not causal:
            return seq_len * seq_len
        span = seq_len if self.window is None else min(self.window, seq_len)
        return span * (span + 1) // 2 + (seq_len - span) * span

    def core_flops(self, seq_len: int, *, causal: bool = True) -> int:
        """FLOPs a *sequence* of scores and weighted values: 4 H C times `score_pairs`."""
        return 4 * self.out_dim * self.score_pairs(seq_len, causal=causal)


@dataclass(frozen=True, kw_only=True)
class DenseFFNShape:
    """A gated feed-forward layer: three matrices D x F."""

    hidden_dim: int

    def num_params(self, dim: int) -> int:
        """3 D F."""
        return 3 * dim * self.hidden_dim

    def flops_per_token(self, dim: int) -> int:
        """6 D F."""
        return 6 * dim * self.hidden_dim


@dataclass(frozen=True, kw_only=True)
class MoEShape:
    """Routed experts (gated, three matrices D x F each) and shared experts."""

    num_experts: int
    top_k: int
    expert_dim: int
    shared_dim: int = 0
    """Hidden size of the shared experts taken together; 0: none."""
    bias: bool = False
    """Biases in the router and in every expert."""
    route_norm: bool = False
    """The weights of a token's K experts are divided by their sum."""

    def router_params(self, dim: int) -> int:
        """D E (+ E)."""
        return dim * self.num_experts + (self.num_experts if self.bias else 0)

    def expert_params(self, dim: int) -> int:
        """Of *one* routed expert: 3 D F (+ 2 F + D)."""
        return 3 * dim * self.expert_dim + (2 * self.expert_dim + dim if self.bias else 0)

    def shared_params(self, dim: int) -> int:
        """3 D S."""
        return 3 * dim * self.shared_dim

    def router_flops(self, dim: int) -> int:
        """FLOPs a token of the router's gate: 2 D E."""
        return 2 * dim * self.num_experts

    def expert_flops(self, dim: int) -> int:
        """FLOPs of one token in *one* expert: 6 D F. A token costs K times this."""
        return 6 * dim * self.expert_dim

    def shared_flops(self, dim: int) -> int:
        """FLOPs a token of the shared experts: 6 D S."""
        return 6 * dim * self.shared_dim


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """One transformer block: attention, then a dense or a mixture-of-experts feed-forward part."""

    attention: AttentionShape
    ffn: DenseFFNShape | MoEShape

    @property
    def is_moe(self) -> bool:
        return isinstance(self.ffn, MoEShape)

    @property
    def moe(self) -> MoEShape:
        """The mixture of experts of this layer; an error on a dense one."""
        if not isinstance(self.ffn, MoEShape):
            raise TypeError("this layer has a dense feed-forward part, no experts")
        return self.ffn

    def attention_sublayer_params(self, dim: int) -> int:
        """What an A-worker holds of a MoE layer: attention and its norm, the feed-forward norm, the router."""
        return self.attention.num_params(dim) + 2 * dim + self.moe.router_params(dim)

    def expert_sublayer_params(self, dim: int, num_experts: int | None = None) -> int:
        """What an F-worker with `num_experts` (default: all) experts holds of a MoE layer.

        The experts, the whole shared experts and a second copy of the feed-forward norm (D).
        """
        count = self.moe.num_experts if num_experts is None else num_experts
        return count * self.moe.expert_params(dim) + self.moe.shared_params(dim) + dim

    def num_params(self, dim: int) -> int:
        """Of the unsplit layer: attention, two norms, and router, experts and shared experts or dense layer."""
        base = self.attention.num_params(dim) + 2 * dim
        if isinstance(self.ffn, DenseFFNShape):
            return base + self.ffn.num_params(dim)
        experts = self.ffn.num_experts * self.ffn.expert_params(dim)
        return base + self.ffn.router_params(dim) + experts + self.ffn.shared_params(dim)

    def num_active_params(self, dim: int) -> int:
        """As `num_params`, with K experts instead of E."""
        if isinstance(self.ffn, DenseFFNShape):
            return self.num_params(dim)
        return self.num_params(dim) - (self.ffn.num_experts - self.ffn.top_k) * self.ffn.expert_params(dim)

    def attention_flops(self, dim: int, seq_len: int, *, causal: bool = True) -> int:
        """FLOPs a *sequence* on the A side: projections, scores and values, router, or the dense layer."""
        per_token = self.attention.projection_flops(dim)
        if isinstance(self.ffn, DenseFFNShape):
            per_token += self.ffn.flops_per_token(dim)
        else:
            per_token += self.ffn.router_flops(dim)
        return seq_len * per_token + self.attention.core_flops(seq_len, causal=causal)

    def expert_flops(self, dim: int, seq_len: int) -> int:
        """FLOPs a *sequence* on the F side, over all workers: s (6 D F K + 6 D S); 0 for a dense layer."""
        if isinstance(self.ffn, DenseFFNShape):
            return 0
        return seq_len * (self.ffn.top_k * self.ffn.expert_flops(dim) + self.ffn.shared_flops(dim))


@dataclass(frozen=True, kw_only=True)
class RopeShape:
    """Rotary embedding: frequencies theta^(-2i/C), stretched as in YaRN (arXiv 2309.00071) when `factor` is above 1."""

    theta: float = 10000.0
    factor: float = 1.0
    """YaRN: by how much the context of `original_seq_len` tokens is stretched."""
    original_seq_len: int = 4096
    beta_fast: float = 32.0
    """YaRN: dimensions that turn more often than this within the original context keep their frequency."""
    beta_slow: float = 1.0
    """YaRN: dimensions that turn less often than this are stretched in full."""
    truncate: bool = True
    """YaRN: the bounds between those dimensions are whole numbers."""

    @property
    def attention_factor(self) -> float:
        """What YaRN multiplies queries and keys by: 0.1 ln(factor) + 1."""
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1.0 else 1.0


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder: embedding V x D, layers, final norm, head D x V (not tied to the embedding)."""

    name: str
    dim: int
    vocab_size: int
    layers: tuple[LayerShape, ...]
    max_seq_len: int
    norm_eps: float = 1e-6
    """Added to the mean square in every norm."""
    rope: RopeShape = RopeShape()
    init_std: float = 0.02
    """Standard deviation of the initial weights, as far as the recipe has one for all."""

    @property
    def is_moe_layer(self) -> tuple[bool, ...]:
        return tuple(layer.is_moe for layer in self.layers)

    @property
    def embedding_params(self) -> int:
        """V D."""
        return self.vocab_size * self.dim

    @property
    def head_params(self) -> int:
        """V D, and D of the final norm."""
        return self.vocab_size * self.dim + self.dim

    @property
    def num_params(self) -> int:
        """Of the unsplit model."""
        return self.embedding_params + self.head_params + sum(layer.num_params(self.dim) for layer in self.layers)

    @property
    def num_active_params(self) -> int:
        """That one token meets: K of E experts in every MoE layer; embedding and head count."""
        layers = sum(layer.num_active_params(self.dim) for layer in self.layers)
        return self.embedding_params + self.head_params + layers

    @property
    def head_flops(self) -> int:
        """FLOPs a token of the head: 2 D V."""
        return 2 * self.dim * self.vocab_size

    def flops_per_sequence(self, seq_len: int, *, causal: bool = True) -> int:
        """Forward FLOPs of one sequence of `seq_len` tokens in the whole model (see `AttentionShape.score_pairs`)."""
        attention = sum(layer.attention_flops(self.dim, seq_len, causal=causal) for layer in self.layers)
        experts = sum(layer.expert_flops(self.dim, seq_len) for layer in self.layers)
        return attention + experts + seq_len * self.head_flops

    def flops_per_token(self, seq_len: int) -> float:
        """Forward FLOPs a token at sequence length `seq_len`, causal pairs only."""
        return self.flops_per_sequence(seq_len) / seq_len

    def row_bytes(self, bytes_per_element: int) -> int:
        """Bytes of the hidden state of one token in one transfer: D elements."""
        return self.dim * bytes_per_element
