"""How a run ends when a worker fails: nobody hangs, and everybody says whose fault it was.

Every process keeps a one-line *status* (step, action, layer, micro-batch) that outlives it, and runs two threads. The
*heartbeat* talks to the run's store: the failure notice, signs of life. The *guard* looks at what this host knows: the
other processes here, the launcher, signals, how long the store has been silent, how long this process has been in a
collective. The first one to see a failure posts the notice; everyone else finds it there. The main thread asks
`Monitor.check` in each slice of every wait; should it sit in a call that does not return, the guard ends the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from disagmoe.layout import Layout
from disagmoe.parallelisms.heartbeat import NOTICE_KEY, POLL_S, Heartbeat, beat_key, is_alive, is_stopped
from disagmoe.parallelisms.notice import Notice, PeerLost, TransferTimeout, WorkerFailure
from disagmoe.parallelisms.signals import Signals
from disagmoe.parallelisms.status import StatusBoard

__all__ = ["POLL_S", "Monitor", "Notice", "PeerLost", "StatusBoard", "TransferTimeout", "WorkerFailure"]

COLLECTIVE_MARGIN_S = 60.0
"""By how much torch's own limit on collectives exceeds `[comm] timeout_s`: ours says more, so it should come first."""
_GRACE_S = 5.0
_STORE_ANSWER_S = 3.0
_REASON_CHARS = 2000
_DONE_KEY = "disagmoe/done"
_LEFT_KEY = "disagmoe/left"
_ENDED = "ended after: "
"""Begins the last status of a worker that ended because of a notice, which follows: known even without the store."""
_GONE = "its process is gone (killed, or crashed without a word)"
T = TypeVar("T")


