"""The trace file."""

from __future__ import annotations

import json
from pathlib import Path

from disagmoe.observability import Event, write_chrome_trace


def test_trace(tmp_path: Path) -> None:
    attn = [Event("0F0", "compute", 10.0, 10.5, {"microbatch": 0}), Event("0SEND_F0", "send", 10.5, 10.8, {})]
    ffn = [
        Event("b", "send", 3.0, 4.0, {}),
        Event("a", "send", 2.5, 3.5, {"bytes": 7}),
        Event("c", "send", 3.5, 4.5, {}),
        Event("1F0", "compute", 4.0, 5.0, {}),
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
        (0, 1): "send",
        (1, 0): "compute",
        (1, 1): "send",
        (1, 2): "send 2",
        (1, 3): "other",
    }
    events = {e["name"]: e for e in trace if e["ph"] == "X"}
    # Rank 1's clock is 8 s behind, so that its first event, at 2.0, is also the first of all.
    assert events["step"]["ts"] == 0 and events["step"]["dur"] == 3e6
    assert events["0F0"]["ts"] == 0 and events["0F0"]["args"] == {"microbatch": 0}
    assert (events["a"]["tid"], events["b"]["tid"], events["c"]["tid"]) == (1, 2, 1)
    assert events["a"]["ts"] == 0.5e6 and events["a"]["cat"] == "send"
    assert [p.name for p in path.parent.iterdir()] == ["timeline.json"]


def test_trace_of_nothing(tmp_path: Path) -> None:
    write_chrome_trace(tmp_path / "timeline.json", {}, {})
    assert json.loads((tmp_path / "timeline.json").read_text())["traceEvents"] == []
