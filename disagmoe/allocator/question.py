"""What is asked of the allocator, and what it may answer.

Words as in `disagmoe.layout`: p_A x M attention workers, p_F x N expert workers, R replicas. A *site* says which pool
of the cluster each role lives in. All numbers a micro-batch are for one replica.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import product
from typing import Literal, NamedTuple

from disagmoe.cluster import Cluster, Pool
from disagmoe.layout import Layout
from disagmoe.shapes import MoEShape
from disagmoe.simulator.roofline import Job, Recompute

Objective = Literal["bound", "paper"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "ffn", "full")
MAX_WORKERS = 512
"""Most workers of one group that are considered."""
FREE = ("attn_depth", "ffn_depth", "attn_workers", "ffn_workers", "replicas", "microbatches", "recompute")
"""What a candidate says, and a pin may fix."""
RULES = (
    "every group holds a layer: p_F at most the MoE layers, p_A at most one more (the head's stage)",
    "every F-worker holds an expert: N at most the experts of a layer",
    "every replica and micro-batch has a sample: R x micro-batches at most the global batch",
    "sequences are not cut: an A-worker computes whole samples of a micro-batch",
    "layers go round the groups: a role's groups differ by at most one layer, its workers by one expert a layer",
    "every node starts the same number of processes: the workers of a pool fill whole nodes, or part of a single one",
)
"""Of the runtime. Nothing needs to divide: depths, workers, layers, experts, samples may be any numbers else."""


class Site(NamedTuple):
    """Pools of the A- and of the F-workers, as indices into the cluster's."""

    attn: int
    ffn: int

    @property
    def shared(self) -> bool:
        return self.attn == self.ffn


ONE_POOL = Site(0, 0)


@dataclass(frozen=True, kw_only=True)
class Pins:
    """What the user has fixed; None: free."""

    attn_depth: int | None = None
    ffn_depth: int | None = None
    attn_workers: int | None = None
    ffn_workers: int | None = None
    replicas: int | None = None
    microbatches: int | None = None
    in_flight: int | None = None
    recompute: Recompute | None = None
    schedule: str | None = None
    split_backward: bool | None = None
    rank_order: str | None = None

    def allow(self, name: str, value: object) -> bool:
        pinned = getattr(self, name)
        return pinned is None or pinned == value

    def given(self) -> dict[str, object]:
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}


@dataclass(frozen=True, order=True, kw_only=True)
class Candidate:
    """One answer, before schedule and packing."""

    attn_depth: int
    ffn_depth: int
    attn_workers: int
    ffn_workers: int
    replicas: int
    microbatches: int
    recompute: Recompute
    site: Site = ONE_POOL

    @property
    def attn_gpus(self) -> int:
        return self.replicas * self.attn_depth * self.attn_workers

    @property
    def ffn_gpus(self) -> int:
        return self.replicas * self.ffn_depth * self.ffn_workers

    def layout(self, rank_order: str) -> Layout:
        return Layout(
            attn_depth=self.attn_depth,
            ffn_depth=self.ffn_depth,
            attn_workers=self.attn_workers,
            ffn_workers=self.ffn_workers,
            replicas=self.replicas,
            rank_order=rank_order,
        )

    def __str__(self) -> str:
        times = f"{self.replicas} x " if self.replicas > 1 else ""
        inner = f"{self.attn_depth} x {self.attn_workers} A + {self.ffn_depth} x {self.ffn_workers} F"
        return f"{times}({inner})" if times else inner


POWER = 2
UNEQUAL = 1.1
"""What the generators lose where depths differ."""


KEPT = 2.0
"""Schedules keep a micro-batch's room until all of it is through, about twice as long as they must on average."""


def soft_max(terms: Sequence[float], candidate: Candidate) -> float:
    """The POWER-norm of what limits a step (compute, memory, links), times UNEQUAL where depths differ."""
    work, kept, link = terms
    unequal = candidate.attn_depth != candidate.ffn_depth
    size = work**POWER + (KEPT * kept) ** POWER + link**POWER
    return size ** (1 / POWER) * (UNEQUAL if unequal else 1.0)


