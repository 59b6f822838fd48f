"""Puts a model on a layout: which sublayers this process builds, in which order they are wrapped, and what joins them.

`apply_disagmoe` is the one place that shows a worker's part from module to runnable pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from disagmoe.config.schema import CommConfig, DisagMoEConfig
from disagmoe.layout import Layout, Role, Stage, Worker, split_evenly
from disagmoe.parallelisms.attention_stage import AttentionStage
from disagmoe.parallelisms.clock import StepClock
from disagmoe.parallelisms.expert_stage import ExpertStage
from disagmoe.parallelisms.failures import Monitor
from disagmoe.parallelisms.gradients import GradientSync, SyncGroup
from disagmoe.parallelisms.mesh import EdgeKey, Meshes, hop_edge
from disagmoe.parallelisms.runtime import AFPipeRuntime, LossFunction
from disagmoe.parallelisms.stage import (
    AnyChannel,
    DisagStage,
    RouterState,
    RouterStats,
    StageLinks,
    WeightGradientsLike,
)
from disagmoe.parallelisms.transfer.channel import Channel, ChannelContext
from disagmoe.parallelisms.transfer.in_process import InProcessChannel
from disagmoe.parallelisms.transfer.wire import BufferPool, Counts, MessageKind, WireFormat
from disagmoe.schedules.actions import Kind, Schedule

_KIND_OF_EDGE = {
    ("m2n", False): MessageKind.DISPATCH,
    ("n2m", False): MessageKind.COMBINE,
    ("m2n", True): MessageKind.COMBINE_GRAD,
    ("n2m", True): MessageKind.DISPATCH_GRAD,
}


class SublayerFactory(Protocol):
    """What the parallelism needs to know of a model. Modules come initialised, on the device, in the row dtype."""

    dim: int
    row_dtype: torch.dtype

    @property
    def is_moe_layer(self) -> Sequence[bool]: ...

    def num_experts(self, layer: int) -> int: ...

    def top_k(self, layer: int) -> int: ...

    def attention_part(self, stage: Stage) -> nn.Module:
        """Module of an A-stage: (hidden or tokens, positions, masks) -> (hidden, routing), or logits in the last."""
        ...

    def expert_part(self, stage: Stage, experts: range) -> nn.Module:
        """Module of an F-stage: (rows, weights, pair rows, pair experts, primary rows) -> rows."""
        ...

    def tied_parameters(self, part: nn.Module) -> list[nn.Parameter]:
        """Parameters of a part that have a second home in the other role's part of the same layer, in a fixed order."""
        ...

    def expert_parameters(self, part: nn.Module) -> list[nn.Parameter]:
        """Parameters of an F-part that are sharded over the workers."""
        ...

    def weight_gradients(self) -> WeightGradientsLike:
        """Holder of the weight gradients that one stage puts off for one micro-batch."""
        ...

    def router_state(self, part: nn.Module) -> RouterState | None:
        """The router bias of an A-part; None without a router."""
        ...


@dataclass(kw_only=True)
class Pipeline:
    """One process's share of a disaggregated model, ready to train."""

    stages: list[DisagStage]
    schedule: Schedule
    runtime: AFPipeRuntime
    gradients: GradientSync
    clock: StepClock
    clock_offset_s: dict[int, float]
    pool: BufferPool
    own_monitor: Monitor | None = None
    """Ended by `close`; None: the caller ends the one that it gave."""

    @property
    def modules(self) -> list[nn.Module]:
        """The stages' modules; their parameters carry the unsplit model's names."""
        return [stage.submod for stage in self.stages]

    def attention_stages(self) -> list[AttentionStage]:
        """A-stages with a router, by layer."""
        return [s for s in self.stages if isinstance(s, AttentionStage) and s.stats is not None]

    def close(self) -> None:
        """End the threads. After the last step of all workers: one that is no longer watched is not missed."""
        self.runtime.close()
        if self.own_monitor is not None:
            self.own_monitor.stop()


