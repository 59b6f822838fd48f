"""Published weights into the parameters of a model, or of any part of one that a worker holds.

A process reads only what its own parameters need, a slice at a time, and holds one slice beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from disagmoe.models.state_dict.files import Weights
from disagmoe.models.state_dict.maps import ParameterMap, Part
from disagmoe.models.state_dict.mxfp4 import dequantise

SLICE_BYTES = 1 << 24
"""About how much is read at once."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """A parameter, or its range of experts, on this process."""

    name: str
    """In the unsplit model."""
    value: Tensor
    experts: range | None
    """Global ids along dimension 0; None: the parameter is whole."""


def held_by(modules: Iterable[nn.Module], maps: Mapping[str, ParameterMap]) -> Iterator[Held]:
    """The parameters of `modules`, which carry the unsplit model's names.

    A module that holds a range of the routed experts says so in its attribute `experts`.
    """
    for module in modules:
        held: range | None = getattr(module, "experts", None)
        for name, parameter in module.named_parameters():
            entry = maps[name]
            experts = (range(entry.shape[0]) if held is None else held) if entry.experts else None
            shape = entry.shape if experts is None else (len(experts), *entry.shape[1:])
            assert parameter.shape == shape, f"{name}: {tuple(parameter.shape)}, must be {shape}"
            yield Held(name=name, value=parameter.detach(), experts=experts)


@torch.no_grad()
def load_parameters(
    modules: Sequence[nn.Module], weights: Weights, *, progress: Callable[[str], None] = lambda _: None
) -> int:
    """Fill every parameter of `modules`; router biases, which published weights don't have, become zero.

    Args:
        modules: whole models or parts, with storage on any device and in any float dtype.
        weights: from `match`, for the whole model.
        progress: told what is being read, once a file.

    Returns: bytes of this process's parameters.
    """
    every = [(part, target) for target in held_by(modules, weights.maps) for part in _held(target, weights)]
    jobs = [(weights.stored[part.tensors[0].name].file, part, target) for part, target in every]
    jobs.sort(key=lambda job: job[0])
    last: Path | None = None
    with SliceReader(weights) as reader:
        for file, part, target in jobs:
            if file != last:
                last = file
                progress(f"reading {file.name}")
            fill(reader, part, target)
    for module in modules:
        for name, buffer in module.named_buffers():
            if name.endswith("expert_bias_E"):
                buffer.zero_()
    return sum(p.numel() * p.element_size() for module in modules for p in module.parameters())


def _held(target: Held, weights: Weights) -> Iterator[Part]:
    for part in weights.parts[target.name]:
        if target.experts is None or _overlap(part.first, target.experts):
            yield part


def _overlap(a: range, b: range) -> range:
    return range(max(a.start, b.start), max(max(a.start, b.start), min(a.stop, b.stop)))


class SliceReader:
    """Slices of a folder's tensors; keeps the last file open."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._stack = ExitStack()
        self._file: Path | None = None
        self._open: Any = None

    def __enter__(self) -> SliceReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """A copy of tensor[index] in memory of its own."""
        file = self._weights.stored[name].file
        if file != self._file:
            # The old file's pages are given back before the next one's come.
            self._open = None
            self._stack.close()
            self._open = self._stack.enter_context(safe_open(str(file), framework="pt"))
            self._file = file
        return self._open.get_slice(name)[index]


def fill(reader: SliceReader, part: Part, target: Held) -> None:
    """Copy what `part` holds of `target`, slice by slice along the first dimension of the part's region."""
    first = part.first
    rows = first if target.experts is None else _overlap(first, target.experts)
    base = 0 if target.experts is None else target.experts.start
    view = target.value.view(target.value.shape[0] if target.experts is not None else part.view[0], *part.view[1:])
    others = part.index[1:]
    # Published rows for each row of the region; the region may be one row of a tensor without that dimension.
    per_row = part.shape[0] // len(first)
    row_bytes = max(1, prod(part.region[1:]) * target.value.element_size())
    step = max(1, SLICE_BYTES // row_bytes)
    for start in range(rows.start, rows.stop, step):
        stop = min(start + step, rows.stop)
        region = view[(slice(start - base, stop - base), *others)]
        place = slice((start - first.start) * per_row, (stop - first.start) * per_row)
        if part.encoding == "mxfp4":
            _fill_mxfp4(reader, part, place, region)
            continue
        index = (place,) if part.columns is None else (place, part.columns)
        values = reader.read(part.name, index)
        if part.transposed:
            values = values.transpose(-1, -2)
        region.copy_(values.reshape(region.shape))


def _fill_mxfp4(reader: SliceReader, part: Part, experts: slice, region: Tensor) -> None:
    """Decode some rows of one expert at a time: while it is decoded a value takes several times its final size."""
    blocks, scales = part.tensors
    step = max(1, SLICE_BYTES // (part.shape[2] * 16))
    for local, expert in enumerate(range(experts.start, experts.stop)):
        for start in range(0, part.shape[1], step):
            index = (slice(expert, expert + 1), slice(start, min(start + step, part.shape[1])))
            values = dequantise(reader.read(blocks.name, index), reader.read(scales.name, index))
            region[local, index[1]].copy_(values[0])


