"""The allocator against exhaustive enumeration: the solver's bound, and the simulated step."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from disagmoe.allocator.candidates import all_tables
from disagmoe.allocator.milp import solve
from disagmoe.allocator.paper import allocate_paper
from disagmoe.allocator.question import Question
from disagmoe.allocator.search import NothingFits, allocate
from tests.unit.allocator.problems import all_candidates, every_outcome, questions

SETTINGS = {"deadline": None, "derandomize": True, "suppress_health_check": [HealthCheck.too_slow]}


@settings(max_examples=30, **SETTINGS)
@given(question=questions())
def test_the_solver_finds_the_least_bound(question: Question) -> None:
    tables = {(t.recompute, t.site): t for t in all_tables(question)}
    bounds = [tables[c.recompute, c.site].bound_s(c) for c in all_candidates(question)]
    solution = solve(question)
    if min(bounds) == float("inf"):
        assert solution.status == "infeasible"
        return
    assert solution.status == "optimal" and solution.candidate is not None
    assert solution.step_s == pytest.approx(min(bounds), rel=1e-3)


def check_against_everything(question: Question) -> None:
    outcomes = list(every_outcome(question))
    try:
        answer = allocate(question)
    except NothingFits:
        assert not outcomes
        return
    best = min(o.step_s for o in outcomes)
    assert answer.best.step_s <= 1.01 * best
    assert best >= answer.least_s * (1 - 1e-9) or answer.best.step_s <= best * (1 + 1e-9)
    paper = allocate_paper(question)
    assert paper is None or answer.best.step_s <= paper.step_s * (1 + 1e-9)
    for outcome in answer.outcomes:
        assert outcome.step_s >= outcome.placed.bound_s * (1 - 1e-9)
        assert max(outcome.memory_bytes) <= question.job.cluster.pools[0].gpu.memory_bytes


@settings(max_examples=8, **SETTINGS)
@given(question=questions())
def test_within_a_hundredth_of_the_best_of_all_layouts(question: Question) -> None:
    check_against_everything(question)
