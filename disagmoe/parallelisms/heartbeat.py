"""The part of failure detection that talks to the run's store, on a thread and a connection of its own.

A store that hangs (its host is gone without a word) blocks this thread for as long as TCP likes; whoever owns it
notices by `last_answer_s`, and must not wait for it.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from torch.distributed.distributed_c10d import Store

from disagmoe.parallelisms.status import StatusBoard

POLL_S = 0.5
NOTICE_KEY = "disagmoe/failure"
_JOINED_KEY = "disagmoe/joined"
_STALL_S = 2.0


class Heartbeat:
    """Says regularly that this rank lives and what it does; listens for the failure notice and to the next rank.

    Args:
        store: A connection for this object alone.
        timeout_s: The next rank counts as gone after so long without a new beat, once it has begun to beat.
        on_notice: Called with the notice's text when there is one.
        on_silence: Called with the rank that has gone silent.
    """

    def __init__(
        self,
        *,
        store: Store,
        rank: int,
        world_size: int,
        status: StatusBoard,
        timeout_s: float,
        on_notice: Callable[[str], None],
        on_silence: Callable[[int], None],
    ) -> None:
        self._store, self._rank, self._world_size, self._status = store, rank, world_size, status
        self._timeout_s, self._on_notice, self._on_silence = timeout_s, on_notice, on_silence
        self._watched = (rank + 1) % world_size
        self._beats = 0
        self._seen: tuple[str, float] = ("", time.monotonic())
        self._last_look_s = time.monotonic()
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._looked = threading.Condition()
        self._num_looks = 0
        self.last_answer_s = time.monotonic()
        """When the store last answered."""
        self.error: str | None = None
        """Why the connection to the store is lost; None while it is not."""
        self.pid_of_rank: dict[int, int] = {}
        """The other processes that run on this host, as far as they have joined."""
        self.num_joined = 0
        self._host_key = f"disagmoe/host/{_host_name()}"
        store.append(self._host_key, f"{rank}:{os.getpid()} ")  # type: ignore[attr-defined]
        store.add(_JOINED_KEY, 1)
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def look_now(self, seconds: float) -> None:
        """Have the thread look, and wait up to `seconds` until it has."""
        with self._looked:
            # The look under way may have read the notice already: the one after it counts.
            wanted = self._num_looks + 2
            deadline = time.monotonic() + seconds
            while self._num_looks < wanted and self.error is None:
                self._wake.set()
                self._looked.wait(0.05)
                if time.monotonic() >= deadline:
                    return

    def stop(self) -> None:
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._look()
            except Exception as error:  # whatever it is: without the store nothing more is learnt
                if not self._stop.is_set():
                    self.error = str(error).splitlines()[0][:200] or type(error).__name__
                return
            self.last_answer_s = time.monotonic()
            with self._looked:
                self._num_looks += 1
                self._looked.notify_all()
            self._wake.wait(POLL_S)
            self._wake.clear()

    def _look(self) -> None:
        now = time.monotonic()
        stalled = now - self._last_look_s > POLL_S + _STALL_S
        self._last_look_s = now
        self._beats += 1
        self._store.set(beat_key(self._rank), f"{self._beats} {self._status.read(self._rank)}")
        if self._store.check([NOTICE_KEY]):
            self._on_notice(self._store.get(NOTICE_KEY).decode())
        if self.num_joined < self._world_size:
            joined = self._store.add(_JOINED_KEY, 0)
            entries = (entry.split(":") for entry in self._store.get(self._host_key).decode().split())
            self.pid_of_rank = {int(r): int(pid) for r, pid in entries if int(r) != self._rank}
            self.num_joined = joined
        if self._watched != self._rank:
            self._listen(stalled)

    def _listen(self, stalled: bool) -> None:
        """Whether the next rank has a new beat. A rank that has not begun yet is none of this method's business."""
        if not self._store.check([beat_key(self._watched)]):
            return
        beat = self._store.get(beat_key(self._watched)).decode().split(" ", 1)[0]
        now = time.monotonic()
        # A process that was itself stopped for a while (or a whole machine) has not listened: start anew.
        if beat != self._seen[0] or stalled:
            self._seen = (beat, now)
        elif now - self._seen[1] > self._timeout_s:
            self._on_silence(self._watched)


def beat_key(rank: int) -> str:
    """Where `rank` says how often its heart has beaten, and, after a blank, what it does."""
    return f"disagmoe/beat/{rank}"


def _host_name() -> str:
    """Equal for processes that see each other's process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()}"


def is_alive(pid: int) -> bool:
    """Whether a process of this host runs or may run again (a zombie does not)."""
    return _state(pid) not in ("", "Z", "X")


def is_stopped(pid: int) -> bool:
    """Whether a process of this host has been stopped by a signal or a debugger."""
    return _state(pid) in ("T", "t")


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""
