"""Pipelines of expert-parallel groups as `Schedule`s, so that the same engine runs them as runs AF-Pipe.

A *rank* of the pipeline is a group of workers that holds whole layers: attention and experts alike. A *chunk* is a run
of consecutive layers on one rank. Both orders below say which chunk's forward or backward a rank does when; `spell_out`
writes each of them as the stages of its layers:

    A (attention) -> dispatch -> F (experts) -> combine -> A ... F -> combine -> C -> next rank

Dispatch and combine are hops from a rank to itself, over its NICs; C takes no time and stands for the collected output
that goes to the next rank. What a rank has no other work for while it waits is exposed communication: nothing of it has
to be assumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from disagmoe.layout import Role, Stage, split_evenly
from disagmoe.schedules import Action, Kind, Schedule
from disagmoe.schedules.lower import lower


class ChunkWork(NamedTuple):
    """What a rank does next."""

    kind: Literal["F", "B", "I", "W"]
    """Forward; backward; its input half, its weight half."""
    chunk: int
    microbatch: int


Order = list[list[tuple[ChunkWork, ...]]]
"""By rank: works; two in one tuple, a forward and a backward, are done interleaved, stage by stage."""


@dataclass(frozen=True, kw_only=True)
class ChunkStage:
    """A stage of the chain that all micro-batches go through."""

    chunk: int
    kind: Literal["A", "F", "C"]
    layer: int | None
    """The MoE layer of an A or F; None: the last A, with the head, or a C."""
    dense_layers: tuple[int, ...] = ()
    has_embedding: bool = False
    has_head: bool = False


def cut_into_chunks(is_moe_layer: Sequence[bool], num_chunks: int) -> list[ChunkStage]:
    """All stages. Layers are dealt out evenly, earlier chunks take one more; the last one has the head.

    Raises:
        ValueError: fewer layers than chunks.
    """
    if num_chunks > len(is_moe_layer):
        raise ValueError(f"{num_chunks} chunks for {len(is_moe_layer)} layers: must be at most one a layer")
    stages: list[ChunkStage] = []
    for chunk, layers in enumerate(split_evenly(len(is_moe_layer), num_chunks)):
        dense: list[int] = []
        last = chunk == num_chunks - 1
        for layer in layers:
            if not is_moe_layer[layer]:
                dense.append(layer)
                continue
            first = not stages
            stages.append(
                ChunkStage(chunk=chunk, kind="A", layer=layer, dense_layers=tuple(dense), has_embedding=first)
            )
            stages.append(ChunkStage(chunk=chunk, kind="F", layer=layer))
            dense = []
        if last or dense:
            end = ChunkStage(chunk=chunk, kind="A", layer=None, dense_layers=tuple(dense), has_head=last,
                             has_embedding=not stages)  # fmt: skip
            stages.append(end)
        else:
            stages.append(ChunkStage(chunk=chunk, kind="C", layer=None))
    return stages


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


def spell_out(
    order: Order, stages: Sequence[ChunkStage], rank_of_chunk: Sequence[int], *, name: str, num_microbatches: int
) -> Schedule:
    """Chunks' works as stages' actions, with sends and receives. Not validated."""
    of_chunk: dict[int, list[int]] = {}
    for index, stage in enumerate(stages):
        of_chunk.setdefault(stage.chunk, []).append(index)
    compute = tuple(tuple(action for works in rank for action in _actions(works, of_chunk, stages)) for rank in order)
    layout_stages = tuple(
        Stage(
            index=index,
            role=Role.FFN if stage.kind == "F" else Role.ATTN,
            group=rank_of_chunk[stage.chunk],
            dense_layers=stage.dense_layers,
            moe_layer=stage.layer,
            has_embedding=stage.has_embedding,
            has_head=stage.has_head,
        )
        for index, stage in enumerate(stages)
    )
    groups = tuple(rank_of_chunk[stage.chunk] for stage in stages)
    return Schedule(
        name=name,
        num_microbatches=num_microbatches,
        stages=layout_stages,
        group_of_stage=groups,
        num_groups=len(order),
        compute=compute,
        programs=lower(compute, stages=layout_stages, group_of_stage=groups, hoist=8, send_after=0),
    )


def _actions(
    works: tuple[ChunkWork, ...], of_chunk: dict[int, list[int]], stages: Sequence[ChunkStage]
) -> Iterator[Action]:
    if len(works) == 1:
        for step in _steps(works[0], of_chunk, split=False):
            yield from step
        return
    # A forward and a backward: one's compute hides the other's transfers. Input gradients leave before the weights'.
    forward = list(_steps(works[0], of_chunk, split=True))
    backward = list(_steps(works[1], of_chunk, split=True))
    if stages[backward[0][0].stage].kind == "C":
        yield from backward.pop(0)
    for index in range(max(len(forward), len(backward))):
        if index < len(forward):
            yield from forward[index]
        if index < len(backward):
            yield from backward[index]


def _steps(work: ChunkWork, of_chunk: dict[int, list[int]], *, split: bool) -> Iterator[list[Action]]:
    """The actions of each stage, in order."""
    kind, chunk, microbatch = work
    if kind == "F":
        for stage in of_chunk[chunk]:
            yield [Action(Kind.FORWARD, stage, microbatch)]
        return
    halves = {
        "B": [Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT] if split else [Kind.FULL_BACKWARD],
        "I": [Kind.BACKWARD_INPUT],
        "W": [Kind.BACKWARD_WEIGHT],
    }[kind]
    for stage in reversed(of_chunk[chunk]):
        yield [Action(half, stage, microbatch) for half in halves]
