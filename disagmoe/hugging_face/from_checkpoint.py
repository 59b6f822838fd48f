"""A checkpoint of any layout as a folder that transformers loads, in one process and a few tensors at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from disagmoe.checkpoint.folder import CheckpointError, file_problems, read_state
from disagmoe.checkpoint.state import MODEL, Piece
from disagmoe.checkpoint.storage import read, stored_keys
from disagmoe.config.errors import ConfigError, Problem
from disagmoe.config.recipe import load_recipe
from disagmoe.hugging_face.export import BIAS, SHARD_BYTES, begin, bias_problem, complete, partial_name
from disagmoe.hugging_face.source import format_of
from disagmoe.models.state_dict.maps import ParameterMap
from disagmoe.models.state_dict.write import TensorWriter, plan_files

AT_ONCE_BYTES = 1 << 30
"""Tensors that are read together; a larger one is read alone."""


def export_checkpoint(
    checkpoint: Path,
    folder: str | Path,
    *,
    source: str | Path | None = None,
    dtype: str = "bfloat16",
    drop_router_biases: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write the weights of a complete checkpoint, whose files are verified first. Memory: about `AT_ONCE_BYTES`.

    Args:
        source: the folder whose config.json and tokenizer are carried over; None: the one that the run started from
            (`[checkpoint] initial_load_path`), if it did.
        dtype, drop_router_biases, shard_bytes: as in `export_modules`.

    Returns: how many parameters (by name) were written.

    Raises:
        CheckpointError: the checkpoint is damaged or of another model.
        ConfigError: as `export_modules`.
    """
    problems = file_problems(checkpoint)
    if problems:
        raise CheckpointError("; ".join(problems))
    config = read_state(checkpoint)["config"]
    recipe, flavor = load_recipe(config["recipe"]["name"]), config["recipe"]["flavor"]
    if source is None and config["checkpoint"]["initial_load_in_hf"]:
        source = config["checkpoint"]["initial_load_path"]
    maps = list(format_of(recipe).parameters(recipe.shape(flavor)))
    biases = _accounted_for(checkpoint, maps)
    stored_dtype = getattr(torch, config["training"]["dtype"])
    largest = max((float(bias.abs().max()) for bias in _read_all(checkpoint, biases, torch.float32)), default=0.0)
    if largest and not drop_router_biases:
        raise ConfigError([bias_problem(largest)])
    target = Path(folder).expanduser()
    plans = plan_files(maps, dtype, most_bytes=shard_bytes)
    refused = begin(recipe, flavor, target, plans, source=source, dtype=dtype)
    if refused:
        raise ConfigError(refused)
    try:
        with TensorWriter(partial_name(target), plans, dtype) as writer:
            for group in _groups(maps, stored_dtype.itemsize):
                values = _read_all(checkpoint, {entry.name: entry.shape for entry in group}, stored_dtype)
                for entry, value in zip(group, values, strict=True):
                    writer.write(entry, value)
    except OSError as error:
        raise ConfigError([Problem(origin=str(target), key="", rule=f"can't be written: {error}")]) from None
    complete(target)
    return len(maps)


def _accounted_for(checkpoint: Path, maps: Iterable[ParameterMap]) -> dict[str, tuple[int, ...]]:
    """Compare the checkpoint's tensors with the model's; returns those of router biases, by name."""
    stored = {key.removeprefix(MODEL): shape for key, shape in stored_keys(checkpoint).items() if key.startswith(MODEL)}
    biases = {name: shape for name, shape in stored.items() if name.endswith(BIAS)}
    wanted = {entry.name: entry.shape for entry in maps}
    found = {name: shape for name, shape in stored.items() if name not in biases}
    if found != wanted:
        other = sorted({name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name)})
        raise CheckpointError(f"{checkpoint}: holds other tensors than the model: {', '.join(other[:5])}")
    return biases


def _groups(maps: Iterable[ParameterMap], itemsize: int) -> Iterator[list[ParameterMap]]:
    group: list[ParameterMap] = []
    size = 0
    for entry in maps:
        if group and size + entry.num_elements * itemsize > AT_ONCE_BYTES:
            yield group
            group, size = [], 0
        group.append(entry)
        size += entry.num_elements * itemsize
    if group:
        yield group


def _read_all(checkpoint: Path, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    tensors = [torch.empty(shape, dtype=dtype) for shape in shapes.values()]
    pieces = [Piece(key=MODEL + n, start=0, tensor=t, sharded=False) for n, t in zip(shapes, tensors, strict=True)]
    if pieces:
        read(checkpoint, pieces, {MODEL + name: shape for name, shape in shapes.items()})
    return tensors
