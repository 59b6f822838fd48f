"""The parts, called in order, are the unsplit model: outputs, loss and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from disagmoe.layout import Layout, Stage, build_stages
from disagmoe.models.attention import attention_masks
from disagmoe.models.init import init_parameters
from disagmoe.models.split import AttentionPart, ExpertPart, build_attention_part, build_expert_part
from tests.unit.models.local_pipeline import (
    FAMILIES,
    LocalPipeline,
    debug_config,
    loss_of,
    make_batch,
    reference,
    relative,
)

# (attn_depth, ffn_depth, ffn_workers); 3, 5: do not divide the 8 experts.
TABLES = [(1, 1, 1), (2, 1, 3), (1, 2, 2), (3, 3, 5), (4, 5, 8)]


def stages_of(config: object, **layout: int) -> tuple[Stage, ...]:
    sizes = {"attn_depth": 1, "ffn_depth": 1, "attn_workers": 1, "ffn_workers": 1} | layout
    return build_stages(Layout(**sizes), [layer.moe is not None for layer in config.layers])  # type: ignore[attr-defined]


def compare(family: str, pipeline: LocalPipeline, tolerance: float = 2e-6) -> None:
    tokens, labels, positions = make_batch()
    model = reference(pipeline.config)
    expected = model(tokens, positions, attention_masks(pipeline.config, positions))
    actual = pipeline.forward(tokens, positions)
    loss, expected_loss = loss_of(actual, labels), loss_of(expected, labels)
    loss.backward()
    expected_loss.backward()
    assert relative(actual, expected) < tolerance
    assert abs(loss.item() - expected_loss.item()) < 1e-6 * expected_loss.item()
    expected_grads = {name: p.grad for name, p in model.named_parameters()}
    for name, grad in pipeline.gradients(expected_grads).items():
        assert relative(grad, expected_grads[name]) < tolerance, name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("attn_depth", "ffn_depth", "ffn_workers"), TABLES)
def test_parts_equal_the_unsplit_model(family: str, attn_depth: int, ffn_depth: int, ffn_workers: int) -> None:
    compare(
        family,
        LocalPipeline(debug_config(family), attn_depth=attn_depth, ffn_depth=ffn_depth, ffn_workers=ffn_workers),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_parts_equal_the_unsplit_model(family: str) -> None:
    compare(family, LocalPipeline(debug_config(family), attn_depth=2, ffn_workers=3, recompute=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_under_deterministic_algorithms(family: str) -> None:
    """Torch then also fills uninitialised memory with NaN, which would show if any of it were read."""
    torch.use_deterministic_algorithms(True)
    try:
        compare(family, LocalPipeline(debug_config(family), attn_depth=2, ffn_workers=8))
    finally:
        torch.use_deterministic_algorithms(False)


def test_without_router_bias() -> None:
    config = debug_config("deepseek_moe", load_balance_coeff=0)
    pipeline = LocalPipeline(config, ffn_workers=2)
    assert all(
        name.endswith(("cache", "tokens_per_expert_E")) for p, _ in pipeline.parts for name, _ in p.named_buffers()
    )
    compare("deepseek_moe", pipeline)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_router_bias_changes_the_choice_alike(family: str) -> None:
    config = debug_config(family)
    model, pipeline = reference(config), LocalPipeline(config, ffn_workers=2)
    push = torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 0])
    for layer in model.layers.values():
        if layer.moe_enabled:
            layer.moe.expert_bias_E += push
    for part, _ in pipeline.parts:
        if isinstance(part, AttentionPart) and part.router_state is not None:
            part.router_state.expert_bias_E += push
    tokens, _, positions = make_batch()
    expected = model(tokens, positions, attention_masks(config, positions))
    assert relative(pipeline.forward(tokens, positions), expected) < 2e-6
    moe_layers = [layer.moe for layer in model.layers.values() if layer.moe_enabled]
    assert all(moe.tokens_per_expert_E[0] == tokens.numel() for moe in moe_layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16(family: str) -> None:
    config = debug_config(family)
    tokens, labels, positions = make_batch()
    model = reference(config, dtype=torch.bfloat16)
    pipeline = LocalPipeline(config, ffn_workers=3, dtype=torch.bfloat16)
    expected = model(tokens, positions, attention_masks(config, positions))
    actual = pipeline.forward(tokens, positions)
    assert actual.dtype == expected.dtype == torch.bfloat16
    assert relative(actual, expected) < 6e-2
    loss_of(actual, labels).backward()
    loss_of(expected, labels).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    split = pipeline.gradients(grads)
    assert all(torch.isfinite(grad).all() for grad in split.values())
    # Near-ties may route differently after bfloat16 rounding, so single gradients may differ; the whole may not.
    whole = torch.cat([g.flatten().float() for g in grads.values()])
    assert relative(torch.cat([split[name].flatten().float() for name in grads]), whole) < 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_hold_every_parameter_under_its_unsplit_name(family: str) -> None:
    config = debug_config(family)
    names = {name for name, _ in reference(config).named_parameters()}
    pipeline = LocalPipeline(config, attn_depth=2, ffn_depth=3, ffn_workers=3)
    homes: dict[str, int] = {}
    for part, experts in pipeline.parts:
        if experts is None or experts.start == 0:
            for name, _ in part.named_parameters():
                homes[name] = homes.get(name, 0) + 1
    assert set(homes) == names
    moe_layers = [i for i, layer in enumerate(config.layers) if layer.moe is not None]
    assert {name for name, count in homes.items() if count == 2} == {f"layers.{i}.ffn_norm.weight" for i in moe_layers}
    assert max(homes.values()) == 2


def expert_part(family: str, experts: range, dtype: torch.dtype = torch.float32) -> tuple[ExpertPart, int]:
    config = debug_config(family)
    stage = stages_of(config)[1]
    part = build_expert_part(config, stage, experts).to(dtype)
    init_parameters(part, config, 0, experts.start)
    return part, config.dim


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_rows", "num_pairs", "num_primary"), [(0, 0, 0), (3, 0, 0), (3, 0, 2), (3, 4, 0), (1, 2, 1)]
)
def test_empty_shares_still_give_every_gradient(
    family: str, dtype: torch.dtype, num_rows: int, num_pairs: int, num_primary: int
) -> None:
    part, dim = expert_part(family, range(2, 5), dtype)
    rows = torch.randn(num_rows, dim, dtype=dtype, requires_grad=True)
    weights = torch.rand(num_pairs, requires_grad=True)
    pair_row = torch.arange(num_pairs) % max(num_rows, 1)
    out = part(rows, weights, pair_row, torch.arange(num_pairs) % 2, torch.arange(num_primary))
    assert out.shape == (num_rows, dim) and out.dtype == dtype
    grads = torch.autograd.grad(out.float().square().sum(), [rows, weights, *part.parameters()])
    for name, grad in zip(("rows", "weights", *dict(part.named_parameters())), grads, strict=True):
        assert torch.isfinite(grad).all(), name
    if num_pairs == 0 and num_primary == 0:
        assert all((grad == 0).all() for grad in grads) and (out == 0).all()
    for name, grad in zip(dict(part.named_parameters()), grads[2:], strict=True):
        if ".inner_experts." in name:
            assert (grad[2] == 0).all(), f"{name}: expert without rows"


def test_all_pairs_on_one_expert_and_a_row_with_two_experts() -> None:
    part, dim = expert_part("qwen3", range(8))
    rows = torch.randn(5, dim)
    experts = part.layers["0"].moe.routed_experts.inner_experts
    normed = part.layers["0"].ffn_norm(rows)

    def expert(e: int, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.silu(x @ experts.w1_EFD[e].T) * (x @ experts.w3_EFD[e].T)
        return hidden @ experts.w2_EDF[e].T

    out = part(rows, torch.full((5,), 0.5), torch.arange(5), torch.full((5,), 3), torch.empty(0, dtype=torch.int64))
    torch.testing.assert_close(out, 0.5 * expert(3, normed))
    both = part(rows, torch.tensor([0.25, 0.75]), torch.tensor([4, 4]), torch.tensor([7, 1]), torch.tensor([0]))
    expected = torch.zeros(5, dim)
    expected[4] = 0.25 * expert(7, normed[4]) + 0.75 * expert(1, normed[4])
    expected[0] = rows[0]
    torch.testing.assert_close(both, expected)


def test_int32_indices_are_taken_as_they_come_off_the_wire() -> None:
    part, dim = expert_part("deepseek_moe", range(4))
    rows, weights = torch.randn(6, dim), torch.rand(9)
    pair_row, pair_expert, primary = torch.arange(9) % 6, torch.arange(9) % 4, torch.tensor([5, 1])
    expected = part(rows, weights, pair_row, pair_expert, primary)
    assert torch.equal(part(rows, weights, pair_row.int(), pair_expert.int(), primary.int()), expected)


def test_the_same_call_twice_is_bit_equal() -> None:
    part, dim = expert_part("gpt_oss", range(8))
    rows = torch.randn(64, dim, requires_grad=True)
    weights = torch.rand(200)
    pair_row, pair_expert = torch.randint(0, 64, (200,)), torch.randint(0, 8, (200,))

    def run() -> list[torch.Tensor]:
        out = part(rows, weights, pair_row, pair_expert, torch.arange(0, 64, 3))
        return [out, *torch.autograd.grad(out.square().sum(), [rows, *part.parameters()])]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_wrong_expert_ranges_are_refused() -> None:
    config = debug_config("qwen3")
    stage = stages_of(config)[1]
    for experts in (range(4, 9), range(0, 8, 2), range(-1, 3)):
        with pytest.raises(ValueError, match=r"contiguous part of range\(8\)"):
            build_expert_part(config, stage, experts)


def test_attention_part_does_not_count_tokens() -> None:
    config = debug_config("qwen3")
    part = build_attention_part(config, stages_of(config)[0])
    init_parameters(part, config, 0)
    tokens, _, positions = make_batch()
    _, routing = part(tokens, positions, attention_masks(config, positions))
    assert part.router_state is not None and (part.router_state.tokens_per_expert_E == 0).all()
    assert routing.weights_TK.dtype == routing.scores_TE.dtype == torch.float32
    assert routing.weights_TK.requires_grad and not routing.scores_TE.requires_grad
    assert routing.expert_ids_TK.shape == (tokens.numel(), 2) and routing.scores_TE.shape == (tokens.numel(), 8)
    torch.testing.assert_close(routing.weights_TK.sum(1), torch.ones(tokens.numel()))
