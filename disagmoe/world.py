"""The processes of a run: start, device, failure handling, end."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from disagmoe.config.checks import build_layout
from disagmoe.config.schema import Config
from disagmoe.engine import backend_of
from disagmoe.layout import Layout
from disagmoe.parallelisms.failures import Monitor, StatusBoard, WorkerFailure

STATUS_FOLDER = ".status"


@dataclass(kw_only=True)
class World:
    """This process among the others."""

    layout: Layout
    """In `mode = "none"`: one colocated replica, which is how it names its only worker."""
    rank: int
    device: torch.device
    monitor: Monitor


def start_world(config: Config, folder: Path) -> World:
    """Join the run that torchrun's environment variables describe: one process a worker, one GPU each where there are.

    Raises:
        ValueError: The number of processes is not the layout's.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available() and config.comm.backend != "gloo":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "gloo" if backend_of(config, device) == "gloo" else "cpu:gloo,cuda:nccl"
    layout = build_layout(config)
    dist.init_process_group(backend, timeout=timedelta(seconds=max(config.comm.timeout_s, 60.0)))
    if dist.get_world_size() != layout.world_size:
        raise ValueError(f"{dist.get_world_size()} processes were started, the layout needs {layout.world_size}")
    rank = dist.get_rank()
    monitor = Monitor(
        layout=layout,
        rank=rank,
        store=dist.distributed_c10d._get_default_store(),
        status=StatusBoard(folder / STATUS_FOLDER, rank),
        heartbeat_timeout_s=config.comm.heartbeat_timeout_s,
    )
    monitor.catch_sigterm()
    return World(layout=layout, rank=rank, device=device, monitor=monitor)


def run_guarded(world: World, body: Callable[[], None]) -> None:
    """Run `body`; if it fails anywhere, say so to all workers, and do not return.

    The worker that fails prints its traceback and posts the notice; the others end with one line that names it.
    """
    monitor = world.monitor
    name = monitor.workers_on(world.rank)
    try:
        body()
    except WorkerFailure as failure:
        notice = monitor.notice or monitor.report(str(failure))
        _say(name, str(failure) if notice.rank == world.rank else f"ending: {notice}")
        raise
    except BaseException as error:
        # A broken collective is a consequence; the cause has a moment to make itself known.
        notice = monitor.wait_for_notice(3.0) if isinstance(error, RuntimeError) and _is_network(error) else None
        if notice is None or notice.rank == world.rank:
            traceback.print_exc()
        notice = notice or monitor.report(f"{type(error).__name__}: {error}")
        _say(name, str(notice) if notice.rank == world.rank else f"ending: {notice}")
        raise
    if dist.get_world_size() > 1:
        dist.barrier()
    monitor.stop()
    dist.destroy_process_group()


def _is_network(error: RuntimeError) -> bool:
    text = str(error)
    return any(word in text for word in ("gloo", "Connection", "NCCL", "Broken pipe", "Timed out"))


def _say(name: str, text: str) -> None:
    sys.stderr.write(f"[{name}] {text}\n")
    sys.stderr.flush()
