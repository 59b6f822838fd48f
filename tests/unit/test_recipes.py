"""Recipes: published sizes, torchtitan's own configs, loading without torch, the TOML files."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli
import torch

from disagmoe.config.recipe import load_recipe, recipe_names
from disagmoe.models.init import build_model, make_portable

ROOT = Path(__file__).parents[2]
BILLION = 1e9
# (recipe, flavor, parameters, active parameters), from the model cards; active ones are not all published.
PUBLISHED = [
    ("deepseek_moe", "16B", 16.4, 2.8),
    ("gpt_oss", "20b", 20.9, 3.6),
    ("gpt_oss", "120b", 116.8, 5.1),
    ("qwen3", "30B-A3B", 30.5, 3.3),
    ("qwen3", "235B-A22B", 235.1, 22.2),
]


@pytest.mark.parametrize(("name", "flavor", "total", "active"), PUBLISHED)
def test_published_sizes(name: str, flavor: str, total: float, active: float) -> None:
    recipe = load_recipe(name)
    with torch.device("meta"):
        model = build_model(make_portable(recipe.model_config(flavor), seq_len=8, attention=True))
    assert sum(p.numel() for p in model.parameters()) / BILLION == pytest.approx(total, rel=0.01)
    # Cards round, and GPT-OSS's counts the embedding only once.
    unembedded = 0.58 if name == "gpt_oss" else 0.0
    assert recipe.shape(flavor).num_active_params / BILLION - unembedded == pytest.approx(active, rel=0.025)


def test_the_papers_variant_differs_in_top_k_only() -> None:
    shapes = load_recipe("deepseek_moe").shapes
    assert {layer.moe.top_k for layer in shapes["16B-top4"].layers[1:]} == {4}
    assert {layer.moe.top_k for layer in shapes["16B"].layers[1:]} == {6}
    assert shapes["16B-top4"].num_params == shapes["16B"].num_params


def torchtitan_config(name: str, flavor: str) -> Any:
    if name == "qwen3":
        from torchtitan.models.qwen3 import qwen3_configs

        return qwen3_configs[flavor](attn_backend="flex")
    from torchtitan.models.gpt_oss import gptoss_configs

    return gptoss_configs[flavor](moe_comm_backend="standard", attn_backend="flex")


def described(value: Any) -> Any:
    """A config as comparable data: nested dataclasses as dicts, initialisers as (function, keywords)."""
    if hasattr(value, "__dataclass_fields__"):
        return {"": type(value)} | {f: described(getattr(value, f)) for f in value.__dataclass_fields__}
    if isinstance(value, dict):
        return {key: described(item) for key, item in value.items()}
    if isinstance(value, list):
        return [described(item) for item in value]
    if hasattr(value, "keywords"):
        return value.func, value.keywords
    if getattr(value, "__closure__", None):
        return [described(cell.cell_contents) for cell in value.__closure__]
    return value


@pytest.mark.parametrize(
    ("name", "flavor"), [("qwen3", "30B-A3B"), ("qwen3", "235B-A22B"), ("gpt_oss", "20b"), ("gpt_oss", "120b")]
)
def test_full_sizes_equal_torchtitans_own_configs(name: str, flavor: str) -> None:
    ours, theirs = described(load_recipe(name).model_config(flavor)), described(torchtitan_config(name, flavor))
    _without_absent_biases(ours)
    _without_absent_biases(theirs)
    assert ours == theirs


def _without_absent_biases(tree: Any) -> None:
    """torchtitan gives bias initialisers to layers without a bias; they are never called."""
    if isinstance(tree, list):
        for item in tree:
            _without_absent_biases(item)
    elif isinstance(tree, dict):
        if tree.get("bias") is False and isinstance(tree.get("param_init"), dict):
            tree["param_init"].pop("bias", None)
        for item in tree.values():
            _without_absent_biases(item)


@pytest.mark.parametrize("name", recipe_names())
def test_debug_flavors(name: str) -> None:
    shape = load_recipe(name).shape("debug")
    assert sum(shape.is_moe_layer) >= 6
    assert shape.vocab_size >= 257, "256 bytes and an end of document"
    assert shape.num_params < 2e6


def test_debug_flavors_show_what_is_special_in_their_family() -> None:
    deepseek, oss, qwen = (load_recipe(name).shape("debug") for name in ("deepseek_moe", "gpt_oss", "qwen3"))
    assert deepseek.is_moe_layer[:2] == (False, True) and deepseek.layers[1].moe.shared_dim
    assert {layer.attention.window for layer in oss.layers} == {32, None}
    assert all(layer.attention.sinks and layer.attention.bias and layer.moe.bias for layer in oss.layers)
    assert all(layer.attention.qk_norm for layer in qwen.layers)
    assert all(layer.attention.num_kv_heads < layer.attention.num_heads for layer in qwen.layers)


def test_loading_recipes_imports_no_torch() -> None:
    code = (
        "import sys\nfrom disagmoe.config.recipe import load_recipe, recipe_names\n"
        "for name in recipe_names(): load_recipe(name).shape('debug').num_params\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'torchtitan', 'numpy')])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    assert recipe_names() == ("deepseek_moe", "gpt_oss", "qwen3")
    with pytest.raises(ValueError, match=r'name = "qwen": no such file.*did you mean "qwen3"'):
        load_recipe("qwen")
    with pytest.raises(ValueError, match=r'flavor = "7B": recipe "qwen3" has "debug", "30B-A3B", "235B-A22B"'):
        load_recipe("qwen3").shape("7B")
    with pytest.raises(ValueError, match="flavor"):
        load_recipe("qwen3").model_config("7B")


@pytest.mark.parametrize("path", sorted((ROOT / "train_configs").glob("*.toml")), ids=lambda path: path.stem)
def test_configuration_files_name_what_exists_and_how_to_run_them(path: Path) -> None:
    text = path.read_text()
    values = tomli.loads(text)
    load_recipe(values["recipe"]["name"]).shape(values["recipe"]["flavor"])
    used = re.search(r"CONFIG_FILE=(\S+)", text)
    assert used is None or used[1] == f"train_configs/{path.name}"


def test_each_recipe_has_a_small_and_a_full_size_configuration() -> None:
    flavors: dict[str, set[str]] = {}
    for path in (ROOT / "train_configs").glob("*.toml"):
        recipe = tomli.loads(path.read_text())["recipe"]
        flavors.setdefault(recipe["name"], set()).add(recipe["flavor"])
    for name in recipe_names():
        assert "debug" in flavors[name] and flavors[name] - {"debug"}, name
