"""Initialisation: the same for any part, torchtitan's distributions; what `make_portable` changes and refuses."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from disagmoe.config.recipe import load_recipe
from disagmoe.models.init import build_model, init_parameters, make_portable, materialize
from tests.unit.models.local_pipeline import FAMILIES, SEQ_LEN, LocalPipeline, debug_config, is_stacked, reference


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_start_bit_equal_to_the_unsplit_model(family: str, dtype: torch.dtype) -> None:
    config = debug_config(family)
    whole = dict(reference(config, seed=5, dtype=dtype).named_parameters())
    pipeline = LocalPipeline(config, attn_depth=2, ffn_depth=3, ffn_workers=3, dtype=dtype, seed=5)
    for part, experts in pipeline.parts:
        for name, parameter in part.named_parameters():
            expected = whole[name][experts.start : experts.stop] if is_stacked(name) else whole[name]
            assert parameter.dtype == dtype and torch.equal(parameter, expected), name


@pytest.mark.parametrize("family", FAMILIES)
def test_distributions_are_torchtitans(family: str) -> None:
    config = debug_config(family)
    ours, stock = reference(config), build_model(config)
    torch.manual_seed(0)
    stock.init_states()
    for (name, mine), (_, theirs) in zip(ours.named_parameters(), stock.named_parameters(), strict=True):
        # Standard error of a standard deviation from n draws is about std / sqrt(2 n).
        slack = 5 * theirs.std().item() / (2 * theirs.numel()) ** 0.5 * 2**0.5 if theirs.numel() > 1 else 0
        assert abs(mine.std().item() - theirs.std().item()) <= slack + 1e-12, name
    for (name, mine), (_, theirs) in zip(ours.named_buffers(), stock.named_buffers(), strict=True):
        assert torch.equal(mine, theirs), name


def test_seeds_names_and_experts_give_different_values_and_the_global_generator_is_left_alone() -> None:
    config = debug_config("qwen3")
    one, two = build_model(config), build_model(config)
    state = torch.get_rng_state()
    init_parameters(one, config, 1)
    init_parameters(two, config, 2)
    assert torch.equal(torch.get_rng_state(), state)
    name = "layers.0.moe.routed_experts.inner_experts.w1_EFD"
    w1 = one.get_parameter(name)
    assert not torch.equal(w1, two.get_parameter(name))
    assert not torch.equal(w1, one.get_parameter(name.replace("layers.0", "layers.1")))
    assert not torch.equal(w1, one.get_parameter(name.replace("w1", "w3")))
    assert len({w1[e].sum().item() for e in range(8)}) == 8


def test_values_do_not_change_between_versions() -> None:
    """Runs are resumed and compared across versions of this project: these numbers may not move."""
    model = reference(debug_config("qwen3"), seed=0)
    embedding = model.tok_embeddings.weight[0, :2].tolist()
    expert = model.get_parameter("layers.2.moe.routed_experts.inner_experts.w2_EDF")[7, 0, :2].tolist()
    assert embedding == pytest.approx([0.0780387, -0.027976], rel=1e-4)
    assert expert == pytest.approx([0.0182129, 0.0128373], rel=1e-4)


def test_meta_model_is_materialised_with_float32_buffers() -> None:
    config = debug_config("deepseek_moe")
    with torch.device("meta"):
        model = build_model(config)
    with pytest.raises(ValueError, match="meta device"):
        init_parameters(model, config, 0)
    materialize(model, device="cpu", dtype=torch.bfloat16)
    init_parameters(model, config, 0)
    expected = reference(config, dtype=torch.bfloat16)
    for (name, buffer), (_, other) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
        assert buffer.dtype == torch.float32 and torch.equal(buffer, other), name


def test_experts_beyond_the_layer_and_missing_initialisers_are_refused() -> None:
    config = debug_config("qwen3")
    part = LocalPipeline(config, ffn_workers=3).parts[1][0]
    with pytest.raises(ValueError, match="expert_offset = 7"):
        init_parameters(part, config, 0, 7)
    broken = copy.deepcopy(config)
    broken.layers[0].attention.wo.param_init = None
    with pytest.raises(ValueError, match=r"layers.0.attention.wo.weight: its config has no param_init"):
        reference(broken)


@pytest.mark.parametrize("family", FAMILIES)
def test_make_portable_leaves_the_original_as_it_is(family: str) -> None:
    original = load_recipe(family).model_config("debug")
    before = repr(original)
    config = make_portable(original, seq_len=SEQ_LEN, attention=True, load_balance_coeff=0.5)
    assert repr(original) == before
    for layer in config.layers:
        assert layer.attention.rope.max_seq_len == SEQ_LEN
        assert layer.moe is None or layer.moe.load_balance_coeff == 0.5
    assert {b.shape[0] for n, b in build_model(config).named_buffers() if n.endswith("rope.cache")} == {SEQ_LEN}
    assert make_portable(original, seq_len=8, attention=True).layers[-1].moe.load_balance_coeff == 1e-3
    off = make_portable(original, seq_len=8, attention=True, load_balance_coeff=0.0)
    assert off.layers[-1].moe.load_balance_coeff is None


def test_make_portable_refuses() -> None:
    original = load_recipe("qwen3").model_config("debug")
    with pytest.raises(ValueError, match=r"enable_weight_tying = True.*set enable_weight_tying = False"):
        make_portable(dataclasses.replace(original, enable_weight_tying=True), seq_len=8, attention=True)
    with pytest.raises(ValueError, match="seq_len = 0"):
        make_portable(original, seq_len=0, attention=True)
    with pytest.raises(ValueError, match="load_balance_coeff = -1"):
        make_portable(original, seq_len=8, attention=True, load_balance_coeff=-1)
