"""Schedules as data: made by a generator, lowered to sends and receives, proved by `validate`. Never imports torch."""

from __future__ import annotations

from disagmoe.schedules.actions import Action, Kind, Schedule
from disagmoe.schedules.errors import ScheduleError
from disagmoe.schedules.generate import add_transfers, make_fitted, make_order, make_schedule, split_order
from disagmoe.schedules.validate import peak_in_flight, peak_microbatches, validate

__all__ = [
    "Action",
    "Kind",
    "Schedule",
    "ScheduleError",
    "add_transfers",
    "make_fitted",
    "make_order",
    "make_schedule",
    "peak_in_flight",
    "peak_microbatches",
    "split_order",
    "validate",
]
