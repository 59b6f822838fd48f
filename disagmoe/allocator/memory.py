"""Bytes of the heaviest worker of each group, put together from `disagmoe.memory`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from disagmoe.layout import Role, Stage, split_evenly
from disagmoe.memory import (
    Execution,
    Rows,
    attention_kept_bytes,
    attention_passing_bytes,
    buffer_bytes,
    expert_kept_bytes,
    expert_passing_bytes,
    head_passing_bytes,
)
from disagmoe.schedules import Action, Kind
from disagmoe.shapes import LayerShape
from disagmoe.simulator.replicated import Replicated
from disagmoe.simulator.roofline import BYTES, AFRoofline, Job
from disagmoe.simulator.routing import hit_probability


@dataclass(frozen=True, kw_only=True)
class GroupMemory:
    """Of a group's heaviest worker."""

    state_bytes: float
    """Parameters, gradients, optimizer states."""
    grad_bytes: Mapping[int, float]
    """The gradients among them, by stage."""
    buffer_bytes: float
    passing_bytes: Mapping[int, float]
    """By stage, while it computes."""
    kept_bytes: Mapping[int, float]
    """By stage, a micro-batch."""

    @property
    def fixed_bytes(self) -> float:
        """All but what is kept, with the largest passing part."""
        return self.state_bytes + self.buffer_bytes + max(self.passing_bytes.values())

    def peak_bytes(self, order: Iterable[Action]) -> float:
        """Most bytes at a time when the group's compute actions have this order."""
        alive = self.state_bytes - sum(self.grad_bytes.values()) + self.buffer_bytes
        peak, has_gradient = alive, set()
        for kind, stage, _ in order:
            if kind is Kind.FORWARD:
                alive += self.kept_bytes[stage]
                peak = max(peak, alive)
                continue
            if stage not in has_gradient:
                has_gradient.add(stage)
                alive += self.grad_bytes[stage]
            peak = max(peak, alive + self.passing_bytes[stage])
            if kind is not Kind.BACKWARD_INPUT:
                alive -= self.kept_bytes[stage]
        return peak

    @property
    def kept_a_microbatch(self) -> float:
        return sum(self.kept_bytes.values())


def execution(job: Job, *, portable: bool = False) -> Execution:
    return Execution(
        width=BYTES[job.dtype],
        recompute_attention=job.recompute == "full",
        recompute_experts=job.recompute != "none",
        portable=portable,
    )


def stage_kept_bytes(job: Job, stage: Stage, samples: float, *, portable: bool = False) -> float:
    """Of an A-stage, for `samples` samples a worker."""
    how = execution(job, portable=portable)
    return sum(attention_kept_bytes(job.model, layer, samples, job.seq_len, how) for layer in _layers(job, stage))


def stage_passing_bytes(job: Job, stage: Stage, samples: float, *, portable: bool = False) -> float:
    """Of an A-stage while it computes."""
    how = execution(job, portable=portable)
    layers = _layers(job, stage)
    size = sum(attention_passing_bytes(job.model, layer, samples, job.seq_len, how) for layer in layers)
    return size + (head_passing_bytes(job.model, samples * job.seq_len, how) if stage.has_head else 0.0)


def _layers(job: Job, stage: Stage) -> list[LayerShape]:
    held = [*stage.dense_layers, *([] if stage.moe_layer is None else [stage.moe_layer])]
    return [job.model.layers[i] for i in held]


def received(layer: LayerShape, tokens: float, workers: int, imbalance: float = 1.0) -> Rows:
    """Of `tokens` tokens of all A-workers, what the F-worker with most experts gets on average, times `imbalance`."""
    moe = layer.moe
    held = len(split_evenly(moe.num_experts, workers)[0])
    hit = max(hit_probability(moe.num_experts, moe.top_k, held), 1 / workers)
    # A primary row may go to a worker that none of the token's experts is on.
    return Rows(
        rows=tokens * min(1.0, imbalance * hit),
        pairs=tokens * moe.top_k * min(1.0, imbalance * held / moe.num_experts),
        primary=tokens / workers,
    )


def ffn_kept_bytes(
    job: Job, layer: LayerShape, tokens: float, workers: int, imbalance: float, *, portable: bool = False
) -> float:
    """Of an F-stage, for `tokens` tokens of all A-workers."""
    got = received(layer, tokens, workers, imbalance)
    return expert_kept_bytes(job.model, layer.moe, got, execution(job, portable=portable))


def ffn_passing_bytes(
    job: Job, layer: LayerShape, tokens: float, workers: int, imbalance: float, *, portable: bool = False
) -> float:
    """Of an F-stage while it computes."""
    got = received(layer, tokens, workers, imbalance)
    held = len(split_evenly(layer.moe.num_experts, workers)[0])
    return expert_passing_bytes(job.model, layer.moe, held, got, execution(job, portable=portable))


def attn_buffer_bytes(job: Job, samples: float, workers: int) -> float:
    """Of an A-worker before `workers` F-workers: a row for each that is hit."""
    layer = next(layer for layer in job.model.layers if layer.is_moe)
    rows = received(layer, samples * job.seq_len, workers).rows * workers
    return buffer_bytes(job.model, rows, execution(job))


def ffn_buffer_bytes(job: Job, layer: LayerShape, tokens: float, workers: int, imbalance: float) -> float:
    """Of an F-worker."""
    return buffer_bytes(job.model, received(layer, tokens, workers, imbalance).rows, execution(job))


def group_memories(
    job: Job, roofline: AFRoofline, *, imbalance: float, portable: bool = False
) -> tuple[GroupMemory, ...]:
    """By pipeline group."""
    layout, held = roofline.layout, roofline.held()
    return tuple(
        _group_memory(job, roofline, role, group, held[role, group], imbalance, portable)
        for role in Role
        for group in range(layout.depth_of(role))
    )


def _group_memory(
    job: Job, roofline: AFRoofline, role: Role, group: int, held: list[Replicated], imbalance: float, portable: bool
) -> GroupMemory:
    workers, samples = roofline.layout.ffn_workers, roofline.worker_samples
    tokens = roofline.microbatch_samples * job.seq_len
    own = [s for s in roofline.stages if s.role is role and s.group == group]
    kept: dict[int, float] = {}
    passing: dict[int, float] = {}
    params: dict[int, float] = {}
    buffers = attn_buffer_bytes(job, samples, workers)
    if role is Role.ATTN:
        for s in own:
            kept[s.index] = stage_kept_bytes(job, s, samples, portable=portable)
            passing[s.index] = stage_passing_bytes(job, s, samples, portable=portable)
            params[s.index] = roofline.attention_params(s)
    else:
        assert own[0].moe_layer is not None
        layer = job.model.layers[own[0].moe_layer]
        experts = len(split_evenly(layer.moe.num_experts, workers)[0])
        sizes = (
            ffn_kept_bytes(job, layer, tokens, workers, imbalance, portable=portable),
            ffn_passing_bytes(job, layer, tokens, workers, imbalance, portable=portable),
            layer.expert_sublayer_params(job.model.dim, experts),
        )
        for s in own:
            kept[s.index], passing[s.index], params[s.index] = sizes
        buffers = ffn_buffer_bytes(job, layer, tokens, workers, imbalance)
    return GroupMemory(
        state_bytes=job.state_bytes(held),
        grad_bytes={stage: count * job.grad_bytes for stage, count in params.items()},
        buffer_bytes=buffers,
        passing_bytes=passing,
        kept_bytes=kept,
    )
