"""What a process holds of the unsplit model's training state, and who writes which part of it.

Names are `model.<parameter>`, `model.layers.<i>.moe.expert_bias_E` and `optimizer.<moment>.<parameter>`, with the
parameter's name in the unsplit model (as `named_parameters` gives it: `wqkv` stays one). Tensors have the unsplit
shape; of a stacked expert parameter a process holds rows [start, stop) of dimension 0, by global expert id. In a
checkpoint every expert is a piece of its own, so that any layout reads its experts and nothing else.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from disagmoe.checkpoint.folder import CheckpointError
from disagmoe.engine import Engine
from disagmoe.optimizer import Optimizers

MODEL = "model."
OPTIMIZER = "optimizer."
_ROUTED = ".routed_experts."


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Rows [start, start + len) of a tensor, in this process's memory."""

    key: str
    start: int
    tensor: Tensor
    sharded: bool
    """Whether dimension 0 is that of the routed experts; otherwise this is the whole tensor."""


@dataclass(frozen=True, kw_only=True, order=True)
class Unit:
    """What is written at once: a whole tensor, or one expert of a stacked one."""

    key: str
    start: int
    shape: tuple[int, ...]
    """Of the unit: dimension 0 is 1 for an expert."""
    full_shape: tuple[int, ...]
    """Of the tensor."""
    dtype: str


class LocalState:
    """This process's pieces of everything that training changes.

    Args:
        engine: Its modules carry the unsplit names; one that holds a part of the routed experts has their global ids
            in its attribute `experts`.
        optimizers: Over the engine's modules.
    """

    def __init__(self, engine: Engine, optimizers: Optimizers) -> None:
        self._engine = engine
        self._optimizers = optimizers
        self._owner = {id(p): o for o in optimizers.optimizers for group in o.param_groups for p in group["params"]}
        self.moments = _moments(optimizers)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter, int, bool]]:
        """(unsplit name, parameter, first row, whether it is one of stacked experts)."""
        for module in self._engine.modules:
            experts = getattr(module, "experts", None)
            start = experts.start if isinstance(experts, range) else 0
            for name, parameter in module.named_parameters():
                sharded = _ROUTED in name
                yield name, parameter, start if sharded else 0, sharded

    def pieces(self) -> list[Piece]:
        """Everything; several pieces are alike where a parameter has two homes here. Moments must exist."""
        pieces = []
        for name, parameter, start, sharded in self.parameters():
            tensors = {MODEL + name: parameter.detach()}
            state = self._owner[id(parameter)].state[parameter]
            tensors |= {f"{OPTIMIZER}{moment}.{name}": state[moment] for moment in self.moments}
            pieces += [Piece(key=k, start=start, tensor=t, sharded=sharded) for k, t in tensors.items()]
        return pieces + self._biases()

    def shapes(self) -> list[Piece]:
        """The same as `pieces`, before there are moments: they are as large as their parameters."""
        pieces = []
        for name, parameter, start, sharded in self.parameters():
            keys = [MODEL + name, *(f"{OPTIMIZER}{moment}.{name}" for moment in self.moments)]
            pieces += [Piece(key=key, start=start, tensor=parameter.detach(), sharded=sharded) for key in keys]
        return pieces + self._biases()

    def _biases(self) -> list[Piece]:
        return [
            Piece(key=f"{MODEL}layers.{r.layer}.moe.expert_bias_E", start=0, tensor=r.bias_E, sharded=False)
            for r in self._engine.routers
            if r.bias_E is not None
        ]

    def make_moments(self) -> None:
        """Create the optimizers' states, as their first step would, so that they can be loaded into."""
        from torchtitan.components.optimizer.utils import init_optim_state

        for optimizer in self._optimizers.optimizers:
            init_optim_state(optimizer)

    def set_optimizer_step(self, step: int) -> None:
        """How many updates the optimizers have made; Adam corrects its moments by it."""
        for optimizer in self._optimizers.optimizers:
            for state in optimizer.state.values():
                if "step" in state:
                    state["step"].fill_(float(step))


