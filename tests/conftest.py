"""Which tests run: the quick ones always, others with --full and --exhaustive, `gpu` ones where there are devices."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the wide matrices too")
    parser.addoption("--exhaustive", action="store_true", help="run every combination of the parity matrix too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not (config.getoption("--full") or config.getoption("--exhaustive")):
        _skip(items, "full", "wide matrix: runs with --full")
    if not config.getoption("--exhaustive"):
        _skip(items, "exhaustive", "every combination: runs with --exhaustive")
    if any(item.get_closest_marker("gpu") for item in items) and not _num_gpus():
        _skip(items, "gpu", "needs CUDA devices, of which this machine has none")


def _skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items:
        if item.get_closest_marker(marker) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
