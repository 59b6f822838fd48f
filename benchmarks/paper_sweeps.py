"""The paper's sweeps, each as a Markdown table: the split of workers, top-k, virtual stages."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.paper_setting import (
    GLOBAL_BATCH,
    NUM_GPUS,
    AssumptionSet,
    best_af,
    job_of,
    memory_mark,
    model_of,
    paper_plan,
    roomy,
)
from disagmoe.layout import Layout
from disagmoe.shapes import MoEShape
from disagmoe.simulator.report import as_markdown
from disagmoe.simulator.systems import BASELINES, AFPlan
from disagmoe.simulator.tuning import run_on_plan, with_least_recompute

SPLITS = ((16, 16), (16, 14), (16, 12), (16, 11), (16, 10), (16, 8), (8, 16))


def sweep_split(given: AssumptionSet) -> str:
    """A : F sweep at p = 4: tokens/s/GPU over Megatron's at EP 16."""
    rows = []
    for length in (4096, 16384):
        job = job_of(model_of("DeepSeek-MoE", given.head), length, given.technology)
        base = with_least_recompute(job, lambda j: BASELINES["megatron"].run(j, paper_plan("megatron")))
        row = [f"{length // 1024}K"]
        for attn, ffn in SPLITS:
            layout = Layout(attn_depth=4, ffn_depth=4, attn_workers=attn, ffn_workers=ffn)
            run = run_on_plan(job, AFPlan(layout=layout, num_microbatches=GLOBAL_BATCH // attn), "af-deep")
            row.append(f"{run.tokens_per_s_per_gpu / base.tokens_per_s_per_gpu:.2f}{memory_mark(run)}")
        rows.append(row)
    return as_markdown(rows, ["length", *(f"{a}:{f}" for a, f in SPLITS)])


def sweep_top_k(given: AssumptionSet) -> str:
    """DeepSeek-MoE with 64 experts and top-k of 2 to 16: AF-Pipe's best plan over Megatron's at EP 16."""
    shape, row, plans = model_of("DeepSeek-MoE", given.head), ["ratio"], ["plan"]
    for top_k in (2, 4, 8, 16):
        layers = tuple(
            replace(layer, ffn=replace(layer.ffn, top_k=top_k)) if isinstance(layer.ffn, MoEShape) else layer
            for layer in shape.layers
        )
        job = job_of(replace(shape, layers=layers), 8192, given.technology)
        base = with_least_recompute(job, lambda j: BASELINES["megatron"].run(j, paper_plan("megatron")))
        best = best_af(job, 3)
        row.append(f"{best.tokens_per_s_per_gpu / base.tokens_per_s_per_gpu:.2f}")
        plans.append(best.plan)
    return as_markdown([row, plans], ["", "k = 2", "4", "8", "16"])


def sweep_virtual_stages(given: AssumptionSet) -> str:
    """v = layers / p: without recomputation, to see memory grow, and with what fits."""
    rows = []
    model = model_of("DeepSeek-MoE", given.head)
    for depth in (16, 8, 4, 2, 1):
        width = NUM_GPUS // 2 // depth
        layout = Layout(attn_depth=depth, ffn_depth=depth, attn_workers=width, ffn_workers=width)
        job = job_of(model, 4096, given.technology)
        plan = AFPlan(layout=layout, num_microbatches=GLOBAL_BATCH // width)
        run = run_on_plan(job, plan, "af-deep")
        full = run_on_plan(replace(job, cluster=roomy(job.cluster)), plan, "af-deep")
        rows.append([f"{27 / depth:.1f}", str(plan), str(plan.num_microbatches), f"{full.tokens_per_s_per_gpu:,.0f}",
                     f"{full.peak_bytes / 1e9:.0f}", run.recompute, f"{run.tokens_per_s_per_gpu:,.0f}",
                     f"{run.peak_bytes / 1e9:.0f}{memory_mark(run)}"])  # fmt: skip
    header = [
        "v",
        "layout",
        "micro-batches",
        "tokens/s/GPU, nothing recomputed",
        "GB",
        "recompute",
        "tokens/s/GPU",
        "GB",
    ]
    return as_markdown(rows, header)
