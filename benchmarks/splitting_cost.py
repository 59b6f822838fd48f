"""What splitting a model into A- and F-stages costs by itself: one process, nothing sent, against the unsplit model.

    python -m benchmarks.splitting_cost [--rounds N] [--json FILE]

Both train the recipe's `bench` flavor on the same batches with the same micro-batches, one compute thread each. In
every round both are launched, the first one in turn; a launch's step is the median of its steps after the first two.
Printed are medians over rounds and the median, smallest and largest of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.side_by_side.preset import EMPTY

MICROBATCHES = 8
WARM_UP = 2
SHARED = {
    "recipe.name": "deepseek_moe",
    "recipe.flavor": "bench",
    "data.source": "synthetic",
    "training.seq_len": 256,
    "training.global_batch_size": MICROBATCHES,
    "training.steps": 8,
    "disagmoe.microbatches": MICROBATCHES,
    "metrics.timeline_step": 0,
    "metrics.tensorboard": "false",
}
COLOCATED = {
    "parallelism.mode": "disagmoe",
    "disagmoe.colocate": "true",
    "disagmoe.attn_workers": 1,
    "disagmoe.ffn_workers": 1,
}
SYSTEMS = {"unsplit": {"parallelism.mode": "none"}, "colocated": COLOCATED}


def launch_s(name: str) -> float:
    """Seconds of a step.

    Raises:
        RuntimeError: the run failed; with the end of its output.
    """
    with tempfile.TemporaryDirectory(prefix="splitting_cost_") as folder:
        options = {**SHARED, **SYSTEMS[name], "dump_folder": folder}
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "disagmoe.train",
                f"--config-file={EMPTY}",
                *(f"--{k}={v}" for k, v in options.items()),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{name}: exit code {done.returncode}:\n{done.stderr[-3000:]}")
        lines = Path(folder, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return median(json.loads(line)["step_time_s"] for line in lines[WARM_UP:])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    options = parser.parse_args(arguments)
    steps: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    for number in range(options.rounds):
        names = list(SYSTEMS) if number % 2 == 0 else list(SYSTEMS)[::-1]
        for name in names:
            steps[name].append(launch_s(name))
            print(f"round {number}  {name:<10} {steps[name][-1]:.3f} s", file=sys.stderr, flush=True)
    ratios = [split / whole for whole, split in zip(steps["unsplit"], steps["colocated"], strict=True)]
    step_s = {name: median(own) for name, own in steps.items()}
    result = {"step_s": step_s, "ratio": median(ratios), "ratios": ratios}
    print(
        f"unsplit {step_s['unsplit']:.3f} s, colocated {step_s['colocated']:.3f} s a step: "
        f"{median(ratios):.3f} x ({min(ratios):.3f} - {max(ratios):.3f}), {len(ratios)} rounds"
    )
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
