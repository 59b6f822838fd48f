"""The shape records against torchtitan's models: parameters exactly, FLOPs against torch's own counter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from disagmoe.config.recipe import load_recipe, recipe_names
from disagmoe.models.attention import attention_masks
from disagmoe.models.init import build_model, init_parameters, make_portable
from disagmoe.shapes import AttentionShape, DenseFFNShape, LayerShape, ModelShape, MoEShape

ALL = [(name, flavor) for name in recipe_names() for flavor in load_recipe(name).shapes]
DEBUG = [name for name in recipe_names() if "debug" in load_recipe(name).shapes]


def meta_model(name: str, flavor: str) -> Any:
    config = make_portable(load_recipe(name).model_config(flavor), seq_len=8, attention=True)
    with torch.device("meta"):
        return build_model(config)


def count(module: torch.nn.Module | None) -> int:
    return 0 if module is None else sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(("name", "flavor"), ALL)
def test_parameters_equal_torchtitans_model(name: str, flavor: str) -> None:
    shape, model = load_recipe(name).shape(flavor), meta_model(name, flavor)
    dim = shape.dim
    assert count(model) == shape.num_params
    assert count(model.tok_embeddings) == shape.embedding_params
    assert count(model.norm) + count(model.lm_head) == shape.head_params
    assert len(model.layers) == len(shape.layers)
    for block, layer in zip(model.layers.values(), shape.layers, strict=True):
        assert count(block) == layer.num_params(dim)
        assert count(block.attention) == layer.attention.num_params(dim)
        assert count(block.attention_norm) == count(block.ffn_norm) == dim
        if isinstance(layer.ffn, DenseFFNShape):
            assert count(block.feed_forward) == layer.ffn.num_params(dim)
            continue
        experts = block.moe.routed_experts.inner_experts
        assert count(block.moe.router) == layer.ffn.router_params(dim)
        assert count(experts) == layer.ffn.num_experts * layer.ffn.expert_params(dim)
        assert count(block.moe.shared_experts) == layer.ffn.shared_params(dim)
        a_side = count(block) - count(experts) - count(block.moe.shared_experts)
        assert layer.attention_sublayer_params(dim) == a_side
        assert layer.expert_sublayer_params(dim) == count(block) - a_side + dim
        assert layer.expert_sublayer_params(dim, 3) < layer.expert_sublayer_params(dim)


@pytest.mark.parametrize(("name", "flavor"), ALL)
def test_structure_equals_torchtitans_config(name: str, flavor: str) -> None:
    recipe = load_recipe(name)
    shape, config = recipe.shape(flavor), recipe.model_config(flavor)
    assert (config.dim, config.vocab_size, config.max_seq_len) == (shape.dim, shape.vocab_size, shape.max_seq_len)
    for built, layer in zip(config.layers, shape.layers, strict=True):
        attn = layer.attention
        assert (built.attention.n_heads, built.attention.n_kv_heads or built.attention.n_heads) == (
            attn.num_heads,
            attn.num_kv_heads,
        )
        assert built.attention.head_dim == attn.head_dim
        assert getattr(built.attention, "sliding_window_size", None) == attn.window
        if layer.is_moe:
            assert (built.moe.num_experts, built.moe.router.top_k) == (layer.moe.num_experts, layer.moe.top_k)


@pytest.mark.parametrize("name", DEBUG)
@pytest.mark.parametrize("seq_len", [64, 96])
def test_forward_flops_equal_torchs_counter(name: str, seq_len: int) -> None:
    """Torch counts all s^2 pairs of a masked attention, hence `causal=False`."""
    recipe, batch = load_recipe(name), 2
    shape = recipe.shape("debug")
    config = make_portable(recipe.model_config("debug"), seq_len=seq_len, attention=True)
    model = build_model(config)
    init_parameters(model, config, 0)
    tokens = torch.randint(0, shape.vocab_size, (batch, seq_len))
    positions = torch.arange(seq_len).repeat(batch, 1)
    masks = attention_masks(config, positions)
    # Torch's counter does not know the fused attention of CPUs: take the one made of matrix products.
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(tokens, positions, masks)
    expected = counter.get_total_flops()
    assert batch * shape.flops_per_sequence(seq_len, causal=False) == pytest.approx(expected, rel=0.01)


def test_causal_pairs_against_a_loop() -> None:
    for window in (None, 1, 5, 16, 40):
        attention = AttentionShape(num_heads=2, num_kv_heads=1, head_dim=4, window=window)
        for seq_len in (1, 4, 16, 33):
            pairs = sum(min(i + 1, window or i + 1) for i in range(seq_len))
            assert attention.score_pairs(seq_len) == pairs
            assert attention.core_flops(seq_len) == 4 * 2 * 4 * pairs
            assert attention.score_pairs(seq_len, causal=False) == seq_len**2


def test_a_layer_by_hand() -> None:
    attention = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=8, bias=True, sinks=True, qk_norm=True)
    moe = MoEShape(num_experts=6, top_k=2, expert_dim=10, shared_dim=20, bias=True)
    layer, dense = (
        LayerShape(attention=attention, ffn=moe),
        LayerShape(attention=attention, ffn=DenseFFNShape(hidden_dim=7)),
    )
    attn_params = 16 * 64 + 64 + 32 * 16 + 16 + 2 * 8 + 4
    assert attention.num_params(16) == attn_params
    assert moe.expert_params(16) == 3 * 16 * 10 + 20 + 16 and moe.shared_params(16) == 3 * 16 * 20
    assert layer.num_params(16) == attn_params + 32 + (16 * 6 + 6) + 6 * moe.expert_params(16) + 3 * 16 * 20
    assert layer.num_active_params(16) == layer.num_params(16) - 4 * moe.expert_params(16)
    assert dense.num_active_params(16) == dense.num_params(16) == attn_params + 32 + 3 * 16 * 7
    projections = 2 * 16 * 64 + 2 * 32 * 16
    assert layer.attention_flops(16, 5) == 5 * (projections + 2 * 16 * 6) + 4 * 32 * 15
    assert dense.attention_flops(16, 5) == 5 * (projections + 6 * 16 * 7) + 4 * 32 * 15
    assert layer.expert_flops(16, 5) == 5 * (2 * 6 * 16 * 10 + 6 * 16 * 20) and dense.expert_flops(16, 5) == 0
    model = ModelShape(name="m", dim=16, vocab_size=11, layers=(dense, layer), max_seq_len=64)
    assert model.is_moe_layer == (False, True)
    assert model.num_params == 2 * 11 * 16 + 16 + dense.num_params(16) + layer.num_params(16)
    assert model.row_bytes(2) == 32
    assert model.flops_per_token(5) * 5 == model.flops_per_sequence(5)
    with pytest.raises(TypeError, match="dense feed-forward"):
        _ = dense.moe
