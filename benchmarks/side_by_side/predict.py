"""What the simulator expects of a system, from costs that its own run measured."""

from __future__ import annotations

from pathlib import Path

from benchmarks.side_by_side.preset import Overrides, resolve
from disagmoe.check import make_plan
from disagmoe.simulator.engine import simulate
from disagmoe.simulator.profile import Profile


def predict_pipeline_s(overrides: Overrides, profile: Path) -> float | None:
    """Seconds of the forward and backward passes: the run's own schedule on its measured stages and transfers.

    None where the run wrote no profile.
    """
    if not profile.exists():
        return None
    schedule = make_plan(resolve(overrides)).schedule
    assert schedule is not None
    return simulate(schedule, Profile.load(profile).costs()).makespan_s