def apply_disagmoe(
    factory: SublayerFactory,
    *,
    meshes: Meshes,
    schedule: Schedule,
    disagmoe: DisagMoEConfig,
    comm: CommConfig,
    device: torch.device,
    loss_fn: LossFunction,
    monitor: Monitor,
    clock_offset_s: dict[int, float],
    slice_tokens: int | None = None,
) -> Pipeline:
    """Build this process's stages and the runtime that executes `schedule` on them.

    The order, for every stage of every worker on this process: module (initialised by the factory), recompute wrapper,
    boundary (channels of its hops), stage. Then the runtime over all stages, then the gradients' groups.

    Args:
        meshes: From `make_meshes`, with the same layout and stages as the schedule.
        loss_fn: Sum of the loss over valid tokens.
        slice_tokens: Most tokens of a micro-batch that any A-worker owns; None: not known.
    Raises:
        ValueError: The schedule's stages are not those of the meshes' layout.
    """
    layout = meshes.layout
    if schedule.num_groups != layout.num_groups:
        raise ValueError(
            f"the schedule is for {schedule.num_groups} component groups, the layout has {layout.num_groups}; "
            "make both from one layout"
        )
    clock, pool = StepClock(device), BufferPool(device)
    context = ChannelContext(
        wire=WireFormat(dim=factory.dim, row_dtype=factory.row_dtype),
        pool=pool,
        monitor=monitor,
        timeout_s=comm.timeout_s,
        strict_order=comm.strict_order,
        device=device,
        clock_offset_s=clock_offset_s,
        # Only over gloo, and not where it stands in for NCCL: that takes messages of exactly the posted size.
        slice_tokens=slice_tokens if device.type == "cpu" and not comm.strict_order else None,
    )
    channels: dict[EdgeKey, AnyChannel] = {}
    workers = layout.workers_on(meshes.rank)
    homes = [
        (spec, worker)
        for spec in schedule.stages
        for worker in workers
        if (worker.role, worker.group) == (spec.role, spec.group)
    ]
    stages: list[DisagStage] = []
    for spec, worker in homes:
        common: dict[str, Any] = {
            "spec": spec,
            "num_stages": schedule.num_stages,
            "pipeline_group": schedule.group_of_stage[spec.index],
            "num_groups": schedule.num_groups,
            "device": device,
            "group": None,
            "links": _links(schedule.stages, spec, worker, meshes, context, channels),
            "clock": clock,
            "dim": factory.dim,
            "row_dtype": factory.row_dtype,
            "weight_gradients": factory.weight_gradients if _is_split(schedule) else None,
            "most": _most_counts(factory, layout, spec, worker, context.slice_tokens),
            "recompute": disagmoe.recompute == "full" or (disagmoe.recompute == "ffn" and spec.role is Role.FFN),
        }
        stages.append(_build_stage(factory, layout, spec, worker, common))
    runtime = AFPipeRuntime(stages=stages, schedule=schedule, loss_fn=loss_fn, clock=clock, monitor=monitor)
    gradients = _gradient_sync(factory, stages, schedule.stages, workers, meshes)
    return Pipeline(
        stages=stages,
        schedule=schedule,
        runtime=runtime,
        gradients=gradients,
        clock=clock,
        clock_offset_s=clock_offset_s,
        pool=pool,
    )


def _most_counts(
    factory: SublayerFactory, layout: Layout, spec: Stage, worker: Worker, slice_tokens: int | None
) -> Counts | None:
    """The largest message that a peer can send to a stage in forward; None where that is not bounded."""
    if slice_tokens is None:
        return None
    if spec.role is Role.ATTN:
        return Counts(slice_tokens, slice_tokens, 0)
    assert spec.moe_layer is not None
    experts = split_evenly(factory.num_experts(spec.moe_layer), layout.ffn_workers)[worker.index]
    pairs = slice_tokens * min(factory.top_k(spec.moe_layer), len(experts))
    return Counts(slice_tokens, slice_tokens, pairs)


def _is_split(schedule: Schedule) -> bool:
    return any(action.kind is Kind.BACKWARD_INPUT for program in schedule.compute for action in program)


def _build_stage(
    factory: SublayerFactory, layout: Layout, spec: Stage, worker: Worker, common: dict[str, Any]
) -> DisagStage:
    if spec.role is Role.FFN:
        assert spec.moe_layer is not None
        experts = split_evenly(factory.num_experts(spec.moe_layer), layout.ffn_workers)
        return ExpertStage(submodule=factory.expert_part(spec, experts[worker.index]), **common)
    num_experts = 0 if spec.moe_layer is None else factory.num_experts(spec.moe_layer)
    device = common["device"]
    stats = None
    if num_experts:
        stats = RouterStats(
            tokens_per_expert_E=torch.zeros(num_experts, device=device),
            entropy_sum=torch.zeros((), device=device),
        )
    experts_by_peer = split_evenly(num_experts, layout.ffn_workers)
    part = factory.attention_part(spec)
    router = factory.router_state(part)
    return AttentionStage(submodule=part, experts_by_peer=experts_by_peer, stats=stats, router=router, **common)


