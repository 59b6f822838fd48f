"""Peak memory of this process, for the memory metrics."""

from __future__ import annotations

import resource
import sys

import torch


def peak_memory_bytes(device: torch.device | None = None) -> int:
    """CUDA: most bytes allocated by torch on `device` since the last `reset_peak_memory`.

    CPU (or None): most resident memory of the process since it began, shared libraries included. It only grows, and a
    child starts from what was resident in its parent when it was forked; compare runs, not steps.
    """
    if device is not None and device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # KiB on Linux


def reset_peak_memory(device: torch.device | None = None) -> None:
    """Begin a new peak, e.g. at the start of a step. CPU: nothing, the system's counter can't be reset."""
    if device is not None and device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
