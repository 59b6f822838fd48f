"""The pure functions behind the metrics."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from disagmoe.layout import Role
from disagmoe.observability import Progress
from disagmoe.observability.memory import peak_memory_bytes, reset_peak_memory
from disagmoe.observability.metrics import all_keys, check_key, expert_load_key, mfu, role_key, role_metrics
from disagmoe.observability.progress import format_duration
from disagmoe.observability.routing import dead_experts, expert_load


def test_keys() -> None:
    keys = all_keys()
    assert len(set(keys)) == len(keys)
    for key in ("loss", "mfu", "attn.compute_s.mean", "ffn.peak_memory_bytes.max", "rows_per_token", "dead_experts"):
        assert key in keys
    for key in (*keys[:10], expert_load_key(0), expert_load_key(93)):
        check_key(key) if "{" not in key else None
    for key in ("expert_load.layer_", "expert_load.layer_x", "expert_load.layer_{layer}", "ffn.compute_s", "Loss"):
        with pytest.raises(ValueError, match="nearest"):
            check_key(key)


def test_role_metrics() -> None:
    result = role_metrics(Role.FFN, {"idle_s": [1.0, 2.0, 6.0], "sent_bytes": [4], "compute_s": []})
    assert result == {
        "ffn.idle_s.mean": 3.0,
        "ffn.idle_s.max": 6.0,
        "ffn.sent_bytes.mean": 4.0,
        "ffn.sent_bytes.max": 4,
    }
    for key in result:
        check_key(key)
    assert role_key(Role.ATTN, "idle_s", "max") == "attn.idle_s.max"


def test_mfu() -> None:
    assert mfu(step_flops=6e12, step_time_s=2.0, num_devices=4, device_flops_per_s=1e12) == pytest.approx(0.75)
    assert mfu(step_flops=6e12, step_time_s=2.0, num_devices=4, device_flops_per_s=0.0) is None


def test_expert_load_and_dead_experts() -> None:
    counts_LE = np.array([[3, 3, 3, 3], [12, 0, 0, 0], [0, 0, 0, 0], [1, 2, 3, 6]])
    assert expert_load(counts_LE) == [1.0, 4.0, 0.0, 2.0]
    assert dead_experts(counts_LE) == 3 + 4


def test_progress_is_not_moved_by_a_slow_step() -> None:
    progress = Progress(num_steps=100, window=5)
    assert progress.eta_s is None
    for step, time_s in enumerate((60.0, 2.0, 2.0, 2.0, 50.0, 2.0), start=1):
        progress.update(step, time_s)
    assert progress.eta_s == 94 * 2.0
    progress.update(101, 2.0)
    assert progress.eta_s == 0


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3600, "1:00:00"), (200_000, "2d 07:33:20")]
)
def test_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_peak_memory() -> None:
    before = peak_memory_bytes()
    assert before > 10 * 2**20
    held = np.ones(64 * 2**20, dtype=np.uint8)
    assert peak_memory_bytes(torch.device("cpu")) >= before
    assert peak_memory_bytes() >= held.nbytes
    reset_peak_memory()
    assert peak_memory_bytes() >= held.nbytes
