"""The paper's own objective (section 3.3), for comparison.

Phase 1: T_a = max(C_a / (M P), V / (M_nic B)), T_f = max(C_f / (N P), V / (N_nic B)), minimise max(T_a, T_f) over the
split of GPUs and NICs; C: forward FLOPs of a layer, V: bytes between the pools. Phase 2: of equals the highest MFU
(C_a + C_f) / (T W P). One depth p for both roles, forward only, groups of any size taken as ideal.

What it leaves open is decided in its favour: V with the rows that really travel (once a worker), efficiencies as in
our model. Of recomputation it knows nothing: its first choice of each policy is simulated. Of depth and replicas it
sees only the product: of equals, up to MOST_TRIED are simulated, shallow ones first. Of all these the fastest counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from disagmoe.allocator.candidates import all_tables, attn_worker_counts, replica_counts
from disagmoe.allocator.evaluate import SCHEDULES, Outcome, make_placed, simulate_placed
from disagmoe.allocator.question import RECOMPUTE, Candidate, Question
from disagmoe.allocator.tables import Tables
from disagmoe.simulator.engine import no_garbage_collection

MOST_TRIED = 5


class PaperChoice(NamedTuple):
    """A candidate by the formula; ordered as its two phases order, then by depth and replicas."""

    period_s: float
    """max(T_a, T_f) a layer and sample, over all GPUs."""
    minus_mfu: float
    recompute: int
    depth: int
    replicas: int
    candidate: Candidate
    nics: tuple[int, int]


def paper_choices(question: Question) -> Iterator[PaperChoice]:
    """All layouts that fit, by the formula."""
    for tables in all_tables(question):
        if not tables.site.shared:
            continue
        for replicas in replica_counts(tables):
            for attn_workers in attn_worker_counts(tables, replicas):
                yield from _of_width(tables, replicas, attn_workers)


def _of_width(tables: Tables, replicas: int, attn_workers: int) -> Iterator[PaperChoice]:
    question = tables.question
    m = question.microbatches(attn_workers, replicas)
    for depth in tables.attn_depths:
        if depth > question.num_moe or not question.pins.allow("ffn_depth", depth):
            continue
        for workers, ffn in tables.ffn_workers.items():
            if replicas * depth * (attn_workers + workers) > tables.gpus:
                break
            c = Candidate(
                attn_depth=depth, ffn_depth=depth, attn_workers=attn_workers, ffn_workers=workers, replicas=replicas,
                microbatches=m, recompute=tables.recompute, site=tables.site,
            )  # fmt: skip
            if not question.fills_nodes(c) or not tables.fits(c):
                continue
            # Forward seconds of a layer and a sample, spread over the pool's workers.
            pipelines = replicas * depth
            attn_s = tables.mean_attn_forward_s / (attn_workers * pipelines)
            ffn_s = tables.ffn_ideal_forward_s / (workers * pipelines)
            for nics in _nic_splits(tables):
                share = _share(nics, attn_workers, workers)
                link = (ffn.attn_link_s / 2 / (attn_workers * pipelines * share[0]),
                        ffn.attn_link_s / 2 / (workers * pipelines * share[1]))  # fmt: skip
                period = max(attn_s, ffn_s, *link)
                mfu = (attn_s * attn_workers + ffn_s * workers) / (period * (attn_workers + workers))
                used = (attn_workers + workers) * pipelines / tables.gpus
                yield PaperChoice(
                    round(period, 12),
                    -round(mfu * used, 9),
                    RECOMPUTE.index(tables.recompute),
                    depth,
                    replicas,
                    c,
                    nics,
                )


def _nic_splits(tables: Tables) -> list[tuple[int, int]]:
    nics = tables.pools[0].nics
    return [(n, nics.per_node - n) for n in range(1, nics.per_node)] if nics.pooled and nics.per_node > 1 else [(0, 0)]


def _share(nics: tuple[int, int], attn: int, ffn: int) -> tuple[float, float]:
    if not any(nics):
        return 1.0, 1.0
    width = attn + ffn
    return nics[0] / sum(nics) * width / attn, nics[1] / sum(nics) * width / ffn


def allocate_paper(question: Question) -> Outcome | None:
    """The fastest of the formula's equal first choices, simulated; None where there is none."""
    with no_garbage_collection():
        return _allocate_paper(question)


def _allocate_paper(question: Question) -> Outcome | None:
    schedules = [name for name in SCHEDULES if question.pins.allow("schedule", name)]
    by_policy: dict[int, list[PaperChoice]] = {}
    for choice in paper_choices(question):
        by_policy.setdefault(choice.recompute, []).append(choice)
    best: Outcome | None = None
    # Most recomputation first: steps with many micro-batches in flight rule out most others by their bounds.
    for _, choices in sorted(by_policy.items(), reverse=True):
        best = _fastest_of_equals(question, sorted(choices), schedules, best)
    return best


def _fastest_of_equals(
    question: Question, choices: list[PaperChoice], schedules: list[str], best: Outcome | None
) -> Outcome | None:
    """The fastest of `best` and of those that the formula finds as good as the first one that can be simulated."""
    first: PaperChoice | None = None
    tried = 0
    for choice in choices:
        if first is not None and (choice[:2] != first[:2] or tried >= MOST_TRIED):
            break
        pooled = any(choice.nics)
        order = question.pins.rank_order or ("mixed" if pooled else "paired")
        placed = make_placed(question, choice.candidate, order, choice.nics if pooled else (0, 0))
        if not placed.fits:
            continue
        first, tried = first or choice, tried + 1
        if best is None or placed.bound_s < best.step_s:
            outcome = simulate_placed(placed, schedules)
            best = outcome if best is None or (outcome and outcome.step_s < best.step_s) else best
    return best
