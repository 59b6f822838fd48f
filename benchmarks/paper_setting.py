"""What the paper's evaluation is simulated with: models, batch, systems' plans and the sets of assumptions."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Protocol

from disagmoe.cluster import Cluster
from disagmoe.config.cluster import load_cluster
from disagmoe.config.recipe import load_recipe
from disagmoe.shapes import ModelShape
from disagmoe.simulator.expert_parallel import EPPlan
from disagmoe.simulator.roofline import Job, Technology
from disagmoe.simulator.systems import SystemRun
from disagmoe.simulator.tuning import run_on_plan, tuned_af

NUM_GPUS = 128

GLOBAL_BATCH = 512
"""Samples a step: 32 micro-batches of one sample a worker for 16 workers."""

HEAD_TOKENS = 4096
"""Logits alive at a time. GPT-OSS's of 32K tokens, with gradients, would take 52 GB."""

MODELS = {
    "DeepSeek-MoE": ("deepseek_moe", "16B-top4"),
    "GPT-OSS-120B": ("gpt_oss", "120b"),
    "Qwen3-235B": ("qwen3", "235B-A22B"),
}

AF_NAMES = ("af-deep-split", "af-fitted-split")


@dataclass(frozen=True, kw_only=True)
class AssumptionSet:
    """One way to look at it."""

    key: str
    text: str
    technology: Technology
    head: bool = True
    """Count the output layer (False: vocabulary of 8)."""


SETS = (
    AssumptionSet(
        key="dedup in all",
        text="same technology for all: a row for each distinct node in AF-Pipe and in EP, equal efficiency",
        technology=Technology(),
    ),
    AssumptionSet(
        key="copies in all",
        text="same technology for all: a row for each of the k experts, equal efficiency",
        technology=Technology(rows_m2n="copy", rows_all_to_all="copy"),
    ),
    AssumptionSet(
        key="dedup in AF only",
        text="a row for each distinct node in AF-Pipe, for each of the k experts in EP",
        technology=Technology(rows_all_to_all="copy"),
    ),
    AssumptionSet(
        key="half all-to-all",
        text="rows de-duplicated in all, all-to-all at half of M2N's efficiency",
        technology=Technology(all_to_all_of_m2n=0.5),
    ),
    AssumptionSet(
        key="dedup in AF only, no head",
        text="as `dedup in AF only`, and the output layer is left out of all systems",
        technology=Technology(rows_all_to_all="copy"),
        head=False,
    ),
)


def model_of(name: str, head: bool) -> ModelShape:
    recipe, flavor = MODELS[name]
    shape = load_recipe(recipe).shape(flavor)
    return shape if head else replace(shape, vocab_size=8)


def job_of(model: ModelShape, length: int, technology: Technology) -> Job:
    return Job(
        model=model,
        cluster=load_cluster("h800x16"),
        seq_len=length,
        global_batch=GLOBAL_BATCH,
        head_tokens=HEAD_TOKENS,
        technology=technology,
    )


def paper_plan(name: str) -> EPPlan:
    """EP 16 over two nodes, 8 pipeline ranks, as the paper's baselines; interleaving in two chunks where it is used."""
    return EPPlan(ranks=8, width=16, ep=16, chunks_a_rank=1 if name.startswith("dualpipe") else 2)


def best_af(job: Job, tries: int) -> SystemRun:
    """AF-Pipe at its best: layout by search with *deep*, then the best of `AF_NAMES` on that layout."""
    runs = [tuned_af(job, "af-deep", NUM_GPUS, tries=tries)]
    plan = runs[0].af_plan
    assert plan is not None
    for name in AF_NAMES:
        try:
            runs.append(run_on_plan(job, plan, name))
        except ValueError as error:  # *fitted*, where even one micro-batch is too much
            print(f"{name}: {error}", file=sys.stderr)
    return max(runs, key=lambda run: (run.fits, run.tokens_per_s_per_gpu))


class Fits(Protocol):
    @property
    def fits(self) -> bool: ...


def memory_mark(run: Fits) -> str:
    return "" if run.fits else " !"


def roomy(cluster: Cluster) -> Cluster:
    """The cluster with unbounded memory."""
    pools = tuple(replace(pool, gpu=replace(pool.gpu, memory_bytes=10**15)) for pool in cluster.pools)
    return replace(cluster, pools=pools)
