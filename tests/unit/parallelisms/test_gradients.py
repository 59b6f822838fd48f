"""Sums over copies, the global norm, clipping and the router bias, on one process."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from disagmoe.parallelisms import gradients
from disagmoe.parallelisms.gradients import GradientSync, SyncGroup, update_router_bias


def parameters(sizes: list[tuple[int, ...]], seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    made = [nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]
    for p in made:
        p.grad = torch.randn(p.shape, generator=generator)
    return made


def sync_of(params: list[nn.Parameter]) -> GradientSync:
    return GradientSync(groups=[SyncGroup(group=None, copies=tuple((p,) for p in params))], counted=params, world=None)


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=6),
    max_norm=st.sampled_from([0.01, 0.5, 3.0, 1e6]),
    seed=st.integers(0, 100),
)
def test_clip_is_torchs(sizes: list[tuple[int, ...]], max_norm: float, seed: int) -> None:
    ours, theirs = parameters(sizes, seed), parameters(sizes, seed)
    norm = sync_of(ours).clip(max_norm)
    assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(theirs, max_norm)), rel=1e-6)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=1e-9)


def test_zero_max_norm_measures_only() -> None:
    params = parameters([(3, 2)])
    before = [p.grad.clone() for p in params if p.grad is not None]
    assert sync_of(params).clip(0.0) == pytest.approx(float(before[0].norm()), rel=1e-6)
    assert params[0].grad is not None and torch.equal(params[0].grad, before[0])


def test_without_counted_parameters() -> None:
    """A worker whose parameters all count elsewhere, alone: norm 0, nothing scaled up."""
    params = parameters([(2, 2)])
    sync = GradientSync(groups=[SyncGroup(group=None, copies=((params[0],),))], counted=[], world=None)
    before = params[0].grad
    assert before is not None
    assert sync.clip(1.0) == 0.0 and torch.equal(params[0].grad, before)  # type: ignore[arg-type]


def test_both_homes_of_a_tied_parameter_get_the_sum() -> None:
    a, f, alone = parameters([(4,), (4,), (2,)])
    f.data.copy_(a.data)
    assert a.grad is not None and f.grad is not None
    total = a.grad + f.grad
    alone.grad = None
    sync = GradientSync(groups=[SyncGroup(group=None, copies=((a, f), (alone,)))], counted=[a, alone], world=None)
    sync.reduce()
    assert torch.equal(a.grad, total) and torch.equal(f.grad, total)
    assert alone.grad is not None and torch.equal(alone.grad, torch.zeros(2)), "no gradient counts as zeros"
    assert sync.clip(1e-3) == pytest.approx(float(total.norm()), rel=1e-6), "counted once"
    assert torch.equal(a.grad, f.grad), "both are clipped alike"


def test_buckets_keep_order_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "_BUCKET_BYTES", 100)
    copies = [(p,) for p in parameters([(10,), (10,), (10,), (50,), (1,)])]
    buckets = gradients._buckets(copies)
    assert [entry for bucket in buckets for entry in bucket] == copies
    assert [[p.numel() for (p,) in bucket] for bucket in buckets] == [[10, 10], [10], [50], [1]]


def test_router_bias_step_by_hand() -> None:
    """Loads 6, 2, 2, 2, mean 3: down, up, up, up by the coefficient, then moved to zero mean."""
    bias_E = torch.tensor([0.5, 0.0, 0.0, -0.5])
    update_router_bias(bias_E, torch.tensor([6.0, 2.0, 2.0, 2.0]), 0.01)
    assert torch.allclose(bias_E, torch.tensor([0.5 - 0.015, 0.005, 0.005, -0.5 + 0.005]), atol=1e-7)
    update_router_bias(bias_E, torch.tensor([3.0, 3.0, 3.0, 3.0]), 0.01)
    assert bias_E.sum() == pytest.approx(0.0, abs=1e-6)
