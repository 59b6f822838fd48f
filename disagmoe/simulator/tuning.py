"""The best plan of each system for a number of GPUs, so that systems are compared at their best.

Every candidate trains on (nearly) the same number of samples a step and gives each attention worker one sample a
micro-batch. Of those that recompute as little as memory allows, the fastest counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from disagmoe.layout import Layout
from disagmoe.simulator.expert_parallel import EPPlan, EPRoofline
from disagmoe.simulator.roofline import AFRoofline, Job, Recompute
from disagmoe.simulator.systems import AF_SYSTEMS, BASELINES, AFPlan, SystemRun

RECOMPUTE: tuple[Recompute, ...] = ("none", "ffn", "full")


def with_least_recompute(job: Job, run: Callable[[Job], SystemRun]) -> SystemRun:
    """The run that recomputes as little as memory allows; the one with full recomputation where nothing fits."""
    for recompute in RECOMPUTE:
        done = run(replace(job, recompute=recompute))
        if done.fits:
            return done
    return done


def candidate_plans(job: Job, num_gpus: int) -> Iterator[EPPlan]:
    """Expert-parallel plans of all `num_gpus` GPUs whose micro-batches and experts come out even."""
    most = max((layer.moe.num_experts for layer in job.model.layers if layer.is_moe), default=1)
    for ranks in (r for r in range(1, num_gpus + 1) if num_gpus % r == 0 and r <= len(job.model.layers)):
        width = num_gpus // ranks
        if job.global_batch % width:
            continue
        microbatches = job.global_batch // width
        for ep in (e for e in range(1, width + 1) if width % e == 0 and most % e == 0):
            for chunks in (c for c in (1, 2, 4, 7, 8) if ranks * c <= len(job.model.layers)):
                if microbatches >= ranks and (chunks == 1 or (ranks > 1 and microbatches % ranks == 0)):
                    yield EPPlan(ranks=ranks, width=width, ep=ep, chunks_a_rank=chunks)


def estimate_s(job: Job, plan: EPPlan) -> float:
    """Quick estimate of an interleaved step: work and exposed transfers of a rank, the bubble, and gradients.

    Infinite where not even full recomputation can fit: rank 0 keeps at least as many micro-batches as there are ranks.
    """
    ranks = tuple(chunk % plan.ranks for chunk in range(plan.ranks * plan.chunks_a_rank))
    roofline = EPRoofline(job=job, plan=plan, rank_of_chunk=ranks)
    costs = roofline.costs()
    work = sum(costs.forward_s) + sum(costs.backward_s)
    work += sum(hop.alone_s for hop in (*costs.forward_hop, *costs.backward_hop))
    microbatches = job.global_batch // plan.width
    held = roofline.held()
    sync = max(map(job.sync_s, held))
    lean = EPRoofline(job=replace(job, recompute="full"), plan=plan, rank_of_chunk=ranks).costs().activation_bytes
    first = sum(size for size, stage in zip(lean, roofline.stages, strict=True) if ranks[stage.chunk] == 0)
    if job.state_bytes(held[0]) + first * min(plan.ranks, job.global_batch // plan.width) > _memory_bytes(job):
        return math.inf
    return work / plan.ranks * (microbatches + (plan.ranks - 1) / plan.chunks_a_rank) + sync


BATCH_TOLERANCE = 0.07
"""By how much an AF-Pipe candidate's samples a step may differ from the job's, where its workers do not divide them."""


def candidate_layouts(job: Job, num_gpus: int) -> Iterator[AFPlan]:
    """AF-Pipe plans of all `num_gpus` GPUs: equal depths, each A-group beside its F-group, splits in eighths."""
    most = max((layer.moe.num_experts for layer in job.model.layers if layer.is_moe), default=1)
    layers = sum(job.model.is_moe_layer)
    for depth in (d for d in range(1, 17) if num_gpus % d == 0 and d <= layers):
        for replicas in (r for r in range(1, num_gpus + 1) if num_gpus // depth % r == 0):
            pair = num_gpus // depth // replicas
            for attn in sorted({max(1, pair * eighth // 8) for eighth in range(1, 8)}):
                microbatches = round(job.global_batch / (attn * replicas))
                off = abs(microbatches * attn * replicas / job.global_batch - 1)
                if pair - attn < 1 or pair - attn > most or microbatches < 2 or off > BATCH_TOLERANCE:
                    continue
                layout = Layout(attn_depth=depth, ffn_depth=depth, attn_workers=attn, ffn_workers=pair - attn,
                                replicas=replicas)  # fmt: skip
                yield AFPlan(layout=layout, num_microbatches=microbatches)


def _batch_of(job: Job, plan: AFPlan) -> Job:
    layout = plan.layout
    return replace(job, global_batch=plan.num_microbatches * layout.attn_workers * layout.replicas)


def estimate_af_samples_per_s(job: Job, plan: AFPlan) -> float:
    """Quick estimate: the most loaded of a group's engine and links, fill and drain, and gradients.

    Zero where not even full recomputation can fit: every group keeps two micro-batches a group at least.
    """
    layout = plan.layout
    roofline = AFRoofline(job=job, layout=layout, microbatch_samples=layout.attn_workers)
    costs = roofline.costs()
    work, links = [0.0] * layout.num_groups, [0.0] * layout.num_groups
    for stage in roofline.stages:
        group = layout.pipeline_group(stage.role, stage.group)
        work[group] += costs.forward_s[stage.index] + costs.backward_s[stage.index]
        hops = (costs.forward_hop[stage.index], costs.backward_hop[stage.index])
        links[group] += sum(max(hop.recv_s, hop.fabric_recv_s) for hop in hops)
    lean = AFRoofline(job=replace(job, recompute="full"), layout=layout, microbatch_samples=layout.attn_workers)
    kept = [0.0] * layout.num_groups
    for stage, size in zip(roofline.stages, lean.costs().activation_bytes, strict=True):
        kept[layout.pipeline_group(stage.role, stage.group)] += size
    in_flight = min(plan.num_microbatches, 2 * layout.attn_depth)
    held = {layout.pipeline_group(*key): parts for key, parts in roofline.held().items()}
    if any(job.state_bytes(held[g]) + kept[g] * in_flight > _memory_bytes(job) for g in held):
        return 0.0
    period = max(*work, *links)
    mean = sum(work) / len(roofline.stages) + sum(hop.alone_s for hop in costs.forward_hop[1:3])
    fill = (layout.num_groups - 1) * mean
    step = plan.num_microbatches * period + fill + max(map(job.sync_s, held.values()))
    return _batch_of(job, plan).global_batch / step


def run_on_plan(job: Job, plan: AFPlan, name: str) -> SystemRun:
    """`name` with as little recomputation as fits, on the batch that the plan divides.

    *fitted* fills the memory that it is given, so there less recomputation is not always faster: the fastest counts.
    """
    job = _batch_of(job, plan)
    if not name.startswith("af-fitted"):
        return with_least_recompute(job, lambda job: AF_SYSTEMS[name].run(job, plan))
    runs: list[SystemRun] = []
    failure: ValueError | None = None
    for recompute in RECOMPUTE:
        try:
            runs.append(AF_SYSTEMS[name].run(replace(job, recompute=recompute), plan))
        except ValueError as error:  # even one micro-batch is too much
            failure = error
    if not runs:
        assert failure is not None
        raise failure
    return max(runs, key=lambda run: (run.fits, run.tokens_per_s_per_gpu if run.fits else -run.peak_bytes))


def tuned_af(job: Job, name: str, num_gpus: int, *, tries: int = 6) -> SystemRun:
    """An AF-Pipe variant on its best plan that fits: of those that are quickest by estimate, `tries` are simulated.

    Raises:
        ValueError: no plan comes out even.
    """
    rates = {plan: estimate_af_samples_per_s(job, plan) for plan in candidate_layouts(job, num_gpus)}
    plans = sorted(rates, key=lambda plan: -rates[plan])

    def runs() -> Iterator[SystemRun]:
        found = False
        for plan in plans:
            if found and rates[plan] == 0:
                return
            try:
                yield run_on_plan(job, plan, name)
                found = True
            except ValueError:  # *fitted*, where even one micro-batch is too much
                continue

    return _best(runs(), tries, f"{name}: no layout of {num_gpus} GPUs for a batch of {job.global_batch} samples")


def tuned(job: Job, name: str, num_gpus: int, *, tries: int = 6) -> SystemRun:
    """A baseline on its best plan that fits: of those that are quickest by estimate, `tries` are simulated.

    Raises:
        ValueError: no plan comes out even.
    """
    times = {plan: estimate_s(job, plan) for plan in candidate_plans(job, num_gpus)}
    plans = sorted(times, key=lambda plan: times[plan])
    if name.startswith("dualpipe"):
        plans = [plan for plan in plans if plan.chunks_a_rank == 1]

    def runs() -> Iterator[SystemRun]:
        found = False
        for plan in plans:
            # What can't fit is tried only to show by how much.
            if found and times[plan] == math.inf:
                return
            try:
                yield with_least_recompute(job, lambda job, plan=plan: BASELINES[name].run(job, plan))  # type: ignore[misc]
                found = True
            except ValueError:  # numbers that do not divide
                continue

    return _best(runs(), tries, f"{name}: no plan of {num_gpus} GPUs for a batch of {job.global_batch} samples")


def _memory_bytes(job: Job) -> float:
    return min(pool.gpu.memory_bytes for pool in job.cluster.pools)


def _best(runs: Iterator[SystemRun], tries: int, otherwise: str) -> SystemRun:
    """The fastest of the first `tries` runs that fit; where hardly any fits, the one that needs least memory."""
    best: SystemRun | None = None
    leanest: SystemRun | None = None
    fitting = others = 0
    for run in runs:
        if run.fits:
            fitting += 1
            if best is None or run.tokens_per_s_per_gpu > best.tokens_per_s_per_gpu:
                best = run
        else:
            others += 1
            if leanest is None or run.peak_bytes < leanest.peak_bytes:
                leanest = run
        if fitting == tries or others == 5 * tries:
            break
    found = best or leanest
    if found is None:
        raise ValueError(f"{otherwise} comes out even")
    return found
