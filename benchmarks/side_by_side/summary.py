"""From measured launches to medians, paired ratios and their ceilings. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.side_by_side.measure import Launch
from benchmarks.side_by_side.preset import OURS, Preset, System, layout_text

EQUAL = "ep_equal_experts_dedup"
DEDUPLICATED = ("ep_best_tuned_dedup", EQUAL)
"""The baseline that exposed communication is compared with: the first of these that was measured."""
Rounds = Mapping[str, Sequence[Launch]]
"""By system, its launches; the i-th of each are of round i."""
_SECONDS = ("step_s", "pipeline_s", "compute_s", "exposed_comm_s", "idle_s", "transfers_cost_s")


def summarise(preset: Preset, systems: Sequence[System], rounds: Rounds) -> dict[str, Any]:
    """What `--json` writes: {preset, num_rounds, systems, ratios, ratio_spread, ceilings, exposed_cut,
    transfers_cost_cut}; a cut of nothing is left out.

    Seconds and bytes are medians over rounds. A ratio is the median over rounds of baseline's step / ours in the same
    round, its spread the smallest and largest of those.
    """
    measured = {system.name: _system(system, rounds[system.name], preset) for system in systems}
    result: dict[str, Any] = {
        "preset": preset.name,
        "num_rounds": min(len(launches) for launches in rounds.values()),
        "systems": measured,
        "ratios": {},
        "ratio_spread": {},
        "ceilings": {},
    }
    compared = next((name for name in DEDUPLICATED if name in measured), None)
    for system in systems:
        name, ours = system.name, system.against
        if ours not in measured or name in own_systems(systems):
            continue
        pairs = [base.step_s / own.step_s for base, own in zip(rounds[name], rounds[ours], strict=False)]
        result["ratios"][name] = median(pairs)
        result["ratio_spread"][name] = [min(pairs), max(pairs)]
        result["ceilings"][name] = ceiling(
            wire_share=measured[name]["wire_share"],
            nic_bytes_ratio=measured[ours]["nic_bytes"] / max(measured[name]["nic_bytes"], 1.0),
        )
        if name == compared:
            for cut, key in (("exposed_cut", "exposed_comm_s"), ("transfers_cost_cut", "transfers_cost_s")):
                if measured[name][key] > 0:
                    result[cut] = 1 - measured[ours][key] / measured[name][key]
    return result


def own_systems(systems: Sequence[System]) -> set[str]:
    """Those that others are compared with."""
    return {OURS, *(system.against for system in systems)}


def ceiling(*, wire_share: float, nic_bytes_ratio: float) -> float:
    """Most that a system can be faster than a baseline that overlaps nothing, with the same compute.

    Args:
        wire_share: c, of the baseline's step: bytes of its busiest card / the card's rate / step.
        nic_bytes_ratio: q, our bytes / its bytes.

    Our step is no shorter than the baseline's compute, (1 - c) of its step, nor than our own wire time, q c of it.

    >>> round(ceiling(wire_share=0.45, nic_bytes_ratio=1.0), 3)
    1.818
    """
    compute, wire = 1 - wire_share, nic_bytes_ratio * wire_share
    return 1 / max(compute, wire, 1e-9)


def _system(system: System, launches: Sequence[Launch], preset: Preset) -> dict[str, Any]:
    values: dict[str, Any] = {key: median(getattr(launch, key) for launch in launches) for key in _SECONDS}
    for key in ("sent_bytes", "nic_bytes", "peak_memory_bytes", "tokens_per_s"):
        values[key] = median(getattr(launch, key) for launch in launches)
    rate = min(rate for rate in preset.cluster.nics_bit_per_s) / 8
    return {
        "title": system.title,
        "layout": layout_text(system.overrides),
        **values,
        "predicted_step_s": median(launch.predicted_step_s for launch in launches),
        "predicted_error": median(launch.predicted_step_s / launch.step_s - 1 for launch in launches),
        "payload_wire_share": values["sent_bytes"] * preset.cluster.workers_per_node / rate / values["step_s"],
        "wire_share": values["nic_bytes"] / rate / values["step_s"],
        "step_s_of_rounds": [launch.step_s for launch in launches],
    }
