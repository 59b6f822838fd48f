"""Saving beside training, and restoring before it."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from disagmoe.checkpoint.folder import (
    CheckpointError,
    Found,
    file_problems,
    find_checkpoints,
    read_manifest,
    read_state,
    remove,
    step_name,
    supersede,
    temporary_name,
    tidy,
)
from disagmoe.checkpoint.resume import (
    Candidates,
    changes,
    checkpoint_folder,
    describe_run,
    differences,
    find_candidates,
    no_usable,
)
from disagmoe.checkpoint.state import Assignment, LocalState, exchange, unit_bytes, views
from disagmoe.checkpoint.storage import CommittingWriter, read, write
from disagmoe.config.errors import ConfigError, Problem
from disagmoe.config.schema import Config
from disagmoe.parallelisms.failures import POLL_S
from disagmoe.world import World

_LONGEST_WRITE = timedelta(hours=12)
"""A peer that dies while it writes is noticed by the monitor; this is only the last resort."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Position:
    """How far a run has come."""

    step: int = 0
    """Optimizer steps made."""
    next_sample: int = 0
    """Global index of the first sample not yet trained on."""


@dataclass(frozen=True, kw_only=True)
class Save:
    """What one checkpoint took, on this process."""

    step: int
    stall_s: float
    """Training waited: for the save before, and for the copy to host memory (`async`) or the whole writing."""
    total_s: float
    """From the call until the checkpoint existed."""
    bytes: int
    """Written by this process."""


