"""Why nothing fits, and the smallest change of each kind that would help.

A question has no answer because the runtime's rules and the pins leave no layout, or because each layout that they
leave has a worker with too little memory. Then the layout that is short by least is named, and each kind of change is
tried for its least value: more memory, more nodes, shorter sequences, fewer samples a micro-batch, a pin less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from disagmoe.allocator.candidates import all_tables, attn_worker_counts, replica_counts
from disagmoe.allocator.evaluate import place
from disagmoe.allocator.question import Candidate, Pins, Question
from disagmoe.allocator.tables import Tables

GIB = 2**30
MOST_FACTOR = 64


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What binds, and what would help."""

    binding: str
    changes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [self.binding]
        lines += ["any one of these would do:", *(f"  - {change}" for change in self.changes)] if self.changes else []
        return "\n".join(lines)


def diagnose(question: Question) -> Diagnosis:
    """Of a question that `allocate` found no answer for."""
    short = min(_shortfalls(question), default=None, key=lambda pair: pair[0])
    if short is None:
        return Diagnosis(binding=_no_layout(question), changes=tuple(_changes(question)))
    missing, candidate, tables = short
    role, group = _short_role(tables, candidate)
    return Diagnosis(
        binding=(
            f"memory of {role}-workers: even the leanest layout, {candidate} with recompute = "
            f'"{candidate.recompute}", is short by {missing / GIB:.3g} GiB on {group}, of '
            f"{tables.capacity[role == 'F'] / GIB:.3g} GiB that a GPU has less the reserve, with one micro-batch "
            "in flight"
        ),
        changes=tuple(_changes(question)),
    )


def _shortfalls(question: Question) -> Iterator[tuple[float, Candidate, Tables]]:
    """By layout that the rules allow: missing bytes with one micro-batch in flight."""
    for tables in all_tables(question):
        for candidate in _allowed(tables):
            yield max(_missing(tables, candidate)), candidate, tables


def _allowed(tables: Tables) -> Iterator[Candidate]:
    question = tables.question
    for replicas in replica_counts(tables):
        for attn_workers in attn_worker_counts(tables, replicas):
            m = question.microbatches(attn_workers, replicas)
            for depth in tables.attn_depths:
                for workers in tables.ffn_workers:
                    for ffn_depth in _ffn_depths(question):
                        if replicas * (depth * attn_workers + ffn_depth * workers) > tables.gpus:
                            break
                        found = Candidate(
                            attn_depth=depth, ffn_depth=ffn_depth, attn_workers=attn_workers, ffn_workers=workers,
                            replicas=replicas, microbatches=m, recompute=tables.recompute, site=tables.site,
                        )  # fmt: skip
                        if question.allows(found):
                            yield found


def _ffn_depths(question: Question) -> list[int]:
    return [p for p in range(1, question.num_moe + 1) if question.pins.allow("ffn_depth", p)]


def _missing(tables: Tables, c: Candidate) -> tuple[float, float]:
    """Bytes that A- and F-workers lack; negative where they have some left."""
    layers, ffn = tables.ffn_layers(c.ffn_depth), tables.ffn_workers[c.ffn_workers]
    attn = tables.attn_depths[c.attn_depth].least_bytes
    samples = tables.question.samples(c)
    once = layers * (ffn.state_bytes + samples * ffn.kept_bytes) + samples * ffn.passing_bytes + ffn.matrix_bytes
    return attn - tables.capacity[0], once - tables.capacity[1]


def _short_role(tables: Tables, candidate: Candidate) -> tuple[str, str]:
    attn, ffn = _missing(tables, candidate)
    role = "A" if attn >= ffn else "F"
    placed = place(tables.question, candidate)
    depth = candidate.attn_depth
    groups = range(depth) if role == "A" else range(depth, depth + candidate.ffn_depth)
    heaviest = max(groups, key=lambda g: placed.memories[g].fixed_bytes + placed.memories[g].kept_a_microbatch)
    return role, f"group {role}{heaviest - groups[0]}"


