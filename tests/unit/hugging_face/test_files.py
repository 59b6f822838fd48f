"""Folders that are not the model: every missing, unexpected, mis-shaped or contradicting thing is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from disagmoe.cli import main
from disagmoe.config.errors import ConfigError
from disagmoe.config.hugging_face import config_for
from disagmoe.config.recipe import load_recipe, recipe_names
from disagmoe.hugging_face.export import assign_writers, export_modules
from disagmoe.hugging_face.load import load_hugging_face
from disagmoe.hugging_face.source import find_flavor, find_recipe, format_of, open_weights
from disagmoe.models.state_dict.files import read_header
from tests.unit.hugging_face.models import edit_config, our_model, save_transformers

Tensors = dict[str, torch.Tensor]
GATE = "model.layers.1.mlp.experts.4.gate_proj.weight"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    save_transformers("qwen3", folder)
    return folder


def changed(published: Path, folder: Path, change: Callable[[Tensors], Any]) -> Path:
    tensors = load_file(published / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_bytes((published / "config.json").read_bytes())
    return folder


def refusal(folder: Path, recipe: str = "qwen3", flavor: str | None = None) -> str:
    with pytest.raises(ConfigError) as refused:
        open_weights(load_recipe(recipe), flavor or str(folder), folder)
    return str(refused.value)


def test_missing_tensor_with_the_nearest_name(published: Path, tmp_path: Path) -> None:
    other = GATE.replace("gate_proj", "gate_porj")
    text = refusal(changed(published, tmp_path, lambda t: t.update({other: t.pop(GATE)})))
    assert f"{GATE}: is missing; did you mean {other}?" in text
    assert f"{other}: is unexpected; did you mean {GATE}?" in text
    assert len(text.splitlines()) == 2


def test_mis_shaped_tensors(published: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[GATE] = tensors[GATE].t().contiguous()
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int32)

    text = refusal(changed(published, tmp_path, change))
    assert f"{GATE}: has shape [32, 24], must be [24, 32]" in text
    assert "model.norm.weight: is stored as I32, must be BF16 or F16" in text


def test_a_whole_layer_too_many_is_counted_not_listed(published: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        last = [name for name in tensors if name.startswith("model.layers.2.")]
        tensors.update({name.replace("layers.2.", "layers.3."): tensors[name].clone() for name in last})

    lines = refusal(changed(published, tmp_path, change)).splitlines()
    assert sum("is unexpected" in line for line in lines) == 20
    assert "more are unexpected" in lines[-1]


def test_caches_are_no_weights(published: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = changed(published, tmp_path, lambda tensors: tensors.update({name: torch.ones(8)}))
    open_weights(load_recipe("qwen3"), str(folder), folder)


def test_files_that_are_cut_off_missing_or_none(published: Path, tmp_path: Path) -> None:
    folder = changed(published, tmp_path, lambda t: None)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-10])
    assert f"has {len(whole) - 10} bytes, but its header speaks of {len(whole)}" in refusal(folder)
    (folder / "model.safetensors").write_bytes(b"\x80" * 64)
    assert "is no safetensors file" in refusal(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "there is pytorch_model.bin: convert it" in refusal(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {GATE: "model-1.safetensors"}}))
    assert "model-1.safetensors: is missing; model.safetensors.index.json names it" in refusal(folder)


def test_an_index_that_is_not_true(published: Path, tmp_path: Path) -> None:
    folder = changed(published, tmp_path, lambda t: None)
    names = dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")
    del names[GATE]
    index = {"weight_map": {**names, "a.b": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    text = refusal(folder)
    assert f"{GATE}: is in model.safetensors, but model.safetensors.index.json says nothing of it" in text
    assert "a.b: model.safetensors.index.json says it is in model.safetensors, which has it not" in text


CONTRADICTIONS: list[tuple[str, str, Any, str]] = [
    ("qwen3", "num_attention_heads", 8, "must be 4, as in flavor"),
    ("qwen3", "num_local_experts", 16, "num_local_experts = 16: must be 8"),
    ("qwen3", "num_experts_per_tok", 4, "must be 2"),
    ("qwen3", "rms_norm_eps", 1e-5, "rms_norm_eps = 1e-05: must be 1e-06"),
    ("qwen3", "norm_topk_prob", False, "norm_topk_prob = false: must be true"),
    ("qwen3", "mlp_only_layers", [0], 'mlp_only_layers = "[0]": must be []'),
    ("qwen3", "hidden_act", "gelu", 'hidden_act = "gelu": must be "silu"'),
    ("qwen3", "use_sliding_window", True, "use_sliding_window = true: must be false"),
    ("qwen3", "rope_theta", 1e6, "rope_theta = 1000000.0: must be 10000.0"),
    ("qwen3", "rope_scaling", {"type": "linear", "factor": 2.0}, 'rope_type = "linear": must be "default"'),
    ("qwen3", "rope_scaling", {"rope_type": "yarn", "factor": 2.0}, 'rope_type = "yarn": must be "default"'),
    ("gpt_oss", "sliding_window", 128, "sliding_window = 128: must be 32"),
    ("gpt_oss", "layer_types", ["full_attention"] * 6, "layer_types = "),
    ("gpt_oss", "swiglu_limit", 6.0, "swiglu_limit = 6.0: must be 7.0"),
    ("gpt_oss", "rope_scaling", {"rope_type": "yarn", "factor": 8.0}, "rope_scaling.factor = 8.0: must be 32.0"),
    ("deepseek_moe", "n_shared_experts", 1, "n_shared_experts = 1: must be 2"),
    ("deepseek_moe", "first_k_dense_replace", 2, "first_k_dense_replace = 2: must be 1"),
    ("deepseek_moe", "scoring_func", "sigmoid", 'scoring_func = "sigmoid": must be "softmax"'),
]


@pytest.mark.parametrize(("family", "field", "value", "said"), CONTRADICTIONS)
def test_config_json_against_the_flavor(family: str, field: str, value: Any, said: str, tmp_path: Path) -> None:
    recipe = load_recipe(family)
    content = config_for(format_of(recipe), recipe.shape("debug"))
    if field == "num_local_experts":
        content.pop("num_experts")
    (tmp_path / "config.json").write_text(json.dumps(content | {field: value}))
    text = refusal(tmp_path, family, "debug")
    assert f"{tmp_path / 'config.json'}: {field}" in text
    assert said in text
    assert 'of recipe "' in text or "as in flavor" in text
    assert f'set recipe.flavor = "{tmp_path}"' in text


def test_another_family(published: Path) -> None:
    text = refusal(published, "gpt_oss", "debug")
    assert 'model_type = "qwen3_moe": must be "gpt_oss", which is what recipe "gpt_oss" is for' in text


@pytest.mark.parametrize("name", recipe_names())
def test_a_flavor_goes_through_its_config_json_unchanged(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    form = format_of(recipe)
    for flavor, shape in recipe.shapes.items():
        (tmp_path / "config.json").write_text(json.dumps(config_for(form, shape)))
        found = recipe.shape(str(tmp_path))
        assert found.layers == shape.layers
        assert (found.dim, found.vocab_size, found.norm_eps, found.rope) == (
            shape.dim,
            shape.vocab_size,
            shape.norm_eps,
            shape.rope,
        )
        assert find_recipe(tmp_path) is recipe
        # Flavors may differ in what a config.json does not say, such as initial weights.
        assert form.config_of(recipe.shape(find_flavor(recipe, tmp_path))) == form.config_of(shape), flavor


def test_a_flavor_from_a_config_that_lacks_a_field_or_holds_nonsense(published: Path, tmp_path: Path) -> None:
    for value, said in ((None, "num_experts_per_tok: is missing"), ("two", '= "two": must be a number')):
        (tmp_path / "config.json").write_bytes((published / "config.json").read_bytes())
        edit_config(tmp_path, num_experts_per_tok=value)
        with pytest.raises(ConfigError, match=said):
            load_recipe("qwen3").shape(str(tmp_path))


def test_stacked_experts(published: Path, tmp_path: Path) -> None:
    """As transformers holds them in memory; the same parameters come out."""

    def stack(tensors: Tensors) -> None:
        for layer in range(3):
            prefix = f"model.layers.{layer}.mlp.experts"
            gate, up, down = (
                torch.stack([tensors.pop(f"{prefix}.{e}.{kind}_proj.weight") for e in range(6)])
                for kind in ("gate", "up", "down")
            )
            tensors |= {f"{prefix}.gate_up_proj": torch.cat([gate, up], dim=1), f"{prefix}.down_proj": down}

    folder = changed(published, tmp_path, stack)
    models = []
    for source in (published, folder):
        model, _ = our_model("qwen3", str(source))
        load_hugging_face([model], load_recipe("qwen3"), str(source), source)
        models.append(dict(model.named_parameters()))
    for name, value in models[0].items():
        assert torch.equal(value, models[1][name]), name


def test_import_command(published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import-hf", str(published)]) == 0
    out = capsys.readouterr().out
    assert "recipe qwen3, flavor " in out and "all accounted for" in out
    assert f'initial_load_path = "{published}"' in out
    folder = changed(published, tmp_path, lambda tensors: tensors.pop(GATE))
    assert main(["import-hf", str(folder)]) == 2
    assert f"{GATE}: is missing" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--parallelism.mode=none"]])
def test_a_run_from_other_weights_is_refused(
    arguments: list[str], published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the tensors; by the config.json; by a switch without a folder, and a folder without a switch."""
    folder = changed(published, tmp_path, lambda tensors: tensors.pop(GATE))
    (tmp_path / "mine.toml").write_text('[recipe]\nname = "qwen3"\n')
    command = ["check", str(tmp_path / "mine.toml"), *arguments]
    switch, path = "--checkpoint.initial_load_in_hf=true", f"--checkpoint.initial_load_path={folder}"
    for options, said in (
        ([switch, path, f"--recipe.flavor={folder}"], f"{GATE}: is missing"),
        ([switch, path], "hidden_size = 32: must be 64, as in flavor"),
        ([switch], "checkpoint.initial_load_in_hf = true: needs checkpoint.initial_load_path"),
        ([path], "is read only with checkpoint.initial_load_in_hf = true"),
        ([f"--recipe.flavor={tmp_path / 'none'}"], "there is no such file"),
    ):
        assert main([*command, *options]) == 2
        assert said in capsys.readouterr().err


