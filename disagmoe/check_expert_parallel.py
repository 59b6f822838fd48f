"""`disagmoe check` for `mode = "ep"`: who holds what, and the order of chunks. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from disagmoe.config.checks import describe_world_size
from disagmoe.config.schema import Config
from disagmoe.layout import ChunkStage, cut_into_chunks, split_evenly
from disagmoe.schedules.chunk_orders import make_order, place_chunks
from disagmoe.shapes import ModelShape

_SHOWN_WORKS = 12
"""Works of each pipeline rank that are shown."""


def expert_parallel_lines(
    config: Config, shape: ModelShape, state_bytes: int, processes_per_node: int | None
) -> Iterator[str]:
    """A paragraph a pipeline rank: its chunks, then a line a worker; then the order's first works.

    Args:
        state_bytes: bytes a parameter, its gradient and optimizer state included.
    """
    part = config.expert_parallel
    in_v = part.overlap == "dual_pipe_v"
    ranks = place_chunks(part.pipeline_depth, part.chunks_per_rank, in_v=in_v)
    stages = cut_into_chunks(shape.is_moe_layer, len(ranks))
    layout = part.layout()
    yield f"layout    {describe_world_size(config).removeprefix('the layout needs ')}"
    yield f"overlap   {_describe_overlap(config)}"
    yield ""
    for rank in range(part.pipeline_depth):
        own = [stage for stage in stages if ranks[stage.chunk] == rank]
        chunks = sorted({stage.chunk for stage in own})
        yield f"pipeline rank {rank} holds " + "; ".join(
            f"chunk {chunk}: {_describe_chunk([s for s in own if s.chunk == chunk])}" for chunk in chunks
        )
        for worker in (w for w in layout.workers if w.group == rank):
            process = layout.rank_of(worker)
            node = "" if processes_per_node is None else f" node {process // processes_per_node:<3}"
            params = sum(stage_params(shape, stage, part.expert_workers, worker.index) for stage in own)
            yield (
                f"  {worker!s:<10} rank {process:<4}{node} {count_text(params):>9} parameters  "
                f"{size_text(params * state_bytes):>9} state"
            )
    yield ""
    yield "order     F3.1: forward of chunk 3, micro-batch 1; B: backward; I, W: its halves; &: interleaved"
    order = make_order(part.pipeline_depth, part.chunks_per_rank, part.microbatches, in_v=in_v)
    for rank, works in enumerate(order):
        shown = [" & ".join(f"{w.kind}{w.chunk}.{w.microbatch}" for w in together) for together in works]
        more = " ..." if len(shown) > _SHOWN_WORKS else ""
        yield f"  rank {rank:<3} " + "  ".join(shown[:_SHOWN_WORKS]) + more


def stage_params(shape: ModelShape, stage: ChunkStage, workers: int, index: int) -> int:
    """Parameters of `stage` on worker `index` of the `workers` that share its layer."""
    if stage.kind == "C":
        return 0
    if stage.kind == "F":
        assert stage.layer is not None
        moe = shape.layers[stage.layer].moe
        return len(split_evenly(moe.num_experts, workers)[index]) * moe.expert_params(shape.dim)
    count = sum(shape.layers[layer].num_params(shape.dim) for layer in stage.dense_layers)
    if stage.layer is not None:
        layer = shape.layers[stage.layer]
        count += layer.attention_sublayer_params(shape.dim) + layer.moe.shared_params(shape.dim)
    return count + stage.has_embedding * shape.embedding_params + stage.has_head * shape.head_params


def _describe_overlap(config: Config) -> str:
    part = config.expert_parallel
    rows = "rows once a worker" if part.deduplicate else "a row for each expert of a token"
    kind = {
        "none": "none: interleaved 1F1B",
        "chunked": f"chunked: a stage's tokens in {part.num_chunks} parts",
        "dual_pipe_v": "dual_pipe_v: a forward with another micro-batch's backward",
    }[part.overlap]
    return f"{kind}; {rows}"


def _describe_chunk(stages: Sequence[ChunkStage]) -> str:
    layers = [layer for s in stages if s.kind == "A" for layer in (*s.dense_layers, s.layer) if layer is not None]
    parts = ["embedding"] if any(s.has_embedding for s in stages) else []
    parts += [f"layers {ranges_text(layers)}"] if layers else []
    parts += ["head"] if any(s.has_head for s in stages) else []
    return ", ".join(parts)


def ranges_text(numbers: Sequence[int]) -> str:
    """Consecutive numbers as `a-b`, evenly spaced ones as `a, b ... z`.

    >>> ranges_text([1, 2, 3, 4]), ranges_text([0, 3, 6, 9]), ranges_text([5]), ranges_text([1, 5, 6])
    ('1-4', '0, 3 ... 9', '5', '1, 5, 6')
    """
    steps = {b - a for a, b in pairwise(numbers)}
    if len(numbers) > 1 and steps == {1}:
        return f"{numbers[0]}-{numbers[-1]}"
    if len(numbers) > 3 and len(steps) == 1:
        return f"{numbers[0]}, {numbers[1]} ... {numbers[-1]}"
    return ", ".join(map(str, numbers))


def count_text(number: float) -> str:
    """E.g. `1.23 M`."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:.0f}"


def size_text(number: float) -> str:
    """E.g. `1.2 GiB`."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f} B"
