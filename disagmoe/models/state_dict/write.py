"""Parameters into safetensors files, by as many processes as hold them.

Where each tensor goes in which file follows from names, shapes and type alone (`plan_files`). So the files can be laid
out first, and then every process writes its own experts and parameters to their places: no process gathers a tensor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from disagmoe.models.state_dict.files import INDEX_NAME
from disagmoe.models.state_dict.load import SLICE_BYTES
from disagmoe.models.state_dict.maps import ParameterMap, Part

DTYPES = {"float32": ("F32", torch.float32), "bfloat16": ("BF16", torch.bfloat16), "float16": ("F16", torch.float16)}
"""What can be written: our name -> (safetensors' name, torch's)."""


@dataclass(frozen=True, kw_only=True)
class FilePlan:
    """One safetensors file, whose data begins after `header`."""

    name: str
    header: bytes
    """With the length in front."""
    offsets: Mapping[str, int]
    """Of each tensor in the file."""
    size: int


def plan_files(maps: Sequence[ParameterMap], dtype: str, *, most_bytes: int) -> list[FilePlan]:
    """Which tensors go into which file, in the maps' order.

    Args:
        dtype: a key of `DTYPES`.
        most_bytes: data in a file; a larger tensor has a file of its own.
    """
    code, torch_dtype = DTYPES[dtype]
    groups: list[dict[str, tuple[tuple[int, ...], int]]] = [{}]
    filled = 0
    for entry in maps:
        for part in entry.forms[0]:
            assert part.columns is None and part.encoding == "plain", f"{part.name} is not written whole"
            size = prod(part.shape) * torch_dtype.itemsize
            if groups[-1] and filled + size > most_bytes:
                groups.append({})
                filled = 0
            groups[-1][part.name] = (part.shape, size)
            filled += size
    return [_plan(group, code, number, len(groups)) for number, group in enumerate(groups, 1)]


def _plan(tensors: Mapping[str, tuple[tuple[int, ...], int]], code: str, number: int, count: int) -> FilePlan:
    name = "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    places = {}
    for tensor, (shape, size) in tensors.items():
        entries[tensor] = {"dtype": code, "shape": list(shape), "data_offsets": [begin, begin + size]}
        places[tensor] = begin
        begin += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    offsets = {tensor: len(header) + place for tensor, place in places.items()}
    return FilePlan(name=name, header=header, offsets=offsets, size=len(header) + begin)


def lay_out(folder: Path, plans: Iterable[FilePlan]) -> None:
    """Make the files with their headers, at full size, and the index where there are several. One process does it."""
    plans = list(plans)
    for plan in plans:
        with (folder / plan.name).open("xb") as file:
            file.write(plan.header)
            file.truncate(plan.size)
    if len(plans) > 1:
        total = sum(plan.size - len(plan.header) for plan in plans)
        where = {tensor: plan.name for plan in plans for tensor in plan.offsets}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


class TensorWriter:
    """Writes parameters to their places in files that `lay_out` has made."""

    def __init__(self, folder: Path, plans: Iterable[FilePlan], dtype: str) -> None:
        self._dtype = DTYPES[dtype][1]
        self._folder = folder
        self._places = {tensor: (plan.name, offset) for plan in plans for tensor, offset in plan.offsets.items()}
        self._files: dict[str, int] = {}

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._files.values():
            if kind is None:
                os.fsync(descriptor)
            os.close(descriptor)
        self._files.clear()

    @torch.no_grad()
    def write(
        self, entry: ParameterMap, value: Tensor, experts: range | None = None, keep: range | None = None
    ) -> None:
        """Write a parameter or some of its experts.

        Args:
            value: the parameter; with `experts`, these along dimension 0.
            keep: which of `experts` to write; None: all.
        """
        for part in entry.forms[0]:
            first = part.first
            rows = first
            if experts is not None:
                wanted = experts if keep is None else keep
                rows = range(max(first.start, wanted.start), min(first.stop, wanted.stop))
            base = 0 if experts is None else experts.start
            view = value.view(value.shape[0] if experts is not None else part.view[0], *part.view[1:])
            self._write_rows(part, view, rows, base)

    def _write_rows(self, part: Part, view: Tensor, rows: range, base: int) -> None:
        """Rows of the part's region, which are consecutive in the file."""
        name, offset = self._places[part.name]
        row_bytes = prod(part.region[1:]) * self._dtype.itemsize
        step = max(1, SLICE_BYTES // max(1, row_bytes))
        for start in range(rows.start, rows.stop, step):
            stop = min(start + step, rows.stop)
            values = view[(slice(start - base, stop - base), *part.index[1:])]
            if part.transposed:
                values = values.transpose(-1, -2)
            data = values.to(device="cpu", dtype=self._dtype).contiguous().reshape(-1).view(torch.uint8).numpy()
            self._write_bytes(name, data.data, offset + (start - part.first.start) * row_bytes)

    def _write_bytes(self, name: str, data: memoryview, offset: int) -> None:
        if name not in self._files:
            self._files[name] = os.open(self._folder / name, os.O_WRONLY)
        while data:
            written = os.pwrite(self._files[name], data, offset)
            data, offset = data[written:], offset + written
