"""Hidden states from one chunk to the next, and their gradients back."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from disagmoe.parallelisms.clock import StepClock
from disagmoe.parallelisms.expert_parallel.protocol import Filler, Wait
from disagmoe.parallelisms.stage import MicrobatchInput
from disagmoe.parallelisms.transfer.channel import Arrival, Channel
from disagmoe.parallelisms.transfer.wire import Counts


class PassOn:
    """The border between chunk `index` and the next one, seen from the worker that holds either or both.

    A worker's hidden states go to its counterpart on the next pipeline rank, so sizes are known.

    Args:
        channels: outgoing and incoming, of the forward and the backward pass (see `channels_of`); None: both chunks are
            on this worker.
        stage: index of the last stage before the border in the chain of stages.
    """

    def __init__(
        self,
        *,
        index: int,
        num_chunks: int,
        stage: int,
        forward: Channel | None,
        backward: Channel | None,
        dim: int,
        dtype: torch.dtype,
        clock: StepClock,
        filler: Filler,
    ) -> None:
        self.index, self.stage = index, stage
        self._forward, self._backward = forward, backward
        self._num_chunks, self._dim, self._dtype, self._clock = num_chunks, dim, dtype, clock
        self._filler = filler
        self._here: dict[tuple[bool, int], Tensor] = {}
        self.inputs: Sequence[MicrobatchInput] = ()

    @property
    def is_local(self) -> bool:
        return self._forward is None

    def start_step(self, inputs: Sequence[MicrobatchInput]) -> None:
        self.inputs = inputs
        self._here.clear()

    def post(self, microbatch: int, *, backward: bool) -> None:
        """Post a receive, ahead of need."""
        channel = self._backward if backward else self._forward
        if channel is not None:
            what = "output gradient" if backward else "input"
            chunk = self.index if backward else self.index + 1
            name = f"the {what} of chunk {chunk}, micro-batch {microbatch}"
            channel.post(self._key(microbatch, backward), name, [self._counts(microbatch)])

    def send(self, microbatch: int, x_BLD: Tensor) -> None:
        self._send(microbatch, x_BLD, backward=False)

    def send_gradient(self, microbatch: int, grad_BLD: Tensor) -> None:
        self._send(microbatch, grad_BLD, backward=True)

    def receive(self, microbatch: int) -> Generator[Wait, None, Tensor]:
        """[B, L, D], a new tensor."""
        return (yield from self._receive(microbatch, backward=False))

    def receive_gradient(self, microbatch: int) -> Generator[Wait, None, Tensor]:
        return (yield from self._receive(microbatch, backward=True))

    def _send(self, microbatch: int, x_BLD: Tensor, *, backward: bool) -> None:
        channel = self._backward if backward else self._forward
        if channel is None:
            self._here[backward, microbatch] = x_BLD
            return

        def pack(peer: int, views: dict[str, Tensor]) -> None:
            del peer
            views["rows"].copy_(x_BLD.flatten(0, 1))

        channel.send(self._key(microbatch, backward), [self._counts(microbatch)], pack)

    def _receive(self, microbatch: int, *, backward: bool) -> Generator[Wait, None, Tensor]:
        channel = self._backward if backward else self._forward
        if channel is None:
            return self._here.pop((backward, microbatch))
        arrivals: list[Arrival] = []
        yield lambda: arrivals.append(self._take(channel, microbatch, backward))
        (arrival,) = arrivals
        shape = self.inputs[microbatch].tokens_BL.shape
        views = arrival.views[0]
        rows = views["rows"].clone() if views else torch.empty(0, self._dim, dtype=self._dtype)
        channel.release(arrival)
        return rows.view(*shape, self._dim)

    def _take(self, channel: Channel, microbatch: int, backward: bool) -> Arrival:
        self._filler.fill(lambda: channel.is_here(self._key(microbatch, backward)))
        arrival = channel.take(self._key(microbatch, backward))
        self._clock.waited(
            f"{channel.name} mb {microbatch}",
            arrival.wait_from_s,
            arrival.wait_to_s,
            arrival.sent_at_s,
            arrival.stream_wait,
        )
        self._clock.transfer_s += arrival.transfer_s
        if self._clock.samples is not None and arrival.num_bytes:
            self._clock.samples.transfers[self.stage, backward].append((arrival.num_bytes, arrival.transfer_s))
        return arrival

    def _counts(self, microbatch: int) -> Counts:
        return Counts(self.inputs[microbatch].tokens_BL.numel(), 0, 0)

    def _key(self, microbatch: int, backward: bool) -> tuple[int, int]:
        return (self.index + self._num_chunks * backward, microbatch)
