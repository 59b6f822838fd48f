"""Masks against a naive loop, and the portable attention against a naive softmax."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from disagmoe.config.recipe import load_recipe
from disagmoe.models.attention import PortableAttention, attention_masks, document_causal_mask, mask_for
from disagmoe.models.init import make_portable
from tests.unit.models.local_pipeline import debug_config


def naive_mask(positions: Tensor, window: int | None) -> Tensor:
    batch, length = positions.shape
    mask = torch.zeros(batch, 1, length, length, dtype=torch.bool)
    for b in range(batch):
        for i in range(length):
            start = i - int(positions[b, i])  # first token of i's document
            for j in range(start, i + 1):
                mask[b, 0, i, j] = window is None or i - j < window
    return mask


def positions_of(*documents: list[int]) -> Tensor:
    """One row a list of document lengths."""
    return torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in documents])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.one_of(st.none(), st.integers(1, 12)))
def test_masks_equal_a_naive_loop(lengths: list[int], window: int | None) -> None:
    positions = positions_of(lengths, lengths[::-1])
    assert torch.equal(document_causal_mask(positions, window), naive_mask(positions, window))


def test_gpt_oss_gets_both_masks_and_others_one() -> None:
    positions = positions_of([20, 28], [48])
    config = debug_config("gpt_oss")
    masks = attention_masks(config, positions)
    assert torch.equal(masks["basic_mask"], naive_mask(positions, None))
    assert torch.equal(masks["sliding_window_mask"], naive_mask(positions, 32))
    windows = [layer.attention.sliding_window_size for layer in config.layers]
    assert windows == [32, None] * 3
    assert mask_for(config.layers[0].attention, masks) is masks["sliding_window_mask"]
    assert mask_for(config.layers[1].attention, masks) is masks["basic_mask"]
    assert torch.equal(attention_masks(debug_config("qwen3"), positions), naive_mask(positions, None))


def test_flex_attention_stays_where_asked_and_other_kinds_are_refused() -> None:
    from torchtitan.models.common.attention import FlexAttention, VarlenAttention

    for family in ("qwen3", "gpt_oss", "deepseek_moe"):
        config = make_portable(load_recipe(family).model_config("debug"), seq_len=64, attention=False)
        assert all(isinstance(layer.attention.inner_attention, FlexAttention.Config) for layer in config.layers)
    config.layers[0].attention.inner_attention = VarlenAttention.Config()
    with pytest.raises(ValueError, match="portable or flex"):
        attention_masks(config, positions_of([4]))


def naive_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Head by head; q [B, L, H, C], k and v [B, L, G, C]. Output and log-sum-exp [B, L, H]."""
    group = q.shape[2] // k.shape[2]
    outs, lses = [], []
    for head in range(q.shape[2]):
        scores = torch.einsum("bic,bjc->bij", q[:, :, head], k[:, :, head // group]) * scale
        scores = scores.masked_fill(~mask[:, 0], float("-inf"))
        outs.append(scores.softmax(-1) @ v[:, :, head // group])
        lses.append(scores.logsumexp(-1))
    return torch.stack(outs, 2), torch.stack(lses, 2)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("with_lse", [False, True])
def test_portable_attention_equals_a_naive_softmax(num_kv_heads: int, with_lse: bool) -> None:
    torch.manual_seed(0)
    positions = positions_of([5, 11], [16])
    mask = naive_mask(positions, 6)
    inputs = [
        torch.randn(2, 16, heads, 8, dtype=torch.float64, requires_grad=True)
        for heads in (4, num_kv_heads, num_kv_heads)
    ]
    singles = [t.detach().float().requires_grad_() for t in inputs]

    def sink(out: Tensor, lse: Tensor) -> Tensor:
        return out * torch.sigmoid(lse - 0.3).unsqueeze(-1).to(out.dtype)

    out, lse = naive_attention(*inputs, mask, 0.2)
    expected = sink(out, lse) if with_lse else out
    actual = PortableAttention.Config().build()(
        *singles, attention_masks=mask, scale=0.2, enable_gqa=num_kv_heads < 4, out_transform=sink if with_lse else None
    )
    torch.testing.assert_close(actual.double(), expected, atol=1e-6, rtol=1e-5)
    direction = torch.randn_like(expected)
    grads = torch.autograd.grad(actual, singles, direction.float())
    for grad, wanted in zip(grads, torch.autograd.grad(expected, inputs, direction), strict=True):
        torch.testing.assert_close(grad.double(), wanted, atol=1e-5, rtol=1e-4)


def test_a_document_does_not_see_its_neighbour() -> None:
    from tests.unit.models.local_pipeline import reference

    for family in ("deepseek_moe", "gpt_oss", "qwen3"):
        config = debug_config(family)
        model = reference(config)
        tokens = torch.randint(0, 257, (1, 48))
        packed = positions_of([18, 30])
        logits = model(tokens, packed, attention_masks(config, packed))
        alone = positions_of([30])
        expected = model(tokens[:, 18:], alone, attention_masks(config, alone))
        torch.testing.assert_close(logits[:, 18:], expected, atol=2e-5, rtol=1e-4)
