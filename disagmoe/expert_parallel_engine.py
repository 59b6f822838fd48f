"""The engine of `mode = "ep"`: expert parallelism without disaggregation, the baselines of AF-Pipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from disagmoe.api import backend_of
from disagmoe.config.schema import Config
from disagmoe.engine import Engine, RouterHandle, initial_seed
from disagmoe.models.owner import ChunkParts
from disagmoe.models.titan_dispatcher import TitanDispatcher
from disagmoe.parallelisms.expert_parallel.apply import apply_expert_parallel, borders_of
from disagmoe.parallelisms.expert_parallel.groups import make_groups
from disagmoe.parallelisms.failures import COLLECTIVE_MARGIN_S, Monitor
from disagmoe.parallelisms.mesh import estimate_clock_offsets
from disagmoe.parallelisms.runtime import LossFunction
from disagmoe.parallelisms.stage import MicrobatchInput


class EPEngine(Engine):
    """This worker's chunks of layers, with its share of their experts, and the runtime of its pipeline rank."""

    def __init__(
        self,
        *,
        config: Config,
        model_config: Any,
        device: torch.device,
        dtype: torch.dtype,
        loss_fn: LossFunction,
        monitor: Monitor,
    ) -> None:
        part, comm = config.expert_parallel, config.comm
        layout = part.layout()
        rank = dist.get_rank()
        self._groups = make_groups(
            layout,
            borders=borders_of(part),
            backend=backend_of(comm, device),
            strict_order=comm.strict_order,
            timeout_s=comm.timeout_s + COLLECTIVE_MARGIN_S,
        )
        self.clock_offset_s = estimate_clock_offsets(rank, dist.get_world_size())
        self.pipeline = apply_expert_parallel(
            ChunkParts(model_config, seed=initial_seed(config), device=device, dtype=dtype),
            groups=self._groups,
            config=part,
            comm=comm,
            device=device,
            loss_fn=loss_fn,
            monitor=monitor,
            clock_offset_s=self.clock_offset_s,
            make_dispatcher=lambda experts, top_k, exchange: TitanDispatcher(
                experts_by_worker=experts, top_k=top_k, exchange=exchange
            ),
        )
        self.modules = self.pipeline.modules
        self.gradients = self.pipeline.gradients
        self.clock = self.pipeline.clock
        self.workers = layout.workers_on(rank)
        self.owns_samples = True
        self.routers = []
        for block in self.pipeline.blocks():
            router: Any = block.owner.router_state
            self.routers.append(RouterHandle.of(block.layer, block.stats, router))

    def run(self, inputs: Sequence[MicrobatchInput], *, loss_scale: float, step: int) -> Tensor | None:
        return self.pipeline.runtime.run_step(inputs, loss_scale=loss_scale, step=step)

    @property
    def sent_bytes(self) -> int:
        return self.pipeline.runtime.sent_bytes

    def close(self) -> None:
        self.pipeline.runtime.close()
        self._groups.destroy()
