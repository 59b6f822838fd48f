"""The recorder and the trace file."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from disagmoe.observability import Event, Timeline, write_chrome_trace
from disagmoe.observability.timeline import COMPUTE, TRANSFER, WAIT, clock_offset_s


def test_only_the_chosen_step_is_recorded() -> None:
    ticks = iter(range(100))
    timeline = Timeline(recorded_step=2, clock=lambda: float(next(ticks)))
    for step in (1, 2, 3):
        timeline.begin_step(step)
        timeline.record("0F0", COMPUTE, 5.0, 6.0, step=step)
        with timeline.span("0RECV_F0", WAIT, peer="r0.A0.0"):
            pass
    assert timeline.events == [
        Event("0F0", COMPUTE, 5.0, 6.0, {"step": 2}),
        Event("0RECV_F0", WAIT, 0.0, 1.0, {"peer": "r0.A0.0"}),
    ]
    assert next(ticks) == 2  # the clock is not read while off
    assert pickle.loads(pickle.dumps(timeline.events)) == timeline.events


def test_a_span_that_raises_is_recorded_and_zero_means_never() -> None:
    timeline = Timeline(recorded_step=1)
    timeline.begin_step(1)
    with pytest.raises(KeyError), timeline.span("0F0", COMPUTE):
        raise KeyError
    assert len(timeline.events) == 1
    never = Timeline()
    never.begin_step(0)
    assert not never.enabled


def test_trace(tmp_path: Path) -> None:
    attn = [Event("0F0", COMPUTE, 10.0, 10.5, {"microbatch": 0}), Event("0SEND_F0", TRANSFER, 10.5, 10.8, {})]
    ffn = [
        Event("b", TRANSFER, 3.0, 4.0, {}),
        Event("a", TRANSFER, 2.5, 3.5, {"bytes": 7}),
        Event("c", TRANSFER, 3.5, 4.5, {}),
        Event("1F0", COMPUTE, 4.0, 5.0, {}),
        Event("step", "other", 2.0, 5.0, {}),
    ]
    path = tmp_path / "new" / "timeline.json"
    write_chrome_trace(path, {0: attn, 1: ffn, 2: []}, {0: "r0.A0.0", 1: "r0.F0.0"}, {1: 8.0})
    trace = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in trace if e["name"] == "process_name"}
    assert names == {0: "r0.A0.0", 1: "r0.F0.0", 2: "rank 2"}
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    assert rows == {
        (0, 0): "compute",
        (0, 1): "transfer",
        (1, 0): "compute",
        (1, 1): "transfer",
        (1, 2): "transfer 2",
        (1, 3): "other",
    }
    events = {e["name"]: e for e in trace if e["ph"] == "X"}
    # Rank 1's clock is 8 s behind, so that its first event, at 2.0, is also the first of all.
    assert events["step"]["ts"] == 0 and events["step"]["dur"] == 3e6
    assert events["0F0"]["ts"] == 0 and events["0F0"]["args"] == {"microbatch": 0}
    assert (events["a"]["tid"], events["b"]["tid"], events["c"]["tid"]) == (1, 2, 1)
    assert events["a"]["ts"] == 0.5e6 and events["a"]["cat"] == "transfer"
    assert [p.name for p in path.parent.iterdir()] == ["timeline.json"]


def test_trace_of_nothing(tmp_path: Path) -> None:
    write_chrome_trace(tmp_path / "timeline.json", {}, {})
    assert json.loads((tmp_path / "timeline.json").read_text())["traceEvents"] == []


def test_clock_offset_takes_the_quickest_trip() -> None:
    assert clock_offset_s([(0.0, 100.0, 9.0), (10.0, 110.5, 10.2)]) == pytest.approx(-100.4)
