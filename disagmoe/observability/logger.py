"""Where metrics go: metrics.jsonl, TensorBoard event files and one line a step on the console."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from disagmoe.observability import metrics as m
from disagmoe.observability.console import console_line
from disagmoe.observability.progress import Progress


class MetricsLogger:
    """One object a step into `folder`; does nothing at all where not `enabled` (all ranks but 0).

    A continued run repeats the steps after its checkpoint: what the files hold of the first logged step and of later
    ones is dropped then, so that each step is there once.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        enabled: bool,
        tensorboard: bool,
        num_steps: int,
        log_freq: int,
        stream: TextIO | None = None,
    ) -> None:
        """
        Args:
            folder: the dump folder; receives metrics.jsonl and tb/.
            tensorboard: write event files.
            log_freq: steps between lines on the console and entries in the event files; metrics.jsonl has every step.
            stream: the console; standard output by default. Coloured if it is a terminal.
        """
        if log_freq < 1:
            raise ValueError(f"[metrics] log_freq = {log_freq}: must be at least 1 step")
        self._folder = Path(folder)
        self._enabled = enabled
        self._tensorboard = tensorboard
        self._writer_class: Any = None
        if enabled and tensorboard:
            # Imported here, not above: other ranks, and runs without event files, must not pay for it. And not at the
            # first `log`, which would make the second step look slow.
            from torch.utils.tensorboard import SummaryWriter

            self._writer_class = SummaryWriter
        self._num_steps = num_steps
        self._log_freq = log_freq
        self._stream = stream
        self._progress = Progress(num_steps=num_steps)
        self._file: TextIO | None = None
        self._writer: Any = None
        """torch.utils.tensorboard.SummaryWriter"""

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Report one step.

        Args:
            values: by keys of `metrics`: numbers, 0-dim tensors or lists of numbers (which go to metrics.jsonl only).

        Raises:
            ValueError: a key that is not in `metrics`.
        """
        if not self._enabled:
            return
        plain = {m.STEP: step, **{key: _plain(value) for key, value in values.items()}}
        for key in plain:
            m.check_key(key)
        if self._file is None:
            self._open(step)
        assert self._file is not None
        self._file.write(json.dumps({key: _finite(value) for key, value in plain.items()}, allow_nan=False) + "\n")
        self._file.flush()
        if m.STEP_TIME_S in plain:
            self._progress.update(step, plain[m.STEP_TIME_S])
        if step == 1 or step % self._log_freq == 0 or step == self._num_steps:
            self._write_events(step, plain)
            self._write_line(plain)

    def say(self, text: str) -> None:
        """Show a line that is not a step's on the console."""
        if self._enabled:
            stream = self._stream or sys.stdout
            stream.write(text + "\n")
            stream.flush()

    def close(self) -> None:
        """Finish the files. Safe to call twice."""
        if self._file is not None:
            self._file.close()
        if self._writer is not None:
            self._writer.close()
        self._enabled = False

    def _open(self, first_step: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / "metrics.jsonl"
        set_steps_aside(path, first_step)
        self._file = path.open("a", encoding="utf-8")
        if self._tensorboard:
            folder = self._folder / "tb"
            continued = folder.is_dir() and any(folder.iterdir())
            # `purge_step` makes readers drop what earlier files hold of this step and later ones.
            self._writer = self._writer_class(str(folder), purge_step=first_step if continued else None)

    def _write_events(self, step: int, plain: Mapping[str, Any]) -> None:
        if self._writer is None:
            return
        for key, value in plain.items():
            if key != m.STEP and not isinstance(value, list) and value is not None:
                self._writer.add_scalar(key.replace(".", "/", 1), value, step)
        self._writer.flush()

    def _write_line(self, plain: Mapping[str, Any]) -> None:
        stream = self._stream or sys.stdout
        colour = stream.isatty() and "NO_COLOR" not in os.environ
        line = console_line(plain, num_steps=self._num_steps, eta_s=self._progress.eta_s, colour=colour)
        stream.write(line + "\n")
        stream.flush()


def set_steps_aside(path: Path, first_step: int) -> None:
    """Move `first_step` and later steps out of a metrics.jsonl: a run that continues writes them anew.

    They are added to `metrics.superseded.jsonl`. A last line that a kill left unfinished is dropped.
    """
    if not path.is_file():
        return
    kept: list[str] = []
    aside: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            (kept if json.loads(line)[m.STEP] < first_step else aside).append(line + "\n")
        except ValueError:
            continue
    if aside:  # before they are gone from the other file
        with path.with_suffix(".superseded.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(aside)
    partial = path.with_name(path.name + ".part")
    partial.write_text("".join(kept), encoding="utf-8")
    os.replace(partial, path)


def _plain(value: Any) -> Any:
    """Tensors and arrays as Python numbers or lists of them."""
    return value.tolist() if hasattr(value, "tolist") else value


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
