"""What a stage counts of its routing."""

from __future__ import annotations

import math

import pytest
import torch

from disagmoe.parallelisms.stage import RouterStats


def new_stats() -> RouterStats:
    return RouterStats(tokens_per_expert_E=torch.zeros(6), entropy_sum=torch.zeros(()))


def test_entropy_of_normalised_scores() -> None:
    stats = new_stats()
    ids_TK = torch.zeros(2, 1, dtype=torch.int64)
    # Sigmoid scores are normalised first; a token without scores counts as zero.
    stats.add(ids_TK, torch.tensor([[0.9, 0.9], [0.0, 0.0]]))
    assert float(stats.entropy_sum) == pytest.approx(math.log(2))
    stats.add(ids_TK[:1], torch.eye(1))
    assert float(stats.entropy_sum) == pytest.approx(math.log(2))
    assert stats.num_tokens == 3


def test_sums_do_not_depend_on_the_cut() -> None:
    scores_TE = torch.rand(24, 6, generator=torch.Generator().manual_seed(0))
    ids_TK = scores_TE.topk(2).indices
    whole, parts = new_stats(), new_stats()
    whole.add(ids_TK, scores_TE)
    for rows in (slice(0, 5), slice(5, 5), slice(5, 24)):
        parts.add(ids_TK[rows], scores_TE[rows])
    assert torch.equal(whole.tokens_per_expert_E, torch.bincount(ids_TK.flatten(), minlength=6).float())
    assert torch.equal(whole.tokens_per_expert_E, parts.tokens_per_expert_E)
    torch.testing.assert_close(whole.entropy_sum, parts.entropy_sum)
    assert whole.num_tokens == parts.num_tokens == 24
    whole.reset()
    assert not whole.tokens_per_expert_E.any() and not whole.entropy_sum.any() and whole.num_tokens == 0