def _moments(optimizers: Optimizers) -> tuple[str, ...]:
    """Names of the state tensors of a parameter."""
    names: set[str] = set()
    for optimizer in optimizers.optimizers:
        group = optimizer.param_groups[0]
        if isinstance(optimizer, torch.optim.AdamW):
            names |= {"exp_avg", "exp_avg_sq"}
        elif isinstance(optimizer, torch.optim.SGD):
            names |= {"momentum_buffer"} if group["momentum"] else set()
        else:
            raise CheckpointError(f"no checkpoints of {type(optimizer).__name__}: its state is not known here")
    return tuple(sorted(names))


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Which units there are in the world, and who writes which."""

    units: tuple[Unit, ...]
    by_rank: tuple[tuple[Unit, ...], ...]

    @property
    def bytes_by_rank(self) -> list[int]:
        return [sum(unit_bytes(unit) for unit in units) for units in self.by_rank]


Holding = tuple[str, int, tuple[int, ...], str, bool]
"""Key, first row, shape, dtype, sharded: a piece without its tensor."""


def holdings(pieces: Sequence[Piece]) -> list[Holding]:
    described = ((p.key, p.start, tuple(p.tensor.shape), str(p.tensor.dtype), p.sharded) for p in pieces)
    return list(dict.fromkeys(described))


def assign(by_rank: Sequence[Sequence[Holding]]) -> Assignment:
    """Give every unit to one of the processes that hold it, so that all write about as many bytes.

    A pure function of what every process holds, so that all of them come to the same result.

    Raises:
        CheckpointError: experts are missing between the processes, or they disagree about a shape.
    """
    homes: dict[Unit, list[int]] = defaultdict(list)
    rows = _rows(by_rank)
    for rank, held in enumerate(by_rank):
        for key, start, shape, dtype, sharded in held:
            full = (rows[key], *shape[1:]) if sharded else shape
            if not sharded:
                homes[Unit(key=key, start=0, shape=shape, full_shape=full, dtype=dtype)].append(rank)
            for row in range(start, start + shape[0]) if sharded else ():
                homes[Unit(key=key, start=row, shape=(1, *shape[1:]), full_shape=full, dtype=dtype)].append(rank)
    shapes = {(unit.key, unit.full_shape, unit.dtype) for unit in homes}
    if len(shapes) != len({key for key, _, _ in shapes}):
        keys = sorted(key for key, _, _ in shapes)
        twice = next(key for key, following in itertools.pairwise(keys) if key == following)
        raise CheckpointError(f"processes disagree about the shape of {twice}")
    # The least free units first, then the largest: the others fill up what is left.
    order = sorted(homes, key=lambda unit: (len(homes[unit]), -unit_bytes(unit), unit))
    load = [0] * len(by_rank)
    chosen: list[list[Unit]] = [[] for _ in by_rank]
    for unit in order:
        writer = min(homes[unit], key=lambda rank: (load[rank], rank))
        load[writer] += unit_bytes(unit)
        chosen[writer].append(unit)
    return Assignment(units=tuple(sorted(homes)), by_rank=tuple(tuple(sorted(units)) for units in chosen))


def _rows(by_rank: Sequence[Sequence[Holding]]) -> dict[str, int]:
    """Number of experts by key; all of them must be somewhere."""
    ranges: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for held in by_rank:
        for key, start, shape, _, sharded in held:
            if sharded:
                ranges[key].add((start, start + shape[0]))
    rows = {}
    for key, parts in ranges.items():
        covered = {row for start, stop in parts for row in range(start, stop)}
        rows[key] = max(stop for _, stop in parts)
        if len(covered) != rows[key]:
            missing = sorted(set(range(rows[key])) - covered)
            raise CheckpointError(f"{key}: no process holds experts {missing}")
    return rows


def exchange(pieces: Sequence[Piece]) -> Assignment:
    """`assign` over all processes. Collective."""
    own = holdings(pieces)
    everyone: list[Any] = [own]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
    return assign(everyone)


def unit_bytes(unit: Unit) -> int:
    size = getattr(torch, unit.dtype.removeprefix("torch.")).itemsize
    for length in unit.shape:
        size *= length
    return int(size)


def views(pieces: Sequence[Piece], units: Sequence[Unit]) -> list[Tensor]:
    """The memory of each unit in one of the pieces that hold it."""
    places: dict[tuple[str, int], Tensor] = {}
    for piece in pieces:
        if not piece.sharded:
            places[piece.key, 0] = piece.tensor
            continue
        for row in range(piece.tensor.shape[0]):
            places[piece.key, piece.start + row] = piece.tensor[row : row + 1]
    return [places[unit.key, unit.start] for unit in units]
