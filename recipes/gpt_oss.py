"""GPT-OSS: attention sinks, a sliding window in every second layer, biases everywhere (arXiv 2508.10925).

Nothing at module level may import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from disagmoe.config.hugging_face import HuggingFaceFormat, shape_of_layers
from disagmoe.config.recipe import Recipe
from disagmoe.shapes import AttentionShape, LayerShape, ModelShape, MoEShape, RopeShape

YARN = RopeShape(theta=150000.0, factor=32.0, original_seq_len=4096, truncate=False)


def _shape(
    name: str,
    *,
    dim: int,
    num_layers: int,
    heads: tuple[int, int, int],
    window: int,
    moe: MoEShape,
    vocab_size: int,
    seq: int,
) -> ModelShape:
    """`heads`: query heads, key/value heads, head dim. Even layers have the window, odd ones see everything."""
    attention = partial(
        AttentionShape, num_heads=heads[0], num_kv_heads=heads[1], head_dim=heads[2], bias=True, sinks=True
    )
    layers = tuple(
        LayerShape(attention=attention(window=window if i % 2 == 0 else None), ffn=moe) for i in range(num_layers)
    )
    return ModelShape(
        name=name,
        dim=dim,
        vocab_size=vocab_size,
        layers=layers,
        max_seq_len=seq,
        norm_eps=1e-5,
        rope=YARN,
    )


def _full_size(name: str, *, num_layers: int, num_experts: int) -> ModelShape:
    return _shape(
        name,
        dim=2880,
        num_layers=num_layers,
        heads=(64, 8, 64),
        window=128,
        moe=MoEShape(num_experts=num_experts, top_k=4, expert_dim=2880, bias=True, route_norm=True),
        vocab_size=201088,
        seq=131072,
    )


SHAPES = {
    "debug": _shape(
        "gpt-oss-debug",
        dim=64,
        num_layers=6,
        heads=(4, 2, 16),
        window=32,
        moe=MoEShape(num_experts=8, top_k=2, expert_dim=64, bias=True, route_norm=True),
        vocab_size=260,
        seq=4096,
    ),
    "20b": _full_size("gpt-oss-20b", num_layers=24, num_experts=32),
    "120b": _full_size("gpt-oss-120b", num_layers=36, num_experts=128),
}


def build_config(shape: ModelShape) -> Any:
    """torchtitan's model config of a size; weights start as in torchtitan's own GPT-OSS configs."""
    from disagmoe.models.titan import prepare_torchtitan

    prepare_torchtitan()

    from torch import nn
    from torchtitan.models.common import Embedding, Linear, RMSNorm
    from torchtitan.models.common import config_utils as make
    from torchtitan.models.common.attention import FusedQKVLinear
    from torchtitan.models.common.linear import ScaledBiasRowwiseLinear
    from torchtitan.models.common.moe import RoutedExperts
    from torchtitan.models.common.param_init import depth_scaled_std
    from torchtitan.models.gpt_oss.model import Attention, GptOssModel, GptOssTransformerBlock
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, GptOssMoE

    from disagmoe.models.rope import make_rope

    dim = shape.dim

    def norm() -> Any:
        return RMSNorm.Config(normalized_shape=dim, eps=shape.norm_eps, param_init={"weight": nn.init.ones_})

    def attention(attn: AttentionShape, init: Any) -> Any:
        linear = {"weight": init, "bias": nn.init.zeros_}
        wqkv = Linear.Config(in_features=dim, out_features=attn.qkv_dim, bias=True, param_init=linear)
        # The attention itself puts YaRN's factor into its softmax scale.
        rope = make_rope(shape.rope, head_dim=attn.head_dim, max_seq_len=shape.max_seq_len, scaled=False)
        return Attention.Config(
            dim=dim,
            n_heads=attn.num_heads,
            n_kv_heads=attn.num_kv_heads,
            head_dim=attn.head_dim,
            sliding_window_size=attn.window,
            qkv_linear=FusedQKVLinear.Config(
                head_dim=attn.head_dim, n_heads=attn.num_heads, n_kv_heads=attn.num_kv_heads, wqkv=wqkv
            ),
            wo=ScaledBiasRowwiseLinear.Config(in_features=attn.out_dim, out_features=dim, bias=True, param_init=linear),
            inner_attention=make.get_attention_config("flex"),
            rope=rope,
            param_init={"sinks": init},
        )

    def block(index: int, layer: LayerShape) -> Any:
        moe = layer.moe
        init = partial(nn.init.trunc_normal_, std=depth_scaled_std(0.02, index))
        names = ("mlp1_weight_EGD", "mlp1_bias_EG", "mlp2_weight_EDF", "mlp2_bias_ED")
        return GptOssTransformerBlock.Config(
            attention_norm=norm(),
            attention=attention(layer.attention, init),
            ffn_norm=norm(),
            moe=GptOssMoE.Config(
                num_experts=moe.num_experts,
                router=make.make_router_config(
                    dim=dim,
                    num_experts=moe.num_experts,
                    gate_param_init={"weight": init, "bias": nn.init.zeros_},
                    top_k=moe.top_k,
                    score_func="softmax",
                    route_norm=moe.route_norm,
                    bias=True,
                ),
                routed_experts=RoutedExperts.Config(
                    inner_experts=GptOssGroupedExperts.Config(
                        dim=dim,
                        hidden_dim=moe.expert_dim,
                        num_experts=moe.num_experts,
                        param_init=dict.fromkeys(names, init),
                    ),
                    token_dispatcher=make.make_token_dispatcher_config(
                        num_experts=moe.num_experts, top_k=moe.top_k, comm_backend="standard"
                    ),
                ),
                load_balance_coeff=1e-3,
            ),
        )

    std = dim**-0.5
    head = {"weight": partial(nn.init.trunc_normal_, std=std, a=-3 * std, b=3 * std)}
    embedding = {"weight": partial(nn.init.normal_, std=0.02)}
    return GptOssModel.Config(
        dim=dim,
        vocab_size=shape.vocab_size,
        tok_embeddings=Embedding.Config(num_embeddings=shape.vocab_size, embedding_dim=dim, param_init=embedding),
        layers=[block(i, layer) for i, layer in enumerate(shape.layers)],
        norm=norm(),
        lm_head=Linear.Config(in_features=dim, out_features=shape.vocab_size, param_init=head),
    )


def hf_config(shape: ModelShape) -> dict[str, Any]:
    """What transformers calls these sizes."""
    attn, moe = shape.layers[0].attention, shape.layers[0].moe
    windows = [layer.attention.window for layer in shape.layers]
    window = next((window for window in windows if window is not None), None)
    return {
        "hidden_size": shape.dim,
        "vocab_size": shape.vocab_size,
        "num_hidden_layers": len(shape.layers),
        "num_attention_heads": attn.num_heads,
        "num_key_value_heads": attn.num_kv_heads,
        "head_dim": attn.head_dim,
        "attention_bias": True,
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
        **({} if window is None else {"sliding_window": window}),
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "intermediate_size": moe.expert_dim,
        "hidden_act": "silu",
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "rms_norm_eps": shape.norm_eps,
    }


def hf_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers takes for a field that is left out."""
    num_layers = config.get("num_hidden_layers", 0)
    yarn = {
        "rope_type": "yarn",
        "rope_theta": YARN.theta,
        "factor": YARN.factor,
        "original_max_position_embeddings": YARN.original_seq_len,
        "truncate": YARN.truncate,
    }
    return {
        **({} if config.get("rope_scaling") else {"rope_parameters": yarn}),
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "layer_types": [("sliding_attention", "full_attention")[i % 2] for i in range(num_layers)],
        "hidden_act": "silu",
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
    }


def hf_shape(name: str, config: Mapping[str, Any]) -> ModelShape:
    """The sizes in a config.json."""
    attention = partial(
        AttentionShape,
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        bias=True,
        sinks=True,
    )
    moe = MoEShape(
        num_experts=config["num_local_experts"],
        top_k=config["num_experts_per_tok"],
        expert_dim=config["intermediate_size"],
        bias=True,
        route_norm=True,
    )
    layers = tuple(
        LayerShape(
            attention=attention(window=config["sliding_window"] if kind == "sliding_attention" else None), ffn=moe
        )
        for kind in config["layer_types"]
    )
    return shape_of_layers(name, config, layers)


def hf_parameters(shape: ModelShape) -> Any:
    """Where transformers keeps each parameter."""
    from disagmoe.models.state_dict.gpt_oss import parameters

    return parameters(shape)


RECIPE = Recipe(
    name="gpt_oss",
    shapes=SHAPES,
    build_config=build_config,
    hugging_face=HuggingFaceFormat(
        model_type="gpt_oss",
        architecture="GptOssForCausalLM",
        config_of=hf_config,
        shape_of=hf_shape,
        defaults=hf_defaults,
        aliases={"num_experts": "num_local_experts"},
        parameters=hf_parameters,
    ),
)
