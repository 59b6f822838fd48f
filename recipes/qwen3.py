"""Qwen3-MoE: grouped-query attention with normed queries and keys, no shared experts (arXiv 2505.09388).

To add a model, copy this file, change the sizes in SHAPES and the blocks in `build_config`. Its blocks need
`attention_norm`, `attention`, `ffn_norm` and `moe` (or `feed_forward`): `disagmoe.models.split` cuts them after the
attention's residual. Nothing at module level may import torch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from disagmoe.config.recipe import Recipe
from disagmoe.shapes import AttentionShape, LayerShape, ModelShape, MoEShape


def _shape(
    name: str, *, dim: int, num_layers: int, attention: AttentionShape, moe: MoEShape, vocab_size: int, seq: int
) -> ModelShape:
    layers = (LayerShape(attention=attention, ffn=moe),) * num_layers
    return ModelShape(name=name, dim=dim, vocab_size=vocab_size, layers=layers, max_seq_len=seq)


SHAPES = {
    "debug": _shape(
        "qwen3-debug",
        dim=64,
        num_layers=6,
        attention=AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, qk_norm=True),
        moe=MoEShape(num_experts=8, top_k=2, expert_dim=64),
        vocab_size=260,
        seq=4096,
    ),
    "30B-A3B": _shape(
        "qwen3-30B-A3B",
        dim=2048,
        num_layers=48,
        attention=AttentionShape(num_heads=32, num_kv_heads=4, head_dim=128, qk_norm=True),
        moe=MoEShape(num_experts=128, top_k=8, expert_dim=768),
        vocab_size=151936,
        seq=40960,
    ),
    "235B-A22B": _shape(
        "qwen3-235B-A22B",
        dim=4096,
        num_layers=94,
        attention=AttentionShape(num_heads=64, num_kv_heads=4, head_dim=128, qk_norm=True),
        moe=MoEShape(num_experts=128, top_k=8, expert_dim=1536),
        vocab_size=151936,
        seq=40960,
    ),
}
# torchtitan's for the full sizes; about 1 / (2 sqrt(dim)) for the small one, which learns much faster with it.
INIT_STD = {"debug": 0.06, "30B-A3B": 0.02, "235B-A22B": 0.02}
ROPE_THETA = {"debug": 1e4, "30B-A3B": 1e6, "235B-A22B": 5e6}


def build_config(flavor: str) -> Any:
    """torchtitan's model config of a flavor; weights start as in torchtitan's own Qwen3 configs."""
    from disagmoe.models.titan import prepare_torchtitan

    prepare_torchtitan()

    from torch import nn
    from torchtitan.models.common import CosSinRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common import config_utils as make
    from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock

    shape = SHAPES[flavor]
    dim = shape.dim
    std = INIT_STD[flavor]
    weight = {"weight": partial(nn.init.normal_, std=std)}
    residual = {"weight": partial(nn.init.normal_, std=std / (2 * len(shape.layers)) ** 0.5)}

    def norm(size: int) -> Any:
        return RMSNorm.Config(normalized_shape=size, eps=1e-6, param_init={"weight": nn.init.ones_})

    def block(layer: LayerShape) -> Any:
        attn, moe = layer.attention, layer.moe
        experts = {"w1_EFD": weight["weight"], "w3_EFD": weight["weight"], "w2_EDF": residual["weight"]}
        return Qwen3TransformerBlock.Config(
            attention_norm=norm(dim),
            attention=make.make_gqa_config(
                dim=dim,
                n_heads=attn.num_heads,
                n_kv_heads=attn.num_kv_heads,
                head_dim=attn.head_dim,
                wqkv_param_init=weight,
                wo_param_init=residual,
                fuse_qkv=True,
                qk_norm=norm(attn.head_dim),
                inner_attention=make.get_attention_config("flex"),
                rope=CosSinRoPE.Config(dim=attn.head_dim, max_seq_len=shape.max_seq_len, theta=ROPE_THETA[flavor]),
            ),
            ffn_norm=norm(dim),
            moe=make.make_moe_config(
                num_experts=moe.num_experts,
                router=make.make_router_config(
                    dim=dim,
                    num_experts=moe.num_experts,
                    gate_param_init=weight,
                    top_k=moe.top_k,
                    score_func="softmax",
                    route_norm=True,
                ),
                routed_experts=make.make_routed_experts_config(
                    dim=dim,
                    hidden_dim=moe.expert_dim,
                    num_experts=moe.num_experts,
                    top_k=moe.top_k,
                    param_init=experts,
                    comm_backend="standard",
                ),
            ),
        )

    return Qwen3Model.Config(
        dim=dim,
        vocab_size=shape.vocab_size,
        tok_embeddings=Embedding.Config(num_embeddings=shape.vocab_size, embedding_dim=dim, param_init=weight),
        layers=[block(layer) for layer in shape.layers],
        norm=norm(dim),
        lm_head=Linear.Config(in_features=dim, out_features=shape.vocab_size, param_init=weight),
    )


RECIPE = Recipe(name="qwen3", shapes=SHAPES, build_config=build_config)
