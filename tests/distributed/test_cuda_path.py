"""The transfers' CUDA path, played on CPU (`cuda_path`), against the unsplit model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.harness.cases import SGD, Case, make_config
from tests.distributed.harness.compare import assert_same_training
from tests.distributed.harness.worlds import Worlds


@pytest.mark.parametrize(
    ("layout", "schedule", "send_after", "microbatches"),
    [
        pytest.param((1, 1, 2, 2), "deep", 1, 4),
        # Takes transfers in another order than it posts them.
        pytest.param((2, 2, 1, 1), "deep", 0, 13),
        pytest.param((2, 1, 1, 2), "deep", 1, 7, marks=pytest.mark.full),
        pytest.param((1, 2, 2, 1), "plain", 1, 6, marks=pytest.mark.full),
        pytest.param((3, 3, 1, 1), "deep", 1, 9, marks=pytest.mark.full),
    ],
)
def test_same_training(
    worlds: Worlds,
    documents: Path,
    layout: tuple[int, int, int, int],
    schedule: str,
    send_after: int,
    microbatches: int,
) -> None:
    config = make_config(
        "qwen3",
        documents,
        optimizer=SGD,
        layout=layout,
        schedule=schedule,
        send_after=send_after,
        microbatches=microbatches,
    )
    plain = Case(config=config, steps=2)
    played = Case(config=config, steps=2, hook="tests.distributed.cuda_path:play_cuda")
    result = worlds.run(played)
    assert_same_training(result, worlds.reference(plain), optimizer="SGD", where=f"CUDA path {layout} {schedule}")
    assert all(result.extras), "no transfer took the path"
