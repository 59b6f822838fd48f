"""What a run tells: metrics, console, TensorBoard, memory. `disagmoe.trace` writes the timeline of a step.

    metrics.py    the list of all metrics (docs/metrics.md), role metrics, MFU
    routing.py    expert load, dead experts
    logger.py     metrics.jsonl, event files and console.py's line a step
    progress.py   remaining time
    memory.py     peak memory

Nothing here communicates: the trainer gathers over ranks and hands the result to rank 0's logger.
"""

from __future__ import annotations

from disagmoe.observability.logger import MetricsLogger
from disagmoe.observability.progress import Progress
from disagmoe.trace import Event, write_chrome_trace

__all__ = ["Event", "MetricsLogger", "Progress", "write_chrome_trace"]
