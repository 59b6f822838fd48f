"""What the simulator expects of a system, from costs that its own run measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.side_by_side.preset import Overrides, resolve
from disagmoe.check import make_plan
from disagmoe.config.checks import model_shape
from disagmoe.simulator.engine import simulate
from disagmoe.simulator.measured_ep import predict_expert_parallel
from disagmoe.simulator.profile import Profile


class Prediction(NamedTuple):
    """Seconds of the forward and backward passes."""

    passes_s: float
    without_transfers_s: float
    """As if every payload were there at once."""


def predict_pipeline(overrides: Overrides, profile: Path) -> Prediction:
    """The run's own schedule on its measured stages, with its measured transfers and without."""
    simulated_s = _simulation(overrides)
    costs = Profile.load(profile)
    free = replace(costs, hops=tuple(replace(hop, forward_s=0.0, backward_s=0.0) for hop in costs.hops))
    return Prediction(simulated_s(costs), simulated_s(free))


def _simulation(overrides: Overrides) -> Callable[[Profile], float]:
    """Costs to seconds; the schedule, which may take a search, is made once."""
    resolved = resolve(overrides)
    if resolved.config.parallelism.mode == "disagmoe":
        schedule = make_plan(resolved).schedule
        assert schedule is not None
        return lambda costs: simulate(schedule, costs.costs()).makespan_s
    part, is_moe_layer = resolved.config.expert_parallel, model_shape(resolved.config).is_moe_layer
    return lambda costs: (
        predict_expert_parallel(
            costs,
            is_moe_layer=is_moe_layer,
            pipeline_depth=part.pipeline_depth,
            chunks_per_rank=part.chunks_per_rank,
            microbatches=part.microbatches,
            overlap=part.overlap,
            num_chunks=part.num_chunks,
        ).makespan_s
    )
