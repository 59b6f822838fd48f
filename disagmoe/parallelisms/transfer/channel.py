"""Channels: ordered streams of transfers between this worker and the workers of one group, in one direction.

There is one channel for each edge of the pipeline (A-group, F-group, M2N or N2M) and pass, on process groups of its
own. On each channel the sequence of sends equals the sequence of receives (the schedule's validator proves it), so no
tags are needed; over gloo they are used all the same unless `strict_order` is set.

A forward transfer has two parts. *Counts* go ahead over a host group, since a receiver needs exact sizes; when they are
in, the payload's receive is posted. But gloo takes a message that is shorter than its receive, and a token is at most
one row a peer: where the tokens of a worker are known to be at most so many (`ChannelContext.slice_tokens`), receives
are posted ahead at the size that this bounds, and the counts ride in the message's header: half as many messages.

gloo can neither be polled nor be waited on with a deadline (a timed-out wait breaks the connection), so a thread a
channel waits, and the compute thread waits for *it*, in slices, looking for failures.

On CUDA the thread waits for the counts only. Payloads are packed, sent and received on a side stream a channel, so that
they wait for the data that they need and not for whatever else the compute stream has been given; the compute stream
waits for a payload where it is taken. Buffers and packed tensors are held until the device is done with them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from disagmoe.parallelisms.failures import POLL_S, PeerLost, TransferTimeout
from disagmoe.parallelisms.transfer.messages import (
    Arrival,
    ChannelContext,
    ChannelGroups,
    Flight,
    Pending,
    WaiterThread,
)
from disagmoe.parallelisms.transfer.wire import HEADER_BYTES, Counts, MessageKind

__all__ = ["Arrival", "Channel", "ChannelContext", "ChannelGroups"]


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
        self._counts_inside = context.slice_tokens is not None and not backward
        self._on_cuda = context.device.type == "cuda"
        self._side = torch.cuda.Stream(context.device) if self._on_cuda else None
        self._pending: dict[tuple[int, int], Pending] = {}
        self._made: dict[tuple[int, int], torch.cuda.Event] = {}
        self._flights: list[Flight] = []
        self._threads: dict[str, WaiterThread] = {}
        self._send_error: tuple[int, BaseException] | None = None
        self._waiting_for: int | None = None
        self._last_here_s = 0.0
        self.sent_bytes = 0
        """Payload and count bytes handed to the network so far."""

    # -- sending -------------------------------------------------------------------------------------------------

    def made(self, key: tuple[int, int]) -> None:
        """The compute that makes this transfer's data has just been launched (CUDA: `send` waits for it alone)."""
        if self._side is not None:
            self._made[key] = torch.cuda.Event()
            self._made[key].record()

    def send(
        self, key: tuple[int, int], counts: Sequence[Counts], pack: Callable[[int, dict[str, Tensor]], None]
    ) -> None:
        """Hand one transfer to the network.

        Args:
            key: (hop, micro-batch).
            counts: Message size for each peer.
            pack: Writes peer i's sections into the views of its buffer; called for peers with rows only.
        Raises:
            WorkerFailure: An earlier transfer could not be sent.
        """
        if self._send_error is not None:
            self._raise_lost(self._send_error[0], "sending", self._send_error[1])
        works: list[tuple[int, dist.Work]] = []
        held: list[Tensor] = []
        if not self.backward and not self._counts_inside:
            for peer, count in zip(self._groups.peers, counts, strict=True):
                message = torch.tensor(count, dtype=torch.int64)
                held.append(message)
                works.append((peer, self._isend(message, peer, self._groups.counts, self._tag(key))))
                self.sent_bytes += message.nbytes
        with self._beside(self._made.pop(key, None)):
            buffers = self._pack(counts, pack)
            operations = self._travelling(buffers, counts)
            payload = self._batch(dist.isend, operations, key)
        self.sent_bytes += sum(b.numel() for _, b in operations)
        if self._on_cuda:
            self._flights.append(Flight(works=[w for _, w in payload], buffers=buffers, pack=pack))
            self._thread("send").submit(lambda: self._reap(works, [], held))
        else:
            self._thread("send").submit(lambda: self._reap(works + payload, buffers, held))

    def _pack(self, counts: Sequence[Counts], pack: Callable[[int, dict[str, Tensor]], None]) -> list[Tensor]:
        wire, buffers, headers = self._context.wire, [], []
        for i, count in enumerate(counts):
            num_bytes = wire.num_bytes(self.kind, count)
            buffer = self._context.pool.take(max(num_bytes, HEADER_BYTES) if self._counts_inside else num_bytes)
            buffers.append(buffer)
            if count.num_rows:
                views = wire.views(self.kind, count, buffer)
                pack(i, views)
            if buffer.numel() and not self._on_cuda:  # nothing reads it there
                headers.append((buffer[:HEADER_BYTES].view(torch.float64), count))
        now = time.monotonic()
        for header, count in headers:
            header.copy_(torch.tensor([now, *count], dtype=torch.float64))
        return buffers

    def _reap(self, works: list[tuple[int, dist.Work]], buffers: list[Tensor], held: list[Tensor]) -> None:
        """On the send thread: wait for gloo, then give the buffers back."""
        for peer, work in works:
            try:
                work.wait()
            except RuntimeError as error:
                self._send_error = (peer, error)
                return
        held.clear()
        for buffer in buffers:
            self._context.pool.give(buffer)

    # -- receiving -----------------------------------------------------------------------------------------------

    def post(
        self, key: tuple[int, int], what: str, counts: Sequence[Counts] | None = None, most: Counts | None = None
    ) -> None:
        """Post a receive.

        Args:
            key: (hop, micro-batch).
            what: What is received, for messages, e.g. `layer 3 rows of micro-batch 2`.
            counts: Sizes by peer, where known (backward); else they are received first, or inside the messages.
            most: Upper bounds of a peer's counts, where those travel inside the messages.
        """
        pending = Pending(key=key, what=what, counts=None if counts is None else list(counts))
        self._pending[key] = pending
        if self._counts_inside:
            assert most is not None
            pending.counts = [most] * len(self._groups.peers)
        if pending.counts is not None:
            self._post_payload(pending)
            self._await_payload_later(pending)
            return
        messages = [torch.empty(len(Counts._fields), dtype=torch.int64) for _ in self._groups.peers]
        works = [
            (peer, self._irecv(message, peer, self._groups.counts, self._tag(key)))
            for peer, message in zip(self._groups.peers, messages, strict=True)
        ]
        self._thread("counts").submit(lambda: self._await_counts(pending, works, messages))

    def is_here(self, key: tuple[int, int]) -> bool:
        """Whether `take` of a posted transfer would not have to wait (CUDA: on the host)."""
        return self._pending[key].done.is_set()

    def take(self, key: tuple[int, int]) -> Arrival:
        """Wait for a posted transfer and hand it over; the buffers go back with `release`.

        Raises:
            WorkerFailure: A worker has failed, or this wait took longer than the configured timeout.
        """
        start_s = time.monotonic()
        pending = self._pending[key]
        self._wait(pending, start_s + self._context.timeout_s)
        if self._on_cuda:
            # In the order of the posts: counts come in that order, so those of all earlier receives are here.
            self._post_known()
        del self._pending[key]
        if pending.error is not None:
            self._raise_lost(self._awaited(pending), f"waiting for {pending.what}", pending.error)
        assert pending.counts is not None
        if self._counts_inside:
            headers = (buffer[:HEADER_BYTES].view(torch.float64).tolist() for buffer in pending.buffers)
            pending.counts = [Counts(*map(int, header[1:])) for header in headers]
        stream_wait = self._wait_on_stream(pending) if self._on_cuda else None
        arrival = self._arrival(pending.counts, pending.buffers, start_s, time.monotonic())
        arrival.stream_wait = stream_wait
        arrival.num_bytes = sum(self._context.wire.num_bytes(self.kind, count) for count in pending.counts)
        arrival.transfer_s = max(0.0, pending.here_s - max(arrival.sent_at_s, pending.begun_s))
        return arrival

    def _wait(self, pending: Pending, deadline_s: float) -> None:
        monitor = self._context.monitor
        waited = False
        while not pending.done.wait(min(POLL_S, max(deadline_s - time.monotonic(), 0.0))):
            monitor.check()
            peer = self._awaited(pending)
            if time.monotonic() >= deadline_s:
                raise TransferTimeout(
                    f"waited longer than [comm] timeout_s = {self._context.timeout_s:g} s on edge {self.name} for "
                    f"{pending.what} from worker {monitor.describe(peer)}, which is doing: {monitor.doing(peer)}"
                )
            monitor.status.add(f"waiting on edge {self.name} for worker {monitor.describe(peer)}")
            waited = True
        if waited:
            monitor.status.add("")

    def progress(self) -> None:
        """CUDA: post payload receives whose counts have come in, in order, and give back the buffers of finished sends.

        The runtime calls it between actions.
        """
        while self._flights and all(work.is_completed() for work in self._flights[0].works):
            for buffer in self._flights.pop(0).buffers:
                self._context.pool.give(buffer)
        self._post_known()

    def release(self, arrival: Arrival) -> None:
        """Give a transfer's buffers back; no view of them may be in use, except by kernels launched already."""
        arrival.views.clear()
        after = None
        if self._on_cuda:
            after = torch.cuda.Event()
            after.record()
        for buffer in arrival.buffers:
            self._context.pool.give(buffer, after=after)

    def close(self) -> None:
        if self._flights:
            torch.cuda.synchronize(self._context.device)
            self.progress()
        for thread in self._threads.values():
            thread.close()

    # -- inside --------------------------------------------------------------------------------------------------

    def _beside(self, ready: torch.cuda.Event | None = None) -> AbstractContextManager[object]:
        """CUDA: work on the side stream, after `ready`, by default after all that was launched on the current one."""
        if self._side is None:
            return nullcontext()
        if ready is None:
            self._side.wait_stream(torch.cuda.current_stream(self._context.device))
        else:
            self._side.wait_event(ready)
        return torch.cuda.stream(self._side)

    def _await_counts(self, pending: Pending, works: list[tuple[int, dist.Work]], messages: list[Tensor]) -> None:
        """On the counts thread."""
        try:
            for peer, work in works:
                pending.waiting_for = self._waiting_for = peer
                work.wait()
            pending.counts = [Counts(*message.tolist()) for message in messages]
            if not self._on_cuda:
                self._post_payload(pending)
        except Exception as error:  # raised again where the transfer is taken
            pending.error = error
            pending.done.set()
            return
        self._waiting_for = None
        self._await_payload_later(pending)

    def _post_known(self) -> None:
        """CUDA: post the payloads whose counts are known."""
        for pending in self._pending.values():
            if not pending.done.is_set() or pending.error is not None:
                return
            if not pending.buffers:
                self._post_payload(pending)

    def _post_payload(self, pending: Pending) -> None:
        assert pending.counts is not None
        wire, pool = self._context.wire, self._context.pool
        # Not behind the compute stream: the pool knows what a reused buffer has to wait for.
        with nullcontext() if self._side is None else torch.cuda.stream(self._side):
            pending.buffers = [pool.take(wire.num_bytes(self.kind, c)) for c in pending.counts]
            pending.works = self._batch(dist.irecv, self._travelling(pending.buffers, pending.counts), pending.key)

    def _await_payload_later(self, pending: Pending) -> None:
        if self._on_cuda:
            pending.done.set()
        else:
            self._thread("receive").submit(lambda: self._await_payload(pending))

    def _await_payload(self, pending: Pending) -> None:
        """On the receive thread."""
        try:
            for peer, work in pending.works:
                pending.waiting_for = self._waiting_for = peer
                work.wait()
            self._waiting_for = None
            pending.begun_s, pending.here_s = self._last_here_s, time.monotonic()
            self._last_here_s = pending.here_s
        except Exception as error:  # raised again where the transfer is taken
            pending.error = error
        pending.done.set()

    def _awaited(self, pending: Pending) -> int:
        """The peer that a receive waits for; while earlier receives are waited for, theirs."""
        for peer in (pending.waiting_for, self._waiting_for):
            if peer is not None:
                return peer
        return self._groups.peers[0]

    def _wait_on_stream(self, pending: Pending) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """CUDA: let the compute stream wait for a payload."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _, work in pending.works:
            work.wait()
        end.record()
        return start, end

    def _arrival(self, counts: list[Counts], buffers: list[Tensor], start_s: float, end_s: float) -> Arrival:
        views = [
            self._context.wire.views(self.kind, c, b) if c.num_rows else {}
            for c, b in zip(counts, buffers, strict=True)
        ]
        arrival = Arrival(counts=counts, views=views, buffers=buffers, wait_from_s=start_s, wait_to_s=end_s)
        if not self._on_cuda:
            offsets = self._context.clock_offset_s
            arrival.sent_at_s = max(
                (
                    float(v["header"][0]) + offsets.get(peer, 0.0)
                    for peer, v in zip(self._groups.peers, views, strict=True)
                    if v
                ),
                default=0.0,
            )
        return arrival

    def _travelling(self, buffers: Sequence[Tensor], counts: Sequence[Counts]) -> list[tuple[int, Tensor]]:
        """The messages that travel, with their peers: those with rows, or all where counts are inside."""
        by_peer = zip(self._groups.peers, buffers, counts, strict=True)
        return [(peer, buffer) for peer, buffer, count in by_peer if count.num_rows or self._counts_inside]

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
        if self._on_cuda:
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

    def _raise_lost(self, peer: int, doing: str, cause: BaseException) -> None:
        monitor = self._context.monitor
        monitor.wait_for_notice(monitor.patience_s)
        monitor.check()
        raise PeerLost(
            f"lost the connection on edge {self.name} while {doing} from or to worker {monitor.describe(peer)}, "
            f"which was doing: {monitor.doing(peer)}"
        ) from cause