def _no_layout(question: Question) -> str:
    """Which rule leaves nothing, when memory is not the reason."""
    pins, job = question.pins, question.job
    given = ", ".join(f"{name} = {value}" for name, value in pins.given().items()) or "none"
    gpus = max(question.gpus(site)[2] for site in question.sites())
    if gpus < 2:
        return f"GPUs: an A- and an F-worker are needed, {job.cluster.name} has {gpus}"
    if pins.ffn_workers is not None and pins.ffn_workers > question.moe.num_experts:
        return f"experts: ffn_workers = {pins.ffn_workers}, but a layer has {question.moe.num_experts}, one a worker"
    if pins.ffn_depth is not None and pins.ffn_depth > question.num_moe:
        return f"layers: ffn_depth = {pins.ffn_depth}, but there are {question.num_moe} MoE layers, one a group"
    if pins.attn_depth is not None and pins.attn_depth > question.num_moe + 1:
        return f"layers: attn_depth = {pins.attn_depth}, but there are {question.num_moe + 1} attention stages"
    if (pins.replicas or 1) * (pins.microbatches or 1) > job.global_batch:
        return (
            f"micro-batches: replicas x microbatches = {pins.replicas or 1} x {pins.microbatches or 1}, "
            f"but the global batch has {job.global_batch} samples, one for each at least"
        )
    return (
        f"divisibility: no layout of at most {gpus} GPUs in whole nodes has these pins ({given}) and "
        f"{question.microbatch_samples} samples of each micro-batch on an A-worker"
    )


def _changes(question: Question) -> Iterator[str]:
    """The least change of each kind that makes something fit."""
    memory = _least_factor(question, _with_memory)
    if memory is not None:
        yield f"GPUs with {memory:.3g} times the memory"
    nodes = _least_integer(lambda n: _with_nodes(question, n), 2, MOST_FACTOR)
    if nodes is not None:
        yield f"{nodes} times the nodes"
    lengths = [question.job.seq_len >> k for k in range(1, 12) if question.job.seq_len >> k]
    shorter = next((s for s in lengths if _fits(replace(question, job=replace(question.job, seq_len=s)))), None)
    if shorter is not None:
        yield f"sequences of {shorter} tokens instead of {question.job.seq_len}"
    if question.microbatch_samples > 1:
        smaller = range(question.microbatch_samples - 1, 0, -1)
        fewer = next((u for u in smaller if _fits(replace(question, microbatch_samples=u))), None)
        if fewer is not None:
            yield f"{fewer} samples of a micro-batch on an A-worker instead of {question.microbatch_samples}"
    for name, value in question.pins.given().items():
        free = replace(question, pins=Pins(**{k: v for k, v in question.pins.given().items() if k != name}))  # type: ignore[arg-type]
        if name not in ("schedule", "split_backward", "rank_order") and _fits(free):
            yield f"no pin on {name} (now {value})"
    more = _least_integer(lambda n: _with_batch(question, n), 2, 16)
    if more is not None:
        yield f"a global batch of {more * question.job.global_batch} samples instead of {question.job.global_batch}"


def _fits(question: Question) -> bool:
    """Whether some layout has room for one micro-batch in flight."""
    return any(
        max(_missing(tables, candidate)) <= 0 for tables in all_tables(question) for candidate in _allowed(tables)
    )


def _least_factor(question: Question, change: Callable[[Question, float], Question]) -> float | None:
    """To 1 %, by halving."""
    low, high = 1.0, float(MOST_FACTOR)
    if not _fits(change(question, high)):
        return None
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if _fits(change(question, middle)) else (middle, high)
    return high


def _least_integer(change: Callable[[int], Question], low: int, high: int) -> int | None:
    if not _fits(change(high)):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(change(middle)) else (middle + 1, high)
    return low


def _with_batch(question: Question, factor: int) -> Question:
    return replace(question, job=replace(question.job, global_batch=factor * question.job.global_batch))


def _with_memory(question: Question, factor: float) -> Question:
    cluster = question.job.cluster
    pools = tuple(replace(p, gpu=replace(p.gpu, memory_bytes=int(p.gpu.memory_bytes * factor))) for p in cluster.pools)
    return replace(question, job=replace(question.job, cluster=replace(cluster, pools=pools)))


def _with_nodes(question: Question, factor: int) -> Question:
    cluster = question.job.cluster
    pools = tuple(replace(p, nodes=p.nodes * factor) for p in cluster.pools)
    limit = question.max_gpus * factor
    return replace(question, max_gpus=limit, job=replace(question.job, cluster=replace(cluster, pools=pools)))
