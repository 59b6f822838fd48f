"""Puts a model on an expert-parallel layout: which parts this worker builds, and what joins them.

`apply_expert_parallel` is the one place that shows a worker's share from module to runnable pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from disagmoe.config.schema import CommConfig, ExpertParallelConfig
from disagmoe.layout import ChunkStage, Role, Worker, cut_into_chunks, split_evenly
from disagmoe.parallelisms.clock import StepClock
from disagmoe.parallelisms.expert_parallel.chunk import Block, Chunk, Tail
from disagmoe.parallelisms.expert_parallel.exchange import Exchange
from disagmoe.parallelisms.expert_parallel.groups import EPGroups
from disagmoe.parallelisms.expert_parallel.moe import OverlappedExperts
from disagmoe.parallelisms.expert_parallel.pass_on import PassOn
from disagmoe.parallelisms.expert_parallel.piece import RoutedOptions
from disagmoe.parallelisms.expert_parallel.protocol import (
    BACKWARD_INPUT,
    FULL_BACKWARD,
    ChunkPartsLike,
    Filler,
    Meter,
    RoutedExperts,
)
from disagmoe.parallelisms.expert_parallel.rows import Shares
from disagmoe.parallelisms.expert_parallel.runtime import EPRuntime
from disagmoe.parallelisms.expert_parallel.stock import DispatcherExchange, DispatcherLike, StockExperts
from disagmoe.parallelisms.failures import Monitor
from disagmoe.parallelisms.gradients import GradientSync, SyncGroup
from disagmoe.parallelisms.runtime import LossFunction
from disagmoe.parallelisms.stage import RouterStats
from disagmoe.parallelisms.transfer.channel import Channel, ChannelContext, ChannelGroups
from disagmoe.parallelisms.transfer.wire import BufferPool, MessageKind, WireFormat
from disagmoe.schedules.chunk_orders import make_order, place_chunks

_MOST_LEFT = 16
"""Weight gradients (of a part of a layer, each) that wait to be computed while something is waited for: they keep
activations alive."""
MakeDispatcher = Callable[[list[range], int, DispatcherExchange], DispatcherLike]


def rank_of_chunk(config: ExpertParallelConfig) -> tuple[int, ...]:
    """Pipeline rank of each chunk."""
    return place_chunks(config.pipeline_depth, config.chunks_per_rank, in_v=config.overlap == "dual_pipe_v")


def borders_of(config: ExpertParallelConfig) -> set[tuple[int, int, bool]]:
    """(sending pipeline rank, receiving one, backward) of all transfers between chunks."""
    ranks = rank_of_chunk(config)
    pairs = [(a, b) for a, b in pairwise(ranks) if a != b]
    return {(a, b, False) for a, b in pairs} | {(b, a, True) for a, b in pairs}


@dataclass(kw_only=True)
class EPPipeline:
    """One worker's share of an expert-parallel model, ready to train."""

    stages: tuple[ChunkStage, ...]
    chunks: dict[int, Chunk]
    modules: list[nn.Module]
    runtime: EPRuntime
    gradients: GradientSync
    clock: StepClock
    exchange: Exchange

    def blocks(self) -> list[Block]:
        """This worker's MoE layers."""
        return [block for index in sorted(self.chunks) for block in self.chunks[index].blocks]


