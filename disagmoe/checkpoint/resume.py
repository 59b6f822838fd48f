"""Which checkpoint a run continues from, and whether it may: as far as can be told without torch and without reading
the tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from disagmoe.checkpoint.folder import CheckpointError, Found, find_checkpoints, read_state, step_name
from disagmoe.config.checks import resume_step
from disagmoe.config.errors import Problem, show
from disagmoe.config.load import ResolvedConfig
from disagmoe.config.schema import Config

_SAME = {
    "recipe.name": "the checkpoint is of another model",
    "recipe.flavor": "the checkpoint is of another model",
    "training.dtype": "the checkpoint's tensors are of that type",
    "training.seq_len": "the position in the data is counted in samples of that length",
    "debug.seed": "the order of the data follows from it",
    "optimizer.name": "the checkpoint has that optimizer's moments",
}
"""Keys that must be as in the checkpoint, and why."""
_DATA = ("data.source", "data.tokenizer", "data.text_field", "data.split", "data.shuffle")
"""Keys that may differ as long as the data are the same."""


def checkpoint_folder(config: Config) -> Path:
    return Path(config.dump_folder) / config.checkpoint.folder


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Checkpoints to continue from, best first, and what is passed over."""

    usable: tuple[Found, ...]
    passed_over: tuple[str, ...]
    """A line each: which, and why."""
    requested: int | None
    """The step that was asked for; None: the newest that is whole."""


def find_candidates(config: Config) -> Candidates:
    """What `[checkpoint] resume` allows to continue from; nothing usable and no request means a start from step 1.

    Raises:
        CheckpointError: the requested checkpoint is missing or damaged; or there are checkpoints, and none is whole.
    """
    folder, step = checkpoint_folder(config), resume_step(config)
    if config.checkpoint.resume == "none":
        return Candidates(usable=(), passed_over=(), requested=None)
    found = find_checkpoints(folder)
    complete = tuple(entry for entry in found if entry.state == "complete")
    if step is not None:
        return Candidates(usable=(_requested(folder, step, found),), passed_over=(), requested=step)
    notes = tuple(describe(entry) for entry in found if entry.state != "complete")
    if not complete and any(entry.state == "damaged" for entry in found):
        raise CheckpointError(no_usable(folder, notes))
    return Candidates(usable=complete, passed_over=notes, requested=None)


def find_checkpoint_to_continue(config: Config) -> bool:
    """Whether the run will most likely continue from a checkpoint, so that weights from elsewhere need not be read."""
    try:
        return config.checkpoint.enable and bool(find_candidates(config).usable)
    except CheckpointError:
        return False  # `Checkpointer.restore` says so


def no_usable(folder: Path, notes: tuple[str, ...]) -> str:
    """The error for a folder in which nothing is whole."""
    reasons = "; ".join(notes)
    return f"{folder}: no checkpoint there can be used ({reasons}); to start anew, choose another dump_folder"


def describe(entry: Found) -> str:
    """Why `find_candidates` passes a checkpoint over."""
    if entry.state == "unfinished":
        return f"{entry.path.name}: unfinished, its run ended while it was being written"
    if entry.state == "superseded":
        return f"{entry.path.name}: a later run went back to an earlier step"
    return f"{entry.path.name}: {entry.problems[0] if entry.problems else entry.state}"


def _requested(folder: Path, step: int, found: list[Found]) -> Found:
    of_step = [entry for entry in found if entry.step == step and entry.state in ("complete", "damaged")]
    if not of_step:
        steps = sorted(entry.step for entry in found if entry.state == "complete")
        there = f"complete ones are of step {', '.join(map(str, steps))}" if steps else "there is no complete one"
        raise CheckpointError(f"{folder / step_name(step)}: there is no such checkpoint; {there}")
    if of_step[0].state == "damaged":
        raise CheckpointError("; ".join(of_step[0].problems))
    return of_step[0]


