"""How a run ends when a worker fails: nobody hangs, and everybody says whose fault it was.

Every process keeps a one-line *status* (what it is doing: step, action, layer, micro-batch) in a small memory-mapped
file, and runs a *monitor* thread. The monitor looks once a second at three things: the failure notice in the run's
TCPStore, the processes of its own node (gone?), and the heartbeat of the next rank (host gone, process stopped?). The
first one to see a failure posts the notice; everyone else finds it there. The main thread asks `Monitor.check` in each
slice of every wait; should it sit in a collective that does not return, the monitor ends the process itself.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from disagmoe.layout import Layout

POLL_S = 0.5
_GRACE_S = 5.0
_STATUS_BYTES = 512
_NOTICE_KEY = "disagmoe/failure"


class WorkerFailure(RuntimeError):
    """A worker of this run has failed; the text names it and what it was doing."""


class TransferTimeout(WorkerFailure):
    """A wait on a peer took longer than `[comm] timeout_s`."""


class PeerLost(WorkerFailure):
    """The connection to a peer broke."""


@dataclass(frozen=True, kw_only=True)
class Notice:
    """What the first witness of a failure tells the others."""

    rank: int
    workers: str
    doing: str
    reason: str
    witness: int

    def __str__(self) -> str:
        seen = "" if self.witness == self.rank else f" (seen by rank {self.witness})"
        return f"worker {self.workers} (rank {self.rank}) failed{seen}: {self.reason}; it was doing: {self.doing}"


class StatusBoard:
    """One small memory-mapped file a rank that says what the rank is doing; readable after its process has died."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        path = folder / f"rank_{rank}"
        path.write_bytes(b"\0" * _STATUS_BYTES)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _STATUS_BYTES)

    def write(self, text: str) -> None:
        data = text.encode("utf-8", "replace")[: _STATUS_BYTES - 1]
        self._map[: len(data) + 1] = data + b"\0"

    def read(self, rank: int) -> str:
        """The last status of `rank`; a plain statement if its file is not visible from here."""
        try:
            data = (self._folder / f"rank_{rank}").read_bytes()
        except OSError:
            return "unknown (its status file is not visible from here)"
        return data.split(b"\0", 1)[0].decode("utf-8", "replace") or "starting"


