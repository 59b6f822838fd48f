"""DeepSeek-MoE: a dense first layer, then fine-grained routed experts beside shared ones (arXiv 2401.06066).

`16B` is the published model; `16B-top4` is the variant in the evaluation of the paper that this project implements
(arXiv 2605.11005): top-4 and sequences of up to 32K tokens. The `bench` flavors are for comparisons of speed on small
machines (docs/speed.md): 8 MoE layers, attention and experts about equally expensive; `bench-skewed` routes unevenly.
Nothing at module level may import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from disagmoe.config.hugging_face import HuggingFaceFormat, shape_of_layers
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
    init_std: float,
) -> ModelShape:
    first = LayerShape(attention=attention, ffn=DenseFFNShape(hidden_dim=dense_dim))
    rest = (LayerShape(attention=attention, ffn=moe),) * (num_layers - 1)
    return ModelShape(
        name=name,
        dim=dim,
        vocab_size=vocab_size,
        layers=(first, *rest),
        max_seq_len=seq,
        init_std=init_std,
    )


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
        init_std=0.006,
    )


def _bench(name: str, *, top_k: int) -> ModelShape:
    return _shape(
        name,
        dim=256,
        num_layers=9,
        attention=AttentionShape(num_heads=8, num_kv_heads=8, head_dim=32),
        dense_dim=512,
        moe=MoEShape(num_experts=16, top_k=top_k, expert_dim=128, shared_dim=2 * 128),
        vocab_size=1024,
        seq=8192,
        init_std=0.02,
    )


# Initial weights as published for the 16B model; about 1 / (2 sqrt(dim)) for the small one, which learns much faster
# with it.
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
        init_std=0.06,
    ),
    "bench": _bench("deepseek-moe-bench", top_k=4),
    **{f"bench-top{k}": _bench(f"deepseek-moe-bench-top{k}", top_k=k) for k in (1, 2, 8)},
    "bench-skewed": _bench("deepseek-moe-bench-skewed", top_k=4),
    "16B": _16b("deepseek-moe-16B", top_k=6, seq=4096),
    "16B-top4": _16b("deepseek-moe-16B-top4", top_k=4, seq=32768),
}


BENCH = frozenset(shape.name for name, shape in SHAPES.items() if name.startswith("bench"))
"""Their embeddings start with a standard deviation of 1. With small ones attention's mean over the tokens is the larger
part of every hidden state, all tokens like the same experts, and some experts get 3.5 times the average load; with
these and `[data] source = "synthetic"` untrained routers are nearly as balanced as trained ones."""
SKEWED = ("deepseek-moe-bench-skewed",)


def _skewed_normal(weight_ED: Any, *, std: float) -> None:
    """Router weights whose size falls from 2 std to 0 with the expert's number.

    Scores of an expert with small weights hardly vary, those of one with large weights are often among the highest: the
    first experts get about twice the average load at top-4 of 16.
    """
    import torch

    torch.nn.init.normal_(weight_ED, std=std)
    with torch.no_grad():
        weight_ED.mul_(torch.linspace(2.0, 0.0, weight_ED.shape[0], device=weight_ED.device)[:, None])


def build_config(shape: ModelShape) -> Any:
    """torchtitan's model config of a size, put together from its Qwen3 block (plain attention without norms)."""
    from disagmoe.models.titan import prepare_torchtitan

    prepare_torchtitan()

    from torch import nn
    from torchtitan.models.common import Embedding, Linear, RMSNorm
    from torchtitan.models.common import config_utils as make
    from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock

    from disagmoe.models.rope import make_rope

    dim = shape.dim
    init = partial(nn.init.normal_, std=shape.init_std)
    weight = {"weight": init}
    embedding = {"weight": partial(nn.init.normal_, std=1.0)} if shape.name in BENCH else weight
    gate = {"weight": partial(_skewed_normal, std=shape.init_std)} if shape.name in SKEWED else weight

    def norm(size: int) -> Any:
        return RMSNorm.Config(normalized_shape=size, eps=shape.norm_eps, param_init={"weight": nn.init.ones_})

    def ffn(hidden_dim: int) -> Any:
        return make.make_ffn_config(dim=dim, hidden_dim=hidden_dim, w1_param_init=weight, w2w3_param_init=weight)

    def moe_layer(moe: MoEShape) -> Any:
        return make.make_moe_config(
            num_experts=moe.num_experts,
            router=make.make_router_config(
                dim=dim,
                num_experts=moe.num_experts,
                gate_param_init=gate,
                top_k=moe.top_k,
                score_func="softmax",
                route_norm=moe.route_norm,
            ),
            routed_experts=make.make_routed_experts_config(
                dim=dim,
                hidden_dim=moe.expert_dim,
                num_experts=moe.num_experts,
                top_k=moe.top_k,
                param_init={"w1_EFD": init, "w2_EDF": init, "w3_EFD": init},
                comm_backend="standard",
            ),
            shared_experts=ffn(moe.shared_dim) if moe.shared_dim else None,
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
                rope=make_rope(shape.rope, head_dim=attn.head_dim, max_seq_len=shape.max_seq_len, scaled=True),
            ),
            ffn_norm=norm(dim),
            feed_forward=ffn(layer.ffn.hidden_dim) if isinstance(layer.ffn, DenseFFNShape) else None,
            moe=moe_layer(layer.ffn) if isinstance(layer.ffn, MoEShape) else None,
        )

    return Qwen3Model.Config(
        dim=dim,
        vocab_size=shape.vocab_size,
        tok_embeddings=Embedding.Config(num_embeddings=shape.vocab_size, embedding_dim=dim, param_init=embedding),
        layers=[block(layer) for layer in shape.layers],
        norm=norm(dim),
        lm_head=Linear.Config(in_features=dim, out_features=shape.vocab_size, param_init=weight),
    )