def apply_expert_parallel(
    parts: ChunkPartsLike,
    *,
    groups: EPGroups,
    config: ExpertParallelConfig,
    comm: CommConfig,
    device: torch.device,
    loss_fn: LossFunction,
    monitor: Monitor,
    clock_offset_s: dict[int, float],
    make_dispatcher: MakeDispatcher,
) -> EPPipeline:
    """Build this worker's chunks and the runtime that executes its pipeline rank's order on them.

    For every chunk of this rank: owner and routed parts (initialised by `parts`), their recompute wrappers, the layers'
    exchanges, the borders to other chunks. Then the runtime over all chunks, then the gradients' groups.

    Args:
        groups: From `make_groups`, with the configuration's layout and borders.
        loss_fn: Sum of the loss over valid tokens.
        make_dispatcher: (experts by worker, top-k, exchange) -> torchtitan's dispatcher, for the stock baseline.
    """
    clock = StepClock(device)
    exchange = Exchange(
        group=groups.exchange,
        monitor=monitor,
        clock=clock,
        timeout_s=comm.timeout_s,
        strict_order=comm.strict_order,
        device=device,
        clock_offset_s=clock_offset_s,
    )
    build = _Builder(parts, groups, config, device, loss_fn, Meter(clock), exchange, make_dispatcher)
    context = ChannelContext(
        wire=WireFormat(dim=parts.dim, row_dtype=parts.row_dtype),
        pool=build.pool,
        monitor=monitor,
        timeout_s=comm.timeout_s,
        strict_order=comm.strict_order,
        device=device,
        clock_offset_s=clock_offset_s,
    )
    worker = groups.layout.workers_on(dist.get_rank())[0]
    channels: dict[tuple[int, int, bool], Channel] = {}
    chunks = build.chunks(worker, context, channels)
    in_v = config.overlap == "dual_pipe_v"
    order = make_order(config.pipeline_depth, config.chunks_per_rank, config.microbatches, in_v=in_v)
    runtime = EPRuntime(
        order=order[worker.group],
        chunks=chunks,
        passes=list(build.passes.values()),
        channels=list(channels.values()),
        exchange=exchange,
        filler=build.filler,
        meter=build.meter,
        clock=clock,
        monitor=monitor,
        num_microbatches=config.microbatches,
        on_cuda=device.type == "cuda",
    )
    return EPPipeline(
        stages=build.stages,
        chunks=chunks,
        modules=[*build.owners, *build.routed],
        runtime=runtime,
        gradients=_gradient_sync(build.owners, build.routed, worker, groups),
        clock=clock,
        exchange=exchange,
    )


