"""Worlds for all tests of this folder, and the largest differences they saw, printed at the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.harness.cases import write_documents
from tests.distributed.harness.compare import WORST
from tests.distributed.harness.worlds import Worlds


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    made = Worlds()
    yield made
    made.close()


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Training text: the same whenever and wherever the tests run."""
    return write_documents(tmp_path_factory.mktemp("data") / "documents.jsonl")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if WORST.seen:
        terminalreporter.section("largest differences from the unsplit model")
    for what, (value, where) in sorted(WORST.seen.items()):
        terminalreporter.line(f"{what}: {value:.1e} ({where})")
