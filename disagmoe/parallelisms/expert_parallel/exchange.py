"""All-to-all exchanges among the workers that share a layer's experts: started, then waited for when they are needed.

All workers of a group start the same exchanges in the same order. Each is one batch of sends and receives; where the
receiver can't know the sizes, counts go ahead over a host group. gloo can neither be polled nor be waited on with a
deadline, so threads wait, and the compute thread waits for *them*, in slices, looking for failures (see
`transfer.channel`). On CUDA an exchange is one grouped NCCL call; the compute stream waits for it.

Payloads carry nothing but rows. When each worker handed its own over is told at the end of the step, in one collective
for all exchanges: only then is it known which part of a wait was communication (`settle`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from disagmoe.parallelisms.clock import EventPair, StepClock
from disagmoe.parallelisms.failures import POLL_S, Monitor, PeerLost, TransferTimeout
from disagmoe.parallelisms.transfer.messages import WaiterThread

_TAG_RANGE = 1 << 24


@dataclass(frozen=True, kw_only=True)
class ExchangeGroup:
    """The workers that share experts."""

    payload: dist.ProcessGroup | None
    """None: this worker is alone."""
    counts: dist.ProcessGroup | None
    """Host (gloo) group."""
    ranks: tuple[int, ...]
    """Global ranks, by worker."""
    own: int
    """This worker's index."""


@dataclass(kw_only=True)
class Ticket:
    """An exchange under way. `result` is what `finish` made of it, there after `Exchange.wait`."""

    number: int
    name: str
    hop: tuple[int, bool]
    """Which transfer of the chain of stages this is, and whether of the backward pass; for measured costs."""
    received: list[Tensor] = field(default_factory=list)
    """By worker; the own part is what was passed in."""
    counts: list[Tensor] = field(default_factory=list)
    sizes_known: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    waiting_for: int | None = None
    works: list[tuple[int, dist.Work]] = field(default_factory=list)
    handed_over_s: float = 0.0
    begun_s: float = 0.0
    here_s: float = 0.0
    wait_from_s: float = 0.0
    wait_to_s: float = 0.0
    num_bytes: int = 0
    """Received over the network."""
    after: Callable[[], None] | None = None
    """CUDA: gives send buffers back."""


