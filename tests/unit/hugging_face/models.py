"""Tiny random models as transformers saves them, and logits on both sides."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from disagmoe.config.recipe import load_recipe
from disagmoe.models.attention import attention_masks
from disagmoe.models.init import build_model, make_portable, materialize

VOCABULARY = 260
SIZES: dict[str, dict[str, Any]] = {
    "qwen3": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "max_position_embeddings": 512,
    },
    "gpt_oss": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 32,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
        "initializer_range": 0.2,
        "max_position_embeddings": 512,
    },
    # Of transformers' Qwen2-MoE, which computes the same: see `save_deepseek`.
    "deepseek_moe": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 40,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 48,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "mlp_only_layers": [0],
        "qkv_bias": False,
        "initializer_range": 0.2,
        "max_position_embeddings": 512,
    },
}


def save_transformers(family: str, folder: Path, *, seed: int = 0, **changes: Any) -> Any:
    """A random model of a family, saved by transformers; returns it in eval mode."""
    import transformers

    config_class, model_class = {
        "qwen3": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
        "gpt_oss": (transformers.GptOssConfig, transformers.GptOssForCausalLM),
        "deepseek_moe": (transformers.Qwen2MoeConfig, transformers.Qwen2MoeForCausalLM),
    }[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**SIZES[family], **changes}))
    randomise(model)
    if family == "deepseek_moe":
        save_deepseek(model, folder)
    else:
        model.save_pretrained(folder)
    return reload(folder)


# The original DeepSeek-MoE needs code that is downloaded with its weights. Qwen2-MoE computes the same once the gate of
# its shared experts, a sigmoid, is 1/2 (zero weights) and their last matrix twice as large: exact in binary.
_GATE = "shared_expert_gate"


def save_deepseek(model: Any, folder: Path) -> None:
    """A Qwen2-MoE under DeepSeek-MoE's names, in a folder as it is published."""
    sizes = model.config
    for name, parameter in model.named_parameters():
        if _GATE in name:
            parameter.data.zero_()
    with tempfile.TemporaryDirectory() as temporary:
        model.save_pretrained(temporary)
        tensors = load_file(Path(temporary, "model.safetensors"))
    renamed = {}
    for name, value in tensors.items():
        if _GATE not in name:
            half = 0.5 if "shared_expert.down_proj" in name else 1.0
            renamed[name.replace("shared_expert.", "shared_experts.")] = value * half
    folder.mkdir(parents=True)
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["DeepseekForCausalLM"],
        "model_type": "deepseek",
        "hidden_size": sizes.hidden_size,
        "vocab_size": sizes.vocab_size,
        "num_hidden_layers": sizes.num_hidden_layers,
        "num_attention_heads": sizes.num_attention_heads,
        "num_key_value_heads": sizes.num_key_value_heads,
        "attention_bias": False,
        "first_k_dense_replace": len(sizes.mlp_only_layers),
        "moe_layer_freq": 1,
        "intermediate_size": sizes.intermediate_size,
        "moe_intermediate_size": sizes.moe_intermediate_size,
        "n_routed_experts": sizes.num_experts,
        "n_shared_experts": sizes.shared_expert_intermediate_size // sizes.moe_intermediate_size,
        "num_experts_per_tok": sizes.num_experts_per_tok,
        "norm_topk_prob": sizes.norm_topk_prob,
        "scoring_func": "softmax",
        "hidden_act": "silu",
        "rms_norm_eps": sizes.rms_norm_eps,
        "rope_theta": sizes.rope_parameters["rope_theta"],
        "rope_scaling": None,
        "max_position_embeddings": sizes.max_position_embeddings,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))


def _as_qwen2(folder: Path, target: Path) -> None:
    """The inverse of `save_deepseek`."""
    import transformers

    content = json.loads((folder / "config.json").read_text())
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    renamed = {}
    for name, value in tensors.items():
        twice = 2.0 if "shared_experts.down_proj" in name else 1.0
        renamed[name.replace("shared_experts.", "shared_expert.")] = value * twice
    for layer in range(content["first_k_dense_replace"], content["num_hidden_layers"]):
        renamed[f"model.layers.{layer}.mlp.{_GATE}.weight"] = torch.zeros(1, content["hidden_size"])
    save_file(renamed, target / "model.safetensors", metadata={"format": "pt"})
    transformers.Qwen2MoeConfig(
        vocab_size=content["vocab_size"],
        hidden_size=content["hidden_size"],
        num_hidden_layers=content["num_hidden_layers"],
        num_attention_heads=content["num_attention_heads"],
        num_key_value_heads=content["num_key_value_heads"],
        intermediate_size=content["intermediate_size"],
        moe_intermediate_size=content["moe_intermediate_size"],
        shared_expert_intermediate_size=content["moe_intermediate_size"] * content["n_shared_experts"],
        num_experts=content["n_routed_experts"],
        num_experts_per_tok=content["num_experts_per_tok"],
        norm_topk_prob=content["norm_topk_prob"],
        mlp_only_layers=list(range(content["first_k_dense_replace"])),
        rope_parameters={"rope_type": "default", "rope_theta": content["rope_theta"]},
        rms_norm_eps=content["rms_norm_eps"],
        qkv_bias=False,
        architectures=["Qwen2MoeForCausalLM"],
    ).save_pretrained(target)


def randomise(model: nn.Module) -> None:
    """Norms, biases and sinks that start at constants would hide a mix-up."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif parameter.dim() == 1 or "bias" in name or "sinks" in name or "experts" in name:
                parameter.normal_(std=0.2)


def reload(folder: Path) -> Any:
    """What transformers reads from a folder, in float32 with plain attention."""
    import transformers

    with tempfile.TemporaryDirectory() as temporary:
        if json.loads((folder / "config.json").read_text())["model_type"] == "deepseek":
            _as_qwen2(folder, Path(temporary))
            folder = Path(temporary)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
    return model.eval()


def our_model(recipe: str, flavor: str, *, seq_len: int = 64) -> tuple[Any, Any]:
    """The unsplit model of a flavor, with memory but no values, and its config."""
    config = make_portable(load_recipe(recipe).model_config(flavor), seq_len=seq_len, attention=True)
    with torch.device("meta"):
        model = build_model(config)
    materialize(model, device="cpu", dtype=torch.float32)
    for module in model.modules():
        if hasattr(module, "_init_self_buffers"):
            module._init_self_buffers()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    return model, config


@torch.no_grad()
def our_logits(model: Any, config: Any, tokens_BL: Tensor) -> Tensor:
    positions_BL = torch.arange(tokens_BL.shape[1]).expand_as(tokens_BL)
    return model(tokens_BL, positions_BL, attention_masks(config, positions_BL))


@torch.no_grad()
def their_logits(model: Any, tokens_BL: Tensor) -> Tensor:
    return model(input_ids=tokens_BL, use_cache=False).logits


def some_tokens(*, batch: int = 2, length: int = 24) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(3))


def edit_config(folder: Path, **changes: Any) -> None:
    """Change fields of a config.json; None removes one."""
    path = folder / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
