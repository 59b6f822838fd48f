"""Loss curves of disaggregated runs beside the unsplit model's: `python -m benchmarks.loss_curves [--steps N]`.

Trains each debug configuration twice, with its own layout and with `mode = "none"`, and compares the losses of every
step. Writes docs/loss_curves.md and docs/loss_curves.png and prints the table. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROUNDING = 1e-6
"""Relative difference of losses that the order of sums explains."""
CONFIGS = ("debug_deepseek_moe", "debug_gpt_oss", "debug_qwen3")


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Losses by step, in nats a token."""

    name: str
    disaggregated: list[float]
    unsplit: list[float]

    @property
    def differences(self) -> list[float]:
        """Relative, by step."""
        return [abs(a - b) / b for a, b in zip(self.disaggregated, self.unsplit, strict=True)]

    @property
    def worst(self) -> tuple[int, float]:
        """Step (from 1) and size of the largest relative difference."""
        worst = max(range(len(self.differences)), key=self.differences.__getitem__)
        return worst + 1, self.differences[worst]

    @property
    def steps_within_rounding(self) -> int:
        """Steps before the first one whose losses differ by more than `ROUNDING`."""
        return next((i for i, d in enumerate(self.differences) if d > ROUNDING), len(self.differences))


def run(config: str, num_steps: int, folder: Path, options: list[str]) -> list[float]:
    """Train and return the losses.

    Raises:
        subprocess.CalledProcessError: the run failed; its output has been shown.
    """
    command = [str(ROOT / "run_train.sh"), f"--training.steps={num_steps}", f"--dump_folder={folder}", *options]
    # One thread a process in both modes: more of them only get in each other's way at these sizes.
    environment = os.environ | {"CONFIG_FILE": f"train_configs/{config}.toml", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=sys.stderr)
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def table(curves: list[Curves]) -> str:
    lines = [
        "| config | steps | loss at step 1 | at the last step | steps within 1e-6 | largest difference | at step |",
        "|---|---|---|---|---|---|---|",
    ]
    for c in curves:
        step, worst = c.worst
        losses = f"{len(c.unsplit)} | {c.unsplit[0]:.4f} | {c.unsplit[-1]:.4f}"
        lines.append(f"| {c.name} | {losses} | {c.steps_within_rounding} | {worst:.1e} | {step} |")
    return "\n".join(lines)


def draw(curves: list[Curves], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(curves), figsize=(4 * len(curves), 3.2), squeeze=False)
    for axis, c in zip(axes[0], curves, strict=True):
        steps = range(1, len(c.unsplit) + 1)
        axis.plot(steps, c.unsplit, color="#999999", linewidth=5, label="unsplit, one process")
        axis.plot(steps, c.disaggregated, color="#c8621b", linewidth=1.2, label="2 A-workers + 2 F-workers")
        axis.set_title(c.name)
        axis.set_xlabel("step")
    axes[0][0].set_ylabel("loss, nats a byte")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of the page and the picture")
    arguments = parser.parse_args()
    curves = []
    with tempfile.TemporaryDirectory() as scratch:
        for config in CONFIGS:
            curves.append(
                Curves(
                    name=config,
                    disaggregated=run(config, arguments.steps, Path(scratch) / config, []),
                    unsplit=run(config, arguments.steps, Path(scratch) / f"{config}_none", ["--parallelism.mode=none"]),
                )
            )
    page = (
        "# Loss curves, disaggregated and unsplit\n\n"
        f"Made by `python -m benchmarks.loss_curves --steps {arguments.steps}`: the debug configs (2 A-workers, "
        '2 F-workers, AdamW, fp32) and the same with `mode = "none"`, the unsplit torchtitan model in one process.\n\n'
        f"{table(curves)}\n\n"
        "Differences are relative. Sums in another order round differently, by about 1e-7. A router chooses: once a "
        "token is so near a tie that rounding decides its expert, the two runs train on with different routings, and "
        "drift apart as two runs with different rounding always do.\n\n"
        "![Both curves of each model lie on each other](loss_curves.png)\n"
    )
    (arguments.docs / "loss_curves.md").write_text(page)
    draw(curves, arguments.docs / "loss_curves.png")
    print(table(curves))


if __name__ == "__main__":
    main()