class Checkpointer:
    """Saves and restores the state of one process among all. Every method is collective.

    Args:
        local: This process's part.
        fingerprint: Of the data.
        say: Shows a line on the console.
    """

    def __init__(
        self, *, config: Config, world: World, local: LocalState, fingerprint: str, say: Callable[[str], None]
    ) -> None:
        self._config, self._world, self._local, self._fingerprint, self._say = config, world, local, fingerprint, say
        self.folder = checkpoint_folder(config)
        self._group: dist.ProcessGroup | None = None
        if world.layout.world_size > 1:
            # Its own, so that a save in the background shares nothing with training.
            self._group = dist.new_group(backend="gloo", timeout=_LONGEST_WRITE)
        world.monitor.status.write("dividing the checkpoint among the processes")
        self._assignment: Assignment = exchange(local.shapes())
        self._own = self._assignment.by_rank[world.rank]
        self._full_shapes = {unit.key: unit.full_shape for unit in self._assignment.units}
        self._run = self._from_first(lambda: uuid.uuid4().hex[:8])
        self._staged: list[Tensor] = []
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self._lost = False
        self._saved_step: int | None = None
        self.saves: list[Save] = []

    # -- saving --------------------------------------------------------------------------------------------------

    def after_step(self, position: Position, *, last: bool) -> None:
        """Save if it is time, and always after the `last` step, when the checkpoint is complete on return.

        Raises:
            CheckpointError: saving failed, and training is not to go on without.
        """
        due = last or position.step % self._config.checkpoint.interval == 0
        if self._thread is not None and not self._thread.is_alive():
            self.settle()
        if due and position.step != self._saved_step:
            self.save(position, wait=last or self._config.checkpoint.async_mode == "disabled", last=last)
        if last:
            self.settle(last=True)

    @property
    def total_bytes(self) -> int:
        """Of the tensors in a checkpoint."""
        return sum(self._assignment.bytes_by_rank)

    def save(self, position: Position, *, wait: bool, last: bool = False) -> None:
        """Save now; without `wait`, return as soon as the state is copied. See `after_step`."""
        called_s = time.monotonic()
        self._world.monitor.status.write(f"step {position.step}, saving a checkpoint")
        self.settle()
        tensors = views(self._local.pieces(), self._own)
        if not wait or self._world.device.type == "cuda":
            tensors = self._stage(tensors)
        writer = CommittingWriter(
            self.folder / temporary_name(position.step, self._run), position.step, self._describe(position)
        )
        self._thread = threading.Thread(
            target=self._write, args=(writer, tensors, position.step, called_s), name="checkpoint", daemon=True
        )
        self._thread.start()
        if wait:
            self._join()
        size = sum(unit_bytes(unit) for unit in self._own)
        self.saves.append(
            Save(step=position.step, stall_s=time.monotonic() - called_s, total_s=float("nan"), bytes=size)
        )
        if wait:
            self.settle(last=last)

    def _stage(self, tensors: list[Tensor]) -> list[Tensor]:
        """Copy to host memory of our own, which is kept for the next time."""
        if not self._staged:
            pinned = self._world.device.type == "cuda"
            self._staged = [torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=pinned) for t in tensors]
        for target, source in zip(self._staged, tensors, strict=True):
            target.copy_(source, non_blocking=True)
        if self._world.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return self._staged

    def _write(self, writer: CommittingWriter, tensors: list[Tensor], step: int, called_s: float) -> None:
        """In a thread: write, commit, and remove what is too old. The outcome is the same on every process."""
        try:
            write(writer, self._own, tensors, group=self._group)
            self._saved_step, self._total_s = step, time.monotonic() - called_s
            if self._world.rank == 0:
                self._tidy()
        except CheckpointError as error:
            self._error = CheckpointError(f"the checkpoint of step {step} could not be saved: {error}")
            if self._world.rank == 0:
                with contextlib.suppress(OSError):
                    remove(Path(writer.path))
        except Exception as error:  # the processes could not talk: for one of them this is a failure of another
            self._lost = True
            self._error = CheckpointError(f"the checkpoint of step {step}: {type(error).__name__}: {error}")

    def _tidy(self) -> None:
        try:
            tidy(self.folder, self._config.checkpoint.keep_latest_k, run=self._run)
        except (OSError, CheckpointError) as error:  # the new one is there all the same
            sys.stderr.write(f"warning: {self.folder}: older checkpoints could not be removed: {error}\n")

    def _join(self) -> None:
        """Wait for the thread in slices, so that a failure elsewhere ends the wait."""
        while self._thread is not None and self._thread.is_alive():
            self._world.monitor.check()
            self._thread.join(min(0.05, POLL_S))

    def settle(self, *, last: bool = False) -> None:
        """Wait until the save under way, if any, has ended, and act on its outcome. See `after_step`."""
        if self._thread is None:
            return
        self._join()
        self._thread = None
        error, self._error = self._error, None
        if error is None:
            save = self.saves[-1] = Save(**{**vars(self.saves[-1]), "total_s": self._total_s})
            whole = self.total_bytes / 1e6
            took = f"{save.total_s:.2f} s, of which training waited {save.stall_s:.2f} s"
            self._say(f"saved {self.folder / step_name(save.step)} ({whole:,.1f} MB) in {took}")
            return
        if self._config.checkpoint.on_save_failure == "continue" and not last and not self._lost:
            if self._world.rank == 0:
                sys.stderr.write(f"warning: {error}; training goes on ([checkpoint] on_save_failure)\n")
            return
        if self._world.rank != 0 or self._lost:  # the same error everywhere: one process says it
            self._world.monitor.wait_for_notice(self._world.monitor.patience_s)
            self._world.monitor.check()
        raise error

    def _describe(self, position: Position) -> dict[str, Any]:
        return describe_run(
            self._config,
            step=position.step,
            next_sample=position.next_sample,
            fingerprint=self._fingerprint,
            world_size=self._world.layout.world_size,
            layout=", ".join(self._world.monitor.workers_on(r) for r in range(self._world.layout.world_size)),
        )

    # -- restoring -----------------------------------------------------------------------------------------------

    def restore(self) -> Position:
        """Continue from the checkpoint that `[checkpoint] resume` means, if there is one.

        Raises:
            CheckpointError: a requested checkpoint is missing, partial or damaged; or none is whole.
            ConfigError: the configuration would not continue its run.
        """
        self._world.monitor.status.write("looking for a checkpoint")
        candidates = self._from_first(lambda: find_candidates(self._config))
        notes = list(candidates.passed_over)
        for entry in candidates.usable:
            problems = self._verify(entry)
            if not problems:
                return self._load(entry, notes)
            if candidates.requested is not None:
                raise CheckpointError("; ".join(problems))
            notes.append(f"{entry.path.name}: {'; '.join(problems)}")
        if candidates.usable:
            raise CheckpointError(no_usable(self.folder, tuple(notes)))
        self._begin(candidates)
        return Position()

    def _begin(self, candidates: Candidates) -> None:
        def make_folder() -> None:
            found = [entry for entry in find_checkpoints(self.folder) if entry.state == "complete"]
            if found:  # only with resume = "none"
                what = f"{self.folder}: holds checkpoints of an earlier run ({found[0].path.name})"
                raise CheckpointError(f'{what}; set [checkpoint] resume = "auto", or choose another folder')
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise CheckpointError(f"{self.folder}: can't be made ({error.strerror})") from error

        self._from_first(make_folder)
        for note in candidates.passed_over:
            self._say(f"no checkpoint to continue from; passed over {note}")

    def _verify(self, entry: Found) -> list[str]:
        """Compare the checksums of all files, each process those of a share."""
        self._world.monitor.status.write(f"verifying {entry.path}")
        try:
            names = sorted(read_manifest(entry.path)["files"])
            problems = file_problems(entry.path, names[self._world.rank :: self._world.layout.world_size])
        except CheckpointError as error:
            problems = [str(error)]
        return sorted({problem for share in self._gather(problems) for problem in share})

    def _load(self, entry: Found, notes: list[str]) -> Position:
        state = read_state(entry.path)
        wrong = [
            Problem(origin=str(entry.path), key=key, rule=rule, fix=fix)
            for key, rule, fix in differences(self._config, state, fingerprint=self._fingerprint)
        ]
        if wrong:
            raise ConfigError(wrong)
        self._world.monitor.status.write(f"loading {entry.path}")
        self._local.make_moments()
        read(entry.path, self._local.pieces(), self._full_shapes)
        self._local.set_optimizer_step(state["step"])
        position = Position(step=state["step"], next_sample=state["data"]["next_sample"])
        self._saved_step = position.step
        self._gather(None)  # nobody changes the folder while others read
        if self._world.rank == 0:
            for later in find_checkpoints(self.folder):
                if later.step > position.step and later.state in ("complete", "damaged"):
                    notes.append(f"{later.path.name}: kept as {supersede(later.path).name}")
        for note in notes:
            self._say(f"passed over {note}")
        mode, size = state["layout"]["mode"], state["layout"]["world_size"]
        saved_by = f'mode = "{mode}", {size} process{"es" if size > 1 else ""}'
        self._say(
            f"continuing from {entry.path} ({saved_by}): step {position.step + 1} begins at sample "
            f"{position.next_sample:,}"
        )
        for change in changes(self._config, state):
            self._say(f"changed since: {change}")
        return position

    # -- among the processes -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the group; after the last `after_step`."""
        if self._group is not None:
            dist.destroy_process_group(self._group)

    def _from_first(self, function: Callable[[], T]) -> T:
        """What `function` returns on rank 0, or raises there, on every process."""
        answer: list[Any] = [None, None]
        if self._world.rank == 0:
            try:
                answer[0] = function()
            except CheckpointError as error:
                answer[1] = str(error)
        if self._group is not None:
            dist.broadcast_object_list(answer, src=0, group=self._group)
        if answer[1] is not None:
            raise CheckpointError(answer[1])
        return answer[0]

    def _gather(self, value: T) -> list[T]:
        if self._group is None:
            return [value]
        everyone: list[Any] = [None] * self._world.layout.world_size
        dist.all_gather_object(everyone, value, group=self._group)
        return everyone
