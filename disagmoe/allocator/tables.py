"""The simulator's cost records as tables over depths and workers, and the bound of a step that follows from them.

No step of a layout can be shorter, whatever its schedule, than each of (all times of the fullest group or worker):

    fill + m W_A(p_A)            compute of an A-group: m micro-batches, all its stages, forward and backward
    fill + m l_F(p_F) M F(N)     compute of an F-group: l_F layers, F(N) a layer and a sample of each A-worker
    chain                        one micro-batch through all stages and back
    m l_A(p_A) V_A(N) q          an A-worker's NIC, the busier direction: V_A a layer; q: share that leaves the node
    m l_F(p_F) S V_F(N) q        an F-worker's NIC
    m life / K                   memory has room for K micro-batches in all stages of a group; each stays for `life` on
                                 average over these stages, from there to the end of the chain and back

`fill` is the time before a group's first input can be there and after its last gradient has left; where backwards may
be split only the way there counts, as weight gradients can be computed meanwhile (transfers are left out here). The
first two terms are the paper's T_a and T_f with the backward counted, the next two its V / (NICs B).  With NICs that
both roles of a node may share in any proportion, the two NIC terms become one: all bytes of a node over all its NICs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import inf
from typing import TypeVar

from disagmoe.allocator.memory import (
    attn_buffer_bytes,
    ffn_buffer_bytes,
    ffn_kept_bytes,
    ffn_passing_bytes,
    stage_kept_bytes,
    stage_passing_bytes,
)
from disagmoe.allocator.question import MAX_WORKERS, Candidate, Question, Site, soft_max
from disagmoe.layout import Layout, Role, build_stages, split_evenly
from disagmoe.simulator.roofline import BYTES, AFRoofline, Compute, Recompute, Seconds
from disagmoe.simulator.routing import PAIR_BYTES, TOKEN_BYTES, hit_probability

INFEASIBLE = inf
T = TypeVar("T", int, float)


@dataclass(frozen=True, kw_only=True)
class AttnDepth:
    """A-groups of one depth, all a micro-batch of u samples a worker. Of pairs, those that no other exceeds in both."""

    work: tuple[tuple[float, int], ...]
    """By group that may be the last: seconds of compute; A-F pairs of stages before its first."""
    most_work_s: float
    """Of the fullest group: the largest of `work`."""
    half_layers: int
    """Messages one way that the busiest group's NICs see, two a MoE layer."""
    least_bytes: float
    """Of the fullest group with one micro-batch in flight."""
    life: tuple[tuple[float, float], ...]
    """By group that memory may limit: seconds for which a micro-batch is kept, and how often it adds an F-stage's time,
    both over the micro-batches that there is room for."""


@dataclass(frozen=True, kw_only=True)
class FfnDepth:
    """F-groups of one depth."""

    layers: int
    """l_F: of the fullest group."""
    ahead: int
    """A-F pairs of stages before its first."""
    life: tuple[float, float]
    """Seconds, and times an F-stage's, for which group 0 keeps a micro-batch, on average over its layers."""


@dataclass(frozen=True, kw_only=True)
class FfnWorkers:
    """F-groups of one number of workers, a layer and a sample."""

    compute_s: float
    """Forward and backward of the worker with most experts."""
    through_s: float
    """Of these, until its output and its gradient are there: where backwards may be split, without weight gradients."""
    ahead_s: float
    """What a later group waits for: where backwards may be split, the forward."""
    attn_link_s: float
    """Of an A-worker's NIC for one of its own samples, if no row stays in the node."""
    attn_leave_s: float
    """The same if some do, and the fullest F-workers are beside it."""
    ffn_leave_s: float
    """Of an F-worker's NIC, for a sample of any A-worker; where some stay in the node, of the lightest F-worker."""
    state_bytes: float
    """Of a layer."""
    kept_bytes: float
    """Of a layer and a sample in flight."""
    passing_bytes: float
    """Of a sample, in one layer at a time: what passes, and buffers."""
    attn_buffer_bytes: float
    """Message buffers of an A-worker before so many F-workers."""
    matrix_bytes: float
    """What passes whatever the number of samples, in one layer at a time."""


def _front(pairs: Iterable[tuple[float, T]]) -> tuple[tuple[float, T], ...]:
    """Pairs that no other one exceeds in both."""
    distinct = sorted(set(pairs))
    return tuple(p for p in distinct if not any(o != p and o[0] >= p[0] and o[1] >= p[1] for o in distinct))