@dataclass(frozen=True, kw_only=True)
class Question:
    """Model, batch and cluster (in `job`), what is free, and what is assumed."""

    job: Job
    pins: Pins = field(default_factory=Pins)
    microbatch_samples: int = 1
    """u: samples of an A-worker a micro-batch, where `pins.microbatches` does not say otherwise."""
    max_gpus: int = 0
    """Use at most so many; 0: all of the cluster."""
    reserve_bytes: float = 2 * 2**30
    """Of every GPU, for the CUDA context, NCCL, the allocator's fragmentation."""
    imbalance_factor: float = 1.0
    """Rows of a micro-batch on an F-worker over their average, for memory (see also `[comm] imbalance_factor`)."""

    def __post_init__(self) -> None:
        model = self.job.model
        if not any(model.is_moe_layer):
            raise ValueError(f"{model.name} has no mixture-of-experts layer, so there is nothing to place on F-workers")
        if len({layer.moe for layer in model.layers if layer.is_moe}) > 1:
            raise ValueError(f"{model.name}: MoE layers of different shapes can't be allocated yet")

    @property
    def moe(self) -> MoEShape:
        return next(layer.moe for layer in self.job.model.layers if layer.is_moe)

    @cached_property
    def num_moe(self) -> int:
        return sum(self.job.model.is_moe_layer)

    @property
    def recomputes(self) -> tuple[Recompute, ...]:
        return RECOMPUTE if self.pins.recompute is None else (self.pins.recompute,)

    def sites(self) -> Iterator[Site]:
        """Both roles in one pool, or one pool each. A larger cluster's pools are not spread over within a role."""
        pools = range(len(self.job.cluster.pools))
        yield from (Site(a, f) for a, f in product(pools, pools))

    def pool(self, site: Site, ffn: bool) -> Pool:
        return self.job.cluster.pools[site.ffn if ffn else site.attn]

    def gpus(self, site: Site) -> tuple[int, int, int]:
        """GPUs for A-workers, for F-workers and for both together."""
        attn, ffn = self.pool(site, False).num_gpus, self.pool(site, True).num_gpus
        total = attn if site.shared else attn + ffn
        limit = self.max_gpus or total
        return min(attn, limit), min(ffn, limit), min(total, limit)

    def fills_nodes(self, candidate: Candidate) -> bool:
        """Whether every node in use starts the same number of processes."""
        attn, ffn = candidate.attn_gpus, candidate.ffn_gpus
        if candidate.site.shared:
            return whole_nodes(attn + ffn, self.pool(candidate.site, False).gpus_per_node)
        sizes = {self.pool(candidate.site, f).gpus_per_node for f in (False, True)}
        return len(sizes) == 1 and attn % min(sizes) == 0 and ffn % min(sizes) == 0

    def microbatches(self, attn_workers: int, replicas: int) -> int:
        """As many as it takes when every A-worker has `microbatch_samples` of each."""
        if self.pins.microbatches is not None:
            return self.pins.microbatches
        share = -(-self.job.global_batch // replicas)
        return max(1, -(-share // (attn_workers * self.microbatch_samples)))

    def covers(self, attn_workers: int, replicas: int, microbatches: int) -> bool:
        """Whether so many micro-batches of u samples a worker take a replica's share of the batch; one less, not; and
        some worker has u."""
        samples = self.samples_of(replicas, microbatches)
        share = -(-self.job.global_batch // replicas)
        most = attn_workers * self.microbatch_samples
        return most - attn_workers < samples <= most and (microbatches - 1) * most < share

    def allows(self, c: Candidate) -> bool:
        """Whether a layout is within the cluster, the pins and the runtime's rules; memory is another question."""
        attn, ffn, total = self.gpus(c.site)
        return (
            c.attn_gpus <= attn
            and c.ffn_gpus <= ffn
            and c.attn_gpus + c.ffn_gpus <= total
            and c.attn_depth <= self.num_moe + 1
            and c.ffn_depth <= self.num_moe
            and c.ffn_workers <= self.moe.num_experts
            and c.replicas * c.microbatches <= self.job.global_batch
            and all(self.pins.allow(name, getattr(c, name)) for name in FREE)
            and self.covers(c.attn_workers, c.replicas, c.microbatches)
            and self.fills_nodes(c)
        )

    def samples(self, candidate: Candidate) -> int:
        """Of the largest micro-batch."""
        return self.samples_of(candidate.replicas, candidate.microbatches)

    def samples_of(self, replicas: int, microbatches: int) -> int:
        share = -(-self.job.global_batch // replicas)
        return -(-share // microbatches)

    def cluster_for(self, candidate: Candidate) -> Cluster:
        """The nodes that a candidate uses, in rank order."""
        site, cluster = candidate.site, self.job.cluster
        if site.shared:
            pool = cluster.pools[site.attn]
            return replace(cluster, pools=(_part(pool, candidate.attn_gpus + candidate.ffn_gpus),))
        attn, ffn = cluster.pools[site.attn], cluster.pools[site.ffn]
        return replace(cluster, pools=(_part(attn, candidate.attn_gpus), _part(ffn, candidate.ffn_gpus)))

    def job_for(self, candidate: Candidate) -> Job:
        """With the candidate's recomputation and nodes, and every micro-batch as large as the largest."""
        batch = self.samples(candidate) * candidate.microbatches * candidate.replicas
        return replace(self.job, recompute=candidate.recompute, cluster=self.cluster_for(candidate), global_batch=batch)

    def rank_orders(self, candidate: Candidate) -> tuple[str, ...]:
        """Packings into nodes that are worth trying."""
        if not candidate.site.shared:
            return ("apart",)
        orders: tuple[str, ...] = ("paired", "mixed")
        if candidate.attn_depth > 1 or candidate.ffn_depth > 1 or candidate.replicas > 1:
            orders += ("apart",)
        if self.pins.rank_order is not None:
            orders = (self.pins.rank_order,)
        return orders


def whole_nodes(workers: int, gpus_per_node: int) -> bool:
    """Whether workers fill whole nodes, or part of one node."""
    return workers <= gpus_per_node or workers % gpus_per_node == 0


def _part(pool: Pool, gpus: int) -> Pool:
    """As many of its nodes as `gpus` workers take."""
    return replace(pool, nodes=max(1, -(-gpus // pool.gpus_per_node)))
