"""Weight gradients put off and done later are the same weight gradients."""

from __future__ import annotations

import pytest
import torch

from disagmoe.models.deferred import WeightGradients, active
from tests.unit.models.local_pipeline import (
    FAMILIES,
    LocalPipeline,
    debug_config,
    is_stacked,
    loss_of,
    make_batch,
    reference,
    relative,
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_split_backward_gives_the_same_gradients(family: str, recompute: bool, dtype: torch.dtype) -> None:
    config = debug_config(family)
    tokens, labels, positions = make_batch()
    owed = WeightGradients()
    pipeline = LocalPipeline(config, ffn_workers=3, dtype=dtype, recompute=recompute, owed=owed)
    twin = LocalPipeline(config, ffn_workers=3, dtype=dtype)
    loss_of(twin.forward(tokens, positions), labels).backward()
    loss_of(pipeline.forward(tokens, positions), labels).backward()
    assert active() is None
    named = [item for part, _ in pipeline.parts for item in part.named_parameters()]
    stacked = [p for name, p in named if is_stacked(name) and p.ndim == 3]
    assert all(p.grad is None for p in stacked), "the large products are still owed"
    owed.run()
    like = dict(reference(config, dtype=dtype).named_parameters())
    wanted = twin.gradients(like)
    for name, grad in pipeline.gradients(like).items():
        assert relative(grad, wanted[name]) < (2e-6 if dtype == torch.float32 else 2e-2), name


def test_two_micro_batches_accumulate() -> None:
    config = debug_config("qwen3")
    tokens, labels, positions = make_batch(4)
    whole, split = LocalPipeline(config), LocalPipeline(config)
    loss_of(whole.forward(tokens, positions), labels).backward()
    for half in (slice(0, 2), slice(2, 4)):
        split.owed = owed = WeightGradients()
        loss = loss_of(split.forward(tokens[half], positions[half]), labels[half]) / 2
        loss.backward()
        owed.run()
        owed.run()  # nothing is owed twice
    like = dict(reference(config).named_parameters())
    wanted = whole.gradients(like)
    for name, grad in split.gradients(like).items():
        assert relative(grad, wanted[name]) < 5e-6, name
