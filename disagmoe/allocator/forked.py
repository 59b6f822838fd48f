"""Several long computations at once, on as many cores as there are."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

_T = TypeVar("_T")


def at_once(calls: Sequence[Callable[[], _T]], *, fork: bool = True) -> list[_T]:
    """What each call returns, in order. All but the first run in forked processes, where a core is left for them.

    fork: False: one after the other, for calls that need much memory.

    For pure functions: what a call changes elsewhere, such as caches, is lost. Results travel by pickle.

    Raises:
        What a call raises; of several, the first one's.
        RuntimeError: a process ended without an answer.
    """
    free = _cores() - 1 if fork else 0
    if len(calls) < 2 or not free:
        return [call() for call in calls]
    helped = calls[1 : 1 + free]
    started = [_start(call) for call in helped]
    try:
        first = calls[0]()
        return [first, *(_answer(*one) for one in started), *(call() for call in calls[1 + free :])]
    finally:
        for process, receiver in started:
            process.kill()
            process.join()
            receiver.close()


def _cores() -> int:
    """That this process may use; 1 where that can't be asked, or processes can't be forked."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") and hasattr(os, "fork") else 1


_Started = tuple[BaseProcess, Connection]


def _start(call: Callable[[], object]) -> _Started:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_run, args=(call, sender), daemon=True)
    process.start()
    sender.close()
    return process, receiver


def _run(call: Callable[[], object], sender: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C goes to all processes; the first one reports it
    try:
        answer = (True, call())
    except Exception as error:
        answer = (False, error)
    sender.send(answer)
    sender.close()


def _answer(process: BaseProcess, receiver: Connection) -> Any:
    try:
        good, value = receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"a process of the search ended with exit code {process.exitcode}") from None
    if not good:
        raise value
    return value
