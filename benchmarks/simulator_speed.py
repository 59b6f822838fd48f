"""Time to simulate schedules of growing size: python -m benchmarks.simulator_speed [--json FILE].

p_A = p_F = 8, 12 layers a group; compute actions grow with the micro-batches. Seconds are this process's CPU time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from disagmoe.layout import Layout
from disagmoe.schedules import make_schedule
from disagmoe.simulator.costs import Workers, uniform_costs
from disagmoe.simulator.engine import Options, simulate

MICROBATCHES = (16, 64, 256, 640, 1296)
LINKS = ("in_order", "fair", "no_contention")


def measure(microbatches: int) -> dict[str, float]:
    """Seconds by kind of simulation; the full one has 4 workers a group."""
    layout = Layout(attn_depth=8, ffn_depth=8, attn_workers=1, ffn_workers=1)
    begun = time.process_time()
    schedule = make_schedule(layout, [True] * 96, name="deep", num_microbatches=microbatches)
    row: dict[str, float] = {
        "actions": sum(map(len, schedule.compute)),
        "generated_s": time.process_time() - begun,
    }
    costs = uniform_costs(schedule.num_stages, hop_s=0.5)
    for links in LINKS:
        begun = time.process_time()
        simulate(schedule, costs, options=Options(links=links))  # type: ignore[arg-type]
        row[f"{links}_s"] = time.process_time() - begun
    if microbatches <= 64:
        begun = time.process_time()
        simulate(schedule, costs, workers=Workers(count=(4,) * 16))
        row["full_4_workers_s"] = time.process_time() - begun
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time to simulate schedules of growing size.")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args(arguments)
    rows = []
    for microbatches in MICROBATCHES:
        row = measure(microbatches)
        rows.append(row)
        times = "  ".join(f"{name} {value:.2f}" for name, value in row.items() if name != "actions")
        print(f"{row['actions']:>7} compute actions: {times}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
