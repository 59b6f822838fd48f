"""The one list of what a run reports: keys, units, meaning, and the pure functions that make role metrics.

`docs/metrics.md` is `metrics_markdown()` (a test keeps them equal), and `MetricsLogger` refuses keys that are not in
the list.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from disagmoe.layout import Role


@dataclass(frozen=True, kw_only=True)
class Metric:
    key: str
    """As in metrics.jsonl. `{layer}` stands for a layer's index in the unsplit model."""
    unit: str
    """Empty for pure numbers."""
    meaning: str


STEP = "step"
LOSS = "loss"
GRAD_NORM = "grad_norm"
LR = "lr"
TOKENS = "tokens"
VALID_TOKENS = "valid_tokens"
TOKENS_PER_S = "tokens_per_s"
STEP_TIME_S = "step_time_s"
PIPELINE_TIME_S = "pipeline_time_s"
MFU = "mfu"
ROWS_PER_TOKEN = "rows_per_token"
EXPERT_LOAD = "expert_load.layer_{layer}"
DEAD_EXPERTS = "dead_experts"
ROUTER_ENTROPY = "router_entropy"

METRICS = (
    Metric(key=STEP, unit="", meaning="Optimizer step, from 1."),
    Metric(
        key=LOSS,
        unit="nats a token",
        meaning="Mean cross entropy over the step's valid tokens, before its update, whichever stage computes it.",
    ),
    Metric(key=GRAD_NORM, unit="", meaning="Global L2 norm of the gradients, before clipping; each parameter once."),
    Metric(key=LR, unit="", meaning="Learning rate that the step's update used."),
    Metric(key=TOKENS, unit="tokens", meaning="Input tokens of the step: global_batch_size * seq_len."),
    Metric(
        key=VALID_TOKENS,
        unit="tokens",
        meaning="Those whose prediction counts in the loss: the next token belongs to the same document.",
    ),
    Metric(key=TOKENS_PER_S, unit="tokens/s", meaning="tokens / step_time_s, over all workers."),
    Metric(key=STEP_TIME_S, unit="s", meaning="Wall-clock time of the step, slowest worker, data loading included."),
    Metric(
        key=PIPELINE_TIME_S,
        unit="s",
        meaning="The forward and backward passes' part of it, slowest worker: without data loading, summing gradients, "
        "optimizer and reporting.",
    ),
    Metric(
        key=MFU,
        unit="fraction",
        meaning="Model FLOPs of the step (forward and backward, no recompute) / (step_time_s * peak FLOP/s of all "
        "devices). Only where the devices' peak is known.",
    ),
    Metric(
        key=ROWS_PER_TOKEN,
        unit="rows",
        meaning="Rows sent from attention to experts / (tokens * MoE layers): the average number of F-workers that a "
        "token is routed to. At least 1, at most min(top_k, ffn_workers).",
    ),
    Metric(
        key=EXPERT_LOAD,
        unit="",
        meaning="Tokens of the layer's most loaded expert / mean over its experts. 1: perfectly balanced.",
    ),
    Metric(key=DEAD_EXPERTS, unit="experts", meaning="Experts, over all layers, that no token of the step went to."),
    Metric(
        key=ROUTER_ENTROPY,
        unit="nats",
        meaning="Entropy of the router's probabilities over the experts, mean over tokens and MoE layers. "
        "At most log(experts).",
    ),
)

COMPUTE_S = "compute_s"
EXPOSED_COMM_S = "exposed_comm_s"
IDLE_S = "idle_s"
TRANSFER_S = "transfer_s"
SENT_BYTES = "sent_bytes"
PEAK_MEMORY_BYTES = "peak_memory_bytes"

ROLE_METRICS = (
    Metric(key=COMPUTE_S, unit="s", meaning="Time inside forward and backward computations."),
    Metric(
        key=EXPOSED_COMM_S,
        unit="s",
        meaning="Part of the waiting in which a payload was under way: from when its last sender handed it to the "
        "network until it was here.",
    ),
    Metric(
        key=IDLE_S,
        unit="s",
        meaning="The waiting before that: the senders were not ready (pipeline bubble, slower peers).",
    ),
    Metric(
        key=TRANSFER_S,
        unit="s",
        meaning="Time in which payloads for this worker were under way, waited for or not: 1 - exposed_comm_s / "
        "transfer_s of it was hidden. Transfers of one edge count one after the other. 0 on CUDA.",
    ),
    Metric(key=SENT_BYTES, unit="bytes", meaning="Payload handed to the network, both passes: rows, indices, weights."),
    Metric(
        key=PEAK_MEMORY_BYTES,
        unit="bytes",
        meaning="CUDA: most memory allocated during the step. CPU: most resident memory since the process began.",
    ),
)
"""A value a worker; reported as `<role>.<key>.mean` and `.max` over all workers of the role."""

