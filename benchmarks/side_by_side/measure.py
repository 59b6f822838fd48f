"""One launch of a system on the emulated cluster: a step at full speed, then steps at the workers' and cards' rates."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.emulated_cluster import EmulatedCluster, Run
from benchmarks.emulated_cluster.nursery import Nursery
from benchmarks.side_by_side.pace import SPEED
from benchmarks.side_by_side.predict import predict_pipeline
from benchmarks.side_by_side.preset import EMPTY, Overrides, System, resolve
from disagmoe.config.checks import build_layout
from disagmoe.layout import Role

ROOT = Path(__file__).parents[2]
PRELOADED = ("disagmoe.trainer", "benchmarks.side_by_side.preload")
_LIMIT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Means over the measured steps of one launch. Seconds and bytes of a step; a worker's are means over workers."""

    step_s: float
    pipeline_s: float
    """Forward and backward passes."""
    compute_s: float
    exposed_comm_s: float
    idle_s: float
    sent_bytes: float
    """Payload of a worker."""
    nic_bytes: float
    """What the busiest node's card sent, with headers and the summing of gradients."""
    peak_memory_bytes: float
    """Most resident memory of a worker since its process began."""
    tokens_per_s: float
    predicted_step_s: float
    """Simulated passes on this launch's measured costs, and what was measured outside them."""
    transfers_cost_s: float
    """What transfers add to the passes: simulated on the measured costs, less the same with transfers of no time."""
    loss: float
    """Of the last step."""
    start_s: float
    """Until the end of the first step, at full speed."""


def launch(
    cluster: EmulatedCluster,
    nursery: Nursery,
    system: System,
    *,
    num_steps: int,
    speed: float = 1.0,
    keep_profile: Path | None = None,
) -> Launch:
    """Train one step at full speed and `num_steps` at the workers' `speed` and under the cluster's quotas.

    keep_profile: where to put the measured costs.
    Raises:
        RuntimeError: the run failed; with the end of its output.
    """
    with tempfile.TemporaryDirectory(prefix="side_by_side_") as scratch:
        folder, log, profile = Path(scratch, "run"), Path(scratch, "log"), Path(scratch, "costs.json")
        rates = cluster.spec.nics_bit_per_s
        cluster.limit_network([0.0] * len(rates))
        started = time.monotonic()
        run = cluster.start_forked(
            nursery,
            "disagmoe.train",
            [f"--config-file={EMPTY}", *system.arguments, *_options(system, num_steps, folder, profile)],
            log=log,
            cwd=ROOT,
            environment={SPEED: str(speed)} if speed < 1.0 else {},
            throttle_when=folder / "metrics.jsonl",
        )
        try:
            times, sent = _follow(run, cluster, folder / "metrics.jsonl", lambda: cluster.limit_network(rates))
            code = run.wait(_LIMIT_S)
        except BaseException:
            run.kill()
            raise
        finally:
            cluster.limit_network(rates)
        if code or len(times) != 1 + num_steps:
            text = log.read_text() if log.exists() else ""
            raise RuntimeError(f"{system.name}: the run failed with exit code {code}:\n{text[-3000:]}")
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]
        if keep_profile is not None:
            shutil.copy(profile, keep_profile)
        node_bytes = [(last - first) / num_steps for first, last in zip(sent[0], sent[-1], strict=True)]
        return _summary(system.overrides, lines, max(node_bytes), profile, times[0] - started)


def _options(system: System, num_steps: int, folder: Path, profile: Path) -> list[str]:
    options = {
        "training.steps": 1 + num_steps,
        "metrics.timeline_step": 0,
        "metrics.tensorboard": "false",
        "lr_scheduler.warmup_steps": 0,
        "metrics.profile_costs": profile,
        "dump_folder": folder,
    }
    return [f"--{key}={value}" for key, value in options.items()]


def _follow(
    run: Run, cluster: EmulatedCluster, path: Path, after_first_step: Callable[[], None]
) -> tuple[list[float], list[list[int]]]:
    """Until the run ends: when each step was reported, and what each node had sent by then.

    after_first_step: called at once when that has been reported.
    """
    times: list[float] = []
    sent: list[list[int]] = []
    first_ranks = range(0, cluster.spec.world_size, cluster.spec.workers_per_node)
    deadline = time.monotonic() + _LIMIT_S
    while run.alive and time.monotonic() < deadline:
        run.poll()
        count = path.read_text().count("\n") if path.exists() else 0
        if count > len(times):
            times.append(time.monotonic())
            if len(times) == 1:
                after_first_step()  # takes a tenth of a second, in which the next step reads data and begins to compute
            try:
                sent.append([_sent_bytes(run.processes[rank].pid) for rank in first_ranks])
            except OSError:  # a worker has ended already
                sent.append(cluster.sent_bytes())
        time.sleep(0.004)
    return times, sent


def _sent_bytes(pid: int) -> int:
    """What the card of a worker's node has sent; cheaper than asking `ip`."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    raise OSError(f"process {pid} sees no eth0")


def _summary(
    overrides: Overrides, lines: Sequence[dict[str, Any]], nic_bytes: float, profile: Path, start_s: float
) -> Launch:
    layout = build_layout(resolve(overrides).config)
    count = {role: sum(worker.role is role for worker in layout.workers) for role in Role}

    def workers(key: str) -> float:
        """Mean over all workers and measured steps."""
        return mean(
            sum(line.get(f"{role.value}.{key}.mean", 0.0) * count[role] for role in Role) / sum(count.values())
            for line in lines
        )

    predicted = predict_pipeline(overrides, profile)
    step_s, pipeline_s = (mean(line[key] for line in lines) for key in ("step_time_s", "pipeline_time_s"))
    return Launch(
        step_s=step_s,
        pipeline_s=pipeline_s,
        compute_s=workers("compute_s"),
        exposed_comm_s=workers("exposed_comm_s"),
        idle_s=workers("idle_s"),
        sent_bytes=workers("sent_bytes"),
        nic_bytes=nic_bytes,
        peak_memory_bytes=max(line.get(f"{r.value}.peak_memory_bytes.max", 0.0) for line in lines for r in Role),
        tokens_per_s=mean(line["tokens"] for line in lines) / step_s,
        predicted_step_s=predicted.passes_s + step_s - pipeline_s,
        transfers_cost_s=predicted.passes_s - predicted.without_transfers_s,
        loss=lines[-1]["loss"],
        start_s=start_s,
    )


def quiet_threads() -> None:
    """Before a nursery is made: compute libraries decide about threads when they are imported."""
    os.environ.update({"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"})
