"""A step's time: compute less the waits inside it, exposed communication, idleness."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from disagmoe.parallelisms.clock import StepClock


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The time, to be set by the test."""
    time_s = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: time_s[0])
    yield time_s


def test_compute_excludes_waits(now: list[float]) -> None:
    clock = StepClock()
    with clock.span("compute", "3F0"):
        now[0] = 1.0
        # Waited from 1 to 4; the sender handed over at 3.
        clock.waited("rows", 1.0, 4.0, 3.0)
        now[0] = 6.0
    with clock.span("send", "3SEND_F0"):
        now[0] = 7.0
    assert (clock.compute_s, clock.exposed_comm_s, clock.idle_s) == (3.0, 1.0, 2.0)


@pytest.mark.parametrize(
    ("sent_at_s", "exposed_s"),
    [
        (0.0, 0.0),  # nothing was sent: all of it is idleness
        (5.0, 4.0),  # handed over before the wait began: all of it is communication
        (12.0, 2.0),
        (14.5, 0.0),  # clocks that disagree: never negative
    ],
)
def test_waits_have_two_parts(sent_at_s: float, exposed_s: float) -> None:
    clock = StepClock()
    clock.waited("rows", 10.0, 14.0, sent_at_s)
    assert clock.exposed_comm_s == pytest.approx(exposed_s)
    assert clock.idle_s == pytest.approx(4.0 - exposed_s)


def test_spans_are_kept_while_recording(now: list[float]) -> None:
    clock = StepClock()
    with clock.span("compute", "unseen"):
        now[0] = 1.0
    clock.recording = True
    with clock.span("compute", "3F0"):
        clock.waited("rows", 1.0, 4.0, 3.0)
        now[0] = 5.0
    spans = {(s.category, s.name): (s.start_s, s.end_s) for s in clock.spans}
    assert spans == {
        ("compute", "3F0"): (1.0, 5.0),
        ("idle", "rows"): (1.0, 3.0),
        ("exposed communication", "rows"): (3.0, 4.0),
    }
    clock.reset()
    assert (clock.compute_s, clock.exposed_comm_s, clock.idle_s) == (0.0, 0.0, 0.0)
