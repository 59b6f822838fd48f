"""What the simulator expects of a system, from costs that its own run measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.side_by_side.preset import Overrides, resolve
from disagmoe.check import make_plan
from disagmoe.config.checks import model_shape
from disagmoe.simulator.engine import simulate
from disagmoe.simulator.measured_ep import predict_expert_parallel
from disagmoe.simulator.profile import Profile


def predict_pipeline_s(overrides: Overrides, profile: Path, *, free_transfers: bool = False) -> float:
    """Seconds of the forward and backward passes: the run's own schedule on its measured stages and transfers.

    free_transfers: on the measured stages alone, as if every payload were there at once.
    """
    resolved, costs = resolve(overrides), Profile.load(profile)
    if free_transfers:
        costs = replace(costs, hops=tuple(replace(hop, forward_s=0.0, backward_s=0.0) for hop in costs.hops))
    if resolved.config.parallelism.mode == "disagmoe":
        schedule = make_plan(resolved).schedule
        assert schedule is not None
        return simulate(schedule, costs.costs()).makespan_s
    part = resolved.config.expert_parallel
    result = predict_expert_parallel(
        costs,
        is_moe_layer=model_shape(resolved.config).is_moe_layer,
        pipeline_depth=part.pipeline_depth,
        chunks_per_rank=part.chunks_per_rank,
        microbatches=part.microbatches,
        overlap=part.overlap,
        num_chunks=part.num_chunks,
    )
    return result.makespan_s
