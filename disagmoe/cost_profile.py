"""Measured costs of a run, for the simulator and for *fitted* schedules: `[metrics] profile_costs = "FILE"`.

Each process keeps the times of its own compute actions and of the transfers it receives; at the end of the run rank 0
combines them into the profile that `disagmoe.simulator.profile` defines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import torch.distributed as dist

from disagmoe.check import activation_bytes, make_plan
from disagmoe.config.load import ResolvedConfig
from disagmoe.parallelisms.clock import CostSamples
from disagmoe.schedules import Kind
from disagmoe.simulator.profile import HopProfile, Profile, StageProfile


def gather_profile(resolved: ResolvedConfig, samples: CostSamples) -> Profile | None:
    """The profile of a run, on rank 0; None elsewhere. Collective.

    A stage's time is the median over micro-batches of its slowest worker; a hop's, of the worker that receives most.
    """
    world_size = dist.get_world_size()
    everyone: list[CostSamples | None] = [samples]
    if world_size > 1:
        everyone = [None] * world_size
        dist.gather_object(samples, everyone if dist.get_rank() == 0 else None)
    if dist.get_rank() != 0:
        return None
    plan = make_plan(resolved)
    config = resolved.config
    compute = _slowest(sample.compute_s for sample in everyone if sample is not None)
    transfers = _slowest(
        {key: [seconds for _, seconds in pairs] for key, pairs in sample.transfers.items()}
        for sample in everyone
        if sample is not None
    )
    sizes = _slowest(
        {key: [size for size, _ in pairs] for key, pairs in sample.transfers.items()}
        for sample in everyone
        if sample is not None
    )

    def activations(index: int) -> float:
        stage = plan.stages[index]
        return float(
            max(activation_bytes(plan, stage, worker) for worker in range(plan.layout.workers_of(stage.role)))
        )

    share = -(-config.training.global_batch_size // config.disagmoe.replicas)
    return Profile(
        model=plan.shape.name,
        seq_len=config.training.seq_len,
        microbatch_samples=-(-share // config.disagmoe.microbatches),
        stages=tuple(
            StageProfile(
                index=stage.index,
                forward_s=compute[Kind.FORWARD.name, stage.index],
                backward_s=compute.get((Kind.FULL_BACKWARD.name, stage.index)),
                backward_input_s=compute.get((Kind.BACKWARD_INPUT.name, stage.index)),
                backward_weight_s=compute.get((Kind.BACKWARD_WEIGHT.name, stage.index)),
                activation_bytes=activations(stage.index),
            )
            for stage in plan.stages
        ),
        hops=tuple(
            HopProfile(
                index=hop + 1,
                forward_bytes=sizes.get((hop, False), 0.0),
                forward_s=transfers.get((hop, False), 0.0),
                backward_bytes=sizes.get((hop, True), 0.0),
                backward_s=transfers.get((hop, True), 0.0),
            )
            for hop in range(len(plan.stages) - 1)
        ),
    )


def _slowest(by_worker: Iterable[Mapping[Any, Sequence[float]]]) -> dict[Any, float]:
    """By key: the largest of the workers' medians."""
    largest: dict[Any, float] = {}
    for samples in by_worker:
        for key, values in samples.items():
            if values:
                largest[key] = max(largest.get(key, 0.0), median(values))
    return largest
