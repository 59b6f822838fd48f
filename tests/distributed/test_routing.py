"""Routings that leave experts, workers or slices with nothing, or everything; and exact ties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from disagmoe.layout import split_evenly
from tests.distributed.harness.cases import FAMILIES, SGD, Case, RunResult, make_config
from tests.distributed.harness.compare import assert_same_training
from tests.distributed.harness.worlds import Worlds

NUM_EXPERTS = 8
HOOKS = "tests.distributed.harness.hooks"


def run_both(worlds: Worlds, documents: Path, family: str, *, steps: int = 3, hook: str = "", **case: Any) -> RunResult:
    """Compare with the unsplit model; returns the layout's result."""
    arguments = case.pop("hook_arguments", {})
    config = make_config(family, documents, optimizer=SGD, **case)
    made = Case(config=config, steps=steps, hook=f"{HOOKS}:{hook}" if hook else "", hook_arguments=arguments)
    expected, result = worlds.reference(made), worlds.run(made)
    assert_same_training(result, expected, optimizer="SGD", where=f"{family} {hook} {case}")
    return result


def expert_gradient_norms(result: RunResult) -> torch.Tensor:
    """[E], over all expert parameters and layers."""
    squares = torch.zeros(NUM_EXPERTS, dtype=torch.float64)
    for name, gradient in result.gradients.items():
        if ".routed_experts." in name:
            squares += gradient.double().flatten(1).square().sum(1)
    return squares.sqrt()


@pytest.mark.parametrize("layout", [(1, 1, 2, 2), (1, 1, 1, 3), (2, 2, 2, 1)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_all_tokens_to_one_expert(
    family: str, layout: tuple[int, int, int, int], worlds: Worlds, documents: Path
) -> None:
    """Every token's first choice is expert 5; the second one is free."""
    bias = [10.0 if e == 5 else 0.0 for e in range(NUM_EXPERTS)]
    result = run_both(
        worlds, documents, family, layout=layout, hook="prefer_experts", hook_arguments={"bias": bias}, microbatches=3
    )
    loads = [value for key, value in result.history[0].items() if key.startswith("expert_load")]
    # Of two choices a token over eight experts, the mean is a quarter of the tokens.
    assert loads == [4.0] * 6


@pytest.mark.parametrize("layout", [(1, 1, 2, 2), (1, 1, 1, 3), (2, 2, 1, 2)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_and_workers_without_tokens(
    family: str, layout: tuple[int, int, int, int], worlds: Worlds, documents: Path
) -> None:
    """Experts 0 and 1 get everything: one F-worker does all the work, the others' gradients are zeros, not missing."""
    bias = [10.0 - e if e < 2 else 0.0 for e in range(NUM_EXPERTS)]
    result = run_both(
        worlds, documents, family, layout=layout, hook="prefer_experts", hook_arguments={"bias": bias}, microbatches=3
    )
    assert list(split_evenly(NUM_EXPERTS, layout[3])[0][:2]) == [0, 1]
    norms = expert_gradient_norms(result)
    assert norms[:2].min() > 0 and norms[2:].max() == 0
    assert result.history[0]["dead_experts"] == 6 * (NUM_EXPERTS - 2)
    assert result.history[0]["rows_per_token"] == 1.0


@pytest.mark.parametrize("layout", [(1, 1, 2, 2), (1, 1, 1, 3), (2, 2, 2, 1)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_exact_ties(family: str, layout: tuple[int, int, int, int], worlds: Worlds, documents: Path) -> None:
    """All experts score alike for every token. One step: afterwards rounding alone would decide."""
    run_both(worlds, documents, family, layout=layout, hook="tie_all_experts", steps=1, microbatches=3)


@pytest.mark.parametrize("layout", [(1, 1, 2, 5), (1, 1, 1, 7)], ids=str)
def test_workers_that_do_not_divide_the_experts(
    layout: tuple[int, int, int, int], worlds: Worlds, documents: Path
) -> None:
    run_both(worlds, documents, "qwen3", layout=layout, microbatches=3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("samples", "microbatches"), [(2, 1), (4, 2), (5, 3)])
def test_workers_without_samples(family: str, samples: int, microbatches: int, worlds: Worlds, documents: Path) -> None:
    """Three A-workers, at most two samples a micro-batch: the last one never has anything to do."""
    run_both(worlds, documents, family, layout=(1, 1, 3, 2), global_batch_size=samples, microbatches=microbatches)
