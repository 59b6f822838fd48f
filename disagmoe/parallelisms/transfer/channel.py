"""Channels: ordered streams of transfers between this worker and the workers of one group, in one direction.

There is one channel for each edge of the pipeline (A-group, F-group, M2N or N2M) and pass, on process groups of its
own. On each channel the sequence of sends equals the sequence of receives (the schedule's validator proves it), so no
tags are needed; over gloo they are used all the same unless `strict_order` is set.

A forward transfer has two parts. *Counts* go ahead over a host group, since a receiver needs exact sizes; when they are
in, the payload's receive is posted. gloo can neither be polled nor be waited on with a deadline (a timed-out wait breaks
the connection), so a thread a channel waits, and the compute thread waits for *it*, in slices, looking for failures.
On CUDA the same thread waits for the counts only; payloads are ordered by streams.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from disagmoe.parallelisms.failures import POLL_S, Monitor, PeerLost, TransferTimeout
from disagmoe.parallelisms.transfer.wire import BufferPool, Counts, MessageKind, WireFormat


@dataclass(frozen=True, kw_only=True)
class ChannelGroups:
    """Where a channel's messages travel. `None` groups: both ends are this process."""

    payload: dist.ProcessGroup | None
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


@dataclass(kw_only=True)
class _Pending:
    """A posted receive."""

    key: tuple[int, int]
    what: str
    counts: list[Counts] | None
    buffers: list[Tensor] = field(default_factory=list)
    works: list[tuple[int, dist.Work]] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)
    posted: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    waiting_for: int | None = None
    """Global rank of the peer whose message is being waited for."""


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
            work()


