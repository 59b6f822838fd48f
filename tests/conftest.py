"""Which tests run: the quick ones always, `full` ones with --full, `gpu` ones where there are devices."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the wide matrices too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--full"):
        for item in items:
            if item.get_closest_marker("full") is not None:
                item.add_marker(pytest.mark.skip(reason="wide matrix: runs with --full"))
    on_gpu = [item for item in items if item.get_closest_marker("gpu") is not None]
    if on_gpu and not _num_gpus():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs CUDA devices, of which this machine has none"))


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
