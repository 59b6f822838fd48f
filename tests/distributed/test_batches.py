"""The cut of a batch does not matter: not to the weights, the norm, the clipping or the router bias.

Samples differ in their number of valid tokens (document ends do not count), so a mean of micro-batch means would show.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from disagmoe.config.schema import OptimizerConfig, ParallelismConfig
from disagmoe.data import build_dataset
from disagmoe.layout import Role
from tests.distributed.harness.cases import FAMILIES, SGD, Case, RunResult, make_config, write_uneven_documents
from tests.distributed.harness.compare import assert_same_training, distance
from tests.distributed.harness.worlds import Worlds

SAMPLES = 8
CLIP = 0.1
CUTS = (8, 4, 2, 1)
"""Micro-batches: 8 samples as 8x1, 4x2, 2x4, 1x8."""


def batch_case(
    documents: Path, family: str, *, steps: int = 5, optimizer: OptimizerConfig = SGD, **case: object
) -> Case:
    config = make_config(
        family,
        documents,
        optimizer=optimizer,
        global_batch_size=SAMPLES,
        training={"max_grad_norm": CLIP},
        **case,  # type: ignore[arg-type]
    )
    return Case(config=config, steps=steps)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In place of the folder's: samples with 4 or 8 valid tokens of 8."""
    return write_uneven_documents(tmp_path_factory.mktemp("data") / "uneven.jsonl", seq_len=8)


def hand_made_norm(result: RunResult) -> float:
    """Of all gradients together, each parameter once."""
    return float(torch.cat([g.double().flatten() for g in result.gradients.values()]).norm())


@pytest.mark.parametrize("attn_workers", [1, 2, 3])
@pytest.mark.parametrize("microbatches", CUTS)
def test_any_cut_trains_to_the_same_weights(
    microbatches: int, attn_workers: int, worlds: Worlds, documents: Path
) -> None:
    case = batch_case(documents, "qwen3", layout=(1, 1, attn_workers, 1), microbatches=microbatches)
    expected, result = worlds.reference(case), worlds.run(case)
    where = f"qwen3, {microbatches} micro-batches, M = {attn_workers}"
    assert_same_training(result, expected, optimizer="SGD", where=where)
    norms = zip(result.history, expected.history, strict=True)
    assert all(step["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5) for step, other in norms)
    assert result.history[0]["grad_norm"] == pytest.approx(hand_made_norm(expected), rel=1e-6)


def test_samples_differ_in_valid_tokens(documents: Path) -> None:
    config = batch_case(documents, "qwen3").config
    source = build_dataset(config.data, seq_len=config.training.seq_len, seed=config.debug.seed)
    valid = [source.batch([i]).num_valid_tokens for i in range(SAMPLES)]
    assert min(valid) == 4 and max(valid) >= 7, valid
    for samples in (1, 2, 4):
        sums = {sum(valid[i : i + samples]) for i in range(0, SAMPLES, samples)}
        assert len(sums) > 1, (samples, valid)


@pytest.mark.parametrize("layout", [(1, 1, 2, 2), (2, 2, 1, 2), (3, 3, 1, 1), (1, 2, 2, 1)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_clipping_by_hand(family: str, layout: tuple[int, int, int, int], worlds: Worlds, documents: Path) -> None:
    """One step of SGD with clipped gradients, computed here from the unsplit model's."""
    case = batch_case(documents, family, layout=layout, microbatches=4, steps=1)
    expected, result = worlds.reference(case), worlds.run(case)
    norm = hand_made_norm(expected)
    assert result.history[0]["grad_norm"] == pytest.approx(norm, rel=1e-6)
    factor = CLIP / (norm + 1e-6)
    assert factor < 0.5, "the gradients must be large enough for clipping to matter"
    lr = result.history[0]["lr"]
    assert 0 < lr < SGD.lr, "the first step of a warm-up"
    for name, start in expected.initial.items():
        assert torch.equal(start, result.initial[name]), f"{name}: initial weights"
        step = lr * (factor * expected.gradients[name].double() + SGD.weight_decay * start.double())
        assert distance(result.parameters[name], start.double() - step) <= 1e-6, name
        if step.norm() > 1e-4 * start.double().norm():
            moved = result.parameters[name].double() - start.double()
            assert distance(moved, -step) <= 1e-3, f"{name}: the step itself"


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("layout", [(1, 1, 2, 2), (2, 2, 2, 1)], ids=str)
def test_router_bias_moves_once_a_step(
    layout: tuple[int, int, int, int], microbatches: int, recompute: str, worlds: Worlds, documents: Path
) -> None:
    """By hand: one move up or down an expert, against its load over all micro-batches and workers; zero in the mean."""
    config = batch_case(documents, "deepseek_moe", layout=layout, microbatches=microbatches, recompute=recompute).config
    hook = "tests.distributed.harness.hooks:count_tokens"
    result = worlds.run(Case(config=config, steps=1, hook=hook))
    tokens = SAMPLES * config.training.seq_len
    for name, bias_E in result.biases.items():
        layer = int(name.split(".")[1])
        counts_E = sum(torch.tensor(extra[layer][0]) for extra in result.extras if layer in extra)
        assert isinstance(counts_E, torch.Tensor)
        assert counts_E.sum() == 2 * tokens, "two choices a token, counted once"
        move_E = 1e-3 * torch.sign(counts_E.mean() - counts_E)
        assert torch.allclose(bias_E, move_E - move_E.mean(), rtol=0, atol=1e-9)
    assert len(result.biases) == 6


@pytest.mark.parametrize("family", FAMILIES)
def test_copies_stay_bit_equal(family: str, worlds: Worlds, documents: Path) -> None:
    """Two replicas of 2 A-workers and 2 F-workers, five steps of AdamW: `worlds.run` compares all copies bit by bit."""
    config = make_config(family, documents, layout=(1, 1, 2, 2), replicas=2, optimizer=OptimizerConfig(lr=3e-3))
    result = worlds.run(Case(config=config))
    assert result.unequal == []
    roles = {role: {f"r{r}.{role.letter}0.{i}" for r in range(2) for i in range(2)} for role in Role}
    moe_layer = 3
    norm = f"layers.{moe_layer}.ffn_norm.weight"
    assert set(result.homes[norm]) == roles[Role.ATTN] | roles[Role.FFN], "tied: on both sides"
    for name, homes in result.homes.items():
        if name == norm or "ffn_norm" in name:
            continue
        role = Role.FFN if "_experts" in name else Role.ATTN
        assert set(homes) == roles[role], name
    assert any(not torch.equal(result.initial[name], result.parameters[name]) for name in (norm,))


def test_the_unsplit_model_takes_more_micro_batches_than_samples(worlds: Worlds, documents: Path) -> None:
    """Those without a sample are left out."""
    results = []
    for microbatches in (SAMPLES, 2 * SAMPLES):
        case = batch_case(documents, "qwen3", layout=(1, 1, 1, 1), microbatches=microbatches)
        config = replace(case.config, parallelism=ParallelismConfig(mode="none"))
        results.append(worlds.run(Case(config=config, steps=case.steps)))
    expected, result = results
    assert_same_training(result, expected, optimizer="SGD", where="mode none, 16 micro-batches of 8 samples")
