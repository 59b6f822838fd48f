"""Bytes of live tensors of this process, now and at most: every storage that an operation makes, until it is freed."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Counts storages made by operations of this thread while it is entered. Backward runs on this thread on CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                self._add(value)
        return result

    def _add(self, value: torch.Tensor) -> None:
        storage = value.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or not size:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        if key in self._known:
            self._known.discard(key)
            self.live -= size

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak = self.live
