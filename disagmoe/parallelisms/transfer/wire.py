"""What travels: one byte buffer a peer and transfer, cut into aligned, typed sections; and the pool of such buffers.

Sections by message (r rows, p of them primary and in front, q pairs, D model dim):

| message | pass, edge | sections |
|---|---|---|
| dispatch | forward M2N | header, rows [r, D], token i32 [r], pair_row i32 [q], pair_expert i32 [q], weights f32 [q] |
| combine | forward N2M | header, rows [r, D], token i32 [r] |
| combine gradient | backward N2M (A to F) | header, rows [r, D] |
| dispatch gradient | backward M2N (F to A) | header, rows [r, D], weights f32 [q] |

`token` is the row's position in the owner's slice of the micro-batch: the owner's worker in the *next* A-group did not
make the plan, so the rows say where they belong. The header carries the sender's clock at hand-over, in seconds,
and the message's counts. Where counts travel ahead on a host group, a peer that gets no row gets no message; where they
travel in the header alone (see `channel`), it gets the header.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

_ALIGN_BYTES = 16
HEADER_BYTES = 32


class MessageKind(Enum):
    DISPATCH = "dispatch"
    COMBINE = "combine"
    COMBINE_GRAD = "combine gradient"
    DISPATCH_GRAD = "dispatch gradient"


class Counts(NamedTuple):
    """Size of one peer's message, in rows and pairs."""

    num_rows: int
    num_primary: int
    num_pairs: int


@dataclass(frozen=True, kw_only=True)
class WireFormat:
    """Row width and type of a model's transfers."""

    dim: int
    row_dtype: torch.dtype

    def sections(self, kind: MessageKind, counts: Counts) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Name to (dtype, shape), in wire order."""
        out: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "header": (torch.float64, (HEADER_BYTES // torch.float64.itemsize,)),
            "rows": (self.row_dtype, (counts.num_rows, self.dim)),
        }
        if kind in (MessageKind.DISPATCH, MessageKind.COMBINE):
            out["token"] = (torch.int32, (counts.num_rows,))
        if kind is MessageKind.DISPATCH:
            out["pair_row"] = (torch.int32, (counts.num_pairs,))
            out["pair_expert"] = (torch.int32, (counts.num_pairs,))
        if kind in (MessageKind.DISPATCH, MessageKind.DISPATCH_GRAD):
            out["weights"] = (torch.float32, (counts.num_pairs,))
        return out

    def num_bytes(self, kind: MessageKind, counts: Counts) -> int:
        """Size of a message; 0 for no rows, which is not sent."""
        if counts.num_rows == 0:
            return 0
        return sum(_aligned(_num_bytes(dtype, shape)) for dtype, shape in self.sections(kind, counts).values())

    def views(self, kind: MessageKind, counts: Counts, buffer: Tensor) -> dict[str, Tensor]:
        """Typed views into a uint8 buffer of `num_bytes`."""
        views: dict[str, Tensor] = {}
        offset = 0
        for name, (dtype, shape) in self.sections(kind, counts).items():
            size = _num_bytes(dtype, shape)
            views[name] = buffer[offset : offset + size].view(dtype).view(shape)
            offset += _aligned(size)
        return views


def _num_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    return size


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


class BufferPool:
    """Recycles transfer buffers, so that messages of ever-changing sizes do not fragment memory.

    Sizes are rounded up to an eighth of the next power of two, which wastes at most a fifth of a buffer (or 4 KiB).
    Thread-safe: buffers are taken by the compute thread and given back by the threads that wait for transfers.
    On CUDA a buffer may be given back while kernels that were launched before still use it: it carries an event that
    the stream which takes it next waits for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[int, list[tuple[Tensor, torch.cuda.Event | None]]] = defaultdict(list)
        self._lock = threading.Lock()
        self.allocated_bytes = 0
        """Bytes of all buffers ever made, in use or free."""

    def take(self, num_bytes: int) -> Tensor:
        """A uint8 tensor of exactly `num_bytes`, contents undefined, for use on the current stream."""
        size = _size_class(num_bytes)
        with self._lock:
            free = self._free[size]
            buffer, after = free.pop() if free else (None, None)
        if after is not None:
            torch.cuda.current_stream(self._device).wait_event(after)
        if buffer is None:
            buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
            with self._lock:
                self.allocated_bytes += size
        return buffer[:num_bytes]

    def give(self, view: Tensor, *, after: torch.cuda.Event | None = None) -> None:
        """Return what `take` gave. The caller must hold no view of it any more.

        Args:
            after: When the device is done with it; None: it is.
        """
        size = _size_class(view.numel())
        whole = view.as_strided((size,), (1,))
        with self._lock:
            self._free[size].append((whole, after))


def _size_class(num_bytes: int) -> int:
    step = max(4096, (1 << max(num_bytes - 1, 1).bit_length()) // 8)
    return -(-num_bytes // step) * step