def test_an_export_overwrites_nothing_and_loses_no_bias(published: Path, tmp_path: Path) -> None:
    model, _ = our_model("qwen3", str(published))
    load_hugging_face([model], load_recipe("qwen3"), str(published), published)

    def export(folder: Path, **options: Any) -> None:
        export_modules([model], load_recipe("qwen3"), str(published), folder, source=published, **options)

    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine").touch()
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        export(tmp_path / "used")
    model.layers["1"].moe.expert_bias_E[2] = -0.25
    with pytest.raises(ConfigError, match=r"router biases up to 0\.25 would be lost"):
        export(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export(tmp_path / "out", drop_router_biases=True)
    assert read_header(tmp_path / "out" / "model.safetensors")[GATE].dtype == "BF16"
    load_hugging_face([model], load_recipe("qwen3"), str(published), published)
    assert not model.layers["1"].moe.expert_bias_E.any()


def test_who_writes_what() -> None:
    """Each expert and each parameter once, by the lowest rank that holds it."""
    recipe = load_recipe("qwen3")
    maps = {entry.name: entry for entry in format_of(recipe).parameters(recipe.shape("debug"))}
    dense = [(name, None) for name, entry in maps.items() if not entry.experts]
    stacked = [name for name, entry in maps.items() if entry.experts]

    def experts(*ids: int) -> list[tuple[str, range | None]]:
        return [(name, range(*ids)) for name in stacked]

    writers = assign_writers([dense, dense + experts(0, 5), experts(3, 7), experts(6, 8)], maps)
    assert set(writers[0]) == {name for name, _ in dense}
    assert [writers[rank][stacked[0]] for rank in (1, 2, 3)] == [[range(5)], [range(5, 7)], [range(7, 8)]]
    with pytest.raises(AssertionError, match="held are"):
        assign_writers([dense, experts(0, 7)], maps)
