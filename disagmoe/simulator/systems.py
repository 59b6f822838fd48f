"""AF-Pipe and the systems it is compared with, on one engine and the same costs.

Each builds a schedule and its costs for a `Job` and runs them. What differs between systems is stated in `SYSTEMS`;
what is assumed for all is in the job's `Technology` and in the cluster's efficiencies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from disagmoe.layout import Layout
from disagmoe.schedules import Schedule
from disagmoe.simulator.chunks import cut_into_chunks, dual_pipe_v, interleaved_1f1b, spell_out, v_rank
from disagmoe.simulator.costs import StageCosts
from disagmoe.simulator.engine import Options, simulate
from disagmoe.simulator.expert_parallel import EPPlan, EPRoofline, Within
from disagmoe.simulator.generators import af_schedule
from disagmoe.simulator.replicated import Replicated
from disagmoe.simulator.result import Result
from disagmoe.simulator.roofline import AFRoofline, Job


@dataclass(frozen=True, kw_only=True)
class AFPlan:
    """A layout and how many micro-batches go through it."""

    layout: Layout
    num_microbatches: int
    """Of a replica."""
    in_flight: int = 0
    """As in the configuration; 0: the schedule's own."""
    hoist: int = 8
    send_after: int = 0
    nic_share: tuple[float, float] = (1.0, 1.0)
    """As in `AFRoofline`."""

    @property
    def num_gpus(self) -> int:
        return self.layout.world_size

    def __str__(self) -> str:
        part = self.layout
        replicas = f"{part.replicas} x " if part.replicas > 1 else ""
        return f"{replicas}{part.attn_depth} x {part.attn_workers} A + {part.ffn_depth} x {part.ffn_workers} F"


@dataclass(frozen=True, kw_only=True)
class SystemRun:
    """One system's step."""

    system: str
    plan: str
    num_gpus: int
    tokens: int
    """Of the step, over all GPUs."""
    recompute: str
    schedule: Schedule
    costs: StageCosts
    result: Result
    state_bytes: tuple[float, ...]
    """By group: parameters, gradients, optimizer state of its fullest worker."""
    memory_bytes: float
    """Of a GPU."""

    af_plan: AFPlan | None = None
    """To run AF-Pipe with another order on the same layout."""
    sync_s: float = 0.0
    """To sum gradients after the last backward, on the worker that needs longest."""

    @property
    def step_s(self) -> float:
        """Makespan of the schedule and the sum of gradients; the optimizer's own time is left out."""
        return self.result.makespan_s + self.sync_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens / self.step_s / self.num_gpus

    @property
    def peak_bytes(self) -> float:
        """State and activations of the fullest worker."""
        return max(self.state_bytes[use.group] + use.peak_activation_bytes for use in self.result.uses)

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.memory_bytes


def run_af_pipe(
    job: Job, plan: AFPlan, *, order: str = "deep", split: bool = False, options: Options | None = None,
    costs: StageCosts | None = None,
) -> SystemRun:  # fmt: skip
    """AF-Pipe with the order `plain`, `deep` or `fitted`; `split`: weight gradients apart.

    `costs`: measured ones, in place of the roofline's.

    Raises:
        ValueError: a batch that does not divide, or an order that does not exist.
    """
    layout = plan.layout
    samples, rest = divmod(job.global_batch, layout.replicas * plan.num_microbatches)
    if rest or not samples:
        raise ValueError(
            f"global batch of {job.global_batch} samples: must be a multiple of replicas x micro-batches = "
            f"{layout.replicas} x {plan.num_microbatches}"
        )
    roofline = AFRoofline(job=job, layout=layout, microbatch_samples=samples, nic_share=plan.nic_share)
    costs = costs or roofline.costs()
    parts: list[list[Replicated]] = [[] for _ in range(layout.num_groups)]
    for (role, group), held in roofline.held().items():
        parts[layout.pipeline_group(role, group)] += held
    state = tuple(map(job.state_bytes, parts))
    memory = _memory(job, plan.num_gpus)
    schedule = af_schedule(
        layout,
        job.model.is_moe_layer,
        costs=costs,
        order=order,
        split=split,
        num_microbatches=plan.num_microbatches,
        in_flight=plan.in_flight,
        hoist=plan.hoist,
        send_after=plan.send_after,
        # Where the state alone is too much, no order can help.
        memory_bytes=tuple(memory - size for size in state) if memory > max(state) else (),
    )
    return SystemRun(
        system=f"af-{order}{'-split' if split else ''}",
        plan=str(plan),
        num_gpus=plan.num_gpus,
        tokens=job.tokens,
        recompute=job.recompute,
        schedule=schedule,
        costs=costs,
        result=simulate(schedule, costs, options=options),
        state_bytes=state,
        memory_bytes=memory,
        af_plan=plan,
        sync_s=max(map(job.sync_s, parts)),
    )


