"""Small random questions for the allocator, and what exhaustive enumeration says of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from hypothesis import strategies as st

from disagmoe.allocator.evaluate import SCHEDULES, Outcome, make_placed, packings, simulate_placed
from disagmoe.allocator.question import RECOMPUTE, Candidate, Pins, Question
from disagmoe.cluster import Cluster, Gpu, Link, Nics, Pool
from disagmoe.shapes import AttentionShape, LayerShape, ModelShape, MoEShape
from disagmoe.simulator.roofline import Job, Technology


def make_question(
    *,
    layers: int = 3,
    experts: int = 4,
    top_k: int = 2,
    expert_dim: int = 256,
    seq_len: int = 512,
    batch: int = 6,
    nodes: int = 2,
    gpus_per_node: int = 3,
    nic_bytes_per_s: float = 5e9,
    memory_bytes: int = 10**10,
    vocab: int = 512,
    pooled: bool = False,
    pins: Pins | None = None,
) -> Question:
    """A model of a few layers of D = 256 on a few GPUs; compute and NICs are about as fast as each other needs."""
    attention = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=64)
    moe = MoEShape(num_experts=experts, top_k=top_k, expert_dim=expert_dim)
    model = ModelShape(
        name="small", dim=256, vocab_size=vocab, layers=(LayerShape(attention=attention, ffn=moe),) * layers,
        max_seq_len=1 << 20,
    )  # fmt: skip
    gpu = Gpu(name="g", memory_bytes=memory_bytes, memory_bytes_per_s=1e12, peak_flops_per_s={"bfloat16": 20e12})
    pool = Pool(
        name="p",
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        gpu=gpu,
        fabric=Link(bytes_per_s=5e10, latency_s=1e-6),
        nics=Nics(per_node=gpus_per_node, bytes_per_s=nic_bytes_per_s, latency_s=1e-6, pooled=pooled),
    )
    job = Job(
        model=model, cluster=Cluster(name="c", pools=(pool,)), seq_len=seq_len, global_batch=batch,
        shard_optimizer=False, technology=Technology(rows_m2n="worker"),
    )  # fmt: skip
    return Question(job=job, pins=pins or Pins(), reserve_bytes=0)


@st.composite
def questions(draw: st.DrawFn) -> Question:
    """Of up to 6 GPUs, memory tight in some."""
    question = make_question(
        layers=draw(st.integers(1, 3)),
        experts=draw(st.sampled_from([2, 3, 4, 8])),
        top_k=draw(st.integers(1, 2)),
        expert_dim=draw(st.sampled_from([128, 256, 1024])),
        seq_len=draw(st.sampled_from([128, 512, 4096])),
        batch=draw(st.integers(2, 6)),
        nodes=draw(st.integers(1, 2)),
        gpus_per_node=draw(st.integers(2, 3)),
        nic_bytes_per_s=draw(st.sampled_from([1e9, 5e9, 5e10])),
        vocab=draw(st.sampled_from([512, 8192])),
        pooled=draw(st.booleans()),
        pins=Pins(split_backward=draw(st.sampled_from([False, False, None]))),
    )
    if draw(st.booleans()):
        return question
    return with_memory(question, draw(st.sampled_from([5e7, 1e8, 2e8])))


def with_memory(question: Question, memory_bytes: float) -> Question:
    pools = tuple(
        replace(pool, gpu=replace(pool.gpu, memory_bytes=int(memory_bytes))) for pool in question.job.cluster.pools
    )
    return replace(question, job=replace(question.job, cluster=replace(question.job.cluster, pools=pools)))


def all_candidates(question: Question) -> Iterator[Candidate]:
    """By plain loops, with the rules written out once more."""
    pool = question.job.cluster.pools[0]
    total, size, batch = pool.num_gpus, pool.gpus_per_node, question.job.global_batch
    for replicas in range(1, min(batch, total // 2) + 1):
        for attn_workers in range(1, min(total, -(-batch // replicas)) + 1):
            for ffn_workers in range(1, min(total, question.moe.num_experts) + 1):
                for attn_depth in range(1, question.num_moe + 2):
                    for ffn_depth in range(1, question.num_moe + 1):
                        world = replicas * (attn_depth * attn_workers + ffn_depth * ffn_workers)
                        if world > total or (world > size and world % size):
                            continue
                        for recompute in RECOMPUTE:
                            yield Candidate(
                                attn_depth=attn_depth, ffn_depth=ffn_depth, attn_workers=attn_workers,
                                ffn_workers=ffn_workers, replicas=replicas, recompute=recompute,
                                microbatches=math.ceil(math.ceil(batch / replicas) / attn_workers),
                            )  # fmt: skip


def every_outcome(question: Question) -> Iterator[Outcome]:
    """All candidates in all packings under all schedules."""
    splits = [split for split in (False, True) if question.pins.split_backward in (split, None)]
    for candidate in all_candidates(question):
        for order, nics in packings(question, candidate):
            placed = make_placed(question, candidate, order, nics)
            for name, split in product(SCHEDULES, splits):
                outcome = simulate_placed(placed, [name], split=split)
                if outcome is not None:
                    yield outcome
