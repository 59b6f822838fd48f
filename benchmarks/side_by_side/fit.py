"""Measured costs for *fitted* schedules: one launch of the same layout in the order *deep*, kept beside the preset."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.side_by_side.preset import FOLDER, Overrides, Preset, resolve
from disagmoe.config.checks import build_layout, model_shape
from disagmoe.layout import Stage, build_stages
from disagmoe.simulator.profile import Profile

Profiled = Callable[[Overrides, Path], None]
"""Launches a configuration and writes its profile."""


def wants_costs(overrides: Overrides) -> bool:
    """Whether a system's order is *fitted* and nothing says to what."""
    return overrides.get("disagmoe.schedule") == "fitted" and not overrides.get("disagmoe.costs")


def with_costs(preset: Preset, overrides: Overrides, profiled: Profiled, *, again: bool = False) -> Overrides:
    """`overrides` with the costs that its layout was measured to have.

    again: measure even if that has been done.
    """
    path = costs_path(preset, overrides)
    if again or not path.exists():
        plain = {**overrides, "disagmoe.schedule": "deep", "disagmoe.split_backward": False}
        profiled(plain, path)
        config = resolve(plain).config
        stages = build_stages(build_layout(config), model_shape(config).is_moe_layer)
        evened(Profile.load(path), stages).save(path)
    # Relative to where runs are started: the path becomes part of what was tried.
    return {**overrides, "disagmoe.costs": str(path.relative_to(FOLDER.parents[1]))}


def costs_path(preset: Preset, overrides: Overrides) -> Path:
    """Where a layout's costs are: what order they are used for plays no part."""
    sizes = ("attn_depth", "attn_workers", "ffn_depth", "ffn_workers", "microbatches")
    part = resolve(overrides).config.disagmoe
    name = "-".join(str(getattr(part, size)) for size in sizes)
    placed = re.sub(r"\D", "", str(part.attn_placement))
    return FOLDER / f"{preset.name}.costs-{name}{'-' + placed if placed else ''}.json"


def evened(profile: Profile, stages: Sequence[Stage]) -> Profile:
    """Equal stages cost the same: the median of what was measured. A single stage's time is off by a tenth or more."""
    alike: dict[object, list[int]] = defaultdict(list)
    for stage in stages:
        alike[stage.role, len(stage.dense_layers), stage.has_embedding, stage.has_head].append(stage.index)
    rows = list(profile.stages)
    for indices in alike.values():
        for key in ("forward_s", "backward_s"):
            values = [getattr(profile.stages[i], key) for i in indices]
            if None not in values:
                for i in indices:
                    rows[i] = replace(rows[i], **{key: median(values)})
    return replace(profile, stages=tuple(rows))
