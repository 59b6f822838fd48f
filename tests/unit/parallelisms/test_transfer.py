"""Any routing, through plan, wire and combination, gives what a dense layer gives; unwritten bytes are NaN."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tests.unit.parallelisms.local_transfer import Problem


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    """torch's stages ask for one; nothing is ever sent through it."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def problem_of(slices: list[list[int]], ids: list[list[int]], num_experts: int, num_ffn_workers: int) -> Problem:
    top_k = len(ids[0]) if ids else 1
    return Problem(
        slices=slices,
        expert_ids_SK=torch.tensor(ids, dtype=torch.int64).view(-1, top_k),
        num_experts=num_experts,
        num_ffn_workers=num_ffn_workers,
    )


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    num_attn, num_ffn = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    num_experts = draw(st.integers(num_ffn, 9))
    # Some experts may be out of the question, so that workers get nothing.
    popular = sorted(draw(st.sets(st.integers(0, num_experts - 1), min_size=1)))
    top_k = draw(st.integers(1, min(len(popular), 4)))
    sizes = st.lists(st.integers(0, 6), min_size=num_attn, max_size=num_attn)
    slices = draw(st.lists(sizes, min_size=1, max_size=3))
    choice = st.permutations(popular).map(lambda order: order[:top_k])
    total = sum(map(sum, slices))
    ids = draw(st.lists(choice, min_size=total, max_size=total))
    return problem_of(slices, ids, num_experts, num_ffn)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problem=problems())
@example(problem=problem_of([[0, 0]], [], 4, 2))
@example(problem=problem_of([[3, 0], [0, 2]], [[3, 1]] * 5, 5, 4))
def test_transfer_equals_a_dense_layer(problem: Problem) -> None:
    expected, result = problem.dense(), problem.transferred()
    for name, value in expected.items():
        assert torch.isfinite(result[name]).all(), name
        torch.testing.assert_close(result[name], value, rtol=1e-4, atol=1e-5, msg=f"{name} differs")


def test_statistics_count_rows_and_tokens() -> None:
    """Two tokens on experts {0, 1} (one worker) and {0, 3} (both): three rows."""
    from tests.unit.parallelisms.local_transfer import _build

    stages = _build(problem_of([[2]], [[0, 1], [3, 0]], 4, 2))
    stages.first[0].forward(0)
    stages.first[0].send_forward(0)
    stats = stages.first[0].stats
    assert stats is not None
    assert (stats.num_tokens, stats.num_rows) == (2, 3)
    assert stats.tokens_per_expert_E.tolist() == [2, 1, 0, 1]
    assert float(stats.entropy_sum) == pytest.approx(2 * torch.log(torch.tensor(4.0)))