class Channel:
    """One end of a channel; a worker only ever sends or only ever receives on it.

    Args:
        name: For messages, e.g. `M2N forward A0 -> F1`.
        kind: Which messages these are; decides their sections.
    """

    def __init__(
        self,
        *,
        name: str,
        kind: MessageKind,
        backward: bool,
        groups: ChannelGroups,
        context: ChannelContext,
    ) -> None:
        self.name, self.kind, self.backward = name, kind, backward
        self._groups, self._context = groups, context
        self._is_local = groups.payload is None
        self._local: dict[tuple[int, int], tuple[list[Counts], list[Tensor]]] = {}
        self._pending: dict[tuple[int, int], _Pending] = {}
        self._threads: dict[str, WaiterThread] = {}
        self._send_error: BaseException | None = None
        self.sent_bytes = 0
        """Payload and count bytes handed to the network so far."""

    # -- sending -------------------------------------------------------------------------------------------------

    def send(
        self, key: tuple[int, int], counts: Sequence[Counts], pack: Callable[[int, dict[str, Tensor]], None]
    ) -> None:
        """Hand one transfer to the network.

        Args:
            key: (hop, micro-batch).
            counts: Message size for each peer.
            pack: Writes peer i's sections into the views of its buffer; called for peers with rows only.
        """
        if self._send_error is not None:
            raise self._send_error
        buffers = self._pack(counts, pack)
        if self._is_local:
            self._local[key] = (list(counts), buffers)
            return
        works: list[tuple[int, dist.Work]] = []
        held: list[Tensor] = []
        if not self.backward:
            for peer, count in zip(self._groups.peers, counts, strict=True):
                message = torch.tensor(count, dtype=torch.int64)
                held.append(message)
                works.append((peer, self._isend(message, peer, self._groups.counts, self._tag(key))))
                self.sent_bytes += message.nbytes
        operations = [
            (peer, buffer)
            for peer, buffer, count in zip(self._groups.peers, buffers, counts, strict=True)
            if count.num_rows
        ]
        works += self._batch(dist.isend, operations, key)
        self.sent_bytes += sum(b.numel() for _, b in operations)
        self._thread("send").submit(lambda: self._reap(works, buffers, held))

    def _pack(self, counts: Sequence[Counts], pack: Callable[[int, dict[str, Tensor]], None]) -> list[Tensor]:
        wire, buffers, headers = self._context.wire, [], []
        for i, count in enumerate(counts):
            buffer = self._context.pool.take(wire.num_bytes(self.kind, count))
            buffers.append(buffer)
            if count.num_rows:
                views = wire.views(self.kind, count, buffer)
                pack(i, views)
                headers.append(views["header"])
        now = time.monotonic()
        for header in headers:
            header.fill_(now)
        return buffers

    def _reap(self, works: list[tuple[int, dist.Work]], buffers: list[Tensor], held: list[Tensor]) -> None:
        try:
            for peer, work in works:
                work.wait()
                del peer
        except RuntimeError as error:
            self._send_error = error
            return
        held.clear()
        for buffer in buffers:
            self._context.pool.give(buffer)

    # -- receiving -----------------------------------------------------------------------------------------------

    def post(self, key: tuple[int, int], what: str, counts: Sequence[Counts] | None = None) -> None:
        """Post a receive.

        Args:
            key: (hop, micro-batch).
            what: What is received, for messages, e.g. `layer 3 rows of micro-batch 2`.
            counts: Sizes by peer, where known (backward); else they are received first.
        """
        if self._is_local:
            return
        pending = _Pending(key=key, what=what, counts=None if counts is None else list(counts))
        self._pending[key] = pending
        if counts is not None:
            self._post_payload(pending)
            self._thread("receive").submit(lambda: self._await_payload(pending))
            return
        messages = [torch.empty(len(Counts._fields), dtype=torch.int64) for _ in self._groups.peers]
        works = [
            (peer, self._irecv(message, peer, self._groups.counts, self._tag(key)))
            for peer, message in zip(self._groups.peers, messages, strict=True)
        ]
        self._thread("counts").submit(lambda: self._await_counts(pending, works, messages))

    def take(self, key: tuple[int, int]) -> Arrival:
        """Wait for a posted transfer and hand it over; the buffers go back with `release`.

        Raises:
            WorkerFailure: A worker has failed, or this wait took longer than the configured timeout.
        """
        start_s = time.monotonic()
        if self._is_local:
            counts, buffers = self._local.pop(key)
            return self._arrival(counts, buffers, start_s, start_s)
        pending = self._pending.pop(key)
        deadline = start_s + self._context.timeout_s
        while not pending.done.wait(POLL_S):
            self._context.monitor.check()
            if time.monotonic() > deadline:
                self._raise_timeout(pending)
        if pending.error is not None:
            self._raise_lost(pending)
        assert pending.counts is not None
        if self._context.device.type == "cuda":
            self._finish_on_stream(pending)
        return self._arrival(pending.counts, pending.buffers, start_s, time.monotonic())

    def progress(self) -> None:
        """CUDA: post payload receives whose counts have come in, in order. The runtime calls it between actions."""
        for pending in self._pending.values():
            if not pending.done.is_set() or pending.error is not None:
                return
            if not pending.buffers:
                self._post_payload(pending)

    def release(self, arrival: Arrival) -> None:
        """Give a transfer's buffers back; no view of them may be in use."""
        arrival.views.clear()
        for buffer in arrival.buffers:
            self._context.pool.give(buffer)

    def close(self) -> None:
        for thread in self._threads.values():
            thread.close()

    # -- inside --------------------------------------------------------------------------------------------------

    def _await_counts(self, pending: _Pending, works: list[tuple[int, dist.Work]], messages: list[Tensor]) -> None:
        try:
            for peer, work in works:
                pending.waiting_for = peer
                work.wait()
            pending.counts = [Counts(*message.tolist()) for message in messages]
            if self._context.device.type == "cuda":
                pending.done.set()
                return
            self._post_payload(pending)
        except RuntimeError as error:
            pending.error = error
            pending.done.set()
            return
        self._thread("receive").submit(lambda: self._await_payload(pending))

    def _post_payload(self, pending: _Pending) -> None:
        assert pending.counts is not None
        wire = self._context.wire
        pending.buffers = [self._context.pool.take(wire.num_bytes(self.kind, c)) for c in pending.counts]
        operations = [
            (peer, buffer)
            for peer, buffer, count in zip(self._groups.peers, pending.buffers, pending.counts, strict=True)
            if count.num_rows
        ]
        pending.works = self._batch(dist.irecv, operations, pending.key)

    def _await_payload(self, pending: _Pending) -> None:
        try:
            if self._context.device.type != "cuda":
                for peer, work in pending.works:
                    pending.waiting_for = peer
                    work.wait()
        except RuntimeError as error:
            pending.error = error
        pending.done.set()

    def _finish_on_stream(self, pending: _Pending) -> None:
        """CUDA: post the payload if only the counts are in, then let the compute stream wait for it."""
        if not pending.buffers:
            self._post_payload(pending)
        for _, work in pending.works:
            work.wait()

    def _arrival(self, counts: list[Counts], buffers: list[Tensor], start_s: float, end_s: float) -> Arrival:
        views = [
            self._context.wire.views(self.kind, c, b) if c.num_rows else {}
            for c, b in zip(counts, buffers, strict=True)
        ]
        arrival = Arrival(counts=counts, views=views, buffers=buffers, wait_from_s=start_s, wait_to_s=end_s)
        if self._context.device.type == "cpu":
            offsets = self._context.clock_offset_s
            arrival.sent_at_s = max(
                (
                    float(v["header"]) + offsets.get(peer, 0.0)
                    for peer, v in zip(self._groups.peers, views, strict=True)
                    if v
                ),
                default=0.0,
            )
        return arrival

    def _batch(
        self,
        operation: Callable[..., dist.Work | None],
        operations: list[tuple[int, Tensor]],
        key: tuple[int, int],
    ) -> list[tuple[int, dist.Work]]:
        """One batched call a transfer, so that on NCCL all peers' messages are in flight together."""
        if not operations:
            return []
        tag, group = self._tag(key), self._groups.payload
        if self._context.device.type == "cuda":
            works = dist.batch_isend_irecv([dist.P2POp(operation, b, peer, group) for peer, b in operations])
            return [(operations[min(i, len(operations) - 1)][0], w) for i, w in enumerate(works)]
        call = self._isend if operation is dist.isend else self._irecv
        return [(peer, call(buffer, peer, group, tag)) for peer, buffer in operations]

    def _tag(self, key: tuple[int, int]) -> int:
        hop, microbatch = key
        return 0 if self._context.strict_order else 1 + (hop << 16) + microbatch

    @staticmethod
    def _isend(tensor: Tensor, peer: int, group: dist.ProcessGroup | None, tag: int) -> dist.Work:
        work = dist.isend(tensor, peer, group=group, tag=tag)
        assert work is not None
        return work

    @staticmethod
    def _irecv(tensor: Tensor, peer: int, group: dist.ProcessGroup | None, tag: int) -> dist.Work:
        work = dist.irecv(tensor, peer, group=group, tag=tag)
        assert work is not None
        return work

    def _thread(self, purpose: str) -> WaiterThread:
        if purpose not in self._threads:
            self._threads[purpose] = WaiterThread(f"{purpose} {self.name}")
        return self._threads[purpose]

    def _raise_timeout(self, pending: _Pending) -> None:
        monitor, peer = self._context.monitor, pending.waiting_for
        if peer is None:
            peer = self._groups.peers[0]
        monitor.check()
        raise TransferTimeout(
            f"waited longer than [comm] timeout_s = {self._context.timeout_s:g} s on edge {self.name} for "
            f"{pending.what} from worker {monitor.workers_on(peer)} (rank {peer}), which is doing: "
            f"{monitor.status.read(peer)}"
        )

    def _raise_lost(self, pending: _Pending) -> None:
        monitor, peer = self._context.monitor, pending.waiting_for
        assert peer is not None
        monitor.wait_for_notice(3.0)
        monitor.check()
        raise PeerLost(
            f"lost the connection on edge {self.name} while waiting for {pending.what} from worker "
            f"{monitor.workers_on(peer)} (rank {peer}), which was doing: {monitor.status.read(peer)}"
        ) from pending.error
