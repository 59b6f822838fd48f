"""What a step was like, gathered from all workers: two collectives a step, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from disagmoe.engine import Engine
from disagmoe.layout import Layout, Role
from disagmoe.observability import metrics
from disagmoe.observability.memory import peak_memory_bytes
from disagmoe.observability.routing import dead_experts, expert_load

_PER_WORKER = (
    metrics.COMPUTE_S,
    metrics.EXPOSED_COMM_S,
    metrics.IDLE_S,
    metrics.SENT_BYTES,
    metrics.PEAK_MEMORY_BYTES,
    metrics.TRANSFER_S,
)


class RouterTable:
    """Router statistics of all MoE layers, summed over owners and replicas; drives the bias and the metrics.

    Args:
        moe_layers: Indices of the MoE layers in the unsplit model.
        num_experts: Most experts of a layer.
    """

    def __init__(self, moe_layers: Sequence[int], num_experts: int) -> None:
        self._row = {layer: row for row, layer in enumerate(moe_layers)}
        self._num_experts = num_experts
        self.table = torch.zeros(len(moe_layers), num_experts + 3, dtype=torch.float64)

    def gather(self, engine: Engine) -> None:
        """Sum this step's statistics over the world and start the next step's. Collective."""
        self.table.zero_()
        for router in engine.routers:
            row = self.table[self._row[router.layer]]
            counts_E = router.stats.tokens_per_expert_E
            row[: counts_E.numel()] += counts_E.cpu()
            row[-3] += float(router.stats.entropy_sum)
            row[-2] += router.stats.num_tokens
            row[-1] += router.stats.num_rows
            router.stats.reset()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self.table)

    def counts(self, layer: int) -> Tensor:
        """float32 [E]: tokens of the step by expert."""
        return self.table[self._row[layer], : self._num_experts].to(torch.float32)

    def values(self) -> dict[str, float]:
        """The router metrics of the step."""
        counts_LE = self.table[:, : self._num_experts].numpy()
        values = dict(zip(map(metrics.expert_load_key, self._row), expert_load(counts_LE), strict=True))
        entropy, tokens, rows = self.table[:, -3:].sum(0).tolist()
        values[metrics.DEAD_EXPERTS] = dead_experts(counts_LE)
        if tokens:
            values[metrics.ROUTER_ENTROPY] = entropy / tokens
            if rows:
                values[metrics.ROWS_PER_TOKEN] = rows / tokens
        return values


def gather_workers(
    engine: Engine,
    *,
    layout: Layout | None,
    loss: Tensor | None,
    step_time_s: float,
    pipeline_time_s: float,
    sent_bytes: int,
    device: torch.device,
    stop: bool = False,
) -> tuple[dict[str, float], bool]:
    """Loss of the whole step, the slowest worker's step time, and the role metrics. Collective.

    Args:
        stop: Whether this process has been asked to stop.

    Returns: the values, and whether any process has been asked to stop, on which all agree by this.
    """
    clock = engine.clock
    clock.settle()
    own = torch.tensor(
        [
            0.0 if loss is None else float(loss),
            step_time_s,
            pipeline_time_s,
            clock.compute_s,
            clock.exposed_comm_s,
            clock.idle_s,
            float(sent_bytes),
            float(peak_memory_bytes(device)),
            clock.transfer_s,
            float(stop),
        ],
        dtype=torch.float64,
    )
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    everyone = [torch.empty_like(own) for _ in range(world_size)]
    if world_size > 1:
        dist.all_gather(everyone, own)
    else:
        everyone = [own]
    table = torch.stack(everyone)
    values = {
        metrics.LOSS: float(table[:, 0].sum()),
        metrics.STEP_TIME_S: float(table[:, 1].max()),
        metrics.PIPELINE_TIME_S: float(table[:, 2].max()),
    }
    for role in Role:
        if layout is None:
            ranks = [0] if role is Role.ATTN else []
        else:
            ranks = [r for r in range(world_size) if any(w.role is role for w in layout.workers_on(r))]
        per_worker = {key: table[ranks, 3 + i].tolist() for i, key in enumerate(_PER_WORKER)}
        values |= metrics.role_metrics(role, per_worker)
    return values, bool(table[:, -1].any())
