"""What saving costs: the time of 20 steps with an asynchronous save, a synchronous one, and none, in one run.

    python -m benchmarks.checkpoint_stall [--config-file=FILE] [--windows=4] [--steps=20] [--section.key=value ...]

Starts the processes of the configuration's layout and trains windows of 20 steps, in turns without a save, with an
asynchronous one and with a synchronous one after the window's first step, so that what else the machine does falls on
all alike. Prints for each kind the median time of a window, what that is over the windows without a save, and the
time that the call itself kept training waiting.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

KINDS = ("none", "async", "disabled")
"""`[checkpoint] async_mode` of the windows; `none`: no save."""


def worker(config_file: str, overrides: list[str], windows: int, steps: int) -> None:
    """One process of the run; rank 0 prints."""
    from disagmoe.config.checks import check_config
    from disagmoe.config.load import load_config
    from disagmoe.trainer import Trainer
    from disagmoe.world import run_guarded, start_world

    resolved = load_config(config_file, overrides)
    check_config(resolved)
    config = resolved.config
    config = replace(
        config,
        training=replace(config.training, steps=(windows + 1) * len(KINDS) * steps),
        checkpoint=replace(config.checkpoint, enable=True, interval=10**9, keep_latest_k=2),
    )
    world = start_world(config, Path(config.dump_folder))
    took_s: dict[str, list[float]] = {kind: [] for kind in KINDS}
    stalls_s: dict[str, list[float]] = {kind: [] for kind in KINDS}

    def body() -> None:
        trainer = Trainer(config, world, folder=None)
        checkpointer = trainer.checkpointer
        assert checkpointer is not None
        for window in range(windows + 1):  # the first one warms up
            for kind in KINDS:
                start_s = time.monotonic()
                for number in range(steps):
                    step = trainer.position.step + 1
                    trainer.train_step(step)
                    next_sample = trainer.position.next_sample + config.training.global_batch_size
                    trainer.position = replace(trainer.position, step=step, next_sample=next_sample)
                    if number == 0 and kind != "none":
                        called_s = time.monotonic()
                        checkpointer.save(trainer.position, wait=kind == "disabled")
                        if window:
                            stalls_s[kind].append(time.monotonic() - called_s)
                checkpointer.settle()  # what the background has not done by now counts as well
                if window:
                    took_s[kind].append(time.monotonic() - start_s)
        if world.rank == 0:
            report(took_s, stalls_s, steps, checkpointer.total_bytes, [s.total_s for s in checkpointer.saves])
        trainer.close()

    run_guarded(world, body)


def report(
    took_s: dict[str, list[float]],
    stalls_s: dict[str, list[float]],
    steps: int,
    size: int,
    totals_s: list[float],
) -> None:
    """A line a kind."""
    plain = statistics.median(took_s["none"])
    print(f"checkpoint of {size / 1e6:.1f} MB; until it was complete: median {statistics.median(totals_s):.2f} s")
    for kind in KINDS:
        middle = statistics.median(took_s[kind])
        pairs = [100 * (with_s / without_s - 1) for with_s, without_s in zip(took_s[kind], took_s["none"], strict=True)]
        stall = f"{1e3 * statistics.median(stalls_s[kind]):.0f} ms" if stalls_s[kind] else "-"
        print(
            f"{kind:<9} {steps} steps {middle:6.2f} s  {100 * (middle / plain - 1):+5.1f} %  "
            f"pairs {', '.join(f'{p:+.1f}' for p in pairs)} %  call {stall}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config-file", default="train_configs/debug_deepseek_moe.toml")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    options, overrides = parser.parse_known_args()
    if "RANK" in os.environ:
        if os.environ["RANK"] != "0":
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        worker(options.config_file, overrides, options.windows, options.steps)
        return
    from disagmoe.config.checks import build_layout
    from disagmoe.config.load import load_config

    with tempfile.TemporaryDirectory(prefix="checkpoint_stall_") as folder:
        overrides.append(f"--dump_folder={folder}")
        size = build_layout(load_config(options.config_file, overrides).config).world_size
        command = [
            *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={size}", "--rdzv-backend=c10d"),
            *("--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "-m", "benchmarks.checkpoint_stall"),
            *(f"--config-file={options.config_file}", f"--windows={options.windows}", f"--steps={options.steps}"),
        ]
        environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ}
        sys.exit(subprocess.run([*command, *overrides], env=environment).returncode)


if __name__ == "__main__":
    main()
