"""Workers as devices of a lower speed: what a worker computes takes its CPU time divided by the speed.

A CPU quota is no slow device. Who has waited finds a fresh one, and a piece of work that fits into it runs at full
speed: a system that waits at every layer computes its steps for less than one that does not wait. Here a worker sleeps
after each piece of work, before anybody may see its result, until as much time has passed as the piece would have
taken a device that runs at `speed` times this machine's. A piece lasts from one transfer, wait or action to the next.
The time for which the machine made a worker wait for a core is part of that, so a busy machine does not slow it down.

Moving data costs a worker nothing, as with cards that do so by themselves; packing it does.

`install` wraps the few functions through which the trainer's compute meets the rest of the world. Sleeping counts as
what the worker was doing: compute inside of compute actions.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from disagmoe.parallelisms.clock import StepClock
from disagmoe.parallelisms.expert_parallel.exchange import Exchange
from disagmoe.parallelisms.transfer.channel import Channel
from disagmoe.trainer import Trainer

SPEED = "EMULATED_SPEED"
"""Environment variable of a worker: its speed, as a share of this machine's."""
FIRST_STEP = 2
"""Steps before run at full speed."""
_COLLECTIVES = ("all_reduce", "all_gather", "all_gather_object", "gather_object", "broadcast_object_list", "barrier")


class Pacer:
    """Keeps the books of one worker's main thread.

    Args:
        speed: above 0, at most 1; 1 is full speed.
        cpu_s, wall_s, sleep: clocks in seconds, and how to wait (for tests).
    Raises:
        ValueError: The speed is out of range.
    """

    def __init__(
        self,
        speed: float,
        *,
        cpu_s: Callable[[], float] = time.thread_time,
        wall_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not 0.0 < speed <= 1.0:
            raise ValueError(f"speed = {speed:g}: must be above 0 and at most 1")
        self._speed = speed
        self._cpu_s, self._wall_s, self._sleep = cpu_s, wall_s, sleep
        self._late_s = 0.0
        self.mark()

    def mark(self) -> None:
        """What happened since the last piece of work was none."""
        self._cpu_from_s, self._wall_from_s = self._cpu_s(), self._wall_s()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What happens inside is not part of the piece of work."""
        cpu_s, wall_s = self._cpu_s(), self._wall_s()
        try:
            yield
        finally:
            self._cpu_from_s += self._cpu_s() - cpu_s
            self._wall_from_s += self._wall_s() - wall_s

    def pay(self) -> None:
        """The end of a piece of work: wait until a device of this speed would have done it."""
        wall_s = self._wall_s()
        due_s = (self._cpu_s() - self._cpu_from_s) / self._speed - (wall_s - self._wall_from_s) - self._late_s
        if due_s > 0.0:
            self._sleep(due_s)
            # Sleeps are a little too long, and a busy machine is late: made up for at the next piece.
            self._late_s = self._wall_s() - wall_s - due_s
        else:
            self._late_s = -due_s
        self.mark()


_pacer: Pacer | None = None


def install() -> None:
    """Wrap the trainer, once a process; without effect on workers that no speed is set for."""
    Trainer.train_step = _paced_step(Trainer.train_step)  # type: ignore[method-assign]
    Trainer._report = _before(Trainer._report)  # type: ignore[method-assign]
    StepClock.span = _paced_span(StepClock.span)  # type: ignore[method-assign]
    Channel.send = _before(Channel.send)  # type: ignore[method-assign]
    Channel.take = _around(Channel.take)  # type: ignore[method-assign]
    Exchange.start = _before(Exchange.start)  # type: ignore[method-assign]
    Exchange.start_sized = _before(Exchange.start_sized)  # type: ignore[method-assign]
    Exchange.wait = _around(Exchange.wait)  # type: ignore[method-assign]
    for name in _COLLECTIVES:
        setattr(dist, name, _around(getattr(dist, name)))
    for name in ("isend", "irecv"):
        setattr(dist, name, _free(getattr(dist, name)))


def _paced_step(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def paced(trainer: Trainer, number: int) -> Any:
        global _pacer
        if number == FIRST_STEP and SPEED in os.environ:
            _pacer = Pacer(float(os.environ[SPEED]))
        if _pacer is not None:
            _pacer.mark()
        return step(trainer, number)

    return paced


def _paced_span(span: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    def paced(*args: Any, **kwargs: Any) -> Iterator[None]:
        if _pacer is not None:
            _pacer.pay()
        with span(*args, **kwargs):
            yield
            if _pacer is not None:
                _pacer.pay()

    return paced


def _before(function: Callable[..., Any]) -> Callable[..., Any]:
    """What it hands over has been made at the worker's speed."""

    @functools.wraps(function)
    def paced(*args: Any, **kwargs: Any) -> Any:
        if _pacer is not None:
            _pacer.pay()
        return function(*args, **kwargs)

    return paced


def _around(function: Callable[..., Any]) -> Callable[..., Any]:
    """It waits."""

    @functools.wraps(function)
    def paced(*args: Any, **kwargs: Any) -> Any:
        if _pacer is None:
            return function(*args, **kwargs)
        _pacer.pay()
        try:
            return function(*args, **kwargs)
        finally:
            _pacer.mark()

    return paced


def _free(function: Callable[..., Any]) -> Callable[..., Any]:
    """It moves data; called on helping threads too, whose time does not count."""

    @functools.wraps(function)
    def free(*args: Any, **kwargs: Any) -> Any:
        if _pacer is None or threading.current_thread() is not threading.main_thread():
            return function(*args, **kwargs)
        with _pacer.pause():
            return function(*args, **kwargs)

    return free