def hf_config(shape: ModelShape) -> dict[str, Any]:
    """What the model's published code calls these sizes."""
    attn = shape.layers[0].attention
    moe = next(layer.moe for layer in shape.layers if layer.is_moe)
    dense = [layer.ffn.hidden_dim for layer in shape.layers if isinstance(layer.ffn, DenseFFNShape)]
    return {
        "hidden_size": shape.dim,
        "vocab_size": shape.vocab_size,
        "num_hidden_layers": len(shape.layers),
        "num_attention_heads": attn.num_heads,
        "num_key_value_heads": attn.num_kv_heads,
        "attention_bias": False,
        "first_k_dense_replace": len(dense),
        "moe_layer_freq": 1,
        **({"intermediate_size": dense[0]} if dense else {}),
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.expert_dim,
        "n_shared_experts": moe.shared_dim // moe.expert_dim,
        "norm_topk_prob": moe.route_norm,
        "scoring_func": "softmax",
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
    }


def hf_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the published code takes for a field that is left out."""
    return {
        "num_key_value_heads": config.get("num_attention_heads"),
        "attention_bias": False,
        "first_k_dense_replace": 0,
        "moe_layer_freq": 1,
        "n_shared_experts": 0,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
    }


def hf_shape(name: str, config: Mapping[str, Any]) -> ModelShape:
    """The sizes in a config.json; the published code has no head dimension but the hidden size's share."""
    heads = config["num_attention_heads"]
    attention = AttentionShape(
        num_heads=heads, num_kv_heads=config["num_key_value_heads"], head_dim=config["hidden_size"] // heads
    )
    moe = MoEShape(
        num_experts=config["n_routed_experts"],
        top_k=config["num_experts_per_tok"],
        expert_dim=config["moe_intermediate_size"],
        shared_dim=config["n_shared_experts"] * config["moe_intermediate_size"],
        route_norm=config["norm_topk_prob"],
    )
    num_dense = config["first_k_dense_replace"]
    layers = tuple(
        LayerShape(
            attention=attention, ffn=DenseFFNShape(hidden_dim=config["intermediate_size"]) if i < num_dense else moe
        )
        for i in range(config["num_hidden_layers"])
    )
    return shape_of_layers(name, config, layers)


def hf_parameters(shape: ModelShape) -> Any:
    """Where the published files keep each parameter."""
    from disagmoe.models.state_dict.deepseek_moe import parameters

    return parameters(shape)


RECIPE = Recipe(
    name="deepseek_moe",
    shapes=SHAPES,
    build_config=build_config,
    hugging_face=HuggingFaceFormat(
        model_type="deepseek",
        architecture="DeepseekForCausalLM",
        config_of=hf_config,
        shape_of=hf_shape,
        defaults=hf_defaults,
        parameters=hf_parameters,
        ignored=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
    ),
)