class _Builder:
    """What all chunks of a worker are built from."""

    def __init__(
        self,
        parts: ChunkPartsLike,
        groups: EPGroups,
        config: ExpertParallelConfig,
        device: torch.device,
        loss_fn: LossFunction,
        meter: Meter,
        exchange: Exchange,
        make_dispatcher: MakeDispatcher,
    ) -> None:
        self.parts, self.groups, self.config, self.device = parts, groups, config, device
        self.loss_fn, self.meter, self.exchange, self.make_dispatcher = loss_fn, meter, exchange, make_dispatcher
        self.pool = BufferPool(device)
        self.ranks = rank_of_chunk(config)
        self.stages = tuple(cut_into_chunks(parts.is_moe_layer, len(self.ranks)))
        self.owners: list[nn.Module] = []
        self.routed: list[nn.Module] = []
        self.passes: dict[int, PassOn] = {}
        self.common: dict[str, Any] = {"dim": parts.dim, "dtype": parts.row_dtype}
        # Behind transfers, where there are some to hide: the experts' when a stage is cut, everybody's in the V.
        self.owner_put_off = parts.weight_gradients if config.overlap == "dual_pipe_v" else None
        # On CUDA the host can't tell when a transfer is here: weight gradients follow what they would have delayed.
        self.filler = Filler(0 if device.type == "cuda" else _MOST_LEFT)
        exchange.before_wait = self.filler.fill
        self.expert_put_off = parts.weight_gradients if config.overlap != "none" else None

    def chunks(
        self, worker: Worker, context: ChannelContext, channels: dict[tuple[int, int, bool], Channel]
    ) -> dict[int, Chunk]:
        own = [index for index, rank in enumerate(self.ranks) if rank == worker.group]
        last = len(self.ranks) - 1
        for border in sorted({*own, *(index - 1 for index in own)} & set(range(last))):
            self.passes[border] = self._pass_on(border, worker, context, channels)
        return {index: self._chunk(index, worker) for index in own}

    def _chunk(self, index: int, worker: Worker) -> Chunk:
        of_chunk = [(i, stage) for i, stage in enumerate(self.stages) if stage.chunk == index]
        blocks: list[Block] = []
        tail = None
        for i, stage in of_chunk:
            if stage.kind != "A":
                continue
            part = self.parts.owner_part(stage)
            if stage.layer is None:
                self.owners.append(part)
                tail = Tail(stage=i, part=part, has_head=stage.has_head)
            else:
                self.owners.append(part)
                blocks.append(self._block(i, stage, part, worker))
        return Chunk(
            index=index,
            blocks=blocks,
            tail=tail,
            before=self.passes.get(index - 1),
            after=self.passes.get(index),
            loss_fn=self.loss_fn,
            meter=self.meter,
            put_off=self.owner_put_off,
            filler=self.filler,
            recompute=self.config.recompute == "full",
            device=self.device,
            **self.common,
        )

    def _block(self, index: int, stage: ChunkStage, part: nn.Module, worker: Worker) -> Block:
        assert stage.layer is not None
        num_experts, top_k = self.parts.num_experts(stage.layer), self.parts.top_k(stage.layer)
        experts = split_evenly(num_experts, self.groups.layout.attn_workers)
        routed = self.parts.routed_part(stage, experts[worker.index])
        self.routed.append(routed)
        return Block(
            layer=stage.layer,
            stage=index,
            owner=part,
            routed=self._routed_experts(stage.layer, index + 1, routed, experts, experts[worker.index], top_k),
            top_k=top_k,
            stats=RouterStats(
                tokens_per_expert_E=torch.zeros(num_experts, device=self.device),
                entropy_sum=torch.zeros((), device=self.device),
            ),
        )

    def _routed_experts(
        self, layer: int, stage: int, part: nn.Module, experts: list[range], own: range, top_k: int
    ) -> RoutedExperts:
        recompute = self.config.recompute != "none"
        if self.config.overlap == "none" and not self.config.deduplicate:
            exchange = DispatcherExchange(self.exchange, layer=layer, stage=stage)
            return StockExperts(
                part=part,
                dispatcher=self.make_dispatcher(experts, top_k, exchange),
                exchange=exchange,
                meter=self.meter,
                recompute=recompute,
                num_experts=len(own),
            )
        options = RoutedOptions(
            deduplicate=self.config.deduplicate,
            num_pieces=self.config.num_chunks if self.config.overlap == "chunked" else 1,
            put_off=self.expert_put_off,
            recompute=recompute,
            owner_kind=FULL_BACKWARD if self.owner_put_off is None else BACKWARD_INPUT,
        )
        return OverlappedExperts(
            part=part,
            shares=Shares(experts, self.device),
            exchange=self.exchange,
            pool=self.pool,
            meter=self.meter,
            options=options,
            layer=layer,
            stage=stage,
            device=self.device,
            **self.common,
        )

    def _pass_on(
        self, border: int, worker: Worker, context: ChannelContext, channels: dict[tuple[int, int, bool], Channel]
    ) -> PassOn:
        sender, receiver = self.ranks[border], self.ranks[border + 1]
        stage = max(i for i, s in enumerate(self.stages) if s.chunk == border)

        def channel(source: int, target: int, backward: bool) -> Channel:
            key = (source, target, backward)
            if key not in channels:
                other = target if source == worker.group else source
                peer = self.groups.layout.group_ranks(Role.ATTN, other, worker.replica)[worker.index]
                channels[key] = Channel(
                    name=f"pipeline {'backward' if backward else 'forward'} rank {source} -> rank {target}",
                    kind=MessageKind.COMBINE_GRAD,  # a header and rows
                    backward=True,  # sizes are known
                    groups=ChannelGroups(payload=self.groups.passes[key], counts=None, peers=(peer,)),
                    context=context,
                )
            return channels[key]

        local = sender == receiver
        return PassOn(
            index=border,
            num_chunks=len(self.ranks),
            stage=stage,
            forward=None if local else channel(sender, receiver, False),
            backward=None if local else channel(receiver, sender, True),
            clock=self.meter.clock,
            filler=self.filler,
            **self.common,
        )


def _gradient_sync(
    owners: Sequence[nn.Module], routed: Sequence[nn.Module], worker: Worker, groups: EPGroups
) -> GradientSync:
    """Everything but the routed experts is summed over the pipeline rank's workers and the replicas, experts over the
    replicas only."""
    dense = [p for part in owners for p in part.parameters()]
    experts = [p for part in routed for p in part.parameters()]
    counted: list[nn.Parameter] = []
    if worker.replica == 0:
        counted = [*experts, *(dense if worker.index == 0 else [])]
    sync = [
        SyncGroup(group=groups.dense_sync, copies=tuple((p,) for p in dense)),
        SyncGroup(group=groups.expert_sync, copies=tuple((p,) for p in experts)),
    ]
    world = dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
    return GradientSync(groups=[s for s in sync if s.copies], counted=counted, world=world)