def _is_alive(pid: int) -> bool:
    """Whether a process of this host runs (a zombie does not)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] not in ("Z", "X")


class Monitor:
    """Watches the other workers and ends this one when one of them has failed.

    Args:
        store: The run's TCPStore; the monitor uses a connection of its own (`clone`).
        own_exit: Whether the monitor may end the process. Worlds that run many cases in one process turn it off.
    """

    def __init__(
        self,
        *,
        layout: Layout,
        rank: int,
        store: Store,
        status: StatusBoard,
        heartbeat_timeout_s: float,
        own_exit: bool = True,
    ) -> None:
        self._layout = layout
        self.rank = rank
        self._store = store.clone()
        self.status = status
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._own_exit = own_exit
        self._notice: Notice | None = None
        self._notice_at_s = 0.0
        self._exiting = False
        self._stop = threading.Event()
        self._terminated = False
        self._signal_fd: socket.socket | None = None
        self._pid_of_rank = self._exchange_pids()
        self._watched = (rank + 1) % layout.world_size
        self._last_beat = (-1, time.monotonic())
        self._beats = 0
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self._thread.start()

    def _exchange_pids(self) -> dict[int, int]:
        """Process ids of the ranks on this host."""
        host = socket.gethostname()
        everyone: list[tuple[str, int] | None] = [None] * self._layout.world_size
        if self._layout.world_size > 1:
            dist.all_gather_object(everyone, (host, os.getpid()))
        return {r: e[1] for r, e in enumerate(everyone) if e is not None and e[0] == host and r != self.rank}

    def catch_sigterm(self) -> None:
        """Act on SIGTERM even while the main thread is inside a collective. Call from the main thread."""
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        signal.signal(signal.SIGTERM, lambda _number, _frame: None)
        signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        self._signal_fd, self._keep = ours, theirs

    def workers_on(self, rank: int) -> str:
        names = [str(w) for w in self._layout.workers_on(rank)]
        return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"

    def check(self) -> None:
        """Raise `WorkerFailure` if a worker of the run has failed."""
        if self._notice is not None:
            raise WorkerFailure(str(self._notice))

    @property
    def notice(self) -> Notice | None:
        return self._notice

    def report(self, reason: str, *, rank: int | None = None) -> Notice:
        """Post that `rank` (default: this one) has failed; returns the notice that counts, which may be an earlier one."""
        rank = self.rank if rank is None else rank
        mine = Notice(
            rank=rank,
            workers=self.workers_on(rank),
            doing=self.status.read(rank),
            reason=reason,
            witness=self.rank,
        )
        try:
            first = self._store.compare_set(_NOTICE_KEY, "", json.dumps(asdict(mine)))
            notice = Notice(**json.loads(first))
        except (RuntimeError, ValueError):
            notice = mine  # The store went down with the failed host.
        self._set_notice(notice)
        return notice

    def wait_for_notice(self, seconds: float) -> Notice | None:
        """Give the failing worker time to say so itself, so that the cause is reported and not its consequence."""
        deadline = time.monotonic() + seconds
        while self._notice is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._notice

    def stop(self) -> None:
        """End of a run that went well (call it after a barrier)."""
        self._stop.set()
        self._thread.join(timeout=5.0)

    def leave(self, code: int) -> NoReturn:
        """End this process at once: threads may sit in transfers that never complete."""
        self._exiting = True
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _set_notice(self, notice: Notice) -> None:
        if self._notice is None:
            self._notice, self._notice_at_s = notice, time.monotonic()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._sleep(POLL_S)
            try:
                self._look()
            except (RuntimeError, ValueError, OSError) as error:
                if self._stop.is_set():
                    return
                self._set_notice(
                    Notice(
                        rank=0,
                        workers=self.workers_on(0),
                        doing="unknown",
                        reason=f"the run's store no longer answers ({str(error)[:120]})",
                        witness=self.rank,
                    )
                )
            self._maybe_exit()

    def _sleep(self, seconds: float) -> None:
        if self._signal_fd is None:
            self._stop.wait(seconds)
            return
        if select.select([self._signal_fd], [], [], seconds)[0] and signal.SIGTERM in self._signal_fd.recv(64):
            self._terminated = True

    def _look(self) -> None:
        self._beats += 1
        self._store.set(f"disagmoe/beat/{self.rank}", str(self._beats))
        if self._notice is None and self._store.check([_NOTICE_KEY]):
            text = self._store.get(_NOTICE_KEY).decode()
            if text:
                self._set_notice(Notice(**json.loads(text)))
        if self._notice is not None or self._stop.is_set():
            return
        for rank, pid in self._pid_of_rank.items():
            if not _is_alive(pid):
                self.report("its process is gone (killed, or crashed without a word)", rank=rank)
                return
        self._look_at_heartbeat()

    def _look_at_heartbeat(self) -> None:
        if self._watched == self.rank or not self._store.check([f"disagmoe/beat/{self._watched}"]):
            return
        beat = int(self._store.get(f"disagmoe/beat/{self._watched}"))
        now = time.monotonic()
        if beat != self._last_beat[0]:
            self._last_beat = (beat, now)
        elif now - self._last_beat[1] > self._heartbeat_timeout_s:
            self.report(
                f"no sign of life for {self._heartbeat_timeout_s:.0f} s "
                "(process stopped, host gone or network cut)",
                rank=self._watched,
            )

    def _maybe_exit(self) -> None:
        if not self._own_exit or self._exiting:
            return
        if self._terminated:
            for rank, pid in self._pid_of_rank.items():
                if self._notice is None and not _is_alive(pid):
                    self.report("its process is gone (killed, or crashed without a word)", rank=rank)
            if self._notice is None:
                sys.stderr.write(f"[{self.workers_on(self.rank)}] stopped by SIGTERM: {self.status.read(self.rank)}\n")
                self.leave(143)
            self._notice_at_s = 0.0
        if self._notice is not None and time.monotonic() - self._notice_at_s > _GRACE_S:
            sys.stderr.write(f"[{self.workers_on(self.rank)}] ending: {self._notice}\n")
            self.leave(1)
