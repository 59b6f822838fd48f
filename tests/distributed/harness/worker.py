"""What runs in a world's processes: joins the others once, then one case after another.

Imported by the fork server before it forks, so that a world starts with torch, torchtitan and disagmoe loaded.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from disagmoe.config.checks import build_layout
from disagmoe.config.recipe import load_recipe
from disagmoe.engine import DisagEngine, Engine
from disagmoe.parallelisms.failures import Monitor, StatusBoard, WorkerFailure
from disagmoe.trainer import Trainer
from disagmoe.world import World
from tests.distributed.harness import hooks
from tests.distributed.harness.cases import FAMILIES, Case, Piece, RankResult

# Loads torchtitan's model packages, too.
for _family in FAMILIES:
    load_recipe(_family).model_config("debug")
del hooks
gc.collect()


def main(rank: int, size: int, connection: Connection, folder: str) -> None:
    """Serve cases from `connection` until it closes."""
    torch.set_num_threads(1)
    # What the server loaded stays: collecting garbage need not look at it, nor copy its pages.
    gc.freeze()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    timeout = timedelta(seconds=60)
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        connection.send(store.port)
    else:
        store = TCPStore("127.0.0.1", connection.recv(), is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    connection.send("ready")
    while True:
        try:
            case: Case | None = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            break
        if case is None:
            break
        with Path(folder, f"rank_{rank}.stacks").open("w") as stacks:
            # Should the case hang, the stacks say where; should the tests be gone, this process ends too.
            faulthandler.dump_traceback_later(case.timeout_s, file=stacks)
            reply: RankResult | str
            try:
                reply = run_case(case, rank)
            except BaseException as error:
                kind = "consequence" if isinstance(error, WorkerFailure) else "cause"
                reply = f"{kind}\n{traceback.format_exc()}"
            faulthandler.cancel_dump_traceback_later()
        # Engines hold themselves in cycles; process groups, with their threads and sockets, end with them.
        gc.collect()
        # Not `send`: torch would pass tensors in shared memory, a file descriptor each.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.send_bytes(pickle.dumps(reply))
    os._exit(0)


def run_case(case: Case, rank: int) -> RankResult:
    """Train as the case says, on this process."""
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="disagmoe_status_") as status:
        layout = build_layout(case.config)
        assert dist.get_world_size() == layout.world_size, f"world of {dist.get_world_size()}, not {layout.world_size}"
        monitor = Monitor(
            layout=layout,
            rank=rank,
            store=dist.distributed_c10d._get_default_store(),
            status=StatusBoard(Path(status), rank),
            heartbeat_timeout_s=case.config.comm.heartbeat_timeout_s,
            own_exit=False,
        )
        try:
            world = World(layout=layout, rank=rank, device=torch.device("cpu"), monitor=monitor)
            return _call(case, world) if case.body else _train(case, world, start_s)
        except BaseException as error:
            if not isinstance(error, WorkerFailure):
                monitor.report(f"{type(error).__name__}: {error}")
            raise
        finally:
            monitor.stop()


def _call(case: Case, world: World) -> RankResult:
    module, _, function = case.body.partition(":")
    extra = getattr(importlib.import_module(module), function)(case, world)
    dist.barrier()
    return RankResult(history=[], gradients=[], initial=[], parameters=[], biases=[], extra=extra, seconds=0.0)


def _train(case: Case, world: World, start_s: float) -> RankResult:
    gradients: list[Piece] = []
    initial: list[Piece] = []
    extra: list[Any] = []

    def after_init(engine: Engine) -> None:
        if case.hook:
            module, _, function = case.hook.partition(":")
            extra.append(getattr(importlib.import_module(module), function)(engine, **case.hook_arguments))
        initial.extend(_pieces(engine, gradients=False))
        clip = engine.gradients.clip

        def clip_and_keep(max_norm: float) -> float:
            if not gradients:
                gradients.extend(_pieces(engine, gradients=True))
            return clip(max_norm)

        engine.gradients.clip = clip_and_keep  # type: ignore[method-assign]

    trainer = Trainer(case.config, world, folder=Path(case.folder) if case.folder else None, after_init=after_init)
    trainer.run(case.steps)
    result = RankResult(
        history=trainer.history,
        gradients=gradients,
        initial=initial,
        parameters=_pieces(trainer.engine, gradients=False),
        biases=[
            Piece(name=f"layers.{r.layer}.bias", home=_home(trainer.engine), experts=None, value=r.bias_E.clone())
            for r in trainer.engine.routers
            if r.bias_E is not None
        ],
        extra=extra[0] if extra else None,
        seconds=0.0,
    )
    dist.barrier()
    trainer.close()
    result.seconds = time.monotonic() - start_s
    return result


def _home(engine: Engine) -> str:
    return str(engine.workers[0])


def _pieces(engine: Engine, *, gradients: bool) -> list[Piece]:
    """Copies of the engine's parameters, or of their gradients. A parameter without a gradient is an error."""
    pieces = []
    for module, home in zip(engine.modules, _homes(engine), strict=True):
        for name, parameter in module.named_parameters():
            value = parameter.grad if gradients else parameter.detach()
            assert value is not None, f"{name} on {home} has no gradient"
            experts = _experts(module, name)
            pieces.append(Piece(name=name, home=home, experts=experts, value=value.clone()))
    return pieces


def _homes(engine: Engine) -> list[str]:
    """By module; stages of a colocated pipeline belong to different workers of one process."""
    if not isinstance(engine, DisagEngine):
        return [_home(engine)] * len(engine.modules)
    homes = []
    for stage in engine.pipeline.stages:
        worker = next(w for w in engine.workers if (w.role, w.group) == (stage.spec.role, stage.spec.group))
        homes.append(str(worker))
    return homes


def _experts(module: nn.Module, name: str) -> tuple[int, int] | None:
    experts = getattr(module, "experts", None)
    if isinstance(experts, range) and ".routed_experts." in name:
        return experts.start, experts.stop
    return None
