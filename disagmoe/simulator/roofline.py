"""Costs from shapes: FLOPs over achieved FLOP/s, bytes over achieved bytes/s. An estimate, to be replaced by a profile.

A backward pass takes twice its forward's compute: once more for the gradients of inputs, once for those of weights
(attention scores have no weights: their backward is all input gradients), plus the forward again where recomputed.
Left out: norms, activations, rotary embeddings, softmax, packing of rows, launches, the optimizer step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

from disagmoe.cluster import Cluster, Pool
from disagmoe.layout import Layout, Role, Stage, Worker, build_stages, split_evenly
from disagmoe.shapes import DenseFFNShape, LayerShape, ModelShape, MoEShape
from disagmoe.simulator.costs import NO_HOP, Hop, StageCosts
from disagmoe.simulator.replicated import Replicated, state_bytes, sync_s
from disagmoe.simulator.routing import Message, Place, Rows, expected_loads, hit_probability, hops_of, make_wire

Recompute = Literal["none", "ffn", "full"]
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}


@dataclass(frozen=True, kw_only=True)
class Technology:
    """What is assumed of an implementation, beside the cluster's efficiencies. The same for all systems by default."""

    name: str = "same for all"
    rows_m2n: Rows = "node"
    """How rows travel between groups (see `routing`)."""
    rows_all_to_all: Rows = "node"
    """How rows travel in expert parallelism."""
    all_to_all_of_m2n: float = 1.0
    """Efficiency of an all-to-all relative to the cluster description's."""
    compute_lost: float = 0.0
    """Share of the compute engine that communication kernels take, all the time."""
    imbalance: float = 1.0
    """Rows of the expert worker with most of them over the average; everybody waits for it."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, on what, under which assumptions."""

    model: ModelShape
    cluster: Cluster
    seq_len: int
    global_batch: int
    """Samples a step."""
    dtype: str = "bfloat16"
    recompute: Recompute = "none"
    param_bytes: int = 2
    grad_bytes: int = 2
    optimizer_bytes: int = 4
    """Of a parameter's optimizer state."""
    shard_optimizer: bool = True
    """Whether the workers that hold a copy of a parameter share its optimizer state; False: each has all of it."""
    head_tokens: int = 0
    """Tokens whose logits are alive at a time; 0: those of a micro-batch (the loss is computed in one go)."""
    technology: Technology = Technology()

    @property
    def tokens(self) -> int:
        return self.global_batch * self.seq_len

    def state_bytes(self, parts: Sequence[Replicated]) -> float:
        """Of one worker that holds `parts`."""
        sharded = self.optimizer_bytes if self.shard_optimizer else 0
        kept = self.param_bytes + self.optimizer_bytes - sharded
        return state_bytes(parts, param=kept, grad=self.grad_bytes, optimizer=sharded)

    def sync_s(self, parts: Sequence[Replicated]) -> float:
        """To sum the gradients of `parts`."""
        return sync_s(parts, self.cluster, grad=self.grad_bytes)

    def with_technology(self, **changes: object) -> Job:
        return replace(self, technology=replace(self.technology, **changes))  # type: ignore[arg-type]


