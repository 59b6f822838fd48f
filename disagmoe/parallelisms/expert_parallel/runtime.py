"""Walks a pipeline rank's order of chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from disagmoe.parallelisms.clock import StepClock
from disagmoe.parallelisms.expert_parallel.chunk import Chunk
from disagmoe.parallelisms.expert_parallel.exchange import Exchange
from disagmoe.parallelisms.expert_parallel.pass_on import PassOn
from disagmoe.parallelisms.expert_parallel.protocol import Filler, Meter, run_alone, run_interleaved
from disagmoe.parallelisms.failures import Monitor
from disagmoe.parallelisms.stage import MicrobatchInput
from disagmoe.parallelisms.transfer.channel import Channel
from disagmoe.schedules.chunk_orders import ChunkWork

_HOIST = 4
"""A receive is posted up to this many works before the one that needs it."""


class EPRuntime:
    """The pipeline of one worker.

    Args:
        order: of this pipeline rank: works, two in one tuple (a forward and a backward) interleaved.
        chunks: by index, those on this worker.
        passes: the borders between chunks that this worker has a side of.
    """

    def __init__(
        self,
        *,
        order: Sequence[tuple[ChunkWork, ...]],
        chunks: Mapping[int, Chunk],
        passes: Sequence[PassOn],
        channels: Sequence[Channel],
        exchange: Exchange,
        filler: Filler,
        meter: Meter,
        clock: StepClock,
        monitor: Monitor,
        num_microbatches: int,
        on_cuda: bool,
    ) -> None:
        # The backward goes first: its first transfer then runs behind the forward's first work.
        self._order = [tuple(sorted(works, key=lambda work: work.kind == "F")) for works in order]
        self._chunks, self._passes, self._channels, self._exchange = chunks, passes, channels, exchange
        self._filler = filler
        self._meter, self._clock, self._monitor = meter, clock, monitor
        self._num_microbatches, self._on_cuda = num_microbatches, on_cuda
        self.before_work: Callable[[ChunkWork], None] | None = None
        """Called before each work; for tests that inject faults."""

    def run_step(self, inputs: Sequence[MicrobatchInput], *, loss_scale: float, step: int = 0) -> Tensor | None:
        """Forward and backward of all micro-batches; gradients accumulate in the parameters' `.grad`.

        Args:
            inputs: This worker's slice of each micro-batch.
            loss_scale: Multiplies every micro-batch's summed loss *before* backward.
        Returns:
            The scaled loss of this worker's tokens, where the last chunk is; else None.
        """
        if len(inputs) != self._num_microbatches:
            raise ValueError(f"run_step got {len(inputs)} micro-batches; the order has {self._num_microbatches}")
        for border in self._passes:
            border.start_step(inputs)
        for chunk in self._chunks.values():
            chunk.start_step(inputs, loss_scale)
        posted = 0
        for position, works in enumerate(self._order):
            while posted < min(len(self._order), position + 1 + _HOIST):
                for work in self._order[posted]:
                    self._post(work)
                posted += 1
            self._monitor.status.write(f"step {step}, {' and '.join(map(_describe, works))}")
            self._monitor.check()
            for work in works:
                if self.before_work is not None:
                    self.before_work(work)
            self._run(works)
            if self._on_cuda:
                for channel in self._channels:
                    channel.progress()
        self._filler.drain()
        with self._monitor.collective(f"step {step}, telling when rows were sent"):
            self._exchange.settle()
        self._meter.flush()
        losses = [chunk.losses[m] for chunk in self._chunks.values() for m in sorted(chunk.losses)]
        return torch.stack(losses).sum() if losses else None

    def _run(self, works: tuple[ChunkWork, ...]) -> None:
        if len(works) == 1 and works[0].kind == "W":
            self._chunks[works[0].chunk].weight_gradients(works[0].microbatch)
            return
        parts = []
        for kind, index, microbatch in works:
            chunk = self._chunks[index]
            parts.append(chunk.forward(microbatch) if kind == "F" else chunk.backward(microbatch, put_off=kind == "I"))
        if len(parts) == 1:
            run_alone(parts[0])
        else:
            run_interleaved(parts)

    def _post(self, work: ChunkWork) -> None:
        """Post the receive of what a work begins with."""
        chunk = self._chunks[work.chunk]
        if work.kind == "F" and chunk.before is not None:
            chunk.before.post(work.microbatch, backward=False)
        elif work.kind in ("B", "I") and chunk.after is not None:
            chunk.after.post(work.microbatch, backward=True)

    @property
    def sent_bytes(self) -> int:
        """Bytes this process has handed to the network so far, counts included."""
        return self._exchange.sent_bytes + sum(channel.sent_bytes for channel in self._channels)

    def close(self) -> None:
        """End the threads."""
        self._exchange.close()
        for channel in self._channels:
            channel.close()


def _describe(work: ChunkWork) -> str:
    names = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}
    return f"{names[work.kind]} of chunk {work.chunk}, micro-batch {work.microbatch}"
