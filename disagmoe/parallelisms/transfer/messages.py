"""What channels share and hand over: plain records, and the thread that waits for gloo."""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from disagmoe.parallelisms.failures import Monitor
from disagmoe.parallelisms.transfer.wire import BufferPool, Counts, WireFormat


@dataclass(frozen=True, kw_only=True)
class ChannelGroups:
    """Where a channel's messages travel."""

    payload: dist.ProcessGroup
    counts: dist.ProcessGroup | None
    """Host (gloo) group; None in backward, where sizes are known from forward."""
    peers: tuple[int, ...]
    """Global ranks at the other end, by worker index."""


@dataclass(frozen=True, kw_only=True)
class ChannelContext:
    """What all channels of a process share."""

    wire: WireFormat
    pool: BufferPool
    monitor: Monitor
    timeout_s: float
    strict_order: bool
    device: torch.device
    clock_offset_s: dict[int, float]
    """By global rank: what to add to that rank's clock to get this process's."""
    slice_tokens: int | None = None
    """Most tokens of a micro-batch that an A-worker owns, where receives may be posted at the size that this bounds:
    over gloo, which takes a shorter message. Row counts then travel inside the messages."""


@dataclass(kw_only=True)
class Arrival:
    """A received transfer: one entry a peer, in worker order; peers that sent no rows have no views."""

    counts: list[Counts]
    views: list[dict[str, Tensor]]
    buffers: list[Tensor]
    sent_at_s: float = 0.0
    """When the last sender handed its payload to the network, on this process's clock; 0 if nothing was sent."""
    wait_from_s: float = 0.0
    wait_to_s: float = 0.0
    """The compute thread's wait for it."""
    stream_wait: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
    """CUDA: the compute stream's wait for it, which is the one that counts there."""
    num_bytes: int = 0
    """Payload that came over the network."""
    transfer_s: float = 0.0
    """From the last hand-over, or the end of the channel's previous transfer, until it was here."""


@dataclass(kw_only=True)
class Pending:
    """A posted receive."""

    key: tuple[int, int]
    what: str
    counts: list[Counts] | None
    buffers: list[Tensor] = field(default_factory=list)
    works: list[tuple[int, dist.Work]] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)
    """CPU: everything is here. CUDA: the counts are known."""
    error: BaseException | None = None
    waiting_for: int | None = None
    """Global rank of the peer whose message is being waited for."""
    begun_s: float = 0.0
    """When the previous transfer of the channel had arrived."""
    here_s: float = 0.0
    """When this one had."""


@dataclass(kw_only=True)
class Flight:
    """CUDA: a transfer that the device has not sent yet, with all that its kernels read."""

    works: list[dist.Work]
    buffers: list[Tensor]
    pack: object
    """Refers to the tensors that were packed: they must not be freed before the side stream has read them."""


class WaiterThread:
    """Runs closures in order on a thread of its own."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        self._queue.put(work)

    def close(self) -> None:
        """Finish what was submitted, then end the thread."""
        self._queue.put(None)
        self._thread.join(timeout=10.0)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception:  # the closures catch what they expect; nobody may wait for a thread that has died
                traceback.print_exc()
