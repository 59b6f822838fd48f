"""DeepSeek-MoE: a dense first layer, then fine-grained routed experts beside shared ones (arXiv 2401.06066).

`16B` is the published model; `16B-top4` is the variant in the evaluation of the paper that this project implements
(arXiv 2605.11005): top-4 and sequences of up to 32K tokens. Nothing at module level may import torch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from disagmoe.config.recipe import Recipe
from disagmoe.shapes import AttentionShape, DenseFFNShape, LayerShape, ModelShape, MoEShape


def _shape(
    name: str,
    *,
    dim: int,
    num_layers: int,
    attention: AttentionShape,
    dense_dim: int,
    moe: MoEShape,
    vocab_size: int,
    seq: int,
) -> ModelShape:
    first = LayerShape(attention=attention, ffn=DenseFFNShape(hidden_dim=dense_dim))
    rest = (LayerShape(attention=attention, ffn=moe),) * (num_layers - 1)
    return ModelShape(name=name, dim=dim, vocab_size=vocab_size, layers=(first, *rest), max_seq_len=seq)


def _16b(name: str, *, top_k: int, seq: int) -> ModelShape:
    return _shape(
        name,
        dim=2048,
        num_layers=28,
        attention=AttentionShape(num_heads=16, num_kv_heads=16, head_dim=128),
        dense_dim=10944,
        moe=MoEShape(num_experts=64, top_k=top_k, expert_dim=1408, shared_dim=2 * 1408),
        vocab_size=102400,
        seq=seq,
    )


SHAPES = {
    "debug": _shape(
        "deepseek-moe-debug",
        dim=64,
        num_layers=7,
        attention=AttentionShape(num_heads=4, num_kv_heads=4, head_dim=16),
        dense_dim=192,
        moe=MoEShape(num_experts=8, top_k=2, expert_dim=64, shared_dim=2 * 64),
        vocab_size=260,
        seq=4096,
    ),
    "16B": _16b("deepseek-moe-16B", top_k=6, seq=4096),
    "16B-top4": _16b("deepseek-moe-16B-top4", top_k=4, seq=32768),
}
# Published for the 16B model; about 1 / (2 sqrt(dim)) for the small one, which learns much faster with it.
INIT_STD = {"debug": 0.06, "16B": 0.006, "16B-top4": 0.006}


def build_config(flavor: str) -> Any:
    """torchtitan's model config of a flavor, put together from its Qwen3 block (plain attention without norms)."""
    from disagmoe.models.titan import prepare_torchtitan

    prepare_torchtitan()

    from torch import nn
    from torchtitan.models.common import CosSinRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common import config_utils as make
    from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock

    shape = SHAPES[flavor]
    dim = shape.dim
    init = partial(nn.init.normal_, std=INIT_STD[flavor])
    weight = {"weight": init}

    def norm(size: int) -> Any:
        return RMSNorm.Config(normalized_shape=size, eps=1e-6, param_init={"weight": nn.init.ones_})

    def ffn(hidden_dim: int) -> Any:
        return make.make_ffn_config(dim=dim, hidden_dim=hidden_dim, w1_param_init=weight, w2w3_param_init=weight)

    def moe_layer(moe: MoEShape) -> Any:
        return make.make_moe_config(
            num_experts=moe.num_experts,
            router=make.make_router_config(
                dim=dim,
                num_experts=moe.num_experts,
                gate_param_init=weight,
                top_k=moe.top_k,
                score_func="softmax",
                route_norm=False,
            ),
            routed_experts=make.make_routed_experts_config(
                dim=dim,
                hidden_dim=moe.expert_dim,
                num_experts=moe.num_experts,
                top_k=moe.top_k,
                param_init={"w1_EFD": init, "w2_EDF": init, "w3_EFD": init},
                comm_backend="standard",
            ),
            shared_experts=ffn(moe.shared_dim),
        )

    def block(layer: LayerShape) -> Any:
        attn = layer.attention
        return Qwen3TransformerBlock.Config(
            attention_norm=norm(dim),
            attention=make.make_gqa_config(
                dim=dim,
                n_heads=attn.num_heads,
                n_kv_heads=attn.num_kv_heads,
                head_dim=attn.head_dim,
                wqkv_param_init=weight,
                wo_param_init=weight,
                fuse_qkv=True,
                inner_attention=make.get_attention_config("flex"),
                rope=CosSinRoPE.Config(dim=attn.head_dim, max_seq_len=shape.max_seq_len, theta=10000.0),
            ),
            ffn_norm=norm(dim),
            feed_forward=ffn(layer.ffn.hidden_dim) if isinstance(layer.ffn, DenseFFNShape) else None,
            moe=moe_layer(layer.ffn) if isinstance(layer.ffn, MoEShape) else None,
        )

    return Qwen3Model.Config(
        dim=dim,
        vocab_size=shape.vocab_size,
        tok_embeddings=Embedding.Config(num_embeddings=shape.vocab_size, embedding_dim=dim, param_init=weight),
        layers=[block(layer) for layer in shape.layers],
        norm=norm(dim),
        lm_head=Linear.Config(in_features=dim, out_features=shape.vocab_size, param_init=weight),
    )


RECIPE = Recipe(name="deepseek_moe", shapes=SHAPES, build_config=build_config)
