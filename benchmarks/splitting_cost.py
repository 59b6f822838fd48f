"""What splitting a model into A- and F-stages costs by itself: one process, nothing sent, against the unsplit model.

    python -m benchmarks.splitting_cost [--launches N] [--steps N] [--json FILE]

Both train the recipe's `bench` flavor on the same batches with the same micro-batches, one compute thread each. Both
processes are there at once and take turns, a step each, so that the two steps of a pair meet the same machine: one
whose speed changes every few seconds would hide a few per cent in the noise. Printed are the medians of a step and the
median and quartiles of the pairs' ratios, warm-up excluded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.side_by_side.preset import EMPTY

MICROBATCHES = 8
WARM_UP = 2
SHARED = {
    "recipe.name": "deepseek_moe",
    "recipe.flavor": "bench",
    "data.source": "synthetic",
    "training.seq_len": 256,
    "training.global_batch_size": MICROBATCHES,
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
_OVER = "step is over"


class Runner:
    """A training run that makes a step when told to."""

    def __init__(self, name: str, steps: int, folder: Path) -> None:
        options = {**SHARED, **SYSTEMS[name], "training.steps": steps, "dump_folder": folder / name}
        self._name, self._log = name, folder / f"{name}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.splitting_cost", "--train", f"--config-file={EMPTY}"]
                + [f"--{key}={value}" for key, value in options.items()],
                env=_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def step_s(self) -> float:
        """Seconds of the next step.

        Raises:
            RuntimeError: the run failed; with the end of its output.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        start_s = time.perf_counter()
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # said below
        for line in self._process.stdout:
            if line.strip() == _OVER:
                return time.perf_counter() - start_s
        raise RuntimeError(f"{self._name}: exit code {self._process.wait()}:\n{self._log.read_text()[-3000:]}")

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


def _environment() -> dict[str, str]:
    """One thread, one process whose output is heard, whatever the caller is a part of."""
    foreign = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    kept = {name: value for name, value in os.environ.items() if name not in foreign}
    return {**kept, "OMP_NUM_THREADS": "1", "LOG_RANK": "0"}


def _train(options: Sequence[str]) -> int:
    """In a process of its own: a training run whose steps each wait for a line of standard input."""
    from disagmoe.train import main as train
    from disagmoe.trainer import Trainer

    whole_step = Trainer.train_step

    def step_on_demand(trainer: Trainer, step: int) -> dict[str, Any]:
        sys.stdin.readline()
        result = whole_step(trainer, step)
        print(f"\n{_OVER}", flush=True)
        return result

    Trainer.train_step = step_on_demand  # type: ignore[method-assign]
    return train(options)


def _launch(steps: int) -> list[dict[str, float]]:
    """Both runs' step times in seconds, pair by pair, warm-up excluded; which is first changes from pair to pair."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="splitting_cost_")))
        runners = {}
        for name in SYSTEMS:
            runners[name] = Runner(name, steps + WARM_UP + 1, folder)  # nobody comes to an end
            stack.callback(runners[name].end)
        pairs = []
        for step in range(steps + WARM_UP):
            names = list(SYSTEMS) if step % 2 == 0 else list(SYSTEMS)[::-1]
            pairs.append({name: runners[name].step_s() for name in names})
    return pairs[WARM_UP:]


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["--train"]:
        return _train(given[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=3, help="launches of both runs (default: 3)")
    parser.add_argument("--steps", type=int, default=12, help="pairs of steps a launch (default: 12)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    options = parser.parse_args(given)
    for key in ("launches", "steps"):
        if getattr(options, key) < 1:
            parser.error(f"--{key} = {getattr(options, key)}: must be at least 1")
    pairs: list[dict[str, float]] = []
    for number in range(options.launches):
        pairs += (own := _launch(options.steps))
        ratio = median(pair["colocated"] / pair["unsplit"] for pair in own)
        print(f"launch {number}  {ratio:.3f} x", file=sys.stderr, flush=True)
    ratios = [pair["colocated"] / pair["unsplit"] for pair in pairs]
    step_s = {name: median(pair[name] for pair in pairs) for name in SYSTEMS}
    low, middle, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    print(
        f"unsplit {step_s['unsplit']:.3f} s, colocated {step_s['colocated']:.3f} s a step: {middle:.3f} x "
        f"(quartiles {low:.3f} - {high:.3f}), {len(ratios)} pairs of steps in {options.launches} launches"
    )
    if options.json:
        result = {"step_s": step_s, "ratio": middle, "quartiles": [low, high], "pairs": pairs}
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
