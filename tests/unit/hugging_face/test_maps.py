"""Every parameter of every flavor has its published tensors, with shapes that fit, and nothing is counted twice."""

from __future__ import annotations

import pytest
import torch

from disagmoe.config.recipe import load_recipe, recipe_names
from disagmoe.models.init import build_model, make_portable
from disagmoe.models.state_dict.maps import ParameterMap, Part

FLAVORS = [(name, flavor) for name in recipe_names() for flavor in load_recipe(name).shapes]


def maps_of(name: str, flavor: str) -> list[ParameterMap]:
    recipe = load_recipe(name)
    assert recipe.hugging_face is not None
    return list(recipe.hugging_face.parameters(recipe.shape(flavor)))


@pytest.mark.parametrize(("name", "flavor"), FLAVORS)
def test_maps_name_the_unsplit_models_parameters(name: str, flavor: str) -> None:
    with torch.device("meta"):
        model = build_model(make_portable(load_recipe(name).model_config(flavor), seq_len=8, attention=True))
    found = {entry.name: entry.shape for entry in maps_of(name, flavor)}
    assert found == {key: tuple(p.shape) for key, p in model.named_parameters()}
    experts = {entry.name for entry in maps_of(name, flavor) if entry.experts}
    assert experts == {key for key in found if ".routed_experts." in key}


@pytest.mark.parametrize("name", recipe_names())
def test_every_form_covers_its_parameter_once(name: str) -> None:
    for entry in maps_of(name, "debug"):
        for form in [*entry.forms, *([entry.tied] if entry.tied else [])]:
            count = torch.zeros(entry.shape, dtype=torch.int32)
            for part in form:
                region = count.view(part.view)[part.index]
                assert tuple(region.shape) == part.region
                assert region.numel() == num_values(part), part.name
                region += 1
            assert bool((count == 1).all()), entry.name


@pytest.mark.parametrize("name", recipe_names())
def test_an_export_writes_each_tensor_once(name: str) -> None:
    names = [part.name for entry in maps_of(name, "debug") for part in entry.forms[0]]
    assert len(names) == len(set(names))


def num_values(part: Part) -> int:
    shape = list(part.shape)
    if part.columns is not None:
        shape[1] = len(range(shape[1])[part.columns])
    return torch.Size(shape).numel()


def test_published_names() -> None:
    """As in the models' repositories on the Hub."""

    def needed(name: str, flavor: str) -> dict[str, tuple[int, ...]]:
        parts = [part for entry in maps_of(name, flavor) for form in entry.forms for part in form]
        return {tensor.name: tensor.shape for part in parts for tensor in part.tensors}

    qwen, oss, deepseek = needed("qwen3", "30B-A3B"), needed("gpt_oss", "20b"), needed("deepseek_moe", "16B")
    assert qwen["model.layers.47.mlp.experts.127.gate_proj.weight"] == (768, 2048)
    assert qwen["model.layers.0.mlp.experts.gate_up_proj"] == (128, 1536, 2048)
    assert qwen["model.layers.0.self_attn.k_proj.weight"] == (512, 2048)
    assert qwen["model.layers.0.mlp.gate.weight"] == (128, 2048)
    assert oss["model.layers.23.mlp.experts.gate_up_proj_blocks"] == (32, 5760, 90, 16)
    assert oss["model.layers.23.mlp.experts.gate_up_proj_scales"] == (32, 5760, 90)
    assert oss["model.layers.23.mlp.experts.down_proj"] == (32, 2880, 2880)
    assert oss["model.layers.23.mlp.router.bias"] == (32,)
    assert oss["model.layers.0.self_attn.sinks"] == (64,)
    assert deepseek["model.layers.0.mlp.down_proj.weight"] == (2048, 10944)
    assert deepseek["model.layers.27.mlp.experts.63.up_proj.weight"] == (1408, 2048)
    assert deepseek["model.layers.1.mlp.shared_experts.gate_proj.weight"] == (2816, 2048)
