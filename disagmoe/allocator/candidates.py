"""All candidates whose bound is at most a cut-off, by exhaustive enumeration with the sides' own bounds as filters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from disagmoe.allocator.question import MAX_WORKERS, Candidate, Question
from disagmoe.allocator.tables import Tables
from disagmoe.simulator.roofline import Recompute


@dataclass(frozen=True, order=True)
class Ranked:
    """A candidate in the order in which candidates are tried."""

    estimate_s: float
    candidate: Candidate
    bound_s: float
    """What its step takes at least."""


def all_tables(question: Question) -> list[Tables]:
    """By recomputation policy and site."""
    recomputes: tuple[Recompute, ...] = question.recomputes
    return [Tables(question, recompute, site) for site in question.sites() for recompute in recomputes]


def replica_counts(tables: Tables) -> list[int]:
    """Values of R: each replica has two workers at least, and a sample."""
    question = tables.question
    most = min(tables.gpus // 2, question.job.global_batch, tables.attn_gpus, tables.ffn_gpus)
    if question.pins.microbatches is not None:
        most = min(most, question.job.global_batch // question.pins.microbatches)
    return [r for r in range(1, most + 1) if question.pins.allow("replicas", r)]


def attn_worker_counts(tables: Tables, replicas: int) -> list[int]:
    """Values of M: more than a replica's samples a step would stay idle."""
    question = tables.question
    share = -(-question.job.global_batch // replicas)
    most = min(tables.attn_gpus // replicas, MAX_WORKERS, share)
    return [m for m in range(1, most + 1) if question.pins.allow("attn_workers", m)]


def within(tables: Tables, cutoff_s: float) -> Iterator[Ranked]:
    """Candidates with a bound of at most `cutoff_s` that the runtime's rules allow."""
    for replicas in replica_counts(tables):
        for attn_workers in attn_worker_counts(tables, replicas):
            yield from _of_width(tables, replicas, attn_workers, cutoff_s)


def coarse(tables: Tables) -> Iterator[Candidate]:
    """A few hundred layouts over the whole range."""
    question = tables.question
    for replicas in _some(replica_counts(tables)):
        for attn_workers in _some(attn_worker_counts(tables, replicas)):
            m = question.microbatches(attn_workers, replicas)
            for depth in _some(list(tables.attn_depths)):
                left = tables.gpus // replicas - depth * attn_workers
                for workers in _some(list(tables.ffn_workers)):
                    found = Candidate(
                        attn_depth=depth, ffn_depth=max(1, min(question.num_moe, left // workers)),
                        attn_workers=attn_workers, ffn_workers=workers, replicas=replicas, microbatches=m,
                        recompute=tables.recompute, site=tables.site,
                    )  # fmt: skip
                    if question.allows(found):
                        yield found


def _some(values: list[int]) -> list[int]:
    """Values about a factor of two apart, and what they say for whole nodes."""
    return [v for v in values if v & (v - 1) == 0 or v in (3, 6, 12, 24, 48, 96)]


def _of_width(tables: Tables, replicas: int, attn_workers: int, cutoff_s: float) -> Iterator[Ranked]:
    question = tables.question
    m = question.microbatches(attn_workers, replicas)
    if not question.covers(attn_workers, replicas, m):
        return
    samples = question.samples_of(replicas, m)
    budget = tables.gpus // replicas
    depths = [
        p
        for p, attn in tables.attn_depths.items()
        if p * attn_workers < budget
        and replicas * p * attn_workers <= tables.attn_gpus
        and m * max(seconds for seconds, _ in attn.work) <= cutoff_s
        and attn.least_bytes <= tables.capacity[0]
    ]
    if not depths:
        return
    left = budget - min(depths) * attn_workers
    for workers, ffn in tables.ffn_workers.items():
        if workers > left or replicas * workers > tables.ffn_gpus:
            break
        for ffn_depth in range(1, min(question.num_moe, left // workers, tables.ffn_gpus // (replicas * workers)) + 1):
            if not question.pins.allow("ffn_depth", ffn_depth):
                continue
            layers = tables.ffn_layers(ffn_depth)
            work_s, state = m * layers * samples * ffn.compute_s, layers * ffn.state_bytes
            if work_s > cutoff_s or state > tables.capacity[1]:
                continue
            # Else layouts without room for the A-workers' buffers would crowd out those that fit.
            room = tables.capacity[0] - ffn.attn_buffer_bytes
            for depth in depths:
                if depth * attn_workers + ffn_depth * workers > budget:
                    break
                if tables.attn_depths[depth].least_bytes > room:
                    continue
                found = Candidate(
                    attn_depth=depth, ffn_depth=ffn_depth, attn_workers=attn_workers, ffn_workers=workers,
                    replicas=replicas, microbatches=m, recompute=tables.recompute, site=tables.site,
                )  # fmt: skip
                if question.fills_nodes(found) and (terms := tables.terms_s(found)) and max(terms) <= cutoff_s:
                    yield Ranked(tables.estimate_s(found, terms), found, max(terms))
