"""The harness itself: quick starts, failures with their reason, and nothing that outlives a failed case."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.distributed.harness.cases import Case, make_config
from tests.distributed.harness.worlds import CaseError, Worlds

LAYOUT = (1, 1, 1, 2)
FAIL = "tests.distributed.harness.hooks:fail"


def case(documents: Path, **fields: object) -> Case:
    config = make_config("qwen3", documents, layout=LAYOUT)
    return Case(config=config, steps=1, **fields)  # type: ignore[arg-type]


def test_worlds_start_quickly(worlds: Worlds) -> None:
    """Once the server is up: about 0.2 s for eight processes; much more is allowed on a busy machine."""
    worlds._world(1)
    if (old := worlds._worlds.pop(8, None)) is not None:
        old.kill()
    start = time.monotonic()
    worlds._world(8)
    assert time.monotonic() - start < 4.0


def test_error_in_a_worker(worlds: Worlds, documents: Path) -> None:
    with pytest.raises(CaseError, match="a deliberate error") as raised:
        worlds.run(case(documents, hook=FAIL, hook_arguments={"how": "raise"}))
    assert "before_action" in str(raised.value), "the traceback"
    worlds.run(case(documents))


def test_worker_that_dies(worlds: Worlds, documents: Path) -> None:
    with pytest.raises(CaseError, match="exit code 7"):
        worlds.run(case(documents, hook=FAIL, hook_arguments={"how": "die"}))
    worlds.run(case(documents))


def test_worker_that_hangs(worlds: Worlds, documents: Path) -> None:
    start = time.monotonic()
    with pytest.raises(CaseError, match="no reply within 2 s") as raised:
        worlds.run(case(documents, hook=FAIL, hook_arguments={"how": "hang"}, timeout_s=2.0))
    assert time.monotonic() - start < 20.0
    assert "in before_action" in str(raised.value), "the stack of the worker that hangs"
    worlds.run(case(documents))
