"""The library entry: DisagMoE inside another trainer.

    meshes = make_disagmoe_meshes(model_config, disagmoe_config, device=device)
    pipeline = pipeline_disagmoe(model_config, meshes, disagmoe_config, device=device, dtype=dtype, loss_fn=loss_fn)
    ...
    loss = pipeline.runtime.run_step(microbatches, loss_scale=1 / num_valid_tokens)   # this process's slices
    pipeline.gradients.reduce()
    norm = pipeline.gradients.clip(1.0)
    optimizer.step()                                                                  # over pipeline.modules

`docs/library.md` has a complete example; our own trainer goes through the same two calls.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from disagmoe.config.schema import CommConfig, DisagMoEConfig
from disagmoe.layout import build_stages
from disagmoe.models.parts import DecoderParts
from disagmoe.parallelisms.apply import Pipeline, apply_disagmoe
from disagmoe.parallelisms.failures import COLLECTIVE_MARGIN_S, Monitor, StatusBoard
from disagmoe.parallelisms.mesh import Meshes, estimate_clock_offsets, make_meshes
from disagmoe.parallelisms.runtime import LossFunction
from disagmoe.schedules import Schedule, make_schedule
from disagmoe.simulator.profile import Profile


def is_moe_layer(model_config: Any) -> tuple[bool, ...]:
    """For each layer of a torchtitan decoder config, whether its FFN is a mixture of experts."""
    return tuple(layer.moe is not None for layer in model_config.layers)


def make_disagmoe_meshes(
    model_config: Any, disagmoe: DisagMoEConfig, *, device: torch.device, comm: CommConfig | None = None
) -> Meshes:
    """Meshes and groups of a layout. Collective: every rank of the initialised world calls it with equal arguments.

    Args:
        model_config: torchtitan `Decoder.Config`.
    Raises:
        ValueError: The world has another size than the layout.
    """
    comm = comm or CommConfig()
    layout = disagmoe.layout()
    if dist.get_world_size() != layout.world_size:
        raise ValueError(
            f"the world has {dist.get_world_size()} processes, the layout needs {layout.world_size} = replicas "
            "x (attn_depth x attn_workers + ffn_depth x ffn_workers), or replicas when colocated"
        )
    return make_meshes(
        layout,
        build_stages(layout, is_moe_layer(model_config)),
        device_type=device.type,
        backend=backend_of(comm, device),
        timeout_s=comm.timeout_s + COLLECTIVE_MARGIN_S,
    )


def pipeline_disagmoe(
    model_config: Any,
    meshes: Meshes,
    disagmoe: DisagMoEConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    loss_fn: LossFunction,
    seed: int | None = 0,
    comm: CommConfig | None = None,
    monitor: Monitor | None = None,
    slice_tokens: int | None = None,
) -> Pipeline:
    """This process's stages, initialised, and the schedule and runtime that drive them. Collective.

    Args:
        model_config: From `disagmoe.models.init.make_portable`.
        meshes: From `make_disagmoe_meshes`, for the same configurations.
        dtype: Of parameters and of the rows that travel.
        loss_fn: (logits [B, L, V], labels [B, L]) -> sum of the loss over valid tokens.
        seed: Of the initial weights, which do not depend on the layout; None: they are undefined until you load them.
        monitor: Watches the other workers; if there is none, one is started, which the pipeline's `close` ends.
        slice_tokens: Most tokens of a micro-batch that any A-worker will own, the same on every rank, where known:
            saves the messages with row counts over gloo.
    Raises:
        ValueError: A value that no schedule exists for.
    """
    comm = comm or CommConfig()
    parts = DecoderParts(model_config, seed=seed, device=device, dtype=dtype)
    options = disagmoe.schedule_options()
    if device.type == "cuda":
        options["send_after"] = 1  # the host's wait for row counts must not sit between two launches

    def schedule_of_rank_0() -> Schedule:
        costs = Profile.load(disagmoe.costs).costs() if disagmoe.costs else None
        return make_schedule(meshes.layout, parts.is_moe_layer, costs=costs, **options)

    schedule = _shared(schedule_of_rank_0)
    own_monitor = None
    if monitor is None:
        monitor = own_monitor = Monitor(
            layout=meshes.layout,
            rank=dist.get_rank(),
            store=dist.distributed_c10d._get_default_store(),
            status=StatusBoard(Path(tempfile.mkdtemp(prefix="disagmoe-status-")), dist.get_rank()),
            heartbeat_timeout_s=comm.heartbeat_timeout_s,
        )
    pipeline = apply_disagmoe(
        parts,
        meshes=meshes,
        schedule=schedule,
        disagmoe=disagmoe,
        comm=comm,
        device=device,
        loss_fn=loss_fn,
        monitor=monitor,
        clock_offset_s=estimate_clock_offsets(dist.get_rank(), dist.get_world_size()),
        slice_tokens=slice_tokens,
    )
    pipeline.own_monitor = own_monitor
    return pipeline


def _shared(make: Callable[[], Schedule]) -> Schedule:
    """What rank 0 makes, on every rank: a search takes seconds, and its result must be the same everywhere. Collective.

    Raises:
        ValueError: on every rank, what `make` raised on rank 0.
    """
    made: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            made = [make()]
        except ValueError as error:
            made = [error]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(made, src=0)
    if isinstance(made[0], ValueError):
        raise made[0]
    schedule: Schedule = made[0]
    return schedule


def backend_of(comm: CommConfig, device: torch.device) -> str:
    """`gloo` or `nccl`, from `[comm] backend` and the device."""
    if comm.backend != "auto":
        return comm.backend
    return "nccl" if device.type == "cuda" else "gloo"