class Tables:
    """For one recomputation policy and one site."""

    def __init__(self, question: Question, recompute: Recompute, site: Site) -> None:
        self.question, self.recompute, self.site = question, recompute, site
        self.samples = question.microbatch_samples
        candidate = Candidate(attn_depth=1, ffn_depth=1, attn_workers=1, ffn_workers=1, replicas=1, microbatches=1,
                              recompute=recompute, site=site)  # fmt: skip
        self.job = question.job_for(candidate)
        self.pools = question.pool(site, False), question.pool(site, True)
        self.attn_gpus, self.ffn_gpus, self.gpus = question.gpus(site)
        self.capacity = tuple(pool.gpu.memory_bytes - question.reserve_bytes for pool in self.pools)

    # -- the model on the A side -----------------------------------------------------------------------------------

    @cached_property
    def attn_stages(self) -> list[tuple[Seconds, float, float, float]]:
        """By A-stage: compute of u samples, parameters, bytes kept a micro-batch, bytes on top while it computes."""
        layout = Layout(attn_depth=1, ffn_depth=1, attn_workers=1, ffn_workers=1)
        job, stages = self.job, build_stages(layout, self.job.model.is_moe_layer)
        roofline = AFRoofline(job=job, layout=layout, microbatch_samples=self.samples)
        costs = roofline.costs()
        found = []
        for stage in (s for s in stages if s.role is Role.ATTN):
            seconds = Seconds(
                costs.forward_s[stage.index], costs.backward_input_s[stage.index], costs.backward_weight_s[stage.index]
            )
            kept = stage_kept_bytes(job, stage, self.samples)
            passing = stage_passing_bytes(job, stage, self.samples)
            found.append((seconds, float(roofline.attention_params(stage)), kept, passing))
        return found

    @cached_property
    def attn_depths(self) -> dict[int, AttnDepth]:
        """By p_A."""
        most = min(self.question.num_moe + 1, max(self.attn_gpus, 1))
        return {p: self._attn_depth(p) for p in range(1, most + 1) if self.question.pins.allow("attn_depth", p)}

    def _attn_depth(self, depth: int) -> AttnDepth:
        num_moe = self.question.num_moe
        work, fixed, kept = [0.0] * depth, [0.0] * depth, [0.0] * depth
        most_passing, life = [0.0] * depth, [(0.0, 0.0)] * depth
        for ordinal, (seconds, params, keeps, passing) in enumerate(self.attn_stages):
            group = ordinal % depth
            work[group] += sum(seconds)
            fixed[group] += params * self.bytes_a_param
            kept[group] += keeps
            most_passing[group] = max(most_passing[group], passing)
            area = life[group]
            life[group] = area[0] + keeps * self.attn_after_s[ordinal], area[1] + keeps * (num_moe - ordinal)
        held = [a + b for a, b in zip(fixed, most_passing, strict=True)]
        room = [max(self.capacity[0] - bytes_, 1.0) for bytes_ in held]
        return AttnDepth(
            work=_front(zip(work, range(depth), strict=True)),
            most_work_s=max(work),
            # The first stage gets no combine, the head's sends no dispatch.
            half_layers=2 * -(-num_moe // depth) - (depth > 1 and num_moe % depth == 1),
            least_bytes=max(a + b for a, b in zip(held, kept, strict=True)),
            life=_front((area[0] / free, area[1] / free) for area, free in zip(life, room, strict=True)),
        )

    @cached_property
    def may_split(self) -> bool:
        """Whether weight gradients may come later than the gradients that others wait for."""
        return self.question.pins.split_backward is not False

    def through_s(self, seconds: Seconds) -> float:
        """Of a stage's time, what the chain waits for."""
        return seconds.forward + seconds.backward_input + (0.0 if self.may_split else seconds.backward_weight)

    def ahead_s(self, seconds: Seconds) -> float:
        """Of a stage's time, what a later group can't compute in."""
        return seconds.forward if self.may_split else sum(seconds)

    @cached_property
    def attn_after_s(self) -> list[float]:
        """By A-stage: one micro-batch through this and all later A-stages, and back."""
        return list(accumulate(self.through_s(seconds) for seconds, *_ in reversed(self.attn_stages)))[::-1]

    @property
    def bytes_a_param(self) -> float:
        """Least: with the optimizer's states spread over all holders where they are sharded."""
        job = self.job
        return job.param_bytes + job.grad_bytes + (0 if job.shard_optimizer else job.optimizer_bytes)

    @cached_property
    def attn_ahead_s(self) -> float:
        """What a later group waits for at the cheapest of the A-stages before it."""
        return min(self.ahead_s(seconds) for seconds, *_ in self.attn_stages[:-1])

    @property
    def chain_attn_s(self) -> float:
        """One micro-batch through all A-stages and back."""
        return self.attn_after_s[0]

    @cached_property
    def mean_attn_forward_s(self) -> float:
        """Forward of a MoE layer's attention a sample, on average."""
        layers = self.attn_stages[:-1]
        return sum(seconds.forward for seconds, *_ in layers) / len(layers) / self.samples

    @cached_property
    def ffn_gpu_seconds(self) -> float:
        """Of a sample in all layers, on as many F-workers as make it least."""
        return self.question.num_moe * min((n * t.compute_s for n, t in self.ffn_workers.items()), default=0.0)

    @cached_property
    def ffn_ideal_forward_s(self) -> float:
        """Forward of a layer's experts a sample, on one worker that holds all."""
        layer = next(layer for layer in self.job.model.layers if layer.is_moe)
        return Compute(job=self.job, pool=self.pools[1]).experts(layer, self.job.seq_len, 1).forward

    # -- the model on the F side -----------------------------------------------------------------------------------

    @cached_property
    def ffn_workers(self) -> dict[int, FfnWorkers]:
        """By N."""
        most = min(self.question.moe.num_experts, self.ffn_gpus, MAX_WORKERS)
        return {n: self._ffn_workers(n) for n in range(1, most + 1) if self.question.pins.allow("ffn_workers", n)}

    def _ffn_workers(self, workers: int) -> FfnWorkers:
        job, moe, model = self.job, self.question.moe, self.job.model
        layer = next(layer for layer in model.layers if layer.is_moe)
        seconds = Compute(job=job, pool=self.pools[1]).experts(layer, job.seq_len, workers)
        seconds = seconds if self.recompute == "none" else seconds.recomputed()
        held = [len(r) for r in split_evenly(moe.num_experts, workers)]
        attn_rows, ffn_rows = self._rows(held)
        rate = min(p.nic_bytes_per_s_per_gpu * p.efficiency.nic * p.efficiency.m2n for p in self.pools)

        def link_s(rows: float, experts: float) -> float:
            row, pairs = 2 * model.row_bytes(BYTES[job.dtype]) + TOKEN_BYTES, moe.top_k * experts / moe.num_experts
            return job.seq_len * (rows * row + pairs * PAIR_BYTES["dispatch"]) / rate

        whole_s = link_s(attn_rows, moe.num_experts)
        leave = whole_s, link_s(ffn_rows, held[0])
        if self.site.shared:
            lightest = link_s(self._least_rows(workers, held[-1]), held[-1])
            leave = workers * lightest, lightest
        imbalance = self.question.imbalance_factor
        matrix = ffn_passing_bytes(job, layer, 0, workers, imbalance)
        passing = ffn_passing_bytes(job, layer, job.seq_len, workers, imbalance) - matrix
        params = held[0] * moe.expert_params(model.dim) + layer.expert_sublayer_params(model.dim, 0)
        return FfnWorkers(
            compute_s=sum(seconds),
            through_s=self.through_s(seconds),
            ahead_s=self.ahead_s(seconds),
            attn_link_s=whole_s,
            attn_leave_s=leave[0],
            ffn_leave_s=leave[1],
            state_bytes=params * self.bytes_a_param,
            kept_bytes=ffn_kept_bytes(job, layer, job.seq_len, workers, imbalance),
            passing_bytes=passing + ffn_buffer_bytes(job, layer, job.seq_len, workers, imbalance),
            attn_buffer_bytes=attn_buffer_bytes(job, self.samples, workers),
            matrix_bytes=matrix,
        )

    def _rows(self, held: list[int]) -> tuple[float, float]:
        """Rows a token that an A-worker sends, and that the fullest F-worker gets; a node holds as much of the group
        as it can, which makes rows that travel once a node fewest."""
        moe, kind = self.question.moe, self.job.technology.rows_m2n
        if kind == "copy":
            return float(moe.top_k), moe.top_k * held[0] / moe.num_experts
        if kind == "worker":
            hits = [hit_probability(moe.num_experts, moe.top_k, e) for e in held]
            return sum(hits), hits[0]
        size = self.pools[1].gpus_per_node
        nodes = [held[i : i + size] for i in range(0, len(held), size)]
        hits = [hit_probability(moe.num_experts, moe.top_k, sum(node)) for node in nodes]
        return sum(hits), min(hit / len(node) for hit, node in zip(hits, nodes, strict=True))

    def _least_rows(self, workers: int, experts: int) -> float:
        """Rows a token that a worker with so many experts gets at least, of those that leave a node."""
        moe, kind = self.question.moe, self.job.technology.rows_m2n
        if kind == "copy":
            return moe.top_k * experts / moe.num_experts
        beside = min(workers, self.pools[1].gpus_per_node) if kind == "node" else 1
        return hit_probability(moe.num_experts, moe.top_k, beside * experts) / beside

    @cached_property
    def ffn_depths(self) -> dict[int, FfnDepth]:
        """By p_F."""
        most = min(self.question.num_moe, max(self.ffn_gpus, 1))
        return {p: self._ffn_depth(p) for p in range(1, most + 1) if self.question.pins.allow("ffn_depth", p)}

    def _ffn_depth(self, depth: int) -> FfnDepth:
        count = self.question.num_moe
        own = range(0, count, depth)
        return FfnDepth(
            layers=len(own),
            ahead=(count - 1) % depth,
            life=(sum(self.attn_after_s[i + 1] for i in own) / len(own), sum(count - i for i in own) / len(own)),
        )

    # -- the bound -------------------------------------------------------------------------------------------------

    def leaving(self, c: Candidate) -> float:
        """q: least share of the bytes that leave a node: none of a replica that fits into one. Else, of a worker's
        partners a node holds as many as it has room for when both roles are spread over their nodes alike."""
        if not self.site.shared:
            return 1.0
        size = self.pools[0].gpus_per_node
        if c.attn_depth * c.attn_workers + c.ffn_depth * c.ffn_workers <= size:
            return 0.0
        return max(0.0, 1 - size / (c.attn_workers + c.ffn_workers))

    def ffn_room(self, c: Candidate) -> float:
        """K of an F-group: micro-batches that memory has room for, if each is kept in all stages of the group."""
        samples = self.question.samples(c)
        ffn, layers = self.ffn_workers[c.ffn_workers], self.ffn_layers(c.ffn_depth)
        free = self.capacity[1] - layers * ffn.state_bytes - ffn.matrix_bytes - samples * ffn.passing_bytes
        return free / (layers * samples * ffn.kept_bytes)

    def fits(self, c: Candidate) -> bool:
        """Whether memory has room for a micro-batch."""
        return self.ffn_room(c) >= 1 and self.attn_depths[c.attn_depth].least_bytes <= self.capacity[0]

    def ffn_layers(self, depth: int) -> int:
        """l_F: layers of the fullest F-group."""
        return -(-self.question.num_moe // depth)

    def bound_s(self, c: Candidate) -> float:
        """The largest of the terms above; infinite where memory has no room for a micro-batch."""
        terms = self.terms_s(c)
        return max(terms) if terms else INFEASIBLE

    def terms_s(self, c: Candidate) -> list[float]:
        """Compute, memory, links; empty where memory has no room for a micro-batch."""
        if not self.fits(c):
            return []
        attn, ffn = self.attn_depths[c.attn_depth], self.ffn_workers[c.ffn_workers]
        depth, m, samples = self.ffn_depths[c.ffn_depth], c.microbatches, self.question.samples(c)
        pair_s = self.attn_ahead_s + samples * ffn.ahead_s
        through_s = samples * ffn.through_s
        work = max(
            *(m * seconds + ahead * pair_s for seconds, ahead in attn.work),
            m * depth.layers * samples * ffn.compute_s + depth.ahead * pair_s + self.attn_ahead_s,
            self.chain_attn_s + self.question.num_moe * through_s,
        )
        kept = max(
            *(m * (fixed_s + times * through_s) for fixed_s, times in attn.life),
            m * (depth.life[0] + depth.life[1] * through_s) / self.ffn_room(c),
        )
        return [work, kept, self._link_s(c, self.leaving(c))]

    def estimate_s(self, c: Candidate, terms: list[float]) -> float:
        """For the order of trials, from `terms_s`: with the share of the bytes that leaves a node when a group has only
        its neighbour there, and with terms that are near one another adding up."""
        q = self.leaving(c)
        if self.site.shared and q < 1 and c.attn_gpus + c.ffn_gpus > self.pools[0].gpus_per_node * c.replicas:
            kept = 1.0 if c.attn_depth == c.ffn_depth == 1 else 0.5
            q = max(q, 1 - kept * min(1.0, self.pools[0].gpus_per_node / (c.attn_workers + c.ffn_workers)))
        return soft_max([*terms[:2], self._link_s(c, q)], c)

    def _link_s(self, c: Candidate, q: float) -> float:
        """Of the busiest worker, where a share q of its bytes leaves the node."""
        attn, ffn, m = self.attn_depths[c.attn_depth], self.ffn_workers[c.ffn_workers], c.microbatches
        attn_s = m * attn.half_layers / 2 * self.samples * ffn.attn_leave_s * q
        ffn_s = m * self.ffn_layers(c.ffn_depth) * self.question.samples(c) * ffn.ffn_leave_s * q
        if self.pools[0].nics.pooled and self.site.shared:
            return (c.attn_gpus * attn_s + c.ffn_gpus * ffn_s) / (c.attn_gpus + c.ffn_gpus)
        return max(attn_s, ffn_s)
