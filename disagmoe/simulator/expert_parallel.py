"""Costs of expert-parallel pipelines, stage by stage as `chunks` spells them out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from disagmoe.layout import split_evenly
from disagmoe.shapes import MoEShape
from disagmoe.simulator.chunks import ChunkStage, cut_into_chunks
from disagmoe.simulator.costs import NO_HOP, Hop, StageCosts
from disagmoe.simulator.overlap import Overlapped, best_chunked, fine_grained
from disagmoe.simulator.replicated import Replicated
from disagmoe.simulator.roofline import (
    BYTES,
    Compute,
    Job,
    Seconds,
    attention_activation_bytes,
    expert_activation_bytes,
    head_activation_bytes,
)
from disagmoe.simulator.routing import Message, Place, Wire, expected_loads, hops_of, make_wire

Within = Literal["none", "chunked", "fine_grained"]
"""Overlap within a MoE operator: none, Tutel-like or Comet-like."""


@dataclass(frozen=True, kw_only=True)
class EPPlan:
    """`ranks` pipeline ranks of `width` workers, each with its own samples; `ep` of them share the experts."""

    ranks: int
    width: int
    ep: int
    chunks_a_rank: int = 1
    samples: int = 1
    """Of a worker, a micro-batch."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} = {value}: must be at least 1")
        if self.width % self.ep:
            raise ValueError(f"ep = {self.ep}: must divide the {self.width} workers of a pipeline rank")

    @property
    def num_gpus(self) -> int:
        return self.ranks * self.width

    def __str__(self) -> str:
        interleaved = f" x {self.chunks_a_rank} chunks" if self.chunks_a_rank > 1 else ""
        return f"PP {self.ranks}{interleaved}, DP {self.width}, EP {self.ep}"


