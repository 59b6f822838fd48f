"""The allocator against the paper's formula, simulated.

    python -m benchmarks.allocator_quality [--json FILE] [--quick] [--large [NODES]] [--docs FOLDER]

Three models x four lengths x 4, 8 and 16 nodes of 8 H800, NICs tied to GPUs and pooled in a node. Both answers have the
same memory model, recomputation, schedules and simulator; only the choice of the layout differs. The batch is 32
samples a node. Results are kept in FILE as they come, and what is there is not computed again. `--large` runs the
command on 1,280 nodes, for its time and memory. `--docs` computes the A : F comparison too and writes the generated
part of allocation.md; with `--no-compute` from what FILE has.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.allocator_large import describe, run_large
from benchmarks.allocator_page import mean_gain, write
from benchmarks.allocator_ratios import all_ratios
from benchmarks.paper_setting import MODELS
from disagmoe.allocator.evaluate import Outcome
from disagmoe.allocator.output import mfu, schedule_name
from disagmoe.allocator.paper import allocate_paper
from disagmoe.allocator.question import Question
from disagmoe.allocator.search import NothingFits, allocate
from disagmoe.config.cluster import load_cluster
from disagmoe.config.recipe import load_recipe
from disagmoe.simulator.report import as_text
from disagmoe.simulator.roofline import Job, Technology

LENGTHS = (4096, 8192, 16384, 32768)
NODES = (4, 8, 16)
SAMPLES_A_NODE = 32
HEADER = ("model", "length", "nodes", "NICs", "paper's layout", "step s", "ours", "step s", "gain", "gap", "s")


def question_of(model: str, length: int, nodes: int, *, pooled: bool) -> Question:
    """One cell."""
    recipe, flavor = MODELS[model]
    cluster = load_cluster("h800x16")
    pool = cluster.pools[0]
    pool = replace(pool, nodes=nodes, nics=replace(pool.nics, pooled=pooled))
    job = Job(
        model=load_recipe(recipe).shape(flavor),
        cluster=replace(cluster, pools=(pool,)),
        seq_len=length,
        global_batch=SAMPLES_A_NODE * nodes,
        shard_optimizer=False,
        technology=Technology(rows_m2n="worker"),
    )
    return Question(job=job)


def measure(question: Question) -> dict[str, Any]:
    """Both answers for one cell."""
    begun = time.monotonic()
    try:
        answer = allocate(question)
    except NothingFits:
        return {"ours": None, "paper": None, "wall_s": time.monotonic() - begun}
    spent = time.monotonic() - begun
    paper = allocate_paper(question)
    return {
        "ours": _record(answer.best),
        "paper": None if paper is None else _record(paper),
        "gap": answer.gap,
        "solver": answer.solution.status,
        "wall_s": spent,
    }


def _record(outcome: Outcome) -> dict[str, Any]:
    placed = outcome.placed
    return {
        "layout": str(placed.candidate),
        "recompute": placed.candidate.recompute,
        "schedule": schedule_name(outcome),
        "ranks": placed.rank_order,
        "nics": placed.nics,
        "step_s": outcome.step_s,
        "mfu": mfu(outcome),
    }


def cells(quick: bool) -> Iterator[tuple[str, int, int, bool]]:
    lengths, nodes = (LENGTHS[::2], NODES[:1]) if quick else (LENGTHS, NODES)
    yield from product(MODELS, lengths, nodes, (False, True))


def key_of(model: str, length: int, nodes: int, pooled: bool) -> str:
    """A cell's name in the results."""
    return f"{model}/{length}/{nodes}/{'pooled' if pooled else 'tied'}"


def row_of(key: str, result: dict[str, Any]) -> tuple[str, ...]:
    model, length, nodes, nics = key.split("/")
    ours, paper = result["ours"], result["paper"]
    if ours is None:
        return model, length, nodes, nics, "-", "-", "nothing fits", "-", "-", "-", f"{result['wall_s']:.0f}"
    shown = ("-", "-") if paper is None else (f"{paper['layout']} {paper['recompute']}", f"{paper['step_s']:.4g}")
    gain = "-" if paper is None else f"{paper['step_s'] / ours['step_s'] - 1:+.1%}"
    return (
        model, length, nodes, nics, *shown, f"{ours['layout']} {ours['recompute']}", f"{ours['step_s']:.4g}", gain,
        f"{result['gap']:.0%}", f"{result['wall_s']:.0f}",
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The allocator against the paper's formula, simulated.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the results here")
    parser.add_argument("--quick", action="store_true", help="two lengths, 4 nodes")
    parser.add_argument("--large", type=int, nargs="?", const=1280, metavar="NODES", help="the command on 1,280 nodes")
    parser.add_argument("--docs", type=Path, metavar="FOLDER", help="write the generated part of allocation.md there")
    parser.add_argument("--no-compute", action="store_true", help="only show and write what FILE has")
    options = parser.parse_args(arguments)
    kept: dict[str, Any] = {}
    if options.json is not None and options.json.exists():
        kept = json.loads(options.json.read_text(encoding="utf-8"))
    done: dict[str, Any] = kept.get("cells", {})
    used: dict[str, Any] = {}

    def keep(**more: Any) -> None:
        kept.update(cells=done, gains=gains(done), **more)
        if options.json is not None:
            options.json.write_text(json.dumps(kept, indent=1), encoding="utf-8")

    for model, length, nodes, pooled in cells(options.quick):
        key = key_of(model, length, nodes, pooled)
        if key not in done and options.no_compute:
            continue
        used[key] = done[key] = done.get(key) or measure(question_of(model, length, nodes, pooled=pooled))
        print("  ".join(row_of(key, used[key])), flush=True)
        keep()
    print("\n" + as_text([row_of(key, result) for key, result in used.items()], HEADER))
    for nics, gain in gains(used).items():
        print(f"NICs {nics}: geometric mean of the paper's step over ours {1 + gain:.3f} ({gain:+.1%})")
    print(f"most memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")
    if options.large and not options.no_compute:
        keep(large=run_large(options.large))
        print(describe(kept["large"]))
    if options.docs is not None:
        if not options.no_compute:
            keep(ratios=all_ratios(kept.get("ratios", {})))
        shown = {key: done.get(key) for key in (key_of(*cell) for cell in cells(options.quick))}
        write(options.docs, {**kept, "cells": shown, "gains": gains(done)})
    return 0


def gains(results: dict[str, Any]) -> dict[str, float]:
    return {nics: mean_gain([r for key, r in results.items() if key.endswith(nics)]) for nics in ("tied", "pooled")}


if __name__ == "__main__":
    sys.exit(main())