STATISTICS = ("mean", "max")


def role_key(role: Role, key: str, statistic: str) -> str:
    """E.g. `attn.compute_s.max`."""
    return f"{role.value}.{key}.{statistic}"


def expert_load_key(layer: int) -> str:
    """E.g. `expert_load.layer_3`."""
    return EXPERT_LOAD.format(layer=layer)


def all_keys() -> tuple[str, ...]:
    """Every key; the one for layers with its placeholder."""
    of_roles = (role_key(role, m.key, statistic) for role in Role for m in ROLE_METRICS for statistic in STATISTICS)
    return (*(metric.key for metric in METRICS), *of_roles)


_PLAIN_KEYS = frozenset(key for key in all_keys() if "{" not in key)
_LAYER_KEY = re.compile(re.escape(EXPERT_LOAD.format(layer="#")).replace(r"\#", r"\d+"))


def check_key(key: str) -> None:
    """Raises ValueError, with the nearest key, unless `key` is in the list."""
    if key in _PLAIN_KEYS or _LAYER_KEY.fullmatch(key):
        return
    nearest = difflib.get_close_matches(key, all_keys(), n=1, cutoff=0.0)
    raise ValueError(
        f'metric "{key}": must be a key of disagmoe.observability.metrics; nearest: "{nearest[0]}"; '
        f"add a Metric there to report something new"
    )


def role_metrics(role: Role, per_worker: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Mean and max over a role's workers.

    Args:
        per_worker: for each key of `ROLE_METRICS`, a value a worker. Keys without values give nothing.

    >>> role_metrics(Role.ATTN, {"compute_s": [1.0, 3.0]})
    {'attn.compute_s.mean': 2.0, 'attn.compute_s.max': 3.0}
    """
    result: dict[str, float] = {}
    for key, values in per_worker.items():
        if len(values):
            result[role_key(role, key, "mean")] = sum(values) / len(values)
            result[role_key(role, key, "max")] = max(values)
    return result


def mfu(*, step_flops: float, step_time_s: float, num_devices: int, device_flops_per_s: float) -> float | None:
    """Model FLOPs utilisation in [0, 1]; None where the devices' peak is not known (0).

    >>> mfu(step_flops=3e15, step_time_s=2.0, num_devices=5, device_flops_per_s=1e15)
    0.3
    """
    if device_flops_per_s <= 0 or step_time_s <= 0:
        return None
    return step_flops / (step_time_s * num_devices * device_flops_per_s)


def metrics_markdown() -> str:
    """The text of docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Made from the list in `disagmoe/observability/metrics.py` by its `metrics_markdown()`; change it there.",
        "",
        "`metrics.jsonl` in the dump folder has one JSON object a step with these keys; a value that is not a finite "
        "number is `null`, and a key that a run has no value for is left out. The event files in `tb/` hold the same "
        "numbers every `[metrics] log_freq` steps, with `/` for the first dot (`attn/compute_s.max`), so that "
        "TensorBoard groups them.",
        "",
        "## Of the run",
        "",
        *_markdown_table(METRICS),
        "",
        "## Of each role",
        "",
        "`<role>.<key>.mean` and `<role>.<key>.max` over the workers of a role, `attn` or `ffn`, in all groups and "
        "replicas: for example `ffn.idle_s.max`. Each is of one worker and one step.",
        "",
        *_markdown_table(ROLE_METRICS),
        "",
    ]
    return "\n".join(lines)


def _markdown_table(metrics: Sequence[Metric]) -> list[str]:
    rows = [f"| `{metric.key}` | {metric.unit or '-'} | {metric.meaning} |" for metric in metrics]
    return ["| key | unit | meaning |", "|---|---|---|", *rows]
