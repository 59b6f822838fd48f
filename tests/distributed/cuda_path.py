"""Plays CUDA on CPU: transfers take the code path of CUDA, with gloo in NCCL's part.

What this covers: who posts what, in which order, and when buffers are given back. Without tags, as on NCCL, a payload
that is posted out of order arrives at the wrong place; a send buffer that is given back too early is overwritten while
gloo reads it. What it does not: streams and events themselves, which do nothing here.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from disagmoe.engine import DisagEngine, Engine
from disagmoe.parallelisms.transfer import channel as channel_module
from disagmoe.parallelisms.transfer import wire as wire_module
from disagmoe.parallelisms.transfer.in_process import InProcessChannel
from disagmoe.parallelisms.transfer.messages import Flight


class _Device:
    """Stands for an event and for a stream."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def record(self) -> None:
        pass

    def wait_event(self, event: object) -> None:
        assert event is not None

    def wait_stream(self, stream: object) -> None:
        assert stream is not None


class _Work:
    """A gloo transfer that can be polled like one of NCCL."""

    def __init__(self, work: Any) -> None:
        self._thread = threading.Thread(target=work.wait, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()

    def is_completed(self) -> bool:
        return not self._thread.is_alive()


class _Stand:
    """A module with some names replaced."""

    def __init__(self, module: Any, **replaced: Any) -> None:
        self._module = module
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def play_cuda(engine: Engine) -> list[int]:
    """A hook of the harness. Returns a list that gets, for each transfer sent, how many buffers it held."""
    assert isinstance(engine, DisagEngine)
    cuda = SimpleNamespace(
        Event=_Device, Stream=_Device, stream=_use, current_stream=_Device, synchronize=lambda _device: None
    )
    channel_module.torch = wire_module.torch = _Stand(torch, cuda=cuda)  # type: ignore[attr-defined]
    channel_module.dist = _Stand(dist, batch_isend_irecv=_batch)  # type: ignore[attr-defined]
    held: list[int] = []

    def flight(**values: Any) -> Flight:
        held.append(len(values["buffers"]))
        return Flight(**values)

    channel_module.Flight = flight  # type: ignore[attr-defined,misc,assignment]
    runtime = engine.pipeline.runtime
    runtime._on_cuda = True
    for channel in runtime._channels:
        if isinstance(channel, InProcessChannel):
            continue
        channel._on_cuda = True
        channel._counts_inside = False
        channel._side = _Device()  # type: ignore[assignment]
        # Events have no times here: book the host's.
        channel._wait_on_stream = _wait  # type: ignore[method-assign]
    return held


def _use(stream: object) -> AbstractContextManager[None]:
    assert stream is not None
    return nullcontext()


def _batch(operations: Sequence[dist.P2POp]) -> list[_Work]:
    return [_Work(work) for work in dist.batch_isend_irecv(list(operations))]


def _wait(pending: Any) -> None:
    for _, work in pending.works:
        work.wait()
