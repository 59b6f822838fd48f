"""A-stages are spread so that A-groups have about the same work."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagmoe.config.placement import attention_stage_flops, balanced_placement, placement_warnings
from disagmoe.config.recipe import load_recipe
from disagmoe.layout import Layout


def layout_of(depth: int, **rest: object) -> Layout:
    return Layout(attn_depth=depth, ffn_depth=1, attn_workers=1, ffn_workers=1, **rest)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(work=st.lists(st.floats(0.5, 4.0), min_size=1, max_size=12), depth=st.integers(1, 5))
def test_no_group_has_more_than_a_stage_above_the_average(work: list[float], depth: int) -> None:
    depth = min(depth, len(work))
    placed = balanced_placement(work, depth)
    loads = [sum(w for w, g in zip(work, placed, strict=True) if g == group) for group in range(depth)]
    assert min(loads) > 0 and sorted(set(placed)) == list(range(depth))
    # The last stage of the heaviest group went to what was then the lightest one.
    assert max(loads) <= sum(work) / depth + max(work)
    assert placed[0] == 0


def test_equal_stages_take_turns() -> None:
    assert balanced_placement([1.0] * 7, 3) == (0, 1, 2, 0, 1, 2, 0)


def test_flops_of_stages_add_up_to_the_model() -> None:
    shape = load_recipe("deepseek_moe").shape("debug")
    experts = sum(layer.expert_flops(shape.dim, 256) for layer in shape.layers)
    assert sum(attention_stage_flops(shape, 256)) + experts == shape.flops_per_sequence(256)


def test_advice_is_given_once() -> None:
    """What is advised, taken, leaves nothing to advise."""
    shape = load_recipe("deepseek_moe").shape("16B")
    (warning,) = placement_warnings(layout_of(4), shape, 4096)
    assert "1.47 times the work of the average one" in warning and "1.03 times" in warning
    placed = balanced_placement(attention_stage_flops(shape, 4096), 4)
    assert list(placement_warnings(layout_of(4, attn_placement=placed), shape, 4096)) == []


@pytest.mark.parametrize("depth", [1, 2])
def test_even_groups_need_no_advice(depth: int) -> None:
    shape = load_recipe("qwen3").shape("235B-A22B")
    assert list(placement_warnings(layout_of(depth), shape, 4096)) == []