def _links(
    stages: Sequence[Stage],
    spec: Stage,
    worker: Worker,
    meshes: Meshes,
    context: ChannelContext,
    channels: dict[EdgeKey, AnyChannel],
) -> StageLinks:
    """The channels of a stage's input and output hop in both passes; one object an edge and pass on this process."""

    def channel(hop: int, backward: bool) -> AnyChannel | None:
        if not 0 <= hop < len(stages) - 1:
            return None
        key = hop_edge(stages, hop, backward=backward)
        if key not in channels:
            kind = _KIND_OF_EDGE[key.edge.value, backward]
            if meshes.layout.colocate:
                channels[key] = InProcessChannel(name=key.name, kind=kind, backward=backward, context=context)
            else:
                groups = meshes.channel_groups(key, worker)
                channels[key] = Channel(name=key.name, kind=kind, backward=backward, context=context, groups=groups)
        return channels[key]

    before, after = spec.index - 1, spec.index
    return StageLinks(
        forward_in=channel(before, False),
        forward_out=channel(after, False),
        backward_in=channel(after, True),
        backward_out=channel(before, True),
    )


def _gradient_sync(
    factory: SublayerFactory,
    stages: Sequence[DisagStage],
    all_stages: Sequence[Stage],
    workers: Sequence[Worker],
    meshes: Meshes,
) -> GradientSync:
    """Sort this process's parameters into the groups of the table in `gradients`."""
    attn: list[nn.Parameter] = []
    ffn: list[nn.Parameter] = []
    experts: list[nn.Parameter] = []
    tied: dict[int, list[list[nn.Parameter]]] = {}
    counted: list[nn.Parameter] = []
    first_replica = workers[0].replica == 0
    index_of = {worker.role: worker.index for worker in workers}
    for stage in stages:
        part, role = stage.submod, stage.spec.role
        shared = factory.tied_parameters(part)
        if shared:
            assert stage.spec.moe_layer is not None
            tied.setdefault(stage.spec.moe_layer, []).append(shared)
        sharded = factory.expert_parameters(part) if role is Role.FFN else []
        special = {id(p) for p in (*shared, *sharded)}
        own = [p for p in part.parameters() if id(p) not in special]
        (attn if role is Role.ATTN else ffn).extend(own)
        experts.extend(sharded)
        if first_replica:
            counted.extend(sharded)
            if index_of[role] == 0:
                counted.extend(own)
                counted.extend(shared if role is Role.ATTN else [])
    groups = [
        SyncGroup(group=meshes.attn_sync, copies=tuple((p,) for p in attn)),
        SyncGroup(group=meshes.ffn_sync, copies=tuple((p,) for p in ffn)),
        SyncGroup(group=meshes.expert_sync, copies=tuple((p,) for p in experts)),
        *_tied_groups(tied, all_stages, meshes),
    ]
    world = dist.group.WORLD if dist.get_world_size() > 1 else None
    return GradientSync(groups=[g for g in groups if g.copies], counted=counted, world=world)


def _tied_groups(
    tied: dict[int, list[list[nn.Parameter]]], all_stages: Sequence[Stage], meshes: Meshes
) -> list[SyncGroup]:
    """Tied parameters by pair of groups, in the same order on both sides."""
    pair_of_layer = {
        a.moe_layer: (a.group, f.group)
        for a, f in pairwise(all_stages)
        if f.role is Role.FFN and a.moe_layer is not None
    }
    by_pair: dict[tuple[int, int], list[tuple[nn.Parameter, ...]]] = {}
    for layer in sorted(tied):
        # One list of parameters a home; homes on this process are merged first.
        by_pair.setdefault(pair_of_layer[layer], []).extend(zip(*tied[layer], strict=True))
    colocated = meshes.layout.colocate
    return [
        SyncGroup(group=meshes.attn_sync if colocated else meshes.tied_sync[pair], copies=tuple(by_pair[pair]))
        for pair in sorted(by_pair)
    ]
