"""The channel of an edge whose two ends are this process: what is sent lies there until it is taken."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from disagmoe.parallelisms.transfer.messages import Arrival, ChannelContext
from disagmoe.parallelisms.transfer.wire import Counts, MessageKind


class InProcessChannel:
    """`Channel` without a network: no buffer, no header, no thread; nothing is ever waited for, or asked for early.

    Each section is a tensor of its own, which the taker may keep; a sender writes into it as it does into a message.
    """

    sent_bytes = 0

    def __init__(self, *, name: str, kind: MessageKind, backward: bool, context: ChannelContext) -> None:
        self.name, self.kind, self.backward = name, kind, backward
        self._wire, self._device = context.wire, context.device
        self._lying: dict[tuple[int, int], tuple[list[Counts], list[dict[str, Tensor]]]] = {}

    def made(self, key: tuple[int, int]) -> None:
        """Nothing: one stream makes and takes."""

    def send(
        self, key: tuple[int, int], counts: Sequence[Counts], pack: Callable[[int, dict[str, Tensor]], None]
    ) -> None:
        """As `Channel.send`."""
        messages: list[dict[str, Tensor]] = []
        for peer, count in enumerate(counts):
            sections: dict[str, Tensor] = {}
            if count.num_rows:
                for name, (dtype, shape) in self._wire.sections(self.kind, count).items():
                    if name != "header":
                        sections[name] = torch.empty(shape, dtype=dtype, device=self._device)
                pack(peer, sections)
            messages.append(sections)
        self._lying[key] = (list(counts), messages)

    def post(
        self, key: tuple[int, int], what: str, counts: Sequence[Counts] | None = None, most: Counts | None = None
    ) -> None:
        """Nothing to prepare."""

    def take(self, key: tuple[int, int]) -> Arrival:
        """As `Channel.take`."""
        counts, views = self._lying.pop(key)
        now_s = time.monotonic()
        return Arrival(counts=counts, views=views, buffers=[], wait_from_s=now_s, wait_to_s=now_s)

    def release(self, arrival: Arrival) -> None:
        """The sections go with the last that refers to them."""
        arrival.views.clear()

    def progress(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is held."""
