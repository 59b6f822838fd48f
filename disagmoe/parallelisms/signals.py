"""Signals that tell a process to end: at once, or, where checkpoints are on, at the end of a step."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable
from select import select

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
REQUESTS = (signal.SIGTERM, signal.SIGUSR1)
"""Of these, the ones that schedulers announce a run's end by."""


class Signals:
    """Receives signals, also while the main thread is inside a call that does not return.

    Attributes:
        number: The signal to end by; 0: none.
        request: (signal, monotonic time) of the first request to end at the end of a step; None: there was none.
    """

    def __init__(self) -> None:
        self.number = 0
        self.request: tuple[int, float] | None = None
        self.grace_s: float | None = None
        """How long a request may take; None: there are no requests, every signal ends the process at once."""
        self._old_handlers: dict[int, Callable[..., object] | int | None] = {}
        # A byte here wakes whoever waits; signals write theirs.
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)

    def catch(self, *, but: frozenset[int]) -> None:
        """Take over all of `SIGNALS` that are not ignored, `but` these. From the main thread."""
        for number in SIGNALS:
            if number not in but and signal.getsignal(number) is not signal.SIG_IGN:
                self._old_handlers[number] = signal.signal(number, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._wake_out.fileno(), warn_on_full_buffer=False)

    def wake(self) -> None:
        """End a `wait` of another thread."""
        with contextlib.suppress(OSError):
            self._wake_out.send(b"\0")

    def wait(self, seconds: float) -> list[int]:
        """Signals that came, within `seconds` or until woken."""
        if not select([self._wake_in], [], [], seconds)[0]:
            return []
        return [number for number in self._wake_in.recv(64) if number in SIGNALS]

    def is_request(self, number: int) -> bool:
        """Whether a signal only asks to end at the end of a step."""
        return number in REQUESTS and self.grace_s is not None

    def ask(self, number: int) -> None:
        """Note a request; the time counts from the first one."""
        self.request = self.request or (number, time.monotonic())

    def enforce(self) -> None:
        """Turn a request that has taken too long into a signal to end by."""
        if self.request is not None and time.monotonic() - self.request[1] > (self.grace_s or 0.0):
            self.number = self.request[0]

    def describe(self) -> str:
        """E.g. `stopped by SIGTERM`."""
        text = f"stopped by {signal.Signals(self.number).name}"
        if self.request is not None and self.number in REQUESTS:
            text += f" after [checkpoint] grace_s = {self.grace_s:g} s, before the end of the step and its checkpoint"
        return text

    def close(self) -> None:
        """Give the signals back. From the main thread."""
        if self._old_handlers:
            signal.set_wakeup_fd(-1)
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)
        self._wake_in.close()
        self._wake_out.close()
