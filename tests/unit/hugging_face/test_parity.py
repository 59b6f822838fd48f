"""Logits equal transformers' in float32, on tiny random models that transformers has saved; the way back is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from disagmoe.config.recipe import load_recipe
from disagmoe.hugging_face.export import export_modules
from disagmoe.hugging_face.load import load_hugging_face
from tests.unit.hugging_face.models import (
    our_logits,
    our_model,
    reload,
    save_transformers,
    some_tokens,
    their_logits,
)

TOLERANCE = 1e-5
PLAIN = {"rope_type": "default", "rope_theta": 3e4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 2e4}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "gpt_oss": ("gpt_oss", {}),
    "deepseek_moe": ("deepseek_moe", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen3-yarn": ("qwen3", {"rope_parameters": YARN, "norm_topk_prob": False}),
    "qwen3-one-kv-head": ("qwen3", {"num_key_value_heads": 1, "rms_norm_eps": 1e-5}),
    "qwen3-yarn-truncated": ("qwen3", {"rope_parameters": {**YARN, "truncate": False, "beta_fast": 16.0}}),
    "qwen3-dense-layer": ("qwen3", {"mlp_only_layers": [1], "intermediate_size": 40}),
    "qwen3-many-experts": ("qwen3", {"num_experts": 13, "num_experts_per_tok": 5}),
    "gpt_oss-windows-on-odd-layers": (
        "gpt_oss",
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "num_key_value_heads": 4},
    ),
    "gpt_oss-no-window": ("gpt_oss", {"layer_types": ["full_attention"] * 3, "num_key_value_heads": 1}),
    "gpt_oss-plain-rope": ("gpt_oss", {"rope_parameters": PLAIN}),
    "gpt_oss-tied": ("gpt_oss", {"tie_word_embeddings": True, "sliding_window": 16}),
    "deepseek_moe-grouped": ("deepseek_moe", {"num_key_value_heads": 2, "shared_expert_intermediate_size": 24}),
    "deepseek_moe-normed": ("deepseek_moe", {"norm_topk_prob": True, "num_experts_per_tok": 3}),
    "deepseek_moe-two-dense": ("deepseek_moe", {"mlp_only_layers": [0, 1], "rope_parameters": PLAIN}),
}


def distance(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, norm-wise."""
    return float((value - expected).norm() / expected.norm())


def check(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    source, recipe = tmp_path / "published", load_recipe(family)
    theirs = save_transformers(family, source, **changes)
    (source / "tokenizer.json").write_text("{}")
    model, config = our_model(family, str(source))
    load_hugging_face([model], recipe, str(source), source)
    tokens_BL = some_tokens()
    expected = their_logits(theirs, tokens_BL)
    assert distance(our_logits(model, config, tokens_BL), expected) < TOLERANCE

    # With the config.json that was there, in one file; with one made from the flavor, in several.
    export_modules([model], recipe, str(source), tmp_path / "one", source=source, dtype="float32")
    export_modules([model], recipe, str(source), tmp_path / "several", dtype="float32", shard_bytes=30_000)
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 3
    assert (tmp_path / "one" / "tokenizer.json").read_text() == "{}"
    for folder in (tmp_path / "one", tmp_path / "several"):
        assert torch.equal(their_logits(reload(folder), tokens_BL), expected)
        again, _ = our_model(family, str(folder))
        load_hugging_face([again], recipe, str(folder), folder)
        for (name, value), (_, before) in zip(again.named_parameters(), model.named_parameters(), strict=True):
            assert torch.equal(value, before), name


@pytest.mark.parametrize("case", CASES)
def test_logits_and_the_way_back(case: str, tmp_path: Path) -> None:
    check(*CASES[case], tmp_path)
