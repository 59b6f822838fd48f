"""GPT-OSS as transformers' GptOssForCausalLM has it: experts stacked, plain [E, in, out] or MXFP4 [E, out, in]."""

from __future__ import annotations

from disagmoe.models.state_dict.maps import ParameterMap, stacked, trunk, whole
from disagmoe.shapes import ModelShape


def parameters(shape: ModelShape) -> list[ParameterMap]:
    """Every parameter of the unsplit model. Gate and up rows are interleaved in it as in the published tensors."""
    found = list(trunk(shape))
    dim = shape.dim
    for i, layer in enumerate(shape.layers):
        moe = layer.moe
        experts, hidden_dim = moe.num_experts, moe.expert_dim
        ours, theirs = f"layers.{i}.moe.routed_experts.inner_experts", f"model.layers.{i}.mlp.experts"
        router = f"layers.{i}.moe.router.gate", f"model.layers.{i}.mlp.router"
        found.append(whole(f"{router[0]}.weight", (experts, dim), f"{router[1]}.weight"))
        found.append(whole(f"{router[0]}.bias", (experts,), f"{router[1]}.bias"))
        weights = {
            "mlp1_weight_EGD": ((experts, 2 * hidden_dim, dim), "gate_up_proj"),
            "mlp2_weight_EDF": ((experts, dim, hidden_dim), "down_proj"),
        }
        for name, (weight, published) in weights.items():
            plain = stacked(weight, f"{theirs}.{published}", transposed=True)
            quantised = stacked(weight, f"{theirs}.{published}", encoding="mxfp4")
            found.append(ParameterMap(name=f"{ours}.{name}", shape=weight, forms=(plain, quantised), experts=True))
        biases = {
            "mlp1_bias_EG": ((experts, 2 * hidden_dim), "gate_up_proj_bias"),
            "mlp2_bias_ED": ((experts, dim), "down_proj_bias"),
        }
        for name, (bias, published) in biases.items():
            form = stacked(bias, f"{theirs}.{published}")
            found.append(ParameterMap(name=f"{ours}.{name}", shape=bias, forms=(form,), experts=True))
    return found
