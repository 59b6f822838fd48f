"""The simulator's cost records as tables over depths and workers, and the bound of a step that follows from them.

No step of a layout can be shorter, whatever its schedule, than each of (all times of the fullest group or worker):

    fill + m W_A(p_A)            compute of an A-group: m micro-batches, all its stages, forward and backward
    fill + m l_F(p_F) M F(N)     compute of an F-group: l_F layers, F(N) a layer and a sample of each A-worker
    chain                        one micro-batch through all stages and back
    m l_A(p_A) V_A(N) q          an A-worker's NIC, the busier direction: V_A a layer; q: share that leaves the node
    m l_F(p_F) M V_F(N) q        an F-worker's NIC
    m (chain / 2) / K            memory has room for K micro-batches in all stages; kept half the time on average

`fill` is the time before a group's first input can be there and after its last gradient has left: (2 p - 1) (3 f + 2 c)
for p_A = p_F = p, as in the schedule *deep* (transfers are left out here). The first two terms are the paper's T_a and
T_f with the backward counted, the next two its V / (NICs B).  With NICs that both roles of a node
may share in any proportion, the two NIC terms become one: all bytes of a node over all its NICs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from disagmoe.allocator.memory import (
    ffn_buffer_bytes,
    ffn_kept_bytes,
    ffn_passing_bytes,
    stage_kept_bytes,
    stage_passing_bytes,
)
from disagmoe.allocator.question import MAX_WORKERS, Candidate, Question, Site
from disagmoe.layout import Layout, Role, build_stages, split_evenly
from disagmoe.simulator.roofline import BYTES, AFRoofline, Compute, Recompute, Seconds
from disagmoe.simulator.routing import PAIR_BYTES, TOKEN_BYTES, hit_probability

INFEASIBLE = float("inf")


@dataclass(frozen=True, kw_only=True)
class AttnDepth:
    """A-groups of one depth, all times a micro-batch of u samples a worker."""

    work_s: float
    """Compute of the fullest group."""
    layers: int
    """MoE layers of the fullest group."""
    memory: tuple[tuple[float, float], ...]
    """By group that may be the heaviest: bytes that are always there, bytes a micro-batch in flight."""


@dataclass(frozen=True, kw_only=True)
class FfnWorkers:
    """F-groups of one number of workers, a layer and a sample."""

    compute_s: float
    """Forward and backward of the worker with most experts."""
    attn_link_s: float
    """Of an A-worker's NIC for one of its own samples, if no row stays in the node."""
    ffn_link_s: float
    """Of an F-worker's NIC, for a sample of any A-worker."""
    state_bytes: float
    """Of a layer."""
    kept_bytes: float
    """Of a layer and a sample in flight."""
    passing_bytes: float
    """Of a sample of every A-worker, once: what passes, and buffers."""


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
        work = [0.0] * depth
        memory = [[0.0, 0.0] for _ in range(depth)]
        most_passing = [0.0] * depth
        for ordinal, (seconds, params, kept, passing) in enumerate(self.attn_stages):
            group = ordinal % depth
            work[group] += sum(seconds)
            memory[group][0] += params * self.bytes_a_param
            memory[group][1] += kept
            most_passing[group] = max(most_passing[group], passing)
        held = sorted({(fixed + on_top, kept) for (fixed, kept), on_top in zip(memory, most_passing, strict=True)})
        front = [m for m in held if not any(o != m and o[0] >= m[0] and o[1] >= m[1] for o in held)]
        return AttnDepth(
            work_s=max(work), layers=-(-self.question.num_moe // min(depth, self.question.num_moe)), memory=tuple(front)
        )

    @property
    def bytes_a_param(self) -> float:
        """Least: with the optimizer's states spread over all holders where they are sharded."""
        job = self.job
        return job.param_bytes + job.grad_bytes + (0 if job.shard_optimizer else job.optimizer_bytes)

    @cached_property
    def attn_layer_s(self) -> float:
        """Forward and backward of the cheapest MoE layer's attention."""
        return min(sum(seconds) for seconds, *_ in self.attn_stages[:-1])

    @cached_property
    def chain_attn_s(self) -> float:
        """One micro-batch through all A-stages and back."""
        return sum(sum(seconds) for seconds, *_ in self.attn_stages)

    @cached_property
    def mean_attn_forward_s(self) -> float:
        """Forward of a MoE layer's attention a sample, on average."""
        layers = self.attn_stages[:-1]
        return sum(seconds.forward for seconds, *_ in layers) / len(layers) / self.samples

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
        row = model.row_bytes(BYTES[job.dtype])
        rates = [pool.nic_bytes_per_s_per_gpu * pool.efficiency.nic * pool.efficiency.m2n for pool in self.pools]
        link = [
            job.seq_len * (rows * (2 * row + TOKEN_BYTES) + pairs * PAIR_BYTES["dispatch"]) / min(rates)
            for rows, pairs in ((attn_rows, moe.top_k), (ffn_rows, moe.top_k * held[0] / moe.num_experts))
        ]
        params = held[0] * moe.expert_params(model.dim) + layer.expert_sublayer_params(model.dim, 0)
        return FfnWorkers(
            compute_s=sum(seconds),
            attn_link_s=link[0],
            ffn_link_s=link[1],
            state_bytes=params * self.bytes_a_param,
            kept_bytes=ffn_kept_bytes(job, layer, job.seq_len, workers, self.question.imbalance_factor),
            passing_bytes=ffn_passing_bytes(job, layer, job.seq_len, workers, self.question.imbalance_factor)
            + ffn_buffer_bytes(job, layer, job.seq_len, workers, self.question.imbalance_factor),
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

    # -- the bound -------------------------------------------------------------------------------------------------

    def leaving(self, c: Candidate) -> float:
        """q: least share of the bytes that leave a node: none of a replica that fits into one. Of a larger one, only
        dispatches of a group to its neighbours can stay, which is all traffic at depth 1 and half of it otherwise."""
        if not self.site.shared:
            return 1.0
        size = self.pools[0].gpus_per_node
        if c.attn_depth * c.attn_workers + c.ffn_depth * c.ffn_workers <= size:
            return 0.0
        nodes = -(-(c.attn_workers + c.ffn_workers) // size)
        return 1 - 1 / nodes if c.attn_depth == c.ffn_depth == 1 else 1 - 0.5 / nodes

    def room(self, c: Candidate) -> float:
        """K: micro-batches that memory has room for, if each is kept in all stages of its group."""
        attn, ffn = self.attn_depths[c.attn_depth], self.ffn_workers[c.ffn_workers]
        layers = self.ffn_layers(c.ffn_depth)
        samples = c.attn_workers * self.samples
        free = self.capacity[1] - layers * ffn.state_bytes - samples * ffn.passing_bytes
        room = free / (layers * samples * ffn.kept_bytes)
        return min([room, *((self.capacity[0] - fixed) / max(kept, 1.0) for fixed, kept in attn.memory)])

    def ffn_layers(self, depth: int) -> int:
        """l_F: layers of the fullest F-group."""
        return -(-self.question.num_moe // depth)

    def bound_s(self, c: Candidate) -> float:
        """The largest of the terms above; infinite where memory has no room for a micro-batch."""
        terms = self.terms_s(c)
        return max(terms) if terms else INFEASIBLE

    def terms_s(self, c: Candidate) -> list[float]:
        """Compute, memory, links; empty where memory has no room for a micro-batch."""
        room = self.room(c)
        if room < 1:
            return []
        attn, ffn = self.attn_depths[c.attn_depth], self.ffn_workers[c.ffn_workers]
        m, samples, layers = c.microbatches, c.attn_workers * self.samples, self.ffn_layers(c.ffn_depth)
        a, f = self.attn_layer_s, samples * ffn.compute_s
        attn_ahead = min(c.attn_depth, self.question.num_moe) - 1
        work = max(
            m * attn.work_s + attn_ahead * (a + f),
            m * layers * f + c.ffn_depth * a + (c.ffn_depth - 1) * f,
            self.chain_attn_s + self.question.num_moe * f,
        )
        q = self.leaving(c)
        attn_link = m * attn.layers * self.samples * ffn.attn_link_s * q
        ffn_link = m * layers * samples * ffn.ffn_link_s * q
        if self.pools[0].nics.pooled and self.site.shared:
            width = c.attn_workers + c.ffn_workers
            link = (c.attn_workers * attn_link + c.ffn_workers * ffn_link) / width
        else:
            link = max(attn_link, ffn_link)
        return [work, m * (self.chain_attn_s + self.question.num_moe * f) / 2 / room, link]
