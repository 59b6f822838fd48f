"""Bytes that a stage's worker keeps and needs: the one memory model of the project, without torch.

*Kept* is alive from a stage's forward to the end of its backward, a micro-batch. *Passing* is alive only while the
stage computes: gradients on their way, what is recomputed, logits. *Buffers* are messages sent or awaited. The peak of
a worker is the largest sum over its schedule of parameters, optimizer states, gradients (each from the first backward
of its stage on), what is kept and what passes, and its buffers. The counts follow the modules'
autograd graphs (`models.split`), tensor by tensor; `tests/distributed/test_memory.py` compares them with real runs.

Symbols as in `shapes`: D, H, G, C, F, S, E, K, V; T tokens of an A-worker, R rows and Q (token, expert) pairs of an
F-worker, P primary rows. w: bytes of an element.
"""

from __future__ import annotations

from dataclasses import dataclass

from disagmoe.shapes import DenseFFNShape, LayerShape, ModelShape, MoEShape

INDEX_BYTES = 4
ORDER_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How stages are computed."""

    width: int
    """w."""
    recompute_attention: bool = False
    recompute_experts: bool = False
    portable: bool = False
    """Attention and experts in plain torch, as on CPU: masks, expanded heads and, with sinks, scores are kept too."""


def attention_kept_bytes(model: ModelShape, layer: LayerShape, samples: float, seq_len: int, how: Execution) -> float:
    """Of an A-worker's `samples` samples in one attention sublayer, its input included; all of a dense layer."""
    tokens = samples * seq_len
    if how.recompute_attention:
        return tokens * (model.dim * how.width + _plan_bytes(layer))
    return tokens * (_attention_graph_bytes(model, layer, seq_len, how) + _plan_bytes(layer))


def _attention_graph_bytes(model: ModelShape, layer: LayerShape, seq_len: int, how: Execution) -> float:
    """Bytes a token: input, norm, fused projection, rotated q and k, output, hidden state, norm, router or dense."""
    dim, attn = model.dim, layer.attention
    heads, rotated = attn.num_heads, (attn.num_heads + attn.num_kv_heads) * attn.head_dim
    elements = 4 * dim + attn.qkv_dim + rotated * (2 if attn.qk_norm else 1) + attn.out_dim
    if attn.sinks:
        elements += attn.out_dim  # before and after the sink's factor
    floats = 2.0 + heads + (heads + attn.num_kv_heads if attn.qk_norm else 0) + (3 * heads if attn.sinks else 0)
    if how.portable:
        floats += 2 * heads * seq_len if attn.sinks else seq_len
        if not attn.sinks and attn.num_kv_heads < heads:
            elements += 2 * attn.out_dim
    if isinstance(layer.ffn, DenseFFNShape):
        elements += dim + 4 * layer.ffn.hidden_dim
    else:
        floats += 5 * layer.moe.num_experts + 4 * layer.moe.top_k + (layer.moe.num_experts if layer.moe.bias else 0)
    return elements * how.width + 4 * floats


def _plan_bytes(layer: LayerShape) -> float:
    """Bytes a token of the dispatch plan: indices of rows and pairs, weights, until the gradients are back."""
    return layer.moe.top_k * (3.0 * ORDER_BYTES + 2 * INDEX_BYTES + 4) if layer.is_moe else 0.0


def attention_passing_bytes(
    model: ModelShape, layer: LayerShape, samples: float, seq_len: int, how: Execution
) -> float:
    """Gradients on their way back, that of the largest matrix, received rows, and the graph where it is recomputed."""
    attn, tokens = layer.attention, samples * seq_len
    elements = attn.qkv_dim + 3 * model.dim
    floats = model.dim + (2.5 * attn.num_heads * seq_len if how.portable and attn.sinks else 0.0)
    graph = _attention_graph_bytes(model, layer, seq_len, how) if how.recompute_attention else 0.0
    matrix = max(attn.qkv_dim, layer.ffn.hidden_dim if isinstance(layer.ffn, DenseFFNShape) else 0) * model.dim
    return tokens * (elements * how.width + 4 * floats + graph) + matrix * how.width


def head_passing_bytes(model: ModelShape, tokens: float, how: Execution) -> float:
    """Logits, their logarithmic softmax in float32 and its gradient; the final norm and its gradients."""
    matrix = model.vocab_size * model.dim * how.width
    return tokens * (model.vocab_size * (how.width + 2 * 4) + 4 * model.dim * how.width) + matrix


BUFFERED = 16
"""Messages that a worker has sent and not yet got rid of, or awaits, at a time."""


def buffer_bytes(model: ModelShape, rows: float, how: Execution) -> float:
    """Of a worker whose messages have `rows` rows."""
    return BUFFERED * rows * (model.dim * how.width + INDEX_BYTES)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What reaches the F-worker with most experts, a micro-batch."""

    rows: float
    pairs: float
    primary: float


def expert_kept_bytes(model: ModelShape, moe: MoEShape, got: Rows, how: Execution) -> float:
    """Of an F-worker in one layer: received rows, weights and indices; unless recomputed, the graph."""
    kept = got.rows * (model.dim * how.width + INDEX_BYTES)
    kept += got.pairs * (4 + 2 * INDEX_BYTES) + got.primary * INDEX_BYTES
    return kept if how.recompute_experts else kept + _expert_graph_bytes(model, moe, got, how)


def _expert_graph_bytes(model: ModelShape, moe: MoEShape, got: Rows, how: Execution) -> float:
    """Norm of rows; of pairs: gathered input, middle, output, weighted output in float32; shared experts' middle."""
    dim, middle = model.dim, (7 if moe.bias else 4) * moe.expert_dim
    weighted = 4 * dim * (2 if how.width < 4 else 1)
    pair = dim * how.width + middle * how.width + weighted + (dim * 4 if how.width >= 4 else 0) + 4 * 4
    shared = (4 * moe.shared_dim + dim) * how.width if moe.shared_dim else 0
    return got.rows * (dim * how.width + 4) + got.pairs * pair + got.primary * (4 * dim + shared)


def expert_passing_bytes(model: ModelShape, moe: MoEShape, held: int, got: Rows, how: Execution) -> float:
    """Gradient of the `held` experts' largest matrix; rows summed in float32 and sent, their gradients, those of pairs,
    and the graph where it is recomputed."""
    graph = _expert_graph_bytes(model, moe, got, how) if how.recompute_experts else 0.0
    matrix = held * moe.expert_dim * model.dim * (2 if moe.bias else 1) * how.width
    return matrix + got.rows * model.dim * (how.width + 4) + got.pairs * 2 * moe.expert_dim * how.width + graph
