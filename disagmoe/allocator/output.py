"""An answer as a TOML section with comments, and as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap

from disagmoe.allocator.evaluate import SCHEDULES, Outcome
from disagmoe.allocator.search import CLOSE, Answer
from disagmoe.layout import Role

WIDTH = 116
NOT_MODELLED = (
    "norms, activations, softmax, packing of rows, kernel launches and the optimizer's own step",
    "routing that is not uniform over the experts, stragglers, compute slowed down by transfers",
    "which NIC a worker uses: the runtime does not bind workers to NICs, they follow the GPUs",
)
HEADER = (
    "layout", "micro-batches", "recompute", "schedule", "ranks", "step s", "tokens/s", "MFU", "A GiB", "F GiB",
    "bound s",
)  # fmt: skip
GIB = 2**30


def mfu(outcome: Outcome) -> float:
    """Model FLOPs (three times a forward's, causal pairs once) over the peak of all GPUs that are used."""
    placed = outcome.placed
    job = placed.question.job
    flops = 3 * job.model.flops_per_sequence(job.seq_len) * job.global_batch
    candidate, question = placed.candidate, placed.question
    peaks = [question.pool(candidate.site, ffn).gpu.peak(job.dtype) for ffn in (False, True)]
    return flops / outcome.step_s / (candidate.attn_gpus * peaks[0] + candidate.ffn_gpus * peaks[1])


def role_memory(outcome: Outcome, role: Role) -> float:
    """Bytes of the heaviest worker of a role."""
    depth = outcome.placed.candidate.attn_depth
    return max(outcome.memory_bytes[:depth] if role is Role.ATTN else outcome.memory_bytes[depth:])


def uses(outcome: Outcome) -> list[tuple[float, str]]:
    """Share of the step in which each resource of the role's busiest group is used, largest first."""
    depth, found = outcome.placed.candidate.attn_depth, []
    for role in Role:
        own = [u for u in outcome.result.uses if (u.group < depth) == (role is Role.ATTN)]
        name = f"{role.letter}-workers"
        found += [
            (max(u.compute_s for u in own), f"compute of {name}"),
            (max(max(u.nic_send_s, u.nic_recv_s) for u in own), f"NICs of {name}"),
            (max(max(u.fabric_send_s, u.fabric_recv_s) for u in own), f"links inside nodes of {name}"),
        ]
    return sorted(((seconds / outcome.step_s, name) for seconds, name in found), reverse=True)


def nic_bytes(outcome: Outcome, role: Role) -> float:
    """Bytes a step that a worker of the busiest group sends over its NIC."""
    placed = outcome.placed
    costs, last = placed.costs, len(placed.group_of_stage) - 1
    sent: dict[int, float] = {}
    for stage, group in enumerate(placed.group_of_stage):
        if (group < placed.candidate.attn_depth) != (role is Role.ATTN):
            continue
        forward = costs.forward_hop[stage + 1].send_bytes if stage < last else 0.0
        backward = costs.backward_hop[stage - 1].send_bytes if stage else 0.0
        sent[group] = sent.get(group, 0.0) + forward + backward
    return max(sent.values()) * placed.candidate.microbatches


def disagmoe_section(outcome: Outcome) -> dict[str, object]:
    """Keys of `[disagmoe]`; those that are as the defaults want them, too."""
    c = outcome.placed.candidate
    return {
        "attn_depth": c.attn_depth,
        "ffn_depth": c.ffn_depth,
        "attn_workers": c.attn_workers,
        "ffn_workers": c.ffn_workers,
        "replicas": c.replicas,
        "schedule": outcome.schedule,
        "split_backward": outcome.split_backward,
        "microbatches": c.microbatches,
        "in_flight": outcome.in_flight,
        "rank_order": outcome.placed.rank_order,
        "recompute": c.recompute,
    }


def table_rows(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """Under `HEADER`."""
    return [
        (
            str(o.placed.candidate),
            str(o.placed.candidate.microbatches),
            o.placed.candidate.recompute,
            schedule_name(o),
            o.placed.rank_order + (f" {o.placed.nics[0]}+{o.placed.nics[1]} NICs" if any(o.placed.nics) else ""),
            f"{o.step_s:.4g}",
            f"{o.tokens_per_s:,.0f}",
            f"{mfu(o):.1%}",
            f"{role_memory(o, Role.ATTN) / GIB:.1f}",
            f"{role_memory(o, Role.FFN) / GIB:.1f}",
            f"{o.placed.bound_s:.4g}",
        )
        for o in outcomes
    ]


def schedule_name(outcome: Outcome) -> str:
    limit = f", {outcome.in_flight} in flight" if outcome.in_flight else ""
    return f"{outcome.schedule}{', split' if outcome.split_backward else ''}{limit}"


def sure(answer: Answer) -> str:
    """How good the answer is, in words."""
    tried = " or ".join(name for name in SCHEDULES if answer.question.pins.allow("schedule", name))
    if answer.status == "optimal":
        return (
            f"the shortest step of all layouts with {tried} and {answer.question.microbatch_samples} sample(s) of a "
            "micro-batch on an A-worker: each of the others was simulated and is no shorter, or its bound is not"
        )
    solver = "proved" if answer.solution.status == "optimal" else f"not proved (gap {answer.solution.gap:.1%})"
    return (
        "not proved the best: by the bounds of what was not simulated, this step is at most "
        f"{answer.gap:.0%} longer than any layout's with {tried}; {len(answer.outcomes)} layouts simulated; "
        f"least bound of all {answer.solution.step_s:.4g} s, {solver}"
    )


def comment_lines(answer: Answer) -> Iterator[str]:
    """What is predicted, in lines without `#`."""
    best = answer.best
    placed, job = best.placed, answer.question.job
    c = placed.candidate
    nodes = sum(pool.nodes for pool in placed.job.cluster.pools)
    yield f"{c}: {placed.num_gpus} GPUs on {nodes} node{'s' if nodes > 1 else ''} of {job.cluster.name}."
    yield ""
    yield (
        f"Predicted: step {best.step_s:.4g} s, {best.tokens_per_s:,.0f} tokens/s, "
        f"MFU {mfu(best):.1%} of {placed.job.cluster.pools[0].gpu.name}'s {job.dtype} peak."
    )
    (share, name), *rest = uses(best)
    others = ", ".join(f"{other} {used:.0%}" for used, other in rest[:3])
    yield f"Bottleneck: {name}, used {share:.0%} of the step; then {others}."
    for role in Role:
        yield (
            f"{role.letter}-worker: at most {role_memory(best, role) / GIB:.1f} GiB (of "
            f"{answer.question.pool(c.site, role is Role.FFN).gpu.memory_bytes / GIB:.1f}), "
            f"sends {nic_bytes(best, role) / 1e9:.4g} GB a step over its NIC."
        )
    if any(placed.nics):
        yield f"NICs of a node: {placed.nics[0]} for its A-workers, {placed.nics[1]} for its F-workers (assumed)."
    yield f"Answer: {sure(answer)}."
    close = [o for o in answer.outcomes[1:] if o.step_s <= CLOSE * best.step_s]
    yield f"Within {CLOSE - 1:.0%}: " + ("; ".join(_alternative(o) for o in close[:4]) or "no other simulated") + "."
    yield "Not modelled: " + "; ".join(NOT_MODELLED) + "."


def _alternative(outcome: Outcome) -> str:
    return f"{outcome.placed.candidate} ({schedule_name(outcome)}) {outcome.step_s:.4g} s"


def comment(answer: Answer, notes: Sequence[str] = ()) -> str:
    """The same and `notes`, wrapped, as a TOML comment."""
    lines: list[str] = []
    for line in (*comment_lines(answer), *notes):
        lines += [f"# {part}" for part in wrap(line, WIDTH, subsequent_indent="  ")] or ["#"]
    return "\n".join(lines)
