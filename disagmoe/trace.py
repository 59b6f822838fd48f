"""Who did what when, as a Chrome trace: open it in https://ui.perfetto.dev or chrome://tracing.

The same for what a run has recorded and for what the simulator has computed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

CATEGORIES = ("compute", "exposed communication", "idle", "send", "post receive")
"""In the order of their rows. Others are allowed and come after them."""


class Event(NamedTuple):
    """Plain values, so that a list of events can be sent to another process."""

    name: str
    category: str
    start_s: float
    end_s: float
    args: dict[str, Any]


def write_chrome_trace(
    path: Path | str,
    events_by_rank: Mapping[int, Sequence[Event]],
    rank_names: Mapping[int, str],
    clock_offsets_s: Mapping[int, float] | None = None,
) -> None:
    """Write a trace with a process a rank and a row a category.

    Events of one category that overlap in time (several transfers under way) get rows of their own. The file appears
    whole or not at all.

    Args:
        rank_names: e.g. `r0.A0.1`; ranks without a name show their number.
        clock_offsets_s: added to the times of each rank; 0 where missing.
    """
    offsets = clock_offsets_s or {}
    starts_s = (e.start_s + offsets.get(rank, 0.0) for rank, events in events_by_rank.items() for e in events)
    origin_s = min(starts_s, default=0.0)
    trace: list[dict[str, Any]] = []
    for rank, events in sorted(events_by_rank.items()):
        trace += _process_entries(rank, rank_names.get(rank, f"rank {rank}"), events, offsets.get(rank, 0.0) - origin_s)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".part")
    partial.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": trace}))
    os.replace(partial, target)


def _process_entries(rank: int, name: str, events: Sequence[Event], shift_s: float) -> list[dict[str, Any]]:
    def metadata(kind: str, row: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": rank, "tid": row, "args": args}

    entries = [metadata("process_name", 0, name=name), metadata("process_sort_index", 0, sort_index=rank)]
    categories = [*CATEGORIES, *sorted({event.category for event in events} - set(CATEGORIES))]
    next_row = 0
    for category in categories:
        lanes = _lanes([event for event in events if event.category == category])
        for lane, lane_events in enumerate(lanes):
            row = next_row + lane
            entries.append(metadata("thread_name", row, name=category if lane == 0 else f"{category} {lane + 1}"))
            entries.append(metadata("thread_sort_index", row, sort_index=row))
            entries += [
                {
                    "ph": "X",
                    "name": event.name,
                    "cat": category,
                    "pid": rank,
                    "tid": row,
                    "ts": round((event.start_s + shift_s) * 1e6, 3),
                    "dur": round((event.end_s - event.start_s) * 1e6, 3),
                    "args": event.args,
                }
                for event in lane_events
            ]
        next_row += len(lanes)
    return entries


def _lanes(events: Sequence[Event]) -> list[list[Event]]:
    """Fewest lists of events that don't overlap within a list (first fit by start time)."""
    lanes: list[list[Event]] = []
    for event in sorted(events, key=lambda e: (e.start_s, e.end_s)):
        for lane in lanes:
            if lane[-1].end_s <= event.start_s:
                lane.append(event)
                break
        else:
            lanes.append([event])
    return lanes
