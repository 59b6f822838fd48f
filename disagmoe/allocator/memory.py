"""Bytes of the heaviest worker of each group: state, what is kept for the backward, what comes on top."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from disagmoe.layout import Role, Stage
from disagmoe.shapes import LayerShape
from disagmoe.simulator.roofline import (
    AFRoofline,
    Job,
    attention_activation_bytes,
    expert_activation_bytes,
    head_activation_bytes,
)


@dataclass(frozen=True, kw_only=True)
class GroupMemory:
    """Of a group's heaviest worker."""

    state_bytes: float
    """Parameters, gradients, optimizer states."""
    extra_bytes: float
    """Alive for a short time only, but once at least: logits and their gradient."""
    kept_bytes: Mapping[int, float]
    """By stage, a micro-batch."""

    @property
    def fixed_bytes(self) -> float:
        return self.state_bytes + self.extra_bytes

    @property
    def kept_a_microbatch(self) -> float:
        return sum(self.kept_bytes.values())


def stage_kept_bytes(job: Job, stage: Stage, samples: float) -> float:
    """Of an A-stage, for `samples` samples a worker."""
    layers = job.model.layers
    held = [*stage.dense_layers, *([] if stage.moe_layer is None else [stage.moe_layer])]
    return sum(attention_activation_bytes(job, layers[i], samples) for i in held)


def head_extra_bytes(job: Job, samples: float) -> float:
    """Of the last stage, whose backward follows its forward at once."""
    return head_activation_bytes(job, samples)


def ffn_kept_bytes(job: Job, layer: LayerShape, tokens: float, workers: int, imbalance: float) -> float:
    """Of an F-stage, for `tokens` tokens of all A-workers."""
    return imbalance * expert_activation_bytes(job, layer, tokens, workers)


def group_memories(job: Job, roofline: AFRoofline, *, imbalance: float) -> tuple[GroupMemory, ...]:
    """By pipeline group."""
    layout, held = roofline.layout, roofline.held()
    tokens = roofline.microbatch_samples * job.seq_len
    found = []
    for role in Role:
        for group in range(layout.depth_of(role)):
            own = [s for s in roofline.stages if s.role is role and s.group == group]
            kept = {}
            for s in own:
                if role is Role.ATTN:
                    kept[s.index] = stage_kept_bytes(job, s, roofline.worker_samples)
                else:
                    assert s.moe_layer is not None
                    layer = job.model.layers[s.moe_layer]
                    kept[s.index] = ffn_kept_bytes(job, layer, tokens, layout.ffn_workers, imbalance)
            has_head = any(s.has_head for s in own)
            found.append(
                GroupMemory(
                    state_bytes=job.state_bytes(held[role, group]),
                    extra_bytes=head_extra_bytes(job, roofline.worker_samples) if has_head else 0.0,
                    kept_bytes=kept,
                )
            )
    return tuple(found)
