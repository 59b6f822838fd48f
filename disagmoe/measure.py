"""`disagmoe allocate --measure "COMMAND"`: trials as short runs of a training command, each stored with its outcome.

COMMAND is `run_train.sh` or anything that takes its place and its options (a wrapper that starts all nodes, say). A
trial adds the layout, a number of steps and a dump folder of its own; the median time of the steps after the first ones
is read from that folder's `metrics.jsonl`. A run that fails, hangs or writes nothing is a failed trial, not the end of
the search.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median

from disagmoe.allocator.local_search import Trial
from disagmoe.config.load import as_toml

WARM_UP = 2
"""First steps that do not count."""
TAIL = 600
"""Characters of a failed run's output that are kept."""


class Runner:
    """Runs trials of one configuration in `folder`, and appends each to `folder/trials.jsonl`."""

    def __init__(self, *, command: str, config: Path, folder: Path, steps: int, timeout_s: float) -> None:
        if steps <= WARM_UP:
            raise ValueError(f"steps = {steps}: must be above {WARM_UP}, as the first {WARM_UP} do not count")
        self.command, self.config, self.folder = command, config, folder
        self.steps, self.timeout_s = steps, timeout_s
        self.count = 0
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, settings: Mapping[str, object]) -> Trial:
        """One trial with these `[disagmoe]` values."""
        self.count += 1
        dump = self.folder / f"trial_{self.count:03}"
        options = [f"--disagmoe.{key}={_bare(value)}" for key, value in settings.items()]
        options += [f"--training.steps={self.steps}", f"--dump_folder={dump}", "--metrics.tensorboard=false"]
        output, error = self._start([*shlex.split(self.command), *options])
        step_s = None if error else read_step_s(dump / "metrics.jsonl")
        if step_s is None and not error:
            error = f"no steps after the first {WARM_UP} in {dump / 'metrics.jsonl'}"
        trial = Trial(settings=dict(settings), step_s=step_s, error=error and f"{error}\n{output[-TAIL:]}".strip())
        with (self.folder / "trials.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"trial": self.count, **asdict(trial)}) + "\n")
        return trial

    def _start(self, words: list[str]) -> tuple[str, str]:
        """(Output, what went wrong). A run that takes too long is ended with all that it has started."""
        environment = {**os.environ, "CONFIG_FILE": str(self.config)}
        try:
            process = subprocess.Popen(
                words,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            return "", f"can't be started: {error}"
        try:
            output, _ = process.communicate(timeout=self.timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return output, f"took longer than {self.timeout_s:g} s"
        return output, "" if process.returncode == 0 else f"ended with exit code {process.returncode}"


def read_step_s(path: Path) -> float | None:
    """Median seconds of the steps after the first `WARM_UP`; None where there are none."""
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return None
    counted = (r for r in records if r.get("step", 0) > WARM_UP)
    seconds = [r["step_time_s"] for r in counted if r.get("step_time_s") is not None]
    return median(seconds) if seconds else None


def _bare(value: object) -> str:
    return value if isinstance(value, str) else as_toml(value)