@dataclass(frozen=True, kw_only=True)
class EPRoofline:
    """Costs on one worker. `rank_of_chunk` places chunks; ranks fill nodes in order."""

    job: Job
    plan: EPPlan
    rank_of_chunk: tuple[int, ...]
    within: Within = "none"

    @cached_property
    def stages(self) -> list[ChunkStage]:
        return cut_into_chunks(self.job.model.is_moe_layer, len(self.rank_of_chunk))

    def costs(self) -> StageCosts:
        """By stage."""
        seconds = [self._seconds(stage) for stage in self.stages]
        forward, backward = [NO_HOP], []
        inner: list[tuple[Overlapped, Overlapped, Seconds]] = []
        for index, stage in enumerate(self.stages):
            hops = self._layer_hops(stage)
            if stage.kind == "F":
                inner.append(self._overlap(hops, seconds[index]))
            else:
                inner.append((Overlapped(0, 0), Overlapped(0, 0), seconds[index]))
            if index + 1 < len(self.stages):
                forward.append(self._hop_after(index, backward=False))
                backward.append(self._hop_after(index, backward=True))
        is_expert = [stage.kind == "F" and self.within != "none" for stage in self.stages]
        nic = [self._inner_nic(stage) for stage in self.stages]
        return StageCosts(
            forward_s=tuple(
                o[0].total_s if e else s.forward for s, o, e in zip(seconds, inner, is_expert, strict=True)
            ),
            backward_s=tuple(
                o[1].total_s if e else s.backward_input + s.backward_weight
                for s, o, e in zip(seconds, inner, is_expert, strict=True)
            ),
            backward_input_s=tuple(
                o[1].total_s - s.backward_weight if e else s.backward_input
                for s, o, e in zip(seconds, inner, is_expert, strict=True)
            ),
            backward_weight_s=tuple(s.backward_weight for s in seconds),
            forward_hop=tuple(forward),
            backward_hop=(*backward, NO_HOP),
            activation_bytes=tuple(self._activation_bytes(stage) for stage in self.stages),
            inner_comm_forward_s=tuple(o[0].exposed_s for o in inner),
            inner_comm_backward_s=tuple(o[1].exposed_s for o in inner),
            inner_nic_forward_s=tuple(nic),
            inner_nic_backward_s=tuple(nic),
        )

    def _compute(self, stage: ChunkStage) -> Compute:
        return Compute(job=self.job, pool=self.job.cluster.place(self._first_rank(stage.chunk))[0])

    def _first_rank(self, chunk: int) -> int:
        """Global rank of the first worker that holds a chunk."""
        return self.rank_of_chunk[chunk] * self.plan.width

    def _seconds(self, stage: ChunkStage) -> Seconds:
        compute, layers, samples = self._compute(stage), self.job.model.layers, self.plan.samples
        if stage.kind == "C":
            return Seconds()
        if stage.kind == "F":
            assert stage.layer is not None
            tokens = samples * self.job.seq_len * self.plan.ep
            seconds = compute.experts(layers[stage.layer], tokens, self.plan.ep)
            return seconds if self.job.recompute == "none" else seconds.recomputed()
        held = [*stage.dense_layers, *([] if stage.layer is None else [stage.layer])]
        seconds = sum((compute.attention(layers[i], samples) for i in held), Seconds())
        seconds = seconds.recomputed() if self.job.recompute == "full" else seconds
        if stage.has_embedding:
            seconds += compute.embedding(samples)
        return seconds + compute.head(samples) if stage.has_head else seconds

    def _wire(self, ranks: Sequence[int], *, all_to_all: bool) -> Wire:
        factor = self.job.technology.all_to_all_of_m2n if all_to_all else None
        row = self.job.model.row_bytes(BYTES[self.job.dtype])
        return make_wire(self.job.cluster, ranks, row_bytes=row, all_to_all=factor)

    @cached_property
    def _known_hops(self) -> dict[tuple[int, MoEShape], dict[Message, Hop]]:
        return {}

    def _layer_hops(self, stage: ChunkStage) -> dict[Message, Hop]:
        """The transfers of a layer within its expert-parallel group; empty for other stages than F."""
        if stage.kind != "F" or stage.layer is None:
            return {}
        key = (self._first_rank(stage.chunk), self.job.model.layers[stage.layer].moe)
        known = self._known_hops.get(key)
        if known is None:
            known = self._known_hops[key] = self._make_hops(*key)
        return known

    def _make_hops(self, first: int, moe: MoEShape) -> dict[Message, Hop]:
        ranks = range(first, first + self.plan.ep)
        places = [Place(rank, self.job.cluster.place(rank)[1]) for rank in ranks]
        sent, received = expected_loads(
            places,
            places,
            tokens=self.plan.samples * self.job.seq_len,
            moe=moe,
            experts=[len(r) for r in split_evenly(moe.num_experts, self.plan.ep)],
            rows=self.job.technology.rows_all_to_all,
        )
        return hops_of(self._wire(ranks, all_to_all=True), sent, received)

    def _hop_after(self, index: int, *, backward: bool) -> Hop:
        """The transfer between stage `index` and the next one, in either pass."""
        before, after = self.stages[index], self.stages[index + 1]
        if before.chunk != after.chunk:
            return self._pass_on(before.chunk, after.chunk)
        if self.within != "none":
            return NO_HOP
        if after.kind == "F":
            return self._layer_hops(after)["dispatch gradient" if backward else "dispatch"]
        return self._layer_hops(before)["combine gradient" if backward else "combine"]

    def _pass_on(self, chunk: int, following: int) -> Hop:
        """A worker's hidden states to its counterpart on the next rank."""
        first, second = self._first_rank(chunk), self._first_rank(following)
        if first == second:
            return NO_HOP
        wire = self._wire((first, second), all_to_all=False)
        size = self.plan.samples * self.job.seq_len * wire.row_bytes
        if self.job.cluster.place(first)[1] == self.job.cluster.place(second)[1]:
            seconds = size / wire.fabric_bytes_per_s
            return Hop(fabric_send_s=seconds, fabric_recv_s=seconds, latency_s=wire.fabric_latency_s)
        seconds = size / wire.nic_bytes_per_s
        return Hop(send_s=seconds, recv_s=seconds, latency_s=wire.nic_latency_s, send_bytes=size, recv_bytes=size)

    def _overlap(self, hops: dict[Message, Hop], seconds: Seconds) -> tuple[Overlapped, Overlapped, Seconds]:
        """Forward and full backward of an F-stage with its transfers inside."""
        if self.within == "none":
            return Overlapped(0, 0), Overlapped(0, 0), seconds
        overlap = best_chunked if self.within == "chunked" else fine_grained
        both = seconds.backward_input + seconds.backward_weight
        forward = overlap(hops["dispatch"], seconds.forward, hops["combine"])
        return forward, overlap(hops["combine gradient"], both, hops["dispatch gradient"]), seconds

    def _inner_nic(self, stage: ChunkStage) -> float:
        """Time that one pass's transfers of an F-stage take of a NIC direction, where they are inside of it."""
        if self.within == "none" or stage.kind != "F":
            return 0.0
        hops = self._layer_hops(stage)
        return hops["dispatch"].send_s + hops["combine"].send_s

    def _activation_bytes(self, stage: ChunkStage) -> float:
        job, samples = self.job, self.plan.samples
        if stage.kind == "C":
            return 0.0
        if stage.kind == "F":
            assert stage.layer is not None
            tokens = samples * job.seq_len * self.plan.ep
            return expert_activation_bytes(job, job.model.layers[stage.layer], tokens, self.plan.ep)
        held = [*stage.dense_layers, *([] if stage.layer is None else [stage.layer])]
        size = sum(attention_activation_bytes(job, job.model.layers[i], samples) for i in held)
        return size + (head_activation_bytes(job, samples) if stage.has_head else 0)

    def held(self, *, both_ends: bool = False) -> list[list[Replicated]]:
        """By rank: the parameters of a worker, and who else holds them. Experts are shared out, the rest is not.

        `both_ends`: DualPipe, where the mirror image of a rank holds the same parameters.
        """
        shape, plan = self.job.model, self.plan
        parts: list[list[Replicated]] = [[] for _ in range(plan.ranks)]
        for stage in self.stages:
            rank = self.rank_of_chunk[stage.chunk]
            mirrors = (rank, 2 * plan.ranks - 1 - rank) if both_ends else (rank,)
            ranks = [mirror * plan.width + worker for mirror in mirrors for worker in range(plan.width)]
            if stage.kind == "A":
                params = sum(shape.layers[layer].num_params(shape.dim) for layer in stage.dense_layers)
                params += stage.has_embedding * shape.embedding_params + stage.has_head * shape.head_params
                if stage.layer is not None:
                    params += shape.layers[stage.layer].attention_sublayer_params(shape.dim)
                parts[rank].append(Replicated(params, ranks))
            elif stage.layer is not None:
                moe = shape.layers[stage.layer].moe
                held = len(split_evenly(moe.num_experts, plan.ep)[0])
                parts[rank].append(Replicated(held * moe.expert_params(shape.dim), ranks[:: plan.ep]))
                parts[rank].append(Replicated(moe.shared_params(shape.dim), ranks))
        return parts