def find_resume_problems(resolved: ResolvedConfig) -> Iterator[Problem]:
    """What keeps a run from continuing as configured; nothing if checkpoints are off. For one node: the first."""
    config = resolved.config
    if not config.checkpoint.enable:
        return
    folder = checkpoint_folder(config)
    if folder.exists() and not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        yield resolved.problem("checkpoint.folder", f"{folder} must be a folder that you may write to")
        return
    if config.checkpoint.resume == "none":
        return
    try:
        candidates = find_candidates(config)
        state = read_state(candidates.usable[0].path) if candidates.usable else None
    except CheckpointError as error:
        yield resolved.problem("checkpoint.resume", str(error))
        return
    if state is not None:
        for key, rule, fix in differences(config, state, fingerprint=None):
            yield resolved.problem(key, rule, fix=fix)


def differences(config: Config, state: Mapping[str, Any], *, fingerprint: str | None) -> Iterator[tuple[str, str, str]]:
    """(key, rule, fix) for everything in which `config` would not continue the run of a checkpoint.

    Layout, schedule, batch size, learning rate and the like may change; what is named here may not.

    Args:
        state: of the checkpoint, see `describe_run`.
        fingerprint: of the data as they are now; None: not known yet.
    """
    old, new = state["config"], asdict(config)
    where = step_name(state["step"])

    def value(tree: Mapping[str, Any], key: str) -> Any:
        section, _, name = key.partition(".")
        return tree[section].get(name)

    for key, reason in _SAME.items():
        if value(old, key) != value(new, key):
            yield key, f"must be {show(value(old, key))} as in {where}: {reason}", _another_folder(config)
    if old["optimizer"]["name"] == "SGD" and bool(old["optimizer"]["momentum"]) != bool(config.optimizer.momentum):
        was = old["optimizer"]["momentum"]
        yield "optimizer.momentum", f"must be {'above 0' if was else '0'} as in {where}", f"it was {was} there"
    if old["training"]["load_balance_coeff"] and not config.training.load_balance_coeff:
        yield "training.load_balance_coeff", f"must be above 0: {where} has router biases", ""
    if fingerprint is not None:
        yield from _data_differences(config, state, fingerprint, where)


def _data_differences(
    config: Config, state: Mapping[str, Any], fingerprint: str, where: str
) -> Iterator[tuple[str, str, str]]:
    saved, old, new = state["data"]["fingerprint"], state["config"]["data"], asdict(config)["data"]
    changed = [key for key in _DATA if old[key.partition(".")[2]] != new[key.partition(".")[2]]]
    # A stream's fingerprint knows only its name: there, what it is read with must be the same as well.
    if saved == fingerprint and (not changed or " " not in fingerprint):
        return
    reason = f"the data are not those of {where}, whose run has trained {state['data']['next_sample']} samples of them"
    fix = f"{_another_folder(config)}, or give back the same data"
    for key in changed:
        yield key, f"was {show(old[key.partition('.')[2]])} there; {reason}", fix
    if not changed:
        yield "data.source", f"has other content now; {reason}", fix


def changes(config: Config, state: Mapping[str, Any]) -> list[str]:
    """What bears on training and is not as it was in the checkpoint's run, a line each."""
    new = asdict(config)
    return [
        f"{section}.{key} = {show(new[section][key])}, was {show(old)}"
        for section in ("training", "optimizer", "lr_scheduler")
        for key, old in state["config"][section].items()
        if key != "stop_after" and key in new[section] and new[section][key] != old
    ]


def _another_folder(config: Config) -> str:
    return "to start another run, choose another dump_folder" if config.dump_folder else ""


def describe_run(
    config: Config, *, step: int, next_sample: int, fingerprint: str, world_size: int, layout: str
) -> dict[str, Any]:
    """What goes into `state.json` beside the tensors.

    Args:
        step: optimizer steps made; the learning rate's schedule and Adam's bias correction follow from it.
        next_sample: global index of the first sample that has not been trained on.
        layout: in words.
    """
    return {
        "step": step,
        "data": {"next_sample": next_sample, "fingerprint": fingerprint},
        "seed": config.debug.seed,
        "layout": {"mode": config.parallelism.mode, "world_size": world_size, "text": layout},
        "config": asdict(config),
    }
