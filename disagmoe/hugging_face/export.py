"""The weights that processes hold as a folder that transformers loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from disagmoe.config.errors import ConfigError, Problem
from disagmoe.config.hugging_face import CONFIG_NAME, config_for, find_contradictions, read_config
from disagmoe.config.recipe import Recipe
from disagmoe.hugging_face.source import carry_files, format_of
from disagmoe.models.state_dict.load import held_by
from disagmoe.models.state_dict.maps import ParameterMap
from disagmoe.models.state_dict.write import FilePlan, TensorWriter, lay_out, plan_files

SHARD_BYTES = 5_000_000_000
BIAS = "expert_bias_E"


def largest_bias(modules: Iterable[nn.Module]) -> float:
    """Of the router biases on this process, the largest absolute value; 0 without any."""
    buffers = [buffer for module in modules for name, buffer in module.named_buffers() if name.endswith(BIAS)]
    return max((float(buffer.abs().max()) for buffer in buffers), default=0.0)


def export_modules(
    modules: Sequence[nn.Module],
    recipe: Recipe,
    flavor: str,
    folder: str | Path,
    *,
    source: str | Path | None = None,
    dtype: str = "bfloat16",
    drop_router_biases: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write what an engine's modules hold, together with all other processes. Collective.

    Every tensor (and every expert of a stacked one) is written by the process of lowest rank that holds it, to its
    place in files that rank 0 has laid out: `folder` must be on a file system that all processes share. The folder
    appears under its name only when it is complete.

    Args:
        modules: `Engine.modules`, in any mode and layout.
        folder: must not exist, or be empty.
        source: the folder that the weights came from, whose config.json and tokenizer are carried over; None: a new
            config.json, no tokenizer.
        dtype: `float32`, `bfloat16` or `float16`.
        drop_router_biases: published models have no router biases: where they are not zero, leave them out, which
            changes the choice of experts, instead of refusing.
        shard_bytes: most data in a file.

    Raises:
        ConfigError: the folder is in use, `source` is another model's, or biases would be lost; on every process.
    """
    form, shape = format_of(recipe), recipe.shape(flavor)
    maps = {entry.name: entry for entry in form.parameters(shape)}
    held = {(entry.name, entry.experts): entry for entry in held_by(modules, maps)}
    everyone = _gather((list(held), largest_bias(modules)))
    bias = max(found for _, found in everyone)
    target, plans = Path(folder).expanduser(), plan_files(list(maps.values()), dtype, most_bytes=shard_bytes)
    problems: list[Problem] = []
    if bias and not drop_router_biases:
        problems.append(bias_problem(bias))
    if _rank() == 0 and not problems:
        problems = begin(recipe, flavor, target, plans, source=source, dtype=dtype)
    # After this everyone sees the files, or nobody goes on.
    for found in _gather(problems):
        if found:
            raise ConfigError(found)
    writers = assign_writers([names for names, _ in everyone], maps)
    failure = ""
    try:
        with TensorWriter(partial_name(target), plans, dtype) as writer:
            for entry in held.values():
                for experts in writers[_rank()].get(entry.name, []):
                    writer.write(maps[entry.name], entry.value, entry.experts, experts)
    except OSError as error:
        failure = f"rank {_rank()} could not write: {error}"
    failures = [text for text in _gather(failure) if text]
    if failures:
        raise ConfigError([Problem(origin=str(target), key="", rule=text) for text in failures])
    if _rank() == 0:
        complete(target)
    _gather(None)


def partial_name(target: Path) -> Path:
    """Where an export is until it is complete."""
    return target.with_name(f".{target.name}.incomplete")


def complete(target: Path) -> None:
    """Give a finished export its name."""
    if target.exists():
        target.rmdir()
    partial_name(target).rename(target)


def assign_writers(
    by_rank: Sequence[Sequence[tuple[str, range | None]]], maps: Mapping[str, ParameterMap]
) -> list[dict[str, list[range | None]]]:
    """Who writes what: for each rank, the names and (of stacked parameters) ranges of experts. Pure.

    Args:
        by_rank: what each rank holds.
    Raises:
        AssertionError: the ranks together do not hold the model.
    """
    chosen: list[dict[str, list[range | None]]] = [{} for _ in by_rank]
    written: dict[str, set[int]] = {}
    for rank, names in enumerate(by_rank):
        for name, experts in names:
            done = written.setdefault(name, set())
            ids = [0] if experts is None else list(experts)
            for first, last in _runs([i for i in ids if i not in done]):
                chosen[rank].setdefault(name, []).append(None if experts is None else range(first, last + 1))
            done.update(ids)
    for name, entry in maps.items():
        wanted = set(range(entry.shape[0])) if entry.experts else {0}
        assert written.get(name) == wanted, f"{name}: held are {sorted(written.get(name, ()))} of {sorted(wanted)}"
    return chosen


def _runs(ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Consecutive ids as (first, last)."""
    start = 0
    for i in range(len(ids)):
        if i + 1 == len(ids) or ids[i + 1] != ids[i] + 1:
            yield ids[start], ids[i]
            start = i + 1


def begin(
    recipe: Recipe, flavor: str, target: Path, plans: Sequence[FilePlan], *, source: str | Path | None, dtype: str
) -> list[Problem]:
    """Make all of an export but the weights: config.json, tokenizer files, laid-out files. In one process.

    Returns: what stands against it.
    """
    form, shape, partial = format_of(recipe), recipe.shape(flavor), partial_name(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        rule = "must not exist, or be an empty folder: nothing is overwritten"
        return [Problem(origin=str(target), key="", rule=rule, fix="name another one, or remove it")]
    base = None
    try:
        if source is not None:
            problems = find_contradictions(form, shape, source, recipe=recipe.name, flavor=flavor)
            if problems:
                return problems
            base = read_config(source)
        config = config_for(form, shape, base) | {_dtype_key(base): dtype}
        # What an export that was cut off has left behind.
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        (partial / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if source is not None:
            carry_files(Path(source).expanduser(), partial)
        lay_out(partial, plans)
    except ConfigError as error:
        return list(error.problems)
    except OSError as error:
        return [Problem(origin=str(target), key="", rule=f"can't be written: {error}")]
    return []


def _dtype_key(base: Mapping[str, Any] | None) -> str:
    """transformers 5 writes `dtype`, 4 wrote `torch_dtype`; both read either."""
    return "dtype" if base is not None and "dtype" in base else "torch_dtype"


def bias_problem(bias: float) -> Problem:
    """What stands against an export of a model with router biases up to `bias`."""
    rule = (
        f"router biases up to {bias:.3g} would be lost: published models have none, and they take part in the choice "
        "of experts"
    )
    fix = "train with training.load_balance_coeff = 0, or accept it (drop_router_biases, --drop-router-biases)"
    return Problem(origin="export", key="", rule=rule, fix=fix)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _gather(value: Any) -> list[Any]:
    """From every process, in the order of ranks. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone
