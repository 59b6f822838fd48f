"""How a run is started: processes, nodes and devices, from the environment and the machine. Without torch."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from disagmoe.config.errors import ConfigError, Problem


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What the launching script was asked for."""

    ngpu: int | None = None
    """Processes on this node; None: what the layout needs."""
    nnodes: int = 1
    node_rank: int = 0
    num_gpus: int = 0
    """CUDA devices of this node that torch can use."""


def read_launch(environ: Mapping[str, str]) -> Launch:
    """The launch that `NGPU`, `NNODES` and `NODE_RANK` ask for, on this machine.

    Raises:
        ConfigError: one of them is no number in range.
    """
    problems: list[Problem] = []

    def number(name: str, default: int | None, least: int) -> int | None:
        text = environ.get(name, "")
        if not text:
            return default
        if text.isdecimal() and int(text) >= least:
            return int(text)
        problems.append(
            Problem(origin="environment", key=name, value=text, rule=f"must be an integer, at least {least}")
        )
        return default

    ngpu = number("NGPU", None, 1)
    nnodes = number("NNODES", 1, 1) or 1
    node_rank = number("NODE_RANK", 0, 0) or 0
    if node_rank >= nnodes:
        rule = f"must be below NNODES = {nnodes}; nodes are numbered from 0"
        problems.append(Problem(origin="environment", key="NODE_RANK", value=str(node_rank), rule=rule))
    if problems:
        raise ConfigError(problems)
    return Launch(ngpu=ngpu, nnodes=nnodes, node_rank=node_rank, num_gpus=count_gpus(environ))


def count_gpus(environ: Mapping[str, str]) -> int:
    """CUDA devices that torch will see; found without importing it, which takes seconds.

    0 with a CPU build of torch. `CUDA_VISIBLE_DEVICES` is taken at its word. MIG slices are not counted.
    """
    try:
        if importlib.metadata.version("torch").endswith("+cpu"):
            return 0
    except importlib.metadata.PackageNotFoundError:
        return 0
    present = len([p for p in Path("/dev").glob("nvidia*") if p.name[len("nvidia") :].isdecimal()])
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or present == 0:
        return present
    chosen = visible.split(",") if visible else []
    # As CUDA does: what follows the first invalid entry is hidden.
    end = next((i for i, entry in enumerate(chosen) if not entry.strip() or entry.strip() == "-1"), len(chosen))
    return min(end, present)


def local_processes(world_size: int, launch: Launch) -> int:
    """Processes that this node starts: `NGPU`, or an equal share of the layout's."""
    return launch.ngpu if launch.ngpu is not None else world_size // launch.nnodes
