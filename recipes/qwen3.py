"""Qwen3-MoE: grouped-query attention with normed queries and keys, no shared experts (arXiv 2505.09388).

To add a model, copy this file, change the sizes in SHAPES and the blocks in `build_config`. Its blocks need
`attention_norm`, `attention`, `ffn_norm` and `moe` (or `feed_forward`): `disagmoe.models.split` cuts them after the
attention's residual. Nothing at module level may import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from disagmoe.config.hugging_face import HuggingFaceFormat, shape_of_layers
from disagmoe.config.recipe import Recipe
from disagmoe.shapes import AttentionShape, DenseFFNShape, LayerShape, ModelShape, MoEShape, RopeShape


def _shape(
    name: str,
    *,
    dim: int,
    num_layers: int,
    attention: AttentionShape,
    moe: MoEShape,
    vocab_size: int,
    seq: int,
    theta: float,
    init_std: float,
) -> ModelShape:
    layers = (LayerShape(attention=attention, ffn=moe),) * num_layers
    return ModelShape(
        name=name,
        dim=dim,
        vocab_size=vocab_size,
        layers=layers,
        max_seq_len=seq,
        rope=RopeShape(theta=theta),
        init_std=init_std,
    )


# Initial weights as torchtitan's for the full sizes; about 1 / (2 sqrt(dim)) for the small one, which learns much
# faster with it.
SHAPES = {
    "debug": _shape(
        "qwen3-debug",
        dim=64,
        num_layers=6,
        attention=AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, qk_norm=True),
        moe=MoEShape(num_experts=8, top_k=2, expert_dim=64, route_norm=True),
        vocab_size=260,
        seq=4096,
        theta=1e4,
        init_std=0.06,
    ),
    "30B-A3B": _shape(
        "qwen3-30B-A3B",
        dim=2048,
        num_layers=48,
        attention=AttentionShape(num_heads=32, num_kv_heads=4, head_dim=128, qk_norm=True),
        moe=MoEShape(num_experts=128, top_k=8, expert_dim=768, route_norm=True),
        vocab_size=151936,
        seq=40960,
        theta=1e6,
        init_std=0.02,
    ),
    "235B-A22B": _shape(
        "qwen3-235B-A22B",
        dim=4096,
        num_layers=94,
        attention=AttentionShape(num_heads=64, num_kv_heads=4, head_dim=128, qk_norm=True),
        moe=MoEShape(num_experts=128, top_k=8, expert_dim=1536, route_norm=True),
        vocab_size=151936,
        seq=40960,
        theta=5e6,
        init_std=0.02,
    ),
}


def build_config(shape: ModelShape) -> Any:
    """torchtitan's model config of a size; weights start as in torchtitan's own Qwen3 configs."""
    from disagmoe.models.titan import prepare_torchtitan

    prepare_torchtitan()

    from torch import nn
    from torchtitan.models.common import Embedding, Linear, RMSNorm
    from torchtitan.models.common import config_utils as make
    from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock

    from disagmoe.models.rope import make_rope

    dim = shape.dim
    std = shape.init_std
    weight = {"weight": partial(nn.init.normal_, std=std)}
    residual = {"weight": partial(nn.init.normal_, std=std / (2 * len(shape.layers)) ** 0.5)}

    def norm(size: int) -> Any:
        return RMSNorm.Config(normalized_shape=size, eps=shape.norm_eps, param_init={"weight": nn.init.ones_})

    def moe_layer(moe: MoEShape) -> Any:
        experts = {"w1_EFD": weight["weight"], "w3_EFD": weight["weight"], "w2_EDF": residual["weight"]}
        return make.make_moe_config(
            num_experts=moe.num_experts,
            router=make.make_router_config(
                dim=dim,
                num_experts=moe.num_experts,
                gate_param_init=weight,
                top_k=moe.top_k,
                score_func="softmax",
                route_norm=moe.route_norm,
            ),
            routed_experts=make.make_routed_experts_config(
                dim=dim,
                hidden_dim=moe.expert_dim,
                num_experts=moe.num_experts,
                top_k=moe.top_k,
                param_init=experts,
                comm_backend="standard",
            ),
        )

    def ffn(layer: DenseFFNShape) -> Any:
        return make.make_ffn_config(
            dim=dim, hidden_dim=layer.hidden_dim, w1_param_init=weight, w2w3_param_init=residual
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
                wo_param_init=residual,
                fuse_qkv=True,
                qk_norm=norm(attn.head_dim),
                inner_attention=make.get_attention_config("flex"),
                rope=make_rope(shape.rope, head_dim=attn.head_dim, max_seq_len=shape.max_seq_len, scaled=True),
            ),
            ffn_norm=norm(dim),
            feed_forward=ffn(layer.ffn) if isinstance(layer.ffn, DenseFFNShape) else None,
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


def hf_config(shape: ModelShape) -> dict[str, Any]:
    """What transformers calls these sizes."""
    attn = shape.layers[0].attention
    moe = next(layer.moe for layer in shape.layers if layer.is_moe)
    dense = [layer.ffn.hidden_dim for layer in shape.layers if isinstance(layer.ffn, DenseFFNShape)]
    return {
        "hidden_size": shape.dim,
        "vocab_size": shape.vocab_size,
        "num_hidden_layers": len(shape.layers),
        "num_attention_heads": attn.num_heads,
        "num_key_value_heads": attn.num_kv_heads,
        "head_dim": attn.head_dim,
        "attention_bias": False,
        "use_sliding_window": False,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.expert_dim,
        "norm_topk_prob": moe.route_norm,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, is_moe in enumerate(shape.is_moe_layer) if not is_moe],
        **({"intermediate_size": dense[0]} if dense else {}),
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
    }


def hf_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers takes for a field that is left out."""
    heads = config.get("num_attention_heads", 1)
    return {
        "num_key_value_heads": heads,
        "head_dim": config.get("hidden_size", 0) // heads,
        "attention_bias": False,
        "use_sliding_window": False,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
    }


def hf_shape(name: str, config: Mapping[str, Any]) -> ModelShape:
    """The sizes in a config.json."""
    attention = AttentionShape(
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        qk_norm=True,
    )
    moe = MoEShape(
        num_experts=config["num_experts"],
        top_k=config["num_experts_per_tok"],
        expert_dim=config["moe_intermediate_size"],
        route_norm=config["norm_topk_prob"],
    )
    layers = tuple(
        LayerShape(
            attention=attention,
            ffn=DenseFFNShape(hidden_dim=config["intermediate_size"]) if i in config["mlp_only_layers"] else moe,
        )
        for i in range(config["num_hidden_layers"])
    )
    return shape_of_layers(name, config, layers)


def hf_parameters(shape: ModelShape) -> Any:
    """Where transformers keeps each parameter."""
    from disagmoe.models.state_dict.qwen3 import parameters

    return parameters(shape)


RECIPE = Recipe(
    name="qwen3",
    shapes=SHAPES,
    build_config=build_config,
    hugging_face=HuggingFaceFormat(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        config_of=hf_config,
        shape_of=hf_shape,
        defaults=hf_defaults,
        aliases={"num_local_experts": "num_experts"},
        parameters=hf_parameters,
        ignored=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
    ),
)
