"""`--plot FILE`: both pools on a roofline, before and after the allocation, and the step over A:F ratios."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from disagmoe.allocator.candidates import Ranked
from disagmoe.allocator.evaluate import Placed, make_placed
from disagmoe.allocator.question import Candidate
from disagmoe.allocator.search import Answer
from disagmoe.allocator.tables import Tables
from disagmoe.layout import Role

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {Role.ATTN: "#4c78a8", Role.FFN: "#e45756"}


def sweep(answer: Answer) -> Iterator[Ranked]:
    """The winner's depths and replicas with every split of its M + N workers that memory has room for."""
    best = answer.best.placed.candidate
    tables = Tables(answer.question, best.recompute, best.site)
    total = best.attn_workers + best.ffn_workers
    for attn_workers in range(1, total):
        found = replace(
            best,
            attn_workers=attn_workers,
            ffn_workers=total - attn_workers,
            microbatches=answer.question.microbatches(attn_workers, best.replicas),
        )
        if total - attn_workers in tables.ffn_workers:
            terms = tables.terms_s(found)
            if terms:
                yield Ranked(sum(terms), found, max(terms))


def even(answer: Answer) -> Candidate:
    """The winner with as many A- as F-workers a pair of groups, where experts allow it."""
    best = answer.best.placed.candidate
    half = (best.attn_workers + best.ffn_workers) // 2
    ffn = min(half, answer.question.moe.num_experts)
    attn = best.attn_workers + best.ffn_workers - ffn
    m = answer.question.microbatches(attn, best.replicas)
    return replace(best, attn_workers=attn, ffn_workers=ffn, microbatches=m)


def intensity(placed: Placed, role: Role) -> tuple[float, float]:
    """(FLOPs a byte over a NIC, FLOP/s that a worker of the role reaches if the bound is met), of its busiest group."""
    costs, depth, last = placed.costs, placed.candidate.attn_depth, len(placed.group_of_stage) - 1
    pool = placed.question.pool(placed.candidate.site, role is Role.FFN)
    rate = pool.gpu.peak(placed.job.dtype) * pool.efficiency.gemm
    work: dict[int, float] = {}
    sent: dict[int, float] = {}
    for stage, group in enumerate(placed.group_of_stage):
        if (group < depth) != (role is Role.ATTN):
            continue
        work[group] = work.get(group, 0.0) + costs.forward_s[stage] + costs.backward_s[stage]
        hops = [costs.forward_hop[stage + 1]] if stage < last else []
        hops += [costs.backward_hop[stage - 1]] if stage else []
        sent[group] = sent.get(group, 0.0) + sum(hop.send_bytes for hop in hops)
    group = max(work, key=lambda g: work[g])
    flops = work[group] * rate
    step_s = max(placed.bound_s, 1e-12)
    return flops / max(sent[group], 1.0), flops * placed.candidate.microbatches / step_s


def draw(answer: Answer, path: Path) -> None:
    """Write the picture; the suffix says which kind."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5))
    _roofline(answer, left)
    points = list(sweep(answer))
    best = answer.best.placed.candidate
    right.plot([p.candidate.attn_workers for p in points], [p.bound_s for p in points], color="#4c78a8")
    right.plot([best.attn_workers], [answer.best.placed.bound_s], "o", color="#54a24b", label="chosen, bound")
    right.plot([best.attn_workers], [answer.best.step_s], "^", color="#54a24b", label="chosen, simulated")
    right.set_xlabel(f"M: A-workers of {best.attn_workers + best.ffn_workers} a pair of groups")
    right.set_ylabel("step (s)")
    right.set_title("bound of a step over A:F splits")
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _roofline(answer: Answer, axes: Axes) -> None:
    """Achieved rates under the roof min(peak, intensity x NIC), with its turning point; hollow: an even split."""
    chosen = answer.best.placed
    before = make_placed(answer.question, even(answer), chosen.rank_order)
    for role in Role:
        pool = answer.question.pool(chosen.candidate.site, role is Role.FFN)
        peak = pool.gpu.peak(chosen.job.dtype) * pool.efficiency.gemm
        nic = pool.nic_bytes_per_s_per_gpu * pool.efficiency.nic
        turn = peak / nic
        axes.plot([turn / 30, turn, turn * 30], [peak / 30, peak, peak], color=COLOURS[role], alpha=0.4)
        axes.axvline(turn, color=COLOURS[role], linestyle=":", alpha=0.5)
        for placed, fill in ((before, "none"), (chosen, COLOURS[role])):
            if placed.fits:
                x, y = intensity(placed, role)
                name = f"{role.letter}-workers, {'even split' if fill == 'none' else 'chosen'}"
                x = min(x, turn * 30)
                axes.plot([x], [y], "o", color=COLOURS[role], markerfacecolor=fill, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOPs a byte over the NIC (dotted: turning points)")
    axes.set_ylabel("FLOP/s a worker")
    axes.set_title("roofline of both pools")
    axes.legend()
