"""The paper's best A : F ratios beside the simulator's and the allocator's, under each named set of assumptions."""

from __future__ import annotations

from typing import Any, NamedTuple

from benchmarks.paper_setting import GLOBAL_BATCH, SETS, AssumptionSet, job_of, model_of
from benchmarks.paper_sweeps import SPLITS
from disagmoe.allocator.question import Pins, Question
from disagmoe.allocator.search import NothingFits, allocate
from disagmoe.layout import Layout
from disagmoe.simulator.report import as_markdown
from disagmoe.simulator.systems import AFPlan
from disagmoe.simulator.tuning import run_on_plan

DEPTH = 4
EVEN = (16, 16)


class Claim(NamedTuple):
    """Of the paper, for its DeepSeek-MoE."""

    seq_len: int
    best: tuple[int, int]
    over_even: float
    """Throughput over that of `EVEN`."""


PAPER = (Claim(4096, (16, 16), 1.0), Claim(16384, (16, 10), 1.29))


def measure_ratios(given: AssumptionSet, claim: Claim) -> dict[str, Any]:
    """The splits of the paper's sweep, simulated at p = 4, and what the allocator takes at that depth."""
    job = job_of(model_of("DeepSeek-MoE", given.head), claim.seq_len, given.technology)
    rates = {}
    for attn, ffn in SPLITS:
        layout = Layout(attn_depth=DEPTH, ffn_depth=DEPTH, attn_workers=attn, ffn_workers=ffn)
        run = run_on_plan(job, AFPlan(layout=layout, num_microbatches=GLOBAL_BATCH // attn), "af-deep")
        if run.fits:
            rates[f"{attn}:{ffn}"] = run.tokens_per_s_per_gpu
    pins = Pins(attn_depth=DEPTH, ffn_depth=DEPTH, replicas=1)
    try:
        chosen = allocate(Question(job=job, pins=pins)).best.placed.candidate
        answer = f"{chosen.attn_workers}:{chosen.ffn_workers}"
    except NothingFits:
        answer = "nothing fits"
    return {"rates": rates, "allocator": answer}


def all_ratios(known: dict[str, Any]) -> dict[str, Any]:
    """By set and length; what is in `known` is not computed again."""
    found = {}
    for given in SETS:
        for claim in PAPER:
            key = f"{given.key}/{claim.seq_len}"
            found[key] = known.get(key) or measure_ratios(given, claim)
            print(key, found[key], flush=True)
    return found


def ratios_table(results: dict[str, Any]) -> str:
    """Markdown."""
    rows = []
    for claim in PAPER:
        name = ":".join(map(str, claim.best))
        for given in SETS:
            result = results[f"{given.key}/{claim.seq_len}"]
            rates = result["rates"]
            best = max(rates, key=lambda split: rates[split])
            even = rates[":".join(map(str, EVEN))]
            rows.append([
                f"{claim.seq_len // 1024}K", given.key, f"{name} ({claim.over_even:.2f})",
                f"{best} ({rates[best] / even:.2f})",
                f"{rates[name] / even:.2f}" if name in rates else "does not fit",
                result["allocator"],
            ])  # fmt: skip
    header = ["length", "assumptions", "paper's best (over 16:16)", "best simulated (over 16:16)",
              "the paper's best, simulated (over 16:16)", "allocator at p = 4"]  # fmt: skip
    return as_markdown(rows, header)