class Monitor:
    """Watches the other workers and ends this one when one of them has failed.

    Args:
        store: The run's store; the monitor uses connections of its own (`clone`).
        own_exit: Whether the monitor may end the process. Worlds that run many cases in one process turn it off.
        timeout_s: Longest stay in a collective (see `collective`).
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
        timeout_s: float = float("inf"),
    ) -> None:
        self._layout, self.rank, self.status = layout, rank, status
        self._store = store.clone()  # type: ignore[attr-defined]
        self._heartbeat_timeout_s, self._timeout_s = heartbeat_timeout_s, timeout_s
        self._own_exit = own_exit
        self.patience_s = min(heartbeat_timeout_s + 2 * POLL_S, 17.0)
        """How long a broken connection waits for its cause to become known."""
        self._notice: Notice | None = None
        self._notice_at_s = 0.0
        self._noticed = threading.Event()
        self._said = threading.Lock()
        self._finishing = False
        self._in_collective: tuple[str, float] | None = None
        self._stop = threading.Event()
        self._signals = Signals()
        # torchrun starts the processes; without it, who the parent is says nothing.
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._heart = Heartbeat(
            store=store.clone(),  # type: ignore[attr-defined]
            rank=rank,
            world_size=layout.world_size,
            status=status,
            timeout_s=heartbeat_timeout_s,
            on_notice=lambda text: self._set_notice(Notice(**json.loads(text))) if text else None,
            on_silence=self._silent,
        )
        self._thread = threading.Thread(target=self._run, name="guard", daemon=True)
        self._thread.start()

    # -- names and statuses --------------------------------------------------------------------------------------

    def workers_on(self, rank: int) -> str:
        names = [str(w) for w in self._layout.workers_on(rank)]
        return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"

    def describe(self, rank: int) -> str:
        """E.g. `r0.F0.1 (rank 3, F-worker)`."""
        letters = {w.role.letter for w in self._layout.workers_on(rank)}
        role = f"{letters.pop()}-worker" if len(letters) == 1 else "all roles"
        return f"{self.workers_on(rank)} (rank {rank}, {role})"

    def doing(self, rank: int) -> str:
        """What `rank` was last known to do; on another host, half a second old."""
        if rank == self.rank or rank in self._heart.pid_of_rank:
            text = self.status.read(rank)
            if text.startswith(_ENDED):
                return "nothing any more: it has ended because of a failure"
            if text and is_stopped(self._heart.pid_of_rank.get(rank, 0)):
                return f"{text} (its process is stopped)"
            if text:
                return text
        key = beat_key(rank)
        beat = self._ask(lambda: self._store.get(key).decode() if self._store.check([key]) else "", "")
        return beat.partition(" ")[2] or "unknown"

    # -- for the main thread -------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise `WorkerFailure` if a worker of the run has failed."""
        if self._notice is not None:
            raise WorkerFailure(str(self._notice))

    @property
    def notice(self) -> Notice | None:
        return self._notice

    def wait_until_joined(self, seconds: float) -> None:
        """Wait until every rank has a monitor.

        Raises:
            TransferTimeout: Not all have after so long; the text names them.
        """
        deadline = time.monotonic() + seconds
        while self._heart.num_joined < self._layout.world_size:
            self.check()
            if time.monotonic() > deadline:
                missing = [r for r in range(self._layout.world_size) if not self._store.check([beat_key(r)])]
                names = ", ".join(self.describe(r) for r in missing)
                raise TransferTimeout(f"waited {seconds:g} s for all workers to start; still missing: {names}")
            time.sleep(0.05)

    @contextlib.contextmanager
    def collective(self, text: str) -> Iterator[None]:
        """Around collectives and what leads to them: sets the status, and limits the stay to `timeout_s`."""
        self.status.write(text)
        self.check()
        self._in_collective = (text, time.monotonic())
        try:
            yield
        finally:
            self._in_collective = None

    def report(self, reason: str, *, rank: int | None = None, signal_number: int = 0) -> Notice:
        """Post that `rank` (default: this one) has failed.

        Returns:
            The notice that counts, which may be an earlier one.
        """
        rank = self.rank if rank is None else rank
        reason = " ".join(reason.split())  # one line, whatever it was
        return self._post(
            Notice(
                rank=rank,
                worker=self.describe(rank),
                doing=self.doing(rank),
                reason=reason if len(reason) <= _REASON_CHARS else f"{reason[:_REASON_CHARS]} ...",
                witness=self.rank,
                signal=signal_number,
            )
        )

    def wait_for_notice(self, seconds: float) -> Notice | None:
        """Give the failing worker time to say so itself, so that the cause is reported and not its consequence."""
        self._signals.wake()
        self._noticed.wait(seconds)
        return self._notice

    def say(self, text: str) -> bool:
        """Write this process's last words, once: False if it has said them already."""
        if not self._said.acquire(blocking=False):
            return False
        if self._notice is not None:
            self.status.write(_ENDED + json.dumps(asdict(self._notice)))
        name = self.workers_on(self.rank)
        data = "".join(f"[{name}] {line}\n" if line else "\n" for line in text.splitlines()).encode()
        # In one piece, so that the workers' lines do not mix; not through sys.stderr, whose lock may be taken.
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(2, data) :]
        return True

    def finish(self) -> None:
        """End of a run that went well: wait until every worker has come this far, then stop watching. Collective.

        Raises:
            WorkerFailure: A worker has failed before it came this far.
        """
        self.status.write("finished, waiting for the others")
        size = self._layout.world_size
        self._finishing = True
        with contextlib.suppress(dist.DistError):  # the store's host has finished first
            done = self._store.add(_DONE_KEY, 1)
            while done < size:
                self.check()
                time.sleep(0.02)
                done = self._store.add(_DONE_KEY, 0)
        self.stop()
        self.status.remove()
        with contextlib.suppress(dist.DistError):
            left, deadline = self._store.add(_LEFT_KEY, 1), time.monotonic() + _GRACE_S
            # Rank 0 may host the store, so it leaves last.
            while self.rank == 0 and left < size and time.monotonic() < deadline:
                time.sleep(0.02)
                left = self._store.add(_LEFT_KEY, 0)

    def stop(self) -> None:
        """Stop watching; `finish` does, too. From the main thread."""
        self._stop.set()
        self._signals.wake()
        self._heart.stop()
        self._thread.join(timeout=5.0)
        self._signals.close()

    def catch_signals(self) -> None:
        """Act on a request to stop even while the main thread is inside a collective. Call from the main thread.

        A process alone keeps Python's own behaviour on Ctrl-C.
        """
        self._signals.catch(but=frozenset({signal.SIGINT} if self._layout.world_size == 1 else ()))

    def accept_stop(self, grace_s: float) -> None:
        """From now on SIGTERM and SIGUSR1 only set `stop_requested`, and end this process when it still runs after
        `grace_s` seconds. While a worker has failed, they end it as ever."""
        self._signals.grace_s = grace_s

    @property
    def stop_requested(self) -> bool:
        """Whether this process has been asked to stop at the end of a step."""
        return self._signals.request is not None

    def let_others_read(self) -> None:
        """Before this process ends after a failure: if it hosts the store, the others learn of the notice there."""
        if self.rank == 0 and self._launcher is None and self._layout.world_size > 1:
            time.sleep(2 * POLL_S)

    def leave(self, code: int) -> NoReturn:
        """End this process at once: threads may sit in transfers that never complete."""
        flush = threading.Thread(target=_flush, daemon=True)
        flush.start()
        flush.join(timeout=1.0)  # whoever holds the stream's lock may be stuck
        os._exit(code)

    # -- inside --------------------------------------------------------------------------------------------------

    def _set_notice(self, notice: Notice) -> None:
        if self._notice is None:
            self._notice, self._notice_at_s = notice, time.monotonic()
            self._noticed.set()

    def _post(self, mine: Notice) -> Notice:
        if self._notice is None:
            text = self._ask(lambda: self._store.compare_set(NOTICE_KEY, "", json.dumps(asdict(mine))).decode(), "")
            self._set_notice(Notice(**json.loads(text)) if text else mine)
        assert self._notice is not None
        return self._notice

    def _ask(self, question: Callable[[], T], default: T) -> T:
        """Ask the store something; `default` if it does not answer soon (it may have gone down with its host)."""
        answer: list[T] = []

        def ask() -> None:
            with contextlib.suppress(Exception):
                answer.append(question())

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(timeout=_STORE_ANSWER_S)
        return answer[0] if answer else default

    def _run(self) -> None:
        looked_s = time.monotonic()
        while not self._stop.is_set():
            try:
                self._take_signals(self._signals.wait(POLL_S))
                if self._stop.is_set():
                    return
                now = time.monotonic()
                if now - looked_s > POLL_S + 2.0:  # this process was stopped: the store's silence proves nothing
                    self._heart.last_answer_s = now
                    if self._in_collective is not None:
                        self._in_collective = (self._in_collective[0], now)
                looked_s = now
                if self._notice is None:
                    self._look(now)
                self._maybe_exit()
            except Exception:  # a fault of the guard's own must neither end it nor stay unseen
                if not self._stop.is_set():
                    traceback.print_exc()
                    time.sleep(POLL_S)

    def _take_signals(self, received: list[int]) -> None:
        for number in received:
            if self._signals.is_request(number) and not self._finishing:
                # A launcher sends the same when a worker has failed: that may be known by now.
                self._learn()
                if self._notice is None:
                    self._signals.ask(number)
                    continue
            self._signals.number = number

    def _learn(self) -> None:
        if self._notice is None:
            self._heart.look_now(_STORE_ANSWER_S)
        if self._notice is None:
            self._look(time.monotonic())

    def _look(self, now: float) -> None:
        gone = [rank for rank, pid in list(self._heart.pid_of_rank.items()) if not is_alive(pid)]
        if gone:
            if not self._all_done():
                self._explain_gone(gone)
            return
        if self._launcher is not None and os.getppid() != self._launcher:
            self._report_run("the launcher of this process (torchrun) is gone")
        elif self._heart.error is not None or now - self._heart.last_answer_s > self._heartbeat_timeout_s:
            if not self._finishing:
                silence = f"has not answered for {self._heartbeat_timeout_s:g} s"
                self._report_run(f"the store on the first node {self._heart.error or silence} (launcher or host gone)")
        elif self._in_collective is not None and now - self._in_collective[1] > self._timeout_s:
            self.report(self._late(self._in_collective[0]))

    def _explain_gone(self, gone: list[int]) -> None:
        """Some workers here are gone: the one that said nothing has failed, the others may have ended because of it."""
        said = {rank: text for rank in gone if (text := self.status.read(rank)).startswith(_ENDED)}
        silent = [rank for rank in gone if rank not in said]
        if silent:
            self.report(_GONE, rank=silent[0])
        else:
            self._post(Notice(**json.loads(said[gone[0]].removeprefix(_ENDED))))

    def _late(self, text: str) -> str:
        elsewhere = [
            f"{self.describe(r)}, which is doing: {doing}"
            for r in range(self._layout.world_size)
            if r != self.rank and (doing := self.doing(r)) != text
        ]
        others = "; ".join(elsewhere[:4]) or "nobody is elsewhere"
        return f"waited longer than [comm] timeout_s = {self._timeout_s:g} s in a collective; not there: {others}"

    def _silent(self, rank: int) -> None:
        if self._notice is None and not self._stop.is_set() and not self._all_done():
            limit = f"{self._heartbeat_timeout_s:g} s"
            self.report(f"no sign of life for {limit} (process stopped, host gone or network cut)", rank=rank)

    def _all_done(self) -> bool:
        """Whether everybody has trained to the end, so that processes may go."""
        if not self._finishing:
            return False
        return self._ask(lambda: self._store.add(_DONE_KEY, 0) >= self._layout.world_size, True)

    def _report_run(self, reason: str) -> None:
        self._post(Notice(rank=None, worker="", doing="", reason=reason, witness=self.rank))

    def _maybe_exit(self) -> None:
        if not self._own_exit:
            return
        if self._notice is None and not self._finishing:
            self._signals.enforce()
        told = self._signals.number
        if told and self._notice is None:
            # Launchers stop the others as soon as one has failed: who failed may be known by now.
            self._learn()
            if self._notice is None:
                self.report(self._signals.describe(), signal_number=told)
        notice = self._notice
        # The main thread has a moment to end by itself; much of one only where it can.
        grace_s = _GRACE_S if self._in_collective is None else 2 * POLL_S
        if notice is None or (not told and time.monotonic() - self._notice_at_s < grace_s):
            return
        if notice.signal and told:
            self.say(f"{self._signals.describe()}; it was doing: {self.status.read(self.rank)}")
            self.leave(128 + told)
        if not self.say(str(notice) if notice.rank == self.rank else f"ending: {notice}"):
            # The main thread is about to end the process itself.
            self._stop.wait(_GRACE_S)
        self.let_others_read()
        self.leave(1)


def _flush() -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
