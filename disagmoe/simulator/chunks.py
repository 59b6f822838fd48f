"""Pipelines of expert-parallel groups as `Schedule`s, so that the same engine runs them as runs AF-Pipe.

The orders are those of `disagmoe.schedules.chunk_orders`, which the runtime executes too; `spell_out` writes each of
them as the stages of its layers:

    A (attention) -> dispatch -> F (experts) -> combine -> A ... F -> combine -> C -> next rank

Dispatch and combine are hops from a rank to itself, over its NICs; C takes no time and stands for the collected output
that goes to the next rank. What a rank has no other work for while it waits is exposed communication: nothing of it has
to be assumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from disagmoe.layout import ChunkStage, Role, Stage, cut_into_chunks
from disagmoe.schedules import Action, Kind, Schedule
from disagmoe.schedules.chunk_orders import ChunkWork, Order, dual_pipe_v, interleaved_1f1b, v_rank
from disagmoe.schedules.lower import lower

__all__ = ["ChunkStage", "Order", "cut_into_chunks", "dual_pipe_v", "interleaved_1f1b", "spell_out", "v_rank"]


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
