"""All candidates whose bound is at most a cut-off, by exhaustive enumeration with the sides' own bounds as filters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from disagmoe.allocator.question import MAX_WORKERS, Candidate, Question
from disagmoe.allocator.tables import INFEASIBLE, Tables
from disagmoe.simulator.roofline import Recompute

LARGE = 1024
"""GPUs of a cluster on which not all layouts are listed, but those alone that waste least; see `_useful`."""


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


class _Shortlist:
    """The `size` likeliest candidates so far, and the least bound of those that are not on it."""

    def __init__(self, size: int, cutoff_s: float) -> None:
        self.size = size
        self.cutoff_s = cutoff_s
        """What is on no list has no smaller bound, as far as it has not been offered."""
        self.others_s = cutoff_s
        self.ranked: list[Ranked] = []

    def offer(self, found: Ranked) -> None:
        self.ranked.append(found)
        if len(self.ranked) >= 2 * self.size:
            self._cut()

    def _cut(self) -> None:
        self.ranked.sort()
        for dropped in self.ranked[self.size :]:
            self.others_s = min(self.others_s, dropped.bound_s)
        del self.ranked[self.size :]
        if len(self.ranked) == self.size:
            # An estimate is no less than its bound, so what has a larger bound is not likely enough.
            self.cutoff_s = min(self.cutoff_s, self.ranked[-1].estimate_s)

    def result(self) -> tuple[list[Ranked], float]:
        self._cut()
        return self.ranked, min(self.others_s, self.cutoff_s)


def likeliest(tables: Sequence[Tables], cutoff_s: float, size: int) -> tuple[list[Ranked], float]:
    """Of all candidates with a bound of at most `cutoff_s` that the runtime's rules allow, the `size` likeliest, in
    order; and what all others take at least."""
    found = _Shortlist(size, cutoff_s)
    for one in tables:
        for candidate in coarse(one):
            terms = one.terms_s(candidate)
            if terms and max(terms) <= found.cutoff_s and _has_buffers(one, candidate):
                found.offer(Ranked(one.estimate_s(candidate, terms), candidate, max(terms)))
    # They come again below: only the cut-off is kept of them.
    found._cut()
    found = _Shortlist(size, found.cutoff_s)
    for one in tables:
        if one.gpus > LARGE:
            # Others were not looked at; the caller knows a bound of all.
            found.others_s = 0.0
        for replicas in _worthwhile_replicas(one):
            for attn_workers in attn_worker_counts(one, replicas):
                _of_width(one, replicas, attn_workers, found)
    return found.result()


def _worthwhile_replicas(tables: Tables) -> list[int]:
    """On a large cluster, of the numbers that leave each replica as many GPUs the largest, and the largest that fills
    whole nodes with any layout."""
    counts = replica_counts(tables)
    if tables.gpus <= LARGE:
        return counts
    size = tables.pools[0].gpus_per_node
    kept: dict[tuple[int, bool], int] = {}
    for replicas in counts:
        for whole in {False, replicas % size == 0}:
            kept[tables.gpus // replicas, whole] = replicas
    return sorted(set(kept.values()))


def _useful(values: Iterable[int], parts: int, tables: Tables) -> list[int]:
    """On a large cluster, the numbers of groups or workers that leave the fullest fewer of `parts` than one less."""
    return [v for v in values if tables.gpus <= LARGE or v == 1 or -(-parts // v) < -(-parts // (v - 1))]


def _has_buffers(tables: Tables, c: Candidate) -> bool:
    """Whether A-workers have room for their message buffers. Else layouts without would crowd out those that fit."""
    buffers = tables.ffn_workers[c.ffn_workers].attn_buffer_bytes
    return tables.attn_depths[c.attn_depth].least_bytes + buffers <= tables.capacity[0]


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


def _of_width(tables: Tables, replicas: int, attn_workers: int, shortlist: _Shortlist) -> None:
    """Offer the candidates with so many replicas and A-workers a group."""
    question, cutoff_s = tables.question, shortlist.cutoff_s
    m = question.microbatches(attn_workers, replicas)
    if not question.covers(attn_workers, replicas, m):
        return
    samples = question.samples_of(replicas, m)
    budget = tables.gpus // replicas
    depths = [
        p
        for p in _useful(tables.attn_depths, question.num_moe + 1, tables)
        for attn in [tables.attn_depths[p]]
        if p * attn_workers < budget
        and replicas * p * attn_workers <= tables.attn_gpus
        and m * attn.most_work_s <= cutoff_s
        and attn.least_bytes <= tables.capacity[0]
    ]
    left = min(budget - min(depths) * attn_workers, tables.ffn_gpus // replicas) if depths else 0
    if m * samples * tables.ffn_gpu_seconds > cutoff_s * left:
        return
    ffn_depths = _useful(tables.ffn_depths, question.num_moe, tables)
    for workers in _useful(tables.ffn_workers, question.moe.num_experts, tables):
        ffn = tables.ffn_workers[workers]
        if workers > left:
            break
        # Fewest layers a group that the work leaves time for, so the least depth.
        layers = int(cutoff_s / (m * samples * ffn.compute_s)) if cutoff_s < INFEASIBLE else question.num_moe
        if not layers:
            continue
        shallowest = -(-question.num_moe // layers)
        for ffn_depth in ffn_depths:
            if not shallowest <= ffn_depth <= left // workers:
                continue
            if tables.ffn_layers(ffn_depth) * ffn.state_bytes > tables.capacity[1]:
                continue
            for depth in depths:
                if depth * attn_workers + ffn_depth * workers > budget:
                    break
                found = Candidate(
                    attn_depth=depth, ffn_depth=ffn_depth, attn_workers=attn_workers, ffn_workers=workers,
                    replicas=replicas, microbatches=m, recompute=tables.recompute, site=tables.site,
                )  # fmt: skip
                if not question.fills_nodes(found) or not _has_buffers(tables, found):
                    continue
                terms = tables.terms_s(found)
                if terms and max(terms) <= shortlist.cutoff_s:
                    shortlist.offer(Ranked(tables.estimate_s(found, terms), found, max(terms)))
