"""How far a run is and how long it will take."""

from __future__ import annotations

from collections import deque
from statistics import median


class Progress:
    """Remaining time from the median of recent step times, which a slow first step or a hiccup does not move."""

    def __init__(self, *, num_steps: int, window: int = 21) -> None:
        self._num_steps = num_steps
        self._step = 0
        self._recent_s: deque[float] = deque(maxlen=window)

    def update(self, step: int, step_time_s: float) -> None:
        """Step `step` (from 1) took this long."""
        self._step = step
        self._recent_s.append(step_time_s)

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end of the run; None before the first step."""
        if not self._recent_s:
            return None
        return max(0, self._num_steps - self._step) * median(self._recent_s)


def format_duration(seconds: float) -> str:
    """
    >>> format_duration(9.6), format_duration(3723), format_duration(90_061)
    ('0:10', '1:02:03', '1d 01:01:01')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
