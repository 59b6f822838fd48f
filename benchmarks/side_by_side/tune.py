"""Tuning: every candidate of a preset's grids is run, the fastest is kept."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, Protocol

from benchmarks.side_by_side.measure import Launch
from benchmarks.side_by_side.preset import Overrides, Preset, layout_text

FIGURES = ("step_s", "compute_s", "exposed_comm_s", "idle_s", "sent_bytes", "predicted_step_s")
"""What is kept of a candidate's launch."""
Measure = Callable[[Overrides, str], Launch]


class Clock(Protocol):
    @property
    def time_is_up(self) -> bool: ...


def tune(preset: Preset, measure: Measure, clock: Clock, *, repeats: int = 1) -> int:
    """Run all grids and write NAME.tuned.json: what was tried, with its step time, and the best.

    Returns 3 if time was up before the end, else 0. A grid is stored when all of it has run.
    """
    grids: dict[str, Any] = preset.tuned().get("grids", {})
    command = f"python -m benchmarks.side_by_side --preset {preset.name} --tune"
    for name in preset.grids:
        tried: list[dict[str, Any]] = []
        for own in preset.candidates(name):
            if clock.time_is_up:
                print("time is up; start again to go on", file=sys.stderr)
                return 3
            launch = min((measure(own, f"tuning {i}") for i in range(repeats)), key=lambda one: one.step_s)
            figures = {key: round(getattr(launch, key), 3) for key in FIGURES}
            tried.append({**figures, "layout": layout_text(preset.shared | own), "overrides": own})
            print(f"{name:<24} {launch.step_s:6.2f} s  {tried[-1]['layout']}", file=sys.stderr, flush=True)
        if not tried:
            raise ValueError(f"preset {preset.name}, grid {name}: no candidate is valid")
        tried.sort(key=lambda entry: entry["step_s"])
        grids[name] = {"best": tried[0]["overrides"], "tried": tried}
        preset.tuned_path.write_text(json.dumps({"command": command, "grids": grids}, indent=1) + "\n")
    return 0