class Seconds(NamedTuple):
    """Compute time of one sublayer on one worker."""

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0

    def __add__(self, other: object) -> Seconds:
        assert isinstance(other, Seconds)
        return Seconds(*(a + b for a, b in zip(self, other, strict=True)))

    def recomputed(self) -> Seconds:
        """With the forward once more before the backward."""
        return self._replace(backward_input=self.backward_input + self.forward)


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Compute times on one GPU of `pool`."""

    job: Job
    pool: Pool

    def _gemm(self, flops: float, efficiency: float) -> Seconds:
        rate = self.pool.gpu.peak(self.job.dtype) * efficiency * (1 - self.job.technology.compute_lost)
        return Seconds(flops / rate, flops / rate, flops / rate)

    def _core(self, flops: float) -> Seconds:
        seconds = self._gemm(flops, self.pool.efficiency.attention).forward
        return Seconds(seconds, 2 * seconds, 0.0)

    def attention(self, layer: LayerShape, samples: float) -> Seconds:
        """Attention and router of a MoE layer; all of a dense one."""
        dim, tokens = self.job.model.dim, samples * self.job.seq_len
        flops = layer.attention.projection_flops(dim)
        if isinstance(layer.ffn, DenseFFNShape):
            flops += layer.ffn.flops_per_token(dim)
        else:
            flops += layer.ffn.router_flops(dim)
        core = samples * layer.attention.core_flops(self.job.seq_len)
        return self._gemm(tokens * flops, self.pool.efficiency.gemm) + self._core(core)

    def experts(self, layer: LayerShape, tokens: float, workers: int) -> Seconds:
        """Of `tokens` tokens, the share of the worker with most experts; shared experts are dealt out equally."""
        dim, moe = self.job.model.dim, layer.moe
        held = len(split_evenly(moe.num_experts, workers)[0]) / moe.num_experts
        routed = tokens * held * self.job.technology.imbalance * moe.top_k * moe.expert_flops(dim)
        shared = self._gemm(tokens / workers * moe.shared_flops(dim), self.pool.efficiency.gemm)
        return self._gemm(routed, self.pool.efficiency.expert_gemm) + shared

    def embedding(self, samples: float) -> Seconds:
        """Rows read and written once; their gradients are read, and added to rows that are read and written."""
        moved = 2 * samples * self.job.seq_len * self.job.model.dim * BYTES[self.job.dtype]
        seconds = moved / (self.pool.gpu.memory_bytes_per_s * self.pool.efficiency.memory)
        return Seconds(seconds, 0.0, 2 * seconds)

    def head(self, samples: float) -> Seconds:
        return self._gemm(samples * self.job.seq_len * self.job.model.head_flops, self.pool.efficiency.gemm)


@dataclass(frozen=True, kw_only=True)
class AFRoofline:
    """An AF-Pipe run: `microbatch_samples` samples over the M workers of an A-group."""

    job: Job
    layout: Layout
    microbatch_samples: int
    nic_share: tuple[float, float] = (1.0, 1.0)
    """An A-worker's and an F-worker's part of their node's NICs, over an equal part (see `Nics.pooled`)."""

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        return build_stages(self.layout, self.job.model.is_moe_layer)

    @cached_property
    def _known_hops(self) -> dict[tuple[int, int, MoEShape], dict[Message, Hop]]:
        return {}

    @property
    def worker_samples(self) -> int:
        """Samples of the A-worker with most of them."""
        return len(split_evenly(self.microbatch_samples, self.layout.attn_workers)[0])

    def costs(self) -> StageCosts:
        """Of the most loaded workers of replica 0, by stage."""
        stages = self.stages
        seconds = [self._seconds(stage) for stage in stages]
        forward, backward = [NO_HOP], []
        for before, after in pairwise(stages):
            # Stages alternate A, F, A: an A-stage sends a dispatch, an F-stage a combine.
            if before.role is Role.ATTN:
                hops = self._hops(before, after)
                forward.append(hops["dispatch"])
                backward.append(hops["dispatch gradient"])
            else:
                hops = self._hops(after, before)
                forward.append(hops["combine"])
                backward.append(hops["combine gradient"])
        return StageCosts(
            forward_s=tuple(s.forward for s in seconds),
            backward_s=tuple(s.backward_input + s.backward_weight for s in seconds),
            backward_input_s=tuple(s.backward_input for s in seconds),
            backward_weight_s=tuple(s.backward_weight for s in seconds),
            forward_hop=tuple(forward),
            backward_hop=(*backward, NO_HOP),
            activation_bytes=tuple(map(self._activation_bytes, self.stages)),
        )

    def _pool(self, stage: Stage) -> Pool:
        worker = Worker(0, stage.role.letter, stage.group, 0)
        return self.job.cluster.place(self.layout.rank_of(worker))[0]

    @cached_property
    def _known_seconds(self) -> dict[tuple[object, ...], Seconds]:
        return {}

    def _seconds(self, stage: Stage) -> Seconds:
        layers = self.job.model.layers
        held = [*stage.dense_layers, *([] if stage.moe_layer is None else [stage.moe_layer])]
        shapes = tuple(layers[i] for i in held)
        key = (stage.role, self._pool(stage).name, shapes, stage.has_embedding, stage.has_head)
        known = self._known_seconds.get(key)
        if known is None:
            known = self._known_seconds[key] = self._make_seconds(stage)
        return known

    def _make_seconds(self, stage: Stage) -> Seconds:
        compute, layers = Compute(job=self.job, pool=self._pool(stage)), self.job.model.layers
        if stage.role is Role.FFN:
            assert stage.moe_layer is not None
            tokens = self.microbatch_samples * self.job.seq_len
            seconds = compute.experts(layers[stage.moe_layer], tokens, self.layout.ffn_workers)
            return seconds if self.job.recompute == "none" else seconds.recomputed()
        held = [*stage.dense_layers, *([] if stage.moe_layer is None else [stage.moe_layer])]
        seconds = sum((compute.attention(layers[i], self.worker_samples) for i in held), Seconds())
        seconds = seconds.recomputed() if self.job.recompute == "full" else seconds
        if stage.has_embedding:
            seconds += compute.embedding(self.worker_samples)
        return seconds + compute.head(self.worker_samples) if stage.has_head else seconds

    def _places(self, role: Role, group: int) -> list[Place]:
        key = role, group
        if key not in self._known_places:
            ranks = self.layout.group_ranks(role, group, 0)
            self._known_places[key] = [Place(rank, self.job.cluster.place(rank)[1]) for rank in ranks]
        return self._known_places[key]

    @cached_property
    def _known_places(self) -> dict[tuple[Role, int], list[Place]]:
        return {}

    def _hops(self, attention: Stage, stage: Stage) -> dict[Message, Hop]:
        """All transfers between an A-stage's group and an F-stage's, of the F-stage's layer."""
        assert stage.moe_layer is not None
        key = (attention.group, stage.group, self.job.model.layers[stage.moe_layer].moe)
        known = self._known_hops.get(key)
        if known is None:
            known = self._known_hops[key] = self._make_hops(*key)
        return known

    def _make_hops(self, attn_group: int, ffn_group: int, moe: MoEShape) -> dict[Message, Hop]:
        owners, holders = self._places(Role.ATTN, attn_group), self._places(Role.FFN, ffn_group)
        # Groups that lie alike, each in nodes of its own, have the same transfers.
        number: dict[int, int] = {}
        nodes = tuple([number.setdefault(place.node, len(number)) for place in (*owners, *holders)])
        firsts = {place.node: place.rank for place in (*owners, *holders)}
        pools = tuple([self.job.cluster.place(rank)[0].name for rank in firsts.values()])
        key = (nodes, pools, moe)
        if key not in self._known_transfers:
            self._known_transfers[key] = self._transfers(owners, holders, moe)
        return self._known_transfers[key]

    @cached_property
    def _known_transfers(self) -> dict[tuple[object, ...], dict[Message, Hop]]:
        return {}

    def _transfers(self, owners: list[Place], holders: list[Place], moe: MoEShape) -> dict[Message, Hop]:
        sent, received = expected_loads(
            owners,
            holders,
            tokens=self.worker_samples * self.job.seq_len,
            moe=moe,
            experts=[len(r) for r in split_evenly(moe.num_experts, self.layout.ffn_workers)],
            rows=self.job.technology.rows_m2n,
        )
        row = self.job.model.row_bytes(BYTES[self.job.dtype])
        ranks = [place.rank for place in (*owners, *holders)]
        hops = hops_of(make_wire(self.job.cluster, ranks, row_bytes=row, all_to_all=None), sent, received)
        return {message: self._shared_nics(hop, message) for message, hop in hops.items()}

    def _shared_nics(self, hop: Hop, message: Message) -> Hop:
        from_attention = message in ("dispatch", "combine gradient")
        sender, receiver = self.nic_share if from_attention else self.nic_share[::-1]
        return hop._replace(send_s=hop.send_s / sender, recv_s=hop.recv_s / receiver)

    @cached_property
    def _known_bytes(self) -> dict[tuple[object, ...], float]:
        return {}

    def _activation_bytes(self, stage: Stage) -> float:
        layers = self.job.model.layers
        held = [*stage.dense_layers, *([] if stage.moe_layer is None else [stage.moe_layer])]
        key = (stage.role, tuple(layers[i] for i in held), stage.has_head)
        if key not in self._known_bytes:
            self._known_bytes[key] = self.activation_bytes(stage)
        return self._known_bytes[key]

    def activation_bytes(self, stage: Stage) -> float:
        """Kept by the most loaded worker between forward and backward; what a plain implementation keeps."""
        job, layers = self.job, self.job.model.layers
        if stage.role is Role.FFN:
            assert stage.moe_layer is not None
            tokens = self.microbatch_samples * job.seq_len
            return expert_activation_bytes(job, layers[stage.moe_layer], tokens, self.layout.ffn_workers)
        held = [*stage.dense_layers, *([] if stage.moe_layer is None else [stage.moe_layer])]
        size = sum(attention_activation_bytes(job, layers[i], self.worker_samples) for i in held)
        return size + (head_activation_bytes(job, self.worker_samples) if stage.has_head else 0)

    def attention_params(self, stage: Stage) -> int:
        """Of an A-stage."""
        return attention_stage_params(self.job.model, stage)

    def held(self) -> dict[tuple[Role, int], list[Replicated]]:
        """By role and group: the parameters of its fullest worker, and who else holds them."""
        return self._held

    @cached_property
    def _held(self) -> dict[tuple[Role, int], list[Replicated]]:
        shape, layout = self.job.model, self.layout
        params: dict[tuple[Role, int], list[float]] = {}
        for stage in self.stages:
            sums = params.setdefault((stage.role, stage.group), [0.0, 0.0])
            if stage.role is Role.ATTN:
                sums[0] += self.attention_params(stage)
                continue
            assert stage.moe_layer is not None
            layer = shape.layers[stage.moe_layer]
            experts = -(-layer.moe.num_experts // layout.ffn_workers)
            sums[0] += layer.expert_sublayer_params(shape.dim, 0)
            sums[1] += experts * layer.moe.expert_params(shape.dim)
        parts: dict[tuple[Role, int], list[Replicated]] = {}
        for (role, group), (replicated, expert) in params.items():
            ranks = [r for replica in range(layout.replicas) for r in layout.group_ranks(role, group, replica)]
            parts[role, group] = [Replicated(replicated, ranks)]
            if role is Role.FFN:
                parts[role, group].append(Replicated(expert, ranks[:: layout.ffn_workers]))
        return parts


def attention_stage_params(shape: ModelShape, stage: Stage) -> int:
    """Of an A-stage."""
    count = sum(shape.layers[layer].num_params(shape.dim) for layer in stage.dense_layers)
    if stage.moe_layer is not None:
        count += shape.layers[stage.moe_layer].attention_sublayer_params(shape.dim)
    return count + stage.has_embedding * shape.embedding_params + stage.has_head * shape.head_params


def attention_activation_bytes(job: Job, layer: LayerShape, samples: float) -> float:
    """Inputs and outputs of both norms, q, k, v, the heads' output, and the router's or the dense layer's middle."""
    tokens, dim, width = samples * job.seq_len, job.model.dim, BYTES[job.dtype]
    if job.recompute == "full":
        return tokens * dim * width
    elements = 4 * dim + layer.attention.qkv_dim + layer.attention.out_dim
    elements += 3 * layer.ffn.hidden_dim if isinstance(layer.ffn, DenseFFNShape) else layer.ffn.num_experts
    return tokens * elements * width


def expert_activation_bytes(job: Job, layer: LayerShape, tokens: float, workers: int) -> float:
    """Rows received; unless recomputed, their norm and each pair's input, middle and output."""
    dim, moe, width = job.model.dim, layer.moe, BYTES[job.dtype]
    held = len(split_evenly(moe.num_experts, workers)[0])
    rows = tokens * max(hit_probability(moe.num_experts, moe.top_k, held), 1 / workers) * job.technology.imbalance
    if job.recompute != "none":
        return rows * dim * width
    pairs = tokens * moe.top_k * held / moe.num_experts * job.technology.imbalance
    shared = tokens / workers * 3 * moe.shared_dim
    return (2 * rows * dim + pairs * (2 * dim + 3 * moe.expert_dim) + shared) * width


def head_activation_bytes(job: Job, samples: float) -> float:
    """Logits and their gradient in float32."""
    tokens = samples * job.seq_len
    return (min(tokens, job.head_tokens) if job.head_tokens else tokens) * 2 * 4 * job.model.vocab_size
