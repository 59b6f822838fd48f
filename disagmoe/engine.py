"""What the trainer drives: a model on this process, disaggregated or whole, behind one interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from disagmoe.api import make_disagmoe_meshes, pipeline_disagmoe
from disagmoe.config.schema import Config
from disagmoe.layout import Layout, Role, Worker, owned_samples
from disagmoe.models.experts import add_gradients_in_place
from disagmoe.models.init import build_model, init_parameters, materialize
from disagmoe.parallelisms.clock import StepClock
from disagmoe.parallelisms.failures import Monitor
from disagmoe.parallelisms.gradients import GradientSync, SyncGroup
from disagmoe.parallelisms.runtime import LossFunction
from disagmoe.parallelisms.stage import MicrobatchInput, RouterState, RouterStats


@dataclass(frozen=True, kw_only=True)
class RouterHandle:
    """A router on this process: its statistics of the step, and its bias if it has one."""

    layer: int
    stats: RouterStats
    bias_E: Tensor | None
    coeff: float

    @classmethod
    def of(cls, layer: int, stats: RouterStats, router: RouterState) -> RouterHandle:
        coeff = float(router.load_balance_coeff or 0.0)
        return cls(layer=layer, stats=stats, bias_E=router.expert_bias_E, coeff=coeff)


class Engine(ABC):
    """One process's part of the model.

    Attributes:
        modules: What the optimizer optimizes; parameters carry the unsplit model's names.
        gradients: Sums, measures and clips them.
        routers: The routers on this process.
        workers: Roles of this process.
        owns_samples: Whether this process reads data.
        clock_offset_s: By rank, what to add to its clock to get this process's.
    """

    modules: list[nn.Module]
    gradients: GradientSync
    routers: list[RouterHandle]
    clock: StepClock
    clock_offset_s: dict[int, float]
    workers: tuple[Worker, ...]
    owns_samples: bool

    @abstractmethod
    def run(self, inputs: Sequence[MicrobatchInput], *, loss_scale: float, step: int) -> Tensor | None:
        """Forward and backward of a step; the scaled loss of this process's tokens, where it computes one."""

    @property
    @abstractmethod
    def sent_bytes(self) -> int:
        """Bytes handed to the network by transfers so far."""

    @abstractmethod
    def close(self) -> None:
        """Free groups and threads; collective."""


def initial_seed(config: Config) -> int | None:
    """None where the weights come from files: drawing them first would take time and memory for nothing."""
    return None if config.checkpoint.initial_load_in_hf else config.debug.seed


class PlainEngine(Engine):
    """`mode = "none"`: the unsplit torchtitan model in this one process."""

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
        with torch.device("meta"):
            self.model = build_model(model_config)
        materialize(self.model, device=device, dtype=dtype)
        init_parameters(self.model, model_config, initial_seed(config))
        add_gradients_in_place(self.model)
        self._loss_fn, self._monitor = loss_fn, monitor
        self.modules = [self.model]
        parameters = list(self.model.parameters())
        self.gradients = GradientSync(
            groups=[SyncGroup(group=None, copies=tuple((p,) for p in parameters))], counted=parameters, world=None
        )
        self.clock = StepClock(device)
        self.clock_offset_s = {0: 0.0}
        self.workers = (Worker(0, Role.ATTN.letter, 0, 0),)
        self.owns_samples = True
        self.routers = []
        for index, block in self.model.layers.items():
            if getattr(block, "moe", None) is not None:
                self.routers.append(self._watch_router(int(index), block.moe, device))

    def _watch_router(self, layer: int, moe: Any, device: torch.device) -> RouterHandle:
        stats = RouterStats(
            tokens_per_expert_E=torch.zeros(moe.router.num_experts, device=device),
            entropy_sum=torch.zeros((), device=device),
        )

        def count(_module: nn.Module, _args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
            _, expert_ids, scores = output
            stats.add(expert_ids.flatten(0, -2), scores.detach().flatten(0, -2))

        moe.router.register_forward_hook(count)
        return RouterHandle.of(layer, stats, moe)

    def run(self, inputs: Sequence[MicrobatchInput], *, loss_scale: float, step: int) -> Tensor | None:
        losses = []
        for index, microbatch in enumerate(inputs):
            if not microbatch.tokens_BL.numel():  # fewer samples than micro-batches
                continue
            self._monitor.status.write(f"step {step}, micro-batch {index} of the unsplit model")
            with self.clock.span("compute", f"micro-batch {index}"):
                logits = self.model(microbatch.tokens_BL, microbatch.positions_BL, microbatch.masks)
                loss = self._loss_fn(logits, microbatch.labels_BL) * loss_scale
                loss.backward()
                losses.append(loss.detach())
        return torch.stack(losses).sum()

    @property
    def sent_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass


class DisagEngine(Engine):
    """`mode = "disagmoe"`: this process's stages and the runtime of their schedule."""

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
        self._meshes = make_disagmoe_meshes(model_config, config.disagmoe, device=device, comm=config.comm)
        self.pipeline = pipeline_disagmoe(
            model_config,
            self._meshes,
            config.disagmoe,
            device=device,
            dtype=dtype,
            loss_fn=loss_fn,
            seed=initial_seed(config),
            comm=config.comm,
            monitor=monitor,
            slice_tokens=_largest_slice(config, self._meshes.layout) * config.training.seq_len,
        )
        self.modules = self.pipeline.modules
        self.gradients = self.pipeline.gradients
        self.clock = self.pipeline.clock
        self.clock_offset_s = self.pipeline.clock_offset_s
        self.workers = self._meshes.layout.workers_on(dist.get_rank())
        self.owns_samples = any(w.role is Role.ATTN for w in self.workers)
        self.routers = []
        for stage in self.pipeline.attention_stages():
            assert stage.router is not None and stage.stats is not None and stage.spec.moe_layer is not None
            self.routers.append(RouterHandle.of(stage.spec.moe_layer, stage.stats, stage.router))

    def run(self, inputs: Sequence[MicrobatchInput], *, loss_scale: float, step: int) -> Tensor | None:
        return self.pipeline.runtime.run_step(inputs, loss_scale=loss_scale, step=step)

    @property
    def sent_bytes(self) -> int:
        return self.pipeline.runtime.sent_bytes

    def close(self) -> None:
        self.pipeline.close()
        self._meshes.destroy()


def _largest_slice(config: Config, layout: Layout) -> int:
    """Samples of the largest slice of a micro-batch."""
    return max(
        len(owned)
        for replica in range(layout.replicas)
        for owned in owned_samples(
            layout,
            global_batch_size=config.training.global_batch_size,
            microbatches=config.disagmoe.microbatches,
            replica=replica,
            worker_index=0,  # what does not divide goes to the first workers
        )
    )
