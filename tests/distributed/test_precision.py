"""Recomputed activations and bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.harness.cases import ADAMW, FAMILIES, SGD, Case, make_config
from tests.distributed.harness.compare import WORST, assert_same_training, loss_distances
from tests.distributed.harness.worlds import Worlds

BF16_LOSS = 0.02
"""Relative: bfloat16 has 8 bits, and routing may differ for single tokens."""


@pytest.mark.parametrize("recompute", ["ffn", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_recomputing_changes_nothing(family: str, recompute: str, worlds: Worlds, documents: Path) -> None:
    """Same bits as without, tokens counted once; and so the unsplit model's."""
    base: dict[str, Any] = {"layout": (1, 1, 2, 2), "microbatches": 4}
    stored = worlds.run(Case(config=make_config(family, documents, **base), steps=2))
    case = Case(config=make_config(family, documents, recompute=recompute, **base), steps=2)
    result = worlds.run(case)
    for name, gradient in stored.gradients.items():
        assert torch.equal(result.gradients[name], gradient), name
    for name, bias in stored.biases.items():
        assert torch.equal(result.biases[name], bias), name
    counted = [key for key in stored.history[0] if key.startswith(("expert_load", "dead", "router", "rows"))]
    assert len(counted) == 9
    for step, other in zip(result.history, stored.history, strict=True):
        assert {key: step[key] for key in counted} == {key: other[key] for key in counted}
    assert_same_training(result, worlds.reference(case), optimizer="SGD", where=f"{family}, recompute {recompute}")


@pytest.mark.parametrize("layout", [(1, 1, 2, 2), (2, 2, 2, 1)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16(family: str, layout: tuple[int, int, int, int], worlds: Worlds, documents: Path) -> None:
    """Losses of five steps within 2 % of the unsplit bfloat16 model's and of the float32 one's."""
    half: dict[str, Any] = {"training": {"dtype": "bfloat16"}}
    case = Case(config=make_config(family, documents, layout=layout, microbatches=4, optimizer=ADAMW, **half))
    result, same = worlds.run(case), worlds.reference(case)
    exact = worlds.reference(Case(config=make_config(family, documents, layout=layout, optimizer=ADAMW)))
    assert all(p.dtype is torch.bfloat16 for p in result.parameters.values())
    assert all(bias.dtype is torch.float32 for bias in result.biases.values())
    for what, expected in (("the unsplit model's", same), ("float32", exact)):
        difference = max(loss_distances(result, expected))
        WORST.note(f"bfloat16 loss, from {what}", difference, f"{family} {layout}")
        assert difference <= BF16_LOSS
    assert result.losses()[-1] < result.losses()[0]


def test_sgd_moves_the_weights(worlds: Worlds, documents: Path) -> None:
    """The comparisons of parameters under SGD would say nothing if five steps hardly moved them."""
    result = worlds.reference(Case(config=make_config("qwen3", documents, optimizer=SGD)))
    for name, start in result.initial.items():
        assert (result.parameters[name] - start).norm() > 1e-4 * start.norm(), name
