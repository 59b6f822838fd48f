"""What checkpoint tests do inside a world's processes: train, save, restore, and say what is held, by unsplit name."""

from __future__ import annotations

import hashlib
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from disagmoe.checkpoint.folder import CheckpointError
from disagmoe.config.errors import ConfigError
from disagmoe.config.schema import CheckpointConfig, Config, ExpertParallelConfig, ParallelismConfig
from disagmoe.trainer import Trainer
from disagmoe.world import World
from tests.distributed.harness.cases import ADAMW, Case, make_config

Digests = dict[tuple[str, int], set[str]]
"""By key and row (0 for what is not an expert): SHA-256 of the bits, of all copies."""
SAVED_STEP = 2
STEPS = 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "none": {"mode": "none"},
    "uneven_3x2": {"layout": (1, 1, 3, 2)},
    "f_first_1x3": {
        "layout": (1, 1, 1, 3),
        "rank_order": ["r0.F0.1", "r0.F0.0", "r0.A0.0", "r0.F0.2"],
        "split_backward": True,
    },
    "deep_2x2": {"layout": (2, 2, 1, 1), "schedule": "plain"},
    "replicas": {"layout": (1, 1, 1, 2), "replicas": 2},
    "colocated_replicas": {"layout": (2, 3, 1, 1), "colocate": True, "replicas": 2},
    "ep_3": {"mode": "ep", "expert_workers": 3, "overlap": "chunked", "num_chunks": 2},
    "ep_2x2": {"mode": "ep", "pipeline_depth": 2, "expert_workers": 2, "chunks_per_rank": 2, "deduplicate": True},
}
"""Names of the matrix's rows and columns; all of different ways to hold the same model."""


def config_of(layout: str, documents: Path, folder: Path, *, global_batch_size: int = 14, **checkpoint: Any) -> Config:
    """AdamW (two moments) on a model with router biases and shared experts, saving every second step."""
    options = dict(LAYOUTS[layout])
    mode = options.pop("mode", "disagmoe")
    expert_parallel = ExpertParallelConfig(microbatches=2, **(options if mode == "ep" else {}))
    placed = {} if mode == "ep" else options
    config = make_config("deepseek_moe", documents, optimizer=ADAMW, global_batch_size=global_batch_size, **placed)
    part = CheckpointConfig(**{"enable": True, "interval": SAVED_STEP, "async_mode": "disabled", **checkpoint})
    return replace(
        config,
        parallelism=ParallelismConfig(mode=mode),
        expert_parallel=expert_parallel,
        checkpoint=part,
        training=replace(config.training, steps=20),
        dump_folder=str(folder),
    )


def save_body(case: Case, world: World) -> tuple[list[float], Digests]:
    """Train to the end; returns the losses of all steps, and what was held when `SAVED_STEP` was saved."""
    trainer = Trainer(case.config, world, folder=None)
    held: Digests = {}
    assert trainer.checkpointer is not None
    after_step = trainer.checkpointer.after_step

    def watch(position: Any, *, last: bool) -> None:
        if position.step == SAVED_STEP:
            held.update(digests(trainer))
        after_step(position, last=last)

    trainer.checkpointer.after_step = watch  # type: ignore[method-assign]
    trainer.run(case.steps)
    losses = [entry["loss"] for entry in trainer.history]
    trainer.close()
    return losses, held


def load_body(case: Case, world: World) -> dict[str, tuple[Digests, list[float]]]:
    """Restore from every folder that `hook_arguments` names, in one trainer, and train on to the end from each.

    Returns, by name: what was held after loading, and the losses after it.
    """
    from disagmoe.optimizer import set_schedule_step

    results = {}
    trainer = Trainer(case.config, world, folder=None)
    checkpointer = trainer.checkpointer
    assert checkpointer is not None
    for name, folder in case.hook_arguments["folders"].items():
        checkpointer.folder = Path(folder) / "checkpoints"
        checkpointer._config = replace(case.config, dump_folder=folder)
        spoil(trainer)
        trainer.position = checkpointer.restore()
        set_schedule_step(trainer.lr_schedulers, trainer.position.step)
        held = digests(trainer)
        losses = []
        for step in range(trainer.position.step + 1, case.steps + 1):
            losses.append(trainer.train_step(step)["loss"])
            trainer.position = replace(trainer.position, step=step, next_sample=trainer.position.next_sample + 14)
        results[name] = (held, losses)
    trainer.close()
    return results


def spoil(trainer: Trainer) -> None:
    """Fill everything that a checkpoint must bring back with rubbish."""
    assert trainer.checkpointer is not None
    local = trainer.checkpointer._local
    local.make_moments()
    with torch.no_grad():
        for piece in local.pieces():
            piece.tensor.fill_(float("nan"))


def digests(trainer: Trainer) -> Digests:
    """What this process holds, moments and router biases included."""
    assert trainer.checkpointer is not None
    held: Digests = {}
    for key, row, tensor in rows(trainer.checkpointer._local.pieces()):
        data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        held.setdefault((key, row), set()).add(hashlib.sha256(data).hexdigest())
    return held


def rows(pieces: Any) -> Iterator[tuple[str, int, torch.Tensor]]:
    for piece in pieces:
        if not piece.sharded:
            yield piece.key, 0, piece.tensor
        for row in range(piece.tensor.shape[0]) if piece.sharded else ():
            yield piece.key, piece.start + row, piece.tensor[row]


def merge(ranks: list[Digests]) -> dict[tuple[str, int], str]:
    """One digest by key and row; all homes must hold the same bits."""
    joined: Digests = {}
    for held in ranks:
        for place, values in held.items():
            joined.setdefault(place, set()).update(values)
    several = [place for place, values in joined.items() if len(values) != 1]
    assert not several, f"homes differ in {several}"
    return {place: values.pop() for place, values in joined.items()}


def run_body(case: Case, world: World) -> dict[str, Any]:
    """A run as `disagmoe.trainer.train` does it; errors of configuration and checkpoints are part of the result.

    `hook_arguments`: {"unlink_at": [step, path]} removes a file after that step, {"largest_file": bytes} limits what
    a process may write into one.
    """
    indices: list[int] = []
    result: dict[str, Any] = {"indices": indices, "losses": [], "error": ""}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        trainer = Trainer(case.config, world, folder=Path(case.folder) if case.folder else None)
        _record_indices(trainer, indices)
        _unlink_after(trainer, *case.hook_arguments.get("unlink_at", (0, "")))
        if "largest_file" in case.hook_arguments:
            resource.setrlimit(resource.RLIMIT_FSIZE, (case.hook_arguments["largest_file"], limits[1]))
        trainer.run(case.steps)
        trainer.close()
    except (CheckpointError, ConfigError) as error:
        result["error"] = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    if "trainer" in locals():
        result["losses"] = [entry["loss"] for entry in trainer.history]
        result["position"] = trainer.position
    return result


def _record_indices(trainer: Trainer, indices: list[int]) -> None:
    """Note the samples that this process trains on, if it is the one to count."""
    if trainer._data is None:
        return
    batch = trainer._data.batch

    def recording(asked: Any) -> Any:
        indices.extend(asked)
        return batch(asked)

    trainer._data.batch = recording  # type: ignore[method-assign]


def _unlink_after(trainer: Trainer, step: int, path: str) -> None:
    train_step = trainer.train_step

    def wrapped(number: int) -> dict[str, Any]:
        values = train_step(number)
        if number == step:
            Path(path).unlink()
        return values

    trainer.train_step = wrapped  # type: ignore[method-assign]
