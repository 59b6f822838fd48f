"""What must get better or move one way when one thing changes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from disagmoe.allocator.milp import solve
from disagmoe.allocator.question import Pins
from disagmoe.allocator.search import Answer, allocate
from tests.unit.allocator.problems import make_question

BASE: dict[str, Any] = {"layers": 2, "experts": 8, "batch": 8, "nodes": 8, "gpus_per_node": 1, "vocab": 64}
ONE_PAIR = Pins(attn_depth=1, ffn_depth=1, replicas=1, recompute="none", split_backward=False)
HEAVY: dict[str, Any] = {"expert_dim": 1024, "nic_bytes_per_s": 1e12}
ANOMALY = 1.01
"""List scheduling has anomalies: the simulated step may be longer by this."""


def attn_workers(answer: Answer) -> int:
    return answer.best.placed.candidate.attn_workers


def test_longer_sequences_never_move_workers_to_experts() -> None:
    chosen = [
        attn_workers(allocate(make_question(**BASE, **HEAVY, seq_len=length, pins=ONE_PAIR)))
        for length in (256, 1024, 4096, 16384)
    ]
    assert chosen == sorted(chosen) and chosen[0] < chosen[-1]


def test_more_experts_a_token_never_move_workers_to_attention() -> None:
    chosen = [
        attn_workers(allocate(make_question(**BASE, top_k=k, nic_bytes_per_s=1e12, pins=ONE_PAIR)))
        for k in (1, 2, 4, 8)
    ]
    assert chosen == sorted(chosen, reverse=True) and chosen[0] > chosen[-1]


@pytest.mark.parametrize("pooled", [False, True])
def test_faster_nics_never_make_it_slower(pooled: bool) -> None:
    questions = [
        make_question(**{**BASE, "nodes": 2, "gpus_per_node": 3}, nic_bytes_per_s=rate, pooled=pooled)
        for rate in (1e9, 2e9, 4e9, 1e10, 1e11)
    ]
    bounds = [solve(q).step_s for q in questions]
    steps = [allocate(q).best.step_s for q in questions]
    assert all(later <= earlier * (1 + 1e-3) for earlier, later in pairwise(bounds))
    assert all(later <= earlier * ANOMALY for earlier, later in pairwise(steps))


def test_a_doubled_cluster_never_makes_it_slower() -> None:
    bounds, steps = [], []
    for nodes in (2, 4, 8):
        question = make_question(**{**BASE, "nodes": nodes})
        bounds.append(solve(question).step_s)
        steps.append(allocate(question).best.step_s)
    assert all(later <= earlier * (1 + 1e-3) for earlier, later in pairwise(bounds))
    assert all(later <= earlier * ANOMALY for earlier, later in pairwise(steps))


def test_pools_of_several_gpu_types_are_used_for_what_they_are_good_at() -> None:
    """Experts on the faster pool where they are most of the work; and an answer on both is no slower than on one."""
    question = make_question(**BASE, expert_dim=1024, nic_bytes_per_s=1e12)
    fast = question.job.cluster.pools[0]
    slow = replace(fast, name="slow", gpu=replace(fast.gpu, name="s", peak_flops_per_s={"bfloat16": 4e12}))
    both = replace(question.job.cluster, pools=(replace(fast, nodes=4), replace(slow, nodes=4)))
    alone = replace(question.job.cluster, pools=(replace(fast, nodes=4),))
    mixed = allocate(replace(question, job=replace(question.job, cluster=both)))
    single = allocate(replace(question, job=replace(question.job, cluster=alone)))
    assert mixed.best.step_s <= single.best.step_s * ANOMALY
    candidate = mixed.best.placed.candidate
    assert candidate.site.ffn == 0
    if not candidate.site.shared:
        assert mixed.best.placed.rank_order == "apart" and candidate.site.attn == 1
