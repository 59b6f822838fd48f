"""The one exception of the schedules' room."""

from __future__ import annotations


class ScheduleError(ValueError):
    """A schedule is incomplete, out of order, deadlocks or needs more memory than allowed; the message says where."""
