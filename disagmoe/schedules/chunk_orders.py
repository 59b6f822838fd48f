"""Orders of expert-parallel pipelines as data: the runtime executes them, the simulator times them.

A *rank* of the pipeline is a group of workers that holds whole layers: attention and experts alike. A *chunk* is a run
of consecutive layers on one rank. Both orders below say which chunk's forward or backward a rank does when.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class ChunkWork(NamedTuple):
    """What a rank does next."""

    kind: Literal["F", "B", "I", "W"]
    """Forward; backward; its input half, its weight half."""
    chunk: int
    microbatch: int


Order = list[list[tuple[ChunkWork, ...]]]
"""By rank: works; two in one tuple, a forward and a backward, are done interleaved, stage by stage."""


def interleaved_1f1b(num_ranks: int, chunks_a_rank: int, num_microbatches: int) -> Order:
    """Megatron-LM's order (arXiv 2104.04473): chunk c on rank c mod p, rounds of p micro-batches a chunk.

    Warm-up of rank r: 2 (p - r - 1) + (v - 1) p forwards, or p - r - 1 for v = 1; then forward and backward in turn.

    Raises:
        ValueError: v > 1 and p does not divide the number of micro-batches.
    """
    p, v, total = num_ranks, chunks_a_rank, num_microbatches * chunks_a_rank
    if v > 1 and num_microbatches % p:
        raise ValueError(
            f"{num_microbatches} micro-batches: interleaved 1F1B over {p} ranks needs a multiple of {p}, "
            f"or one chunk a rank"
        )
    order: Order = []
    for rank in range(p):
        forwards = [
            ChunkWork("F", turn * p + rank, start + i)
            for start in range(0, num_microbatches, p)
            for turn in range(v)
            for i in range(min(p, num_microbatches - start))
        ]
        backwards = [ChunkWork("B", (v - 1 - work.chunk // p) * p + rank, work.microbatch) for work in forwards]
        warm_up = min(total, 2 * (p - rank - 1) + (v - 1) * p if v > 1 else p - rank - 1)
        works = forwards[:warm_up]
        for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
            works += [forward, backward]
        works += backwards[total - warm_up :]
        order.append([(work,) for work in works])
    return order


def dual_pipe_v(num_ranks: int, num_microbatches: int) -> Order:
    """DualPipeV (DeepSeek-V3, arXiv 2412.19437; "cut-in-half" by Sea AI Lab): chunk c of 2 p on min(c, 2p - 1 - c).

    Eight phases of rank r, n micro-batches; & means interleaved, I then W means a split backward:

        1. 2 (p - r - 1)     x F0                   5. (p - r - 1) x B1, F1 & B0
        2. (r + 1)           x F0, F1               6. (r + 1)     x B1, B0; of the later half, W is put off
        3. (p - r - 1)       x I1, W1, F1           7. (p - r - 1) x W, I0
        4. (n - 2 p + r + 1) x F0 & B1, F1 & B0     8. W until none is left

    DualPipe runs the same on 2 p ranks from both ends: by symmetry rank g does in both directions what rank
    min(g, 2p - 1 - g) does here, each direction with its own half of the micro-batches.

    Raises:
        ValueError: fewer than 2 p micro-batches.
    """
    p, n = num_ranks, num_microbatches
    if n < 2 * p:
        raise ValueError(f"{n} micro-batches: DualPipeV over {p} ranks needs at least {2 * p}")
    return [_DualPipeVRank(p, rank, n).order() for rank in range(p)]


class _DualPipeVRank:
    """Counters of one rank: micro-batches by chunk (0: the way down, 1: the way up), and weight halves put off."""

    def __init__(self, num_ranks: int, rank: int, num_microbatches: int) -> None:
        self.p, self.rank, self.n = num_ranks, rank, num_microbatches
        self.chunks = (rank, 2 * num_ranks - 1 - rank)
        self.next = {"F": [0, 0], "B": [0, 0]}
        self.put_off: list[ChunkWork] = []
        self.works: list[tuple[ChunkWork, ...]] = []

    def _take(self, kind: Literal["F", "B"], way: int) -> ChunkWork:
        microbatch = self.next[kind][way]
        self.next[kind][way] += 1
        return ChunkWork(kind, self.chunks[way], microbatch)

    def _forward(self, way: int) -> None:
        self.works.append((self._take("F", way),))

    def _backward(self, way: int, *, split: bool = False) -> None:
        work = self._take("B", way)
        if split:
            self.put_off.append(work._replace(kind="W"))
            work = work._replace(kind="I")
        self.works.append((work,))

    def _weight(self) -> None:
        self.works.append((self.put_off.pop(0),))

    def _both(self, forward: int, backward: int) -> None:
        self.works.append((self._take("F", forward), self._take("B", backward)))

    def order(self) -> list[tuple[ChunkWork, ...]]:
        rest, own = self.p - self.rank - 1, self.rank + 1
        for _ in range(2 * rest):  # 1
            self._forward(0)
        for _ in range(own):  # 2
            self._forward(0)
            self._forward(1)
        for _ in range(rest):  # 3
            self._backward(1, split=True)
            self._weight()
            self._forward(1)
        for _ in range(self.n - 2 * self.p + own):  # 4
            self._both(0, 1)
            self._both(1, 0)
        for _ in range(rest):  # 5
            self._backward(1)
            self._both(1, 0)
        for step in range(own):  # 6
            # From the middle of the 2 (r + 1) backwards on.
            self._backward(1, split=2 * step + 1 > own)
            self._backward(0, split=2 * step + 1 >= own)
        for _ in range(rest):  # 7
            self._weight()
            self._backward(0, split=True)
        while self.put_off:  # 8
            self._weight()
        return self.works


def v_rank(chunk: int, num_ranks: int) -> int:
    """Rank of a chunk in a V."""
    return min(chunk, 2 * num_ranks - 1 - chunk)


def place_chunks(num_ranks: int, chunks_a_rank: int, *, in_v: bool) -> tuple[int, ...]:
    """Rank of each chunk: dealt out in turn, or in a V (two chunks a rank).

    >>> place_chunks(2, 2, in_v=False), place_chunks(2, 2, in_v=True)
    ((0, 1, 0, 1), (0, 1, 1, 0))
    """
    total = num_ranks * chunks_a_rank
    return tuple(v_rank(chunk, num_ranks) if in_v else chunk % num_ranks for chunk in range(total))


def make_order(num_ranks: int, chunks_a_rank: int, num_microbatches: int, *, in_v: bool) -> Order:
    """`dual_pipe_v` or `interleaved_1f1b`.

    Raises:
        ValueError: there is no such order for these numbers.
    """
    if not in_v:
        return interleaved_1f1b(num_ranks, chunks_a_rank, num_microbatches)
    if chunks_a_rank != 2:
        raise ValueError(f"{chunks_a_rank} chunks a rank: DualPipeV needs 2, a way down and a way up")
    return dual_pipe_v(num_ranks, num_microbatches)