def run_interleaved(
    job: Job, plan: EPPlan, *, within: Within = "none", system: str = "megatron", options: Options | None = None
) -> SystemRun:
    """Interleaved 1F1B over expert-parallel ranks.

    Raises:
        ValueError: micro-batches, chunks or layers that do not divide (see `chunks`).
    """
    num_chunks = plan.ranks * plan.chunks_a_rank
    ranks = tuple(chunk % plan.ranks for chunk in range(num_chunks))
    microbatches = _microbatches(job.global_batch, plan)
    roofline = EPRoofline(job=job, plan=plan, rank_of_chunk=ranks, within=within)
    schedule = _interleaved(plan.ranks, plan.chunks_a_rank, microbatches, job.model.is_moe_layer)
    return _finish(job, plan, roofline, schedule, system, options)


def run_dual_pipe(job: Job, plan: EPPlan, *, from_both_ends: bool, options: Options | None = None) -> SystemRun:
    """DualPipeV on `plan.ranks` ranks, or DualPipe, which by symmetry is DualPipeV on half the ranks and micro-batches.

    Raises:
        ValueError: an odd number of ranks or too few micro-batches.
    """
    if from_both_ends and plan.ranks % 2:
        raise ValueError(f"ranks = {plan.ranks}: DualPipe needs an even number")
    half = 2 if from_both_ends else 1
    simulated = replace(plan, ranks=plan.ranks // half)
    microbatches, rest = divmod(_microbatches(job.global_batch, plan), half)
    if rest:
        raise ValueError(f"{2 * microbatches + 1} micro-batches: DualPipe needs an even number, half from each end")
    ranks = tuple(v_rank(chunk, simulated.ranks) for chunk in range(2 * simulated.ranks))
    roofline = EPRoofline(job=job, plan=simulated, rank_of_chunk=ranks)
    system = "dualpipe" if from_both_ends else "dualpipev"
    schedule = _dual_pipe_v(simulated.ranks, microbatches, job.model.is_moe_layer)
    return _finish(job, plan, roofline, schedule, system, options)


@lru_cache(maxsize=12)
def _interleaved(ranks: int, chunks_a_rank: int, microbatches: int, is_moe_layer: tuple[bool, ...]) -> Schedule:
    """Orders depend on few numbers; many runs share them."""
    order = interleaved_1f1b(ranks, chunks_a_rank, microbatches)
    rank_of_chunk = tuple(chunk % ranks for chunk in range(ranks * chunks_a_rank))
    stages = cut_into_chunks(is_moe_layer, len(rank_of_chunk))
    return spell_out(order, stages, rank_of_chunk, name="interleaved", num_microbatches=microbatches)


@lru_cache(maxsize=12)
def _dual_pipe_v(ranks: int, microbatches: int, is_moe_layer: tuple[bool, ...]) -> Schedule:
    rank_of_chunk = tuple(v_rank(chunk, ranks) for chunk in range(2 * ranks))
    stages = cut_into_chunks(is_moe_layer, len(rank_of_chunk))
    return spell_out(
        dual_pipe_v(ranks, microbatches), stages, rank_of_chunk, name="dualpipev", num_microbatches=microbatches
    )


def _finish(
    job: Job, plan: EPPlan, roofline: EPRoofline, schedule: Schedule, system: str, options: Options | None
) -> SystemRun:
    costs = roofline.costs()
    parts = roofline.held(both_ends=system == "dualpipe")
    return SystemRun(
        system=system,
        plan=str(plan),
        num_gpus=plan.num_gpus,
        tokens=job.tokens,
        recompute=job.recompute,
        schedule=schedule,
        costs=costs,
        result=simulate(schedule, costs, options=options),
        state_bytes=tuple(map(job.state_bytes, parts)),
        memory_bytes=_memory(job, plan.num_gpus),
        sync_s=max(map(job.sync_s, parts)),
    )


def _microbatches(global_batch: int, plan: EPPlan) -> int:
    count, rest = divmod(global_batch, plan.width * plan.samples)
    if rest or not count:
        raise ValueError(
            f"global batch of {global_batch} samples: must be a multiple of workers x samples = "
            f"{plan.width} x {plan.samples}"
        )
    return count


def _memory(job: Job, num_gpus: int) -> float:
    """Of the smallest GPU in use."""
    used, smallest = 0, float("inf")
    for pool in job.cluster.pools:
        if used < num_gpus:
            smallest = min(smallest, pool.gpu.memory_bytes)
        used += pool.num_gpus
    return smallest


@dataclass(frozen=True, kw_only=True)
class System:
    """A baseline by name. `run(job, plan)` raises ValueError for a plan that it can't run."""

    title: str
    assumptions: tuple[str, ...]
    run: Callable[[Job, EPPlan], SystemRun]


@dataclass(frozen=True, kw_only=True)
class AFSystem:
    """A variant of AF-Pipe by name."""

    title: str
    assumptions: tuple[str, ...]
    order: str
    split: bool = False

    def run(self, job: Job, plan: AFPlan) -> SystemRun:
        return run_af_pipe(job, plan, order=self.order, split=self.split)


_AF = ("groups of one role each; a transfer starts when its payload is handed over and hides behind other compute",)
_SPLIT = ("weight gradients are put off into waits; activations are kept until then",)
AF_SYSTEMS: Mapping[str, AFSystem] = {
    f"af-{order}{'-split' if split else ''}": AFSystem(
        title=f"AF-Pipe, {order}{', split backward' if split else ''}",
        assumptions=_AF + (_SPLIT if split else ()),
        order=order,
        split=split,
    )
    for order in ("plain", "deep", "fitted")
    for split in (False, True)
}
_EP = "attention data-parallel and experts expert-parallel on the same workers, layers in a pipeline"
BASELINES: Mapping[str, System] = {
    "megatron": System(
        title="interleaved 1F1B, EP",
        assumptions=(_EP, "every all-to-all is exposed: nothing else runs on the worker meanwhile"),
        run=run_interleaved,
    ),
    "tutel": System(
        title="Tutel-like",
        assumptions=(
            _EP,
            "tokens in 1, 2, 4 or 8 pieces, whichever is best: a piece's experts run while others travel",
            "pieces compute as efficiently as the whole; each pays the latency",
        ),
        run=lambda job, plan: run_interleaved(job, plan, within="chunked", system="tutel"),
    ),
    "comet": System(
        title="Comet-like",
        assumptions=(
            _EP,
            "dispatch overlaps the first matrix product, combine the second, in 16 steps; ends stay exposed",
            "in backward likewise, with twice the compute",
        ),
        run=lambda job, plan: run_interleaved(job, plan, within="fine_grained", system="comet"),
    ),
    "dualpipe": System(
        title="DualPipe",
        assumptions=(
            _EP,
            "forward of one micro-batch interleaved with backward of another, each hiding the other's transfers",
            "half of the micro-batches from each end; every rank holds two ranks' layers",
        ),
        run=lambda job, plan: run_dual_pipe(job, plan, from_both_ends=True),
    ),
    "dualpipev": System(
        title="DualPipeV",
        assumptions=(_EP, "as DualPipe, but one direction through a V of two chunks a rank"),
        run=lambda job, plan: run_dual_pipe(job, plan, from_both_ends=False),
    ),
}
