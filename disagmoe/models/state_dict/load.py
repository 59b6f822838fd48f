"""Published weights into the parameters of a model, or of any part of one that a worker holds.

A process reads only what its own parameters need, a slice at a time, and holds one slice beside them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from disagmoe.models.state_dict.files import Stored, Weights, WeightsError
from disagmoe.models.state_dict.maps import ParameterMap, Part
from disagmoe.models.state_dict.mxfp4 import dequantise

SLICE_BYTES = 1 << 22
"""About how much is read at once."""
STORED_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "U8": torch.uint8,
}


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
    """Slices of a folder's tensors, read from the files (not mapped, so that no page of them counts as ours)."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._files: dict[Path, int] = {}

    def __enter__(self) -> SliceReader:
        return self

    def __exit__(self, *error: object) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def read(self, name: str, rows: slice, columns: slice | None = None) -> Tensor:
        """tensor[rows], or tensor[rows, columns], on the host."""
        stored = self._weights.stored[name]
        if stored.file not in self._files:
            self._files[stored.file] = os.open(stored.file, os.O_RDONLY)
        first = range(stored.shape[0])[rows]
        tail = stored.shape[1:]
        if columns is not None:
            tail = (len(range(tail[0])[columns]), *tail[1:])
        out = torch.empty((len(first), *tail), dtype=STORED_DTYPES[stored.dtype])
        data = out.view(-1).view(torch.uint8).numpy().data if out.numel() else memoryview(b"")
        row_bytes = prod(stored.shape[1:]) * out.element_size()
        if columns is None:
            self._read(stored, data, stored.offset + first.start * row_bytes)
            return out
        skipped = range(stored.shape[1])[columns].start * (row_bytes // stored.shape[1])
        part_bytes = len(data) // max(1, len(first))
        for i, row in enumerate(first):
            place = slice(i * part_bytes, (i + 1) * part_bytes)
            self._read(stored, data[place], stored.offset + row * row_bytes + skipped)
        return out

    def _read(self, stored: Stored, data: memoryview, offset: int) -> None:
        while data:
            count = os.preadv(self._files[stored.file], [data], offset)
            if count == 0:
                raise WeightsError(stored.file, ["has become shorter while it was being read"])
            data, offset = data[count:], offset + count


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
        values = reader.read(part.name, place, part.columns)
        if part.transposed:
            values = values.transpose(-1, -2)
        region.copy_(values.reshape(region.shape))
        del values  # before the next one is read


def _fill_mxfp4(reader: SliceReader, part: Part, experts: slice, region: Tensor) -> None:
    """Decode some rows of one expert at a time: while it is decoded a value takes several times its final size."""
    blocks, scales = part.tensors
    step = max(1, SLICE_BYTES // (part.shape[2] * 16))
    for local, expert in enumerate(range(experts.start, experts.stop)):
        for start in range(0, part.shape[1], step):
            rows, one = slice(start, min(start + step, part.shape[1])), slice(expert, expert + 1)
            values = dequantise(reader.read(blocks.name, one, rows), reader.read(scales.name, one, rows))
            region[local, rows].copy_(values[0])
            del values
