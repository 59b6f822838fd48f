"""Long computations side by side: the same answers as one after the other, whatever the number of cores."""

from __future__ import annotations

import os
from functools import partial

import pytest

from disagmoe.allocator import forked
from disagmoe.allocator.forked import at_once


@pytest.fixture(params=[1, 2, 3], ids="{} cores".format)
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(forked, "_cores", lambda: request.param)
    return int(request.param)


def test_answers_come_in_the_order_of_the_calls(cores: int) -> None:
    parent = os.getpid()
    answers = at_once([partial(lambda i: (i, os.getpid()), i) for i in range(5)])
    assert [i for i, _ in answers] == list(range(5))
    assert len({pid for _, pid in answers}) == cores
    assert answers[0][1] == parent
    assert at_once([]) == []


def test_answers_larger_than_a_pipe_arrive(cores: int) -> None:
    assert [len(text) for text in at_once([partial(str.ljust, "", 1 << 20)] * 3)] == [1 << 20] * 3


def test_what_a_call_raises_is_raised(cores: int) -> None:
    def fail() -> int:
        raise ZeroDivisionError("here")

    with pytest.raises(ZeroDivisionError, match="here"):
        at_once([lambda: 1, fail, lambda: 2])
    with pytest.raises(ZeroDivisionError, match="here"):
        at_once([fail, lambda: 1])


def test_a_process_that_dies_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "_cores", lambda: 2)
    with pytest.raises(RuntimeError, match="exit code 7"):
        at_once([lambda: 1, lambda: os._exit(7)])
