"""Measured costs of a run, for the simulator and for *fitted* schedules: `[metrics] profile_costs = "FILE"`.

Each process keeps the times of its own compute actions and of the transfers it receives; at the end of the run rank 0
combines them into the profile that `disagmoe.simulator.profile` defines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

import torch.distributed as dist

from disagmoe.check import activation_bytes, make_plan
from disagmoe.config.checks import model_shape
from disagmoe.config.load import ResolvedConfig
from disagmoe.config.schema import Config
from disagmoe.layout import cut_into_chunks
from disagmoe.parallelisms.clock import CostSamples
from disagmoe.schedules import Kind
from disagmoe.shapes import ModelShape
from disagmoe.simulator.profile import HopProfile, Profile, StageProfile


def gather_profile(resolved: ResolvedConfig, samples: CostSamples) -> Profile | None:
    """The profile of a run, on rank 0; None elsewhere. Collective.

    A stage's time is the mean over micro-batches of its slowest worker, with what its compute thread needs to send and
    to post receives: the busiest worker's sum is what a step can't undercut. A hop's is what one in four micro-batches
    does not exceed, of the worker that receives slowest: transfers that met others on the same card took longer, but
    the simulator lets transfers wait for each other itself.
    """
    world_size = dist.get_world_size()
    everyone: list[CostSamples | None] = [samples]
    if world_size > 1:
        everyone = [None] * world_size
        dist.gather_object(samples, everyone if dist.get_rank() == 0 else None)
    if dist.get_rank() != 0:
        return None
    gathered = [sample for sample in everyone if sample is not None]
    if resolved.config.parallelism.mode == "ep":
        return expert_parallel_profile(resolved.config, model_shape(resolved.config), gathered)
    plan = make_plan(resolved, with_schedule=False)
    config = resolved.config

    def activations(index: int) -> float:
        stage = plan.stages[index]
        return float(max(activation_bytes(plan, stage, worker) for worker in range(plan.layout.workers_of(stage.role))))

    share = -(-config.training.global_batch_size // config.disagmoe.replicas)
    return Profile(
        model=plan.shape.name,
        seq_len=config.training.seq_len,
        microbatch_samples=-(-share // config.disagmoe.microbatches),
        stages=_stages(gathered, [activations(stage.index) for stage in plan.stages]),
        hops=tuple(
            _with_senders(hop, *(plan.layout.workers_of(plan.stages[hop.index - back].role) for back in (1, 0)))
            for hop in _hops(gathered, len(plan.stages), {})
        ),
    )


def _with_senders(hop: HopProfile, before: int, after: int) -> HopProfile:
    """A hop between groups of `before` and `after` workers, which all send and receive as much as their peers."""
    return replace(
        hop,
        forward_send_bytes=hop.forward_bytes * after / before,
        backward_send_bytes=hop.backward_bytes * before / after,
    )


def expert_parallel_profile(config: Config, shape: ModelShape, gathered: Sequence[CostSamples]) -> Profile:
    """The profile of a run in `mode = "ep"`: its stages and hops are those of `layout.cut_into_chunks`.

    A stage that computes nothing of its own takes no time, a hop that stays on its worker has no bytes. Activations are
    not counted (0).
    """
    part = config.expert_parallel
    stages = cut_into_chunks(shape.is_moe_layer, part.pipeline_depth * part.chunks_per_rank)
    pieces = part.num_chunks if part.overlap == "chunked" else 1
    # A layer's transfers were measured piece by piece.
    cut = {index: pieces for index, stage in enumerate(stages) if stage.kind == "F"}
    cut |= {index - 1: pieces for index in cut}
    share = -(-config.training.global_batch_size // part.replicas)
    return Profile(
        model=shape.name,
        seq_len=config.training.seq_len,
        microbatch_samples=-(-share // part.microbatches),
        stages=_stages(gathered, [0.0] * len(stages)),
        hops=_hops(gathered, len(stages), cut),
    )


def _stages(gathered: Sequence[CostSamples], activations: Sequence[float]) -> tuple[StageProfile, ...]:
    compute = _slowest((sample.actions_s for sample in gathered), mean)
    send_forward, post_forward, send_backward, post_backward = (
        [compute.get((kind.name, index), 0.0) for index in range(len(activations))]
        for kind in (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)
    )

    def row(index: int, num_bytes: float) -> StageProfile:
        full = compute.get((Kind.FULL_BACKWARD.name, index))
        first = compute.get((Kind.BACKWARD_INPUT.name, index))
        second = compute.get((Kind.BACKWARD_WEIGHT.name, index))
        if full is not None and first is not None:
            # Some of its work is split, the rest is not: all that is not weight gradients is in time for its sender.
            first += full
            full = None
        handling_s = send_backward[index] + post_backward[index]
        full = None if full is None else full + handling_s
        first = None if first is None else first + handling_s
        return StageProfile(
            index=index,
            forward_s=compute.get((Kind.FORWARD.name, index), 0.0) + send_forward[index] + post_forward[index],
            backward_s=0.0 if full is None and first is None and second is None else full,
            backward_input_s=first,
            backward_weight_s=0.0 if first is not None and second is None else second,
            activation_bytes=num_bytes,
        )

    return tuple(row(index, num_bytes) for index, num_bytes in enumerate(activations))


def _hops(gathered: Sequence[CostSamples], num_stages: int, pieces: Mapping[int, int]) -> tuple[HopProfile, ...]:
    """pieces: by hop, how many transfers make one of a whole micro-batch; 1 where missing."""
    transfers = [
        {key: _whole(samples, pieces.get(key[0], 1)) for key, samples in sample.transfers.items()}
        for sample in gathered
    ]
    seconds, sizes = (
        _slowest(({key: [pair[i] for pair in pairs] for key, pairs in own.items()} for own in transfers), typical)
        for i, typical in ((1, _undisturbed), (0, mean))
    )
    return tuple(
        HopProfile(
            index=hop + 1,
            forward_bytes=sizes.get((hop, False), 0.0),
            forward_s=seconds.get((hop, False), 0.0),
            backward_bytes=sizes.get((hop, True), 0.0),
            backward_s=seconds.get((hop, True), 0.0),
        )
        for hop in range(num_stages - 1)
    )


def _whole(samples: Sequence[tuple[float, float]], pieces: int) -> list[tuple[float, float]]:
    """(bytes, seconds) of each `pieces` transfers in a row.

    A micro-batch's first piece may find an idle card, the others follow it: only their sum is typical.
    """
    groups = [samples[start : start + pieces] for start in range(0, len(samples) - pieces + 1, pieces)]
    return [(sum(pair[0] for pair in group), sum(pair[1] for pair in group)) for group in groups]


def _undisturbed(seconds: Sequence[float]) -> float:
    """The first quartile."""
    return sorted(seconds)[len(seconds) // 4]


def _slowest(
    by_worker: Iterable[Mapping[Any, Sequence[float]]], typical: Callable[[Sequence[float]], float]
) -> dict[Any, float]:
    """By key: the largest of what is typical of the workers."""
    largest: dict[Any, float] = {}
    for samples in by_worker:
        for key, values in samples.items():
            if values:
                largest[key] = max(largest.get(key, 0.0), typical(values))
    return largest