class Exchange:
    """One worker's end of all exchanges of its group."""

    def __init__(
        self,
        *,
        group: ExchangeGroup,
        monitor: Monitor,
        clock: StepClock,
        timeout_s: float,
        strict_order: bool,
        device: torch.device,
        clock_offset_s: dict[int, float],
    ) -> None:
        self.group = group
        self._monitor, self._clock, self._timeout_s = monitor, clock, timeout_s
        self._strict_order, self._device, self._offset_s = strict_order, device, clock_offset_s
        self._on_cuda = device.type == "cuda"
        self._peers = [(i, rank) for i, rank in enumerate(group.ranks) if i != group.own]
        self._tickets: list[Ticket] = []
        self._threads: dict[str, WaiterThread] = {}
        self._send_error: tuple[int, BaseException] | None = None
        self._waiting_for: int | None = None
        self._last_here_s = 0.0
        self.before_wait: Callable[[Callable[[], bool]], None] = lambda is_over: None
        """Given what tells whether a wait is over, before it begins: a chance to do something useful."""
        self.sent_bytes = 0
        """Payload and count bytes handed to the network so far."""

    @property
    def num_workers(self) -> int:
        return len(self.group.ranks)

    # -- starting ------------------------------------------------------------------------------------------------

    def start(
        self,
        name: str,
        hop: tuple[int, bool],
        send: Sequence[Tensor],
        receive: Sequence[Tensor],
        *,
        release: Callable[[], None] | None = None,
    ) -> Ticket:
        """Start an exchange whose sizes are known.

        Args:
            send, receive: contiguous, by worker; the own entries are not touched.
            release: called once nothing of `send` is needed any more, maybe on another thread.
        """
        ticket = self._new(name, hop)
        ticket.received = list(receive)
        ticket.sizes_known.set()
        self._post(ticket, send, release, post_receives=True)
        return ticket

    def start_sized(
        self,
        name: str,
        hop: tuple[int, bool],
        send: Sequence[Tensor],
        counts: Sequence[Tensor],
        make_room: Callable[[list[Tensor]], Sequence[Tensor]],
        *,
        release: Callable[[], None] | None = None,
    ) -> Ticket:
        """Start an exchange whose sizes travel ahead.

        Args:
            counts: int64 on the host, by worker: what is told to each.
            make_room: called with what all workers tell this one, as soon as that is known, maybe on another thread;
                returns where to receive, by worker.
        """
        ticket = self._new(name, hop)
        own = self.group.own
        messages = [counts[own] if i == own else torch.empty_like(counts[own]) for i in range(self.num_workers)]
        ticket.counts = messages
        if not self._peers:
            ticket.received = list(make_room(messages))
            self._post(ticket, send, release, post_receives=True)
            return ticket
        tag = self._tag(ticket)
        receiving = [(rank, _irecv(messages[i], rank, self.group.counts, tag)) for i, rank in self._peers]
        sending = [(rank, _isend(counts[i], rank, self.group.counts, tag)) for i, rank in self._peers]
        self.sent_bytes += sum(counts[i].nbytes for i, _ in self._peers)
        self._thread("send").submit(lambda: self._reap(sending, lambda: None, list(counts)))

        def size() -> None:
            if self._await(ticket, receiving):
                ticket.received = list(make_room(messages))
                if not self._on_cuda:
                    self._post_receives(ticket)
            ticket.sizes_known.set()

        self._thread("counts").submit(size)
        if self._on_cuda:
            self._poll(ticket, ticket.sizes_known)
            self._raise_if_failed(ticket)
            self._post(ticket, send, release, post_receives=True)
        else:
            self._post(ticket, send, release, post_receives=False)
        return ticket

    def _new(self, name: str, hop: tuple[int, bool]) -> Ticket:
        if self._send_error is not None:
            self._raise_lost(self._send_error[0], "an earlier exchange", self._send_error[1])
        ticket = Ticket(number=len(self._tickets), name=name, hop=hop)
        self._tickets.append(ticket)
        return ticket

    def _post(
        self, ticket: Ticket, send: Sequence[Tensor], release: Callable[[], None] | None, *, post_receives: bool
    ) -> None:
        outgoing = [(rank, send[i]) for i, rank in self._peers if send[i].numel()]
        self.sent_bytes += sum(tensor.nbytes for _, tensor in outgoing)
        ticket.handed_over_s = time.monotonic()
        if not self._peers:
            ticket.done.set()
            if release is not None:
                release()
            return
        if self._on_cuda:
            self._post_on_device(ticket, outgoing, release)
            return
        if post_receives and self._strict_order:
            # Behind the receives of earlier exchanges, whose sizes may not be known yet.
            self._thread("counts").submit(lambda: self._post_receives(ticket))
        elif post_receives:
            self._post_receives(ticket)
        tag = self._tag(ticket)
        works = [(rank, _isend(tensor, rank, self.group.payload, tag)) for rank, tensor in outgoing]
        self._thread("send").submit(lambda: self._reap(works, release or (lambda: None), [t for _, t in outgoing]))

    def _post_receives(self, ticket: Ticket) -> None:
        incoming = self._incoming(ticket)
        tag = self._tag(ticket)
        ticket.works = [(rank, _irecv(tensor, rank, self.group.payload, tag)) for rank, tensor in incoming]
        self._thread("receive").submit(lambda: self._arrive(ticket))

    def _incoming(self, ticket: Ticket) -> list[tuple[int, Tensor]]:
        incoming = [(rank, ticket.received[i]) for i, rank in self._peers if ticket.received[i].numel()]
        ticket.num_bytes = sum(tensor.nbytes for _, tensor in incoming)
        return incoming

    def _post_on_device(
        self, ticket: Ticket, outgoing: list[tuple[int, Tensor]], release: Callable[[], None] | None
    ) -> None:
        """One grouped call, on NCCL's own stream, behind what the compute stream has been given so far."""
        group = self.group.payload
        operations = [dist.P2POp(dist.isend, tensor, rank, group) for rank, tensor in outgoing]
        operations += [dist.P2POp(dist.irecv, tensor, rank, group) for rank, tensor in self._incoming(ticket)]
        works = dist.batch_isend_irecv(operations) if operations else []
        ticket.works = [(self.group.ranks[self.group.own], work) for work in works]
        ticket.after = release
        ticket.done.set()

    # -- waiting -------------------------------------------------------------------------------------------------

    def wait(self, ticket: Ticket) -> None:
        """Wait until an exchange is here; on CUDA the compute stream does.

        Raises:
            WorkerFailure: A worker has failed, or this wait took longer than the configured timeout.
        """
        self.before_wait(ticket.done.is_set)
        ticket.wait_from_s = time.monotonic()
        self._poll(ticket, ticket.done)
        self._raise_if_failed(ticket)
        if self._on_cuda:
            self._wait_on_stream(ticket)
        ticket.wait_to_s = time.monotonic()
        if not self._on_cuda:
            # As idle for now: `settle` knows better.
            self._clock.idle_s += ticket.wait_to_s - ticket.wait_from_s

    def _poll(self, ticket: Ticket, event: threading.Event) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        waited = False
        while not event.wait(min(POLL_S, max(deadline_s - time.monotonic(), 0.0))):
            self._monitor.check()
            peer = self._awaited(ticket)
            if time.monotonic() >= deadline_s:
                raise TransferTimeout(
                    f"waited longer than [comm] timeout_s = {self._timeout_s:g} s in {ticket.name} for worker "
                    f"{self._monitor.describe(peer)}, which is doing: {self._monitor.doing(peer)}"
                )
            self._monitor.status.add(f"waiting in {ticket.name} for worker {self._monitor.describe(peer)}")
            waited = True
        if waited:
            self._monitor.status.add("")

    def _raise_if_failed(self, ticket: Ticket) -> None:
        if ticket.error is not None:
            self._raise_lost(self._awaited(ticket), ticket.name, ticket.error)

    def _wait_on_stream(self, ticket: Ticket) -> None:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _, work in ticket.works:
            work.wait()
        end.record()
        pair: EventPair = (start, end)
        self._clock.waited(ticket.name, ticket.wait_from_s, time.monotonic(), 0.0, pair)
        if ticket.after is not None:
            ticket.after()

    def _awaited(self, ticket: Ticket) -> int:
        for peer in (ticket.waiting_for, self._waiting_for):
            if peer is not None:
                return peer
        return self._peers[0][1] if self._peers else self._monitor.rank

    # -- on the threads ------------------------------------------------------------------------------------------

    def _await(self, ticket: Ticket, works: list[tuple[int, dist.Work]]) -> bool:
        """Wait for gloo; False and `ticket.done` if that failed."""
        try:
            for peer, work in works:
                ticket.waiting_for = self._waiting_for = peer
                work.wait()
        except Exception as error:  # raised again where the exchange is waited for
            ticket.error = error
            ticket.done.set()
            return False
        ticket.waiting_for = self._waiting_for = None
        return True

    def _arrive(self, ticket: Ticket) -> None:
        if self._await(ticket, ticket.works):
            ticket.begun_s, ticket.here_s = self._last_here_s, time.monotonic()
            self._last_here_s = ticket.here_s
            ticket.done.set()

    def _reap(self, works: list[tuple[int, dist.Work]], release: Callable[[], None], held: list[Tensor]) -> None:
        for peer, work in works:
            try:
                work.wait()
            except Exception as error:  # raised where the next exchange is started
                self._send_error = (peer, error)
                return
        held.clear()
        release()

    # -- end of a step -------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Book the step's waits by when their payloads were handed over. Collective in the group."""
        tickets, self._tickets = self._tickets, []
        if self._on_cuda or not tickets:
            return
        handed_over = torch.tensor([t.handed_over_s for t in tickets], dtype=torch.float64)
        last = handed_over.clone()
        if self._peers:
            everyone = [torch.empty_like(handed_over) for _ in range(self.num_workers)]
            dist.all_gather(everyone, handed_over, group=self.group.counts)
            offsets = [self._offset_s.get(rank, 0.0) for rank in self.group.ranks]
            last = torch.stack([t + offset for t, offset in zip(everyone, offsets, strict=True)]).max(0).values
        samples = self._clock.samples
        for ticket, sent_at_s in zip(tickets, last.tolist(), strict=True):
            self._clock.idle_s -= ticket.wait_to_s - ticket.wait_from_s
            travelled = bool(ticket.num_bytes)
            self._clock.waited(ticket.name, ticket.wait_from_s, ticket.wait_to_s, sent_at_s if travelled else 0.0)
            # Not what an earlier exchange took of the line.
            seconds = max(0.0, ticket.here_s - max(sent_at_s, ticket.begun_s)) if travelled else 0.0
            self._clock.transfer_s += seconds
            if samples is not None:
                samples.transfers[ticket.hop].append((ticket.num_bytes, seconds))

    def close(self) -> None:
        """End the threads."""
        for thread in self._threads.values():
            thread.close()

    # -- inside --------------------------------------------------------------------------------------------------

    def _tag(self, ticket: Ticket) -> int:
        return 0 if self._strict_order else ticket.number % _TAG_RANGE

    def _thread(self, purpose: str) -> WaiterThread:
        if purpose not in self._threads:
            self._threads[purpose] = WaiterThread(f"{purpose} all-to-all")
        return self._threads[purpose]

    def _raise_lost(self, peer: int, name: str, cause: BaseException) -> None:
        self._monitor.wait_for_notice(self._monitor.patience_s)
        self._monitor.check()
        raise PeerLost(
            f"lost the connection in {name} from or to worker {self._monitor.describe(peer)}, which was doing: "
            f"{self._monitor.doing(peer)}"
        ) from cause


def _isend(tensor: Tensor, peer: int, group: dist.ProcessGroup | None, tag: int) -> dist.Work:
    work = dist.isend(tensor, peer, group=group, tag=tag)
    assert work is not None
    return work


def _irecv(tensor: Tensor, peer: int, group: dist.ProcessGroup | None, tag: int) -> dist.Work:
    work = dist.irecv(tensor, peer, group=group, tag=tag)
    assert work is not None
    return work
