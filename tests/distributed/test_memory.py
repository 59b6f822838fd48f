"""The memory model against the live tensors of real runs, for the heaviest worker of each role."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagmoe.allocator.memory import group_memories
from disagmoe.cluster import Cluster, Gpu, Link, Nics, Pool
from disagmoe.config.checks import build_layout, model_shape
from disagmoe.config.schema import Config
from disagmoe.layout import Role, Worker
from disagmoe.schedules import make_schedule
from disagmoe.simulator.roofline import AFRoofline, Job, Recompute
from tests.distributed.harness.cases import FAMILIES, Case, make_config
from tests.distributed.harness.worlds import Worlds

TOLERANCE = 0.1
BODY = "tests.distributed.memory_body:peak_live_bytes"
LAYOUTS: list[tuple[tuple[int, int, int, int], int, Recompute]] = [
    ((1, 1, 2, 2), 4, "none"),
    ((1, 1, 1, 2), 4, "ffn"),
    ((2, 2, 1, 1), 4, "full"),
    ((1, 1, 2, 1), 2, "none"),
    ((2, 1, 1, 2), 4, "ffn"),
]
"""(p_A, p_F, M, N), micro-batches, recomputation; micro-batches come out even, so that all are as the largest."""
ANY_CLUSTER = Cluster(
    name="any",
    pools=(
        Pool(
            name="cpu",
            nodes=8,
            gpus_per_node=1,
            gpu=Gpu(name="cpu", memory_bytes=10**9, memory_bytes_per_s=1e9, peak_flops_per_s={"float32": 1e10}),
            fabric=Link(bytes_per_s=1e9, latency_s=0.0),
            nics=Nics(per_node=1, bytes_per_s=1e9, latency_s=0.0),
        ),
    ),
)


def predicted(config: Config) -> dict[Role, float]:
    """By role: peak bytes of its heaviest worker."""
    part, training, shape = config.disagmoe, config.training, model_shape(config)
    layout = build_layout(config)
    job = Job(
        model=shape, cluster=ANY_CLUSTER, seq_len=training.seq_len, global_batch=training.global_batch_size,
        dtype="float32", recompute=part.recompute, param_bytes=4, grad_bytes=4, optimizer_bytes=4,
        shard_optimizer=False,
    )  # fmt: skip
    roofline = AFRoofline(
        job=job, layout=layout, microbatch_samples=training.global_batch_size // part.replicas // part.microbatches
    )
    memories = group_memories(job, roofline, imbalance=1.0, portable=True)
    schedule = make_schedule(layout, shape.is_moe_layer, **part.schedule_options())
    peaks: dict[Role, float] = {}
    for role in Role:
        for group in range(layout.depth_of(role)):
            place = layout.pipeline_group(role, group)
            peaks[role] = max(peaks.get(role, 0.0), memories[place].peak_bytes(schedule.compute[place]))
    return peaks


@pytest.mark.parametrize(
    ("family", "layout", "microbatches", "recompute"),
    [
        pytest.param(family, *case, marks=() if number < 1 else pytest.mark.full)
        for number, case in enumerate(LAYOUTS)
        for family in FAMILIES
    ],
    ids=str,
)
def test_heaviest_worker_of_each_role(
    family: str, layout: tuple[int, int, int, int], microbatches: int, recompute: str, worlds: Worlds, documents: Path
) -> None:
    config = make_config(
        family, documents, layout=layout, microbatches=microbatches, recompute=recompute, global_batch_size=16
    )
    result = worlds.run(Case(config=config, steps=2, body=BODY, timeout_s=200.0))
    measured: dict[Role, int] = {}
    for extra in result.extras:
        worker: Worker = extra["worker"]
        measured[worker.role] = max(measured.get(worker.role, 0), extra["peak"])
    expected = predicted(config)
    ratios = {role.value: expected[role] / measured[role] for role in Role}
    assert all(abs(ratio - 1) <= TOLERANCE for ratio in ratios.values()), ratios
