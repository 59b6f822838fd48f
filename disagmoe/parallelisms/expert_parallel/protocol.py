"""What expert parallelism needs to know of a model, and how its work is measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from disagmoe.layout import ChunkStage
from disagmoe.parallelisms.clock import StepClock
from disagmoe.parallelisms.stage import RouterState, WeightGradientsLike

Wait = Callable[[], None]
"""Something to be waited for. Work in parts yields it where it can't go on without."""
FORWARD, FULL_BACKWARD = "FORWARD", "FULL_BACKWARD"
BACKWARD_INPUT, BACKWARD_WEIGHT = "BACKWARD_INPUT", "BACKWARD_WEIGHT"


class OwnerPartLike(Protocol):
    """A module that computes all of a layer but its routed experts; see `ChunkPartsLike.owner_part`."""

    @property
    def router_state(self) -> RouterState | None: ...

    @property
    def shared_experts(self) -> nn.Module | None: ...


class ChunkPartsLike(Protocol):
    """A supplier of sublayers. Modules come initialised, on the device, in the row dtype."""

    dim: int
    row_dtype: torch.dtype

    @property
    def is_moe_layer(self) -> Sequence[bool]: ...

    def num_experts(self, layer: int) -> int: ...

    def top_k(self, layer: int) -> int: ...

    def owner_part(self, stage: ChunkStage) -> nn.Module:
        """An `OwnerPartLike`: (hidden or tokens, positions, masks) -> (h, n, weights, expert ids, scores) with a MoE
        layer, (logits,) with the head, (hidden,) with neither."""
        ...

    def routed_part(self, stage: ChunkStage, experts: range) -> nn.Module:
        """(rows sorted by expert [Q, D], counts [e]) -> rows [Q, D]."""
        ...

    def weight_gradients(self) -> WeightGradientsLike: ...


class Later(Protocol):
    """Where work goes that can be put off: a list, or a `Filler`."""

    def append(self, work: Callable[[], None], /) -> None: ...


class RoutedExperts(Protocol):
    """The routed experts of one layer on one worker, transfers included. Both passes work in parts."""

    num_rows: int
    """Rows sent so far."""

    def forward(
        self, microbatch: int, n_TD: Tensor, weights_TK: Tensor, expert_ids_TK: Tensor, meanwhile: Callable[[], None]
    ) -> Generator[Wait, None, Tensor]:
        """[T, D]: for each token the weighted sum over its experts.

        meanwhile: called once, while the rows are under way where that is possible.
        """
        ...

    def backward(
        self,
        microbatch: int,
        grad_TD: Tensor,
        meanwhile: Callable[[], None],
        later: Later | None,
    ) -> Generator[Wait, None, tuple[Tensor, Tensor]]:
        """Gradients of n [T, D] and of the weights [T, K].

        later: receives weight gradients that can be put off; None: they are computed while gradients travel.
        """
        ...

    def clear(self) -> None: ...


class Meter:
    """Times compute in parts: adds up what one stage takes of one micro-batch and pass, over all its parts."""

    def __init__(self, clock: StepClock) -> None:
        self.clock = clock
        self._seconds: dict[tuple[str, int, int], float] = {}

    def time(self, kind: str, stage: int, microbatch: int, what: str) -> AbstractContextManager[None]:
        return self._time(kind, stage, microbatch, what)

    @contextmanager
    def _time(self, kind: str, stage: int, microbatch: int, what: str) -> Iterator[None]:
        before_s = self.clock.compute_s
        with self.clock.span("compute", f"{what} {microbatch}"):
            yield
        key = (kind, stage, microbatch)
        self._seconds[key] = self._seconds.get(key, 0.0) + self.clock.compute_s - before_s

    def flush(self) -> None:
        """End of a step: hand the sums to the clock's samples."""
        samples = self.clock.samples
        if samples is not None:
            for (kind, stage, _), seconds in self._seconds.items():
                samples.actions_s[kind, stage].append(seconds)
        self._seconds.clear()


class Filler:
    """Weight gradients that nobody waits for, to be computed while something else is waited for.

    They need no transfer, so a worker may compute them whenever it likes, whatever the others do.

    Args:
        most: how many may be left; more are computed as they come. 0: all at once.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._left: deque[Callable[[], None]] = deque()

    def append(self, work: Callable[[], None], /) -> None:
        self._left.append(work)
        while len(self._left) > self._most:
            self._left.popleft()()

    def take_over(self, works: list[Callable[[], None]]) -> None:
        """`append` all and leave none."""
        while works:
            self.append(works.pop(0))

    def fill(self, is_over: Callable[[], bool]) -> None:
        """Compute, one after the other, until a wait is over or nothing is left."""
        while self._left and not is_over():
            self._left.popleft()()

    def drain(self) -> None:
        """Compute what is left."""
        while self._left:
            self._left.popleft()()


def run_alone(work: Iterator[Wait]) -> None:
    """Work in parts, one after the other."""
    for wait in work:
        wait()


def run_interleaved(works: Sequence[Iterator[Wait]]) -> None:
    """Works take turns: while one's transfers are under way, the others compute. The turns depend on nothing but the
    works themselves, so all workers of a group take the same."""
    waits: list[tuple[Iterator[Wait], Wait | None]] = [(work, None) for work in works]
    while waits:
        left: list[tuple[Iterator[Wait], Wait | None]] = []
        for work, wait in waits:
            if wait is not None:
                wait()
            following = next(work, None)
            if following is not None:
                left.append((work, following))
        waits = left
