"""The processes of a run: start, device, failure handling, end."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from disagmoe.api import backend_of
from disagmoe.config.checks import build_layout
from disagmoe.config.dump_folder import STATUS_NAME
from disagmoe.config.schema import Config
from disagmoe.layout import Layout
from disagmoe.parallelisms.failures import COLLECTIVE_MARGIN_S, Monitor, StatusBoard, WorkerFailure


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

    The monitor comes first, so that a failure during all the rest is known to everyone.

    Raises:
        ValueError: The number of processes is not the layout's.
        WorkerFailure: Another worker has failed meanwhile, or has not started in time.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available() and config.comm.backend != "gloo":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        # Every edge and pass has a communicator of its own, whose kernels wait for their peers: none may sit in a
        # hardware queue behind another, nor may they fill the device.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        os.environ.setdefault("NCCL_MAX_CTAS", "8")
        if config.debug.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it
        torch.cuda.set_device(device)
    backend = "gloo" if backend_of(config.comm, device) == "gloo" else "cpu:gloo,cuda:nccl"
    layout = build_layout(config)
    seconds = config.comm.timeout_s + COLLECTIVE_MARGIN_S
    store, rank, world_size = next(rendezvous("env://", timeout=timedelta(seconds=seconds)))
    if world_size != layout.world_size:
        raise ValueError(f"{world_size} processes were started, the layout needs {layout.world_size}")
    status = StatusBoard(folder / STATUS_NAME, rank)
    status.write("joining the run")
    monitor = Monitor(
        layout=layout,
        rank=rank,
        store=store,
        status=status,
        heartbeat_timeout_s=config.comm.heartbeat_timeout_s,
        timeout_s=config.comm.timeout_s,
    )
    monitor.catch_signals()
    with _guarded(monitor):
        monitor.wait_until_joined(seconds)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=seconds)
        )
    return World(layout=layout, rank=rank, device=device, monitor=monitor)


def run_guarded(world: World, body: Callable[[], None]) -> None:
    """Run `body`; if it fails anywhere, say so to all workers and raise.

    The worker that fails prints its traceback and posts the notice; the others end with one line that names it.
    """
    with _guarded(world.monitor):
        body()
        world.monitor.finish()
    dist.destroy_process_group()


@contextlib.contextmanager
def _guarded(monitor: Monitor) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        _explain(monitor, error)
        error.add_note(SAID)
        raise


SAID = "(all that is known has been said above)"
"""Note on an exception that has been reported."""


def _explain(monitor: Monitor, error: BaseException) -> None:
    """Find out whose failure it is, tell the others, and say so on stderr."""
    trace = ""
    error = _unwrapped(error)
    if isinstance(error, WorkerFailure):
        notice = monitor.notice or monitor.report(str(error))
    else:
        # A broken connection is a consequence; the cause has a moment to make itself known.
        known = monitor.wait_for_notice(monitor.patience_s) if _is_network(error) else None
        notice = known or monitor.report(f"{type(error).__name__}: {error}")
        if known is None:
            trace = "".join(traceback.format_exception(error))
    if notice.rank == monitor.rank:
        monitor.say(f"{trace}{notice}")
    elif trace and not _is_network(error):
        monitor.say(f"{trace}failed after another worker: {notice}")
    else:
        monitor.say(f"ending: {notice}")
    monitor.let_others_read()


def _unwrapped(error: BaseException) -> BaseException:
    """What went wrong inside a stage: torch's stages wrap it into an error that only describes tensors."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None and "failed to run" in str(error).lower():
        error = error.__cause__
    return error


def _is_network(error: BaseException) -> bool:
    if isinstance(error, dist.DistError | ConnectionError):
        return True
    words = ("gloo", "Connection", "NCCL", "Broken pipe", "Timed out")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
