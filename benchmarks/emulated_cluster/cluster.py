"""The emulated cluster and the runs in it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from benchmarks.emulated_cluster import cgroups, network, ownership
from benchmarks.emulated_cluster.nursery import ForkedProcess, Nursery
from benchmarks.emulated_cluster.spec import ClusterSpec

MASTER_PORT = 29500
_GRACE_S = 10.0
"""Once a worker has failed, or the run is to end: how long the others have before they are killed."""
_POLL_S = 0.005
_PR_SET_PDEATHSIG = 1
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def requirements() -> list[str]:
    """What this machine lacks to emulate a cluster; empty if it can."""
    missing = []
    if sys.platform != "linux":
        missing.append("Linux")
    elif os.geteuid() != 0:
        missing.append("root (network namespaces, bridges and CPU quotas are root's to make)")
    missing += [f"the program {name} (package iproute2)" for name in ("ip", "tc") if shutil.which(name) is None]
    if not missing:
        try:
            root = cgroups.find_hierarchy().root
            if not os.access(root, os.W_OK) or os.statvfs(root).f_flag & os.ST_RDONLY:
                missing.append(f"a writable CPU controller ({root} is read-only)")
        except RuntimeError as error:
            missing.append(f"a CPU controller ({error})")
    return missing


class EmulatedCluster:
    """Namespaces, cards and cgroups, from `with` to its end, however that comes about.

    Args:
        spec: what to build.

    Leftovers of clusters whose owner was killed are removed first. SIGINT, SIGTERM and SIGHUP end the block with an
    exception, so that everything is removed. After SIGKILL a guard process does the same.

    Raises:
        RuntimeError: the machine lacks something; says what.
    """

    def __init__(self, spec: ClusterSpec) -> None:
        self.spec = spec
        self.name = ""
        self._runs: list[Run] = []
        self._handlers: dict[int, Any] = {}
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> EmulatedCluster:
        missing = requirements()
        if missing:
            raise RuntimeError(f"an emulated cluster needs {'; '.join(missing)}")
        if not self.spec.charge_transfers and cgroups.find_hierarchy().version != 1:
            text = "transfers count against the CPU quotas: cgroups version 2 limits whole processes"
            print(f"warning: {text}", file=sys.stderr)
        ownership.remove_leftovers()
        for number in _ENDING_SIGNALS:
            self._handlers[number] = signal.signal(number, _raise_exit)
        try:
            self.name = ownership.claim_name()
            self._guard = _start_guard(self.name)
            cgroups.make(self.name, self.spec.world_size)
            network.make(self.name, self.spec)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        """Remove everything. A second Ctrl-C does not stop it half-way."""
        for number in _ENDING_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        try:
            if self.name:
                ownership.remove_everything(self.name)
            for run in self._runs:
                run.reap()
            if self._guard is not None and self._guard.stdin is not None:
                self._guard.stdin.close()
                self._guard.wait(timeout=_GRACE_S)
        finally:
            for changed, handler in self._handlers.items():
                signal.signal(changed, handler)

    def throttle(self) -> None:
        """Put every worker on its CPU quota."""
        for rank in range(self.spec.world_size):
            folder = cgroups.worker(self.name, rank)
            cgroups.set_quota(folder, *self.spec.quota_s(rank))
            if not self.spec.charge_transfers:
                cgroups.exempt_other_threads(folder)

    def release(self) -> None:
        """Let every worker run at full speed."""
        for rank in range(self.spec.world_size):
            cgroups.set_quota(cgroups.worker(self.name, rank), 0.0, self.spec.period_s)

    def limit_network(self, nics_bit_per_s: Sequence[float]) -> None:
        """Give the cards other rates, one a node (0: not limited)."""
        spec = replace(self.spec, nics_bit_per_s=tuple(nics_bit_per_s), cpus=self.spec.cpus)
        if spec.nodes != self.spec.nodes:
            raise ValueError(f"{spec.nodes} rates for {self.spec.nodes} nodes")
        network.limit(self.name, spec)
        self.spec = spec

    def start(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        throttle_when: str | Path | None = None,
        shown_ranks: Sequence[int] = (0,),
        stdout: int | None = None,
    ) -> Run:
        """Start `command` once a worker, each in its node and with torchrun's environment variables.

        Args:
            environment: added to this process's environment.
            cwd: working directory of the workers; this process's if not given.
            throttle_when: workers run at full speed until this file exists and holds something, then under their
                quotas; without it under their quotas from the start. A file that is already there counts at once.
            shown_ranks: whose standard output is passed on; standard error is passed on from all.
            stdout: where to, a file descriptor; this process's standard output if not given.
        """
        run = self._new_run(throttle_when)
        for rank in range(self.spec.world_size):
            run.processes.append(
                subprocess.Popen(
                    list(command),
                    env=dict(os.environ) | self._environment(rank) | dict(environment or {}),
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout if rank in shown_ranks else subprocess.DEVNULL,
                    start_new_session=True,
                    preexec_fn=self._entrance(rank),
                )
            )
        return run

    def run(self, command: Sequence[str], *, timeout_s: float | None = None, **options: Any) -> int:
        """`start` and wait: 0 if every worker ended well, else the exit code of the first that did not.

        Raises:
            TimeoutError: it took longer than `timeout_s`; its workers have been killed.
        """
        return self.start(command, **options).wait(timeout_s)

    def start_forked(
        self,
        nursery: Nursery,
        module: str,
        arguments: Sequence[str],
        *,
        log: Path,
        cwd: Path,
        environment: Mapping[str, str] | None = None,
        throttle_when: str | Path | None = None,
    ) -> Run:
        """As `start` with `python -m module arguments`, in processes that `nursery` forks; all outputs go to `log`."""
        run = self._new_run(throttle_when)
        for rank in range(self.spec.world_size):
            run.processes.append(
                nursery.start(
                    module,
                    arguments,
                    environment=self._environment(rank) | dict(environment or {}),
                    cwd=cwd,
                    log=log,
                    namespace=network.namespace(self.name, self.spec.node_of(rank)),
                    cgroup=cgroups.worker(self.name, rank),
                )
            )
        return run

    def sent_bytes(self) -> list[int]:
        """What each node's card has sent so far, headers included."""
        return [network.sent_bytes(network.namespace(self.name, node)) for node in range(self.spec.nodes)]

    def _new_run(self, throttle_when: str | Path | None) -> Run:
        if any(run.alive for run in self._runs):
            raise RuntimeError("another run is under way in this cluster")
        self.release()
        run = Run(self, throttle_when=None if throttle_when is None else Path(throttle_when))
        self._runs = [run]
        if throttle_when is None:
            self.throttle()
        return run

    def _environment(self, rank: int) -> dict[str, str]:
        spec, node = self.spec, self.spec.node_of(rank)
        interface = network.INTERFACE
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(spec.world_size),
            "LOCAL_RANK": str(rank % spec.workers_per_node),
            "LOCAL_WORLD_SIZE": str(spec.workers_per_node),
            "GROUP_RANK": str(node),
            "NODE_RANK": str(node),
            "NNODES": str(spec.nodes),
            "MASTER_ADDR": network.address(0),
            "MASTER_PORT": str(MASTER_PORT),
            "GLOO_SOCKET_IFNAME": interface,
            "TP_SOCKET_IFNAME": interface,
            "NCCL_SOCKET_IFNAME": interface,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
            "LOG_RANK": ",".join(map(str, range(spec.workers_per_node))),
            "EMULATED_CLUSTER": self.name,
        }

    def _entrance(self, rank: int) -> Any:
        """What a worker's process does before it becomes the command."""
        where = network.namespace(self.name, self.spec.node_of(rank))
        folder = cgroups.worker(self.name, rank)
        libc = ctypes.CDLL(None)
        owner = os.getpid()

        def enter() -> None:
            # If this process is killed, so are its workers, at once.
            libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
            if os.getppid() != owner:
                os._exit(1)
            for number in _ENDING_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            cgroups.join(folder)
            network.enter(where)

        return enter


class Run:
    """The processes of one command in a cluster."""

    def __init__(self, cluster: EmulatedCluster, *, throttle_when: Path | None) -> None:
        self._cluster = cluster
        self._throttle_when = throttle_when
        self.processes: list[subprocess.Popen[bytes] | ForkedProcess] = []
        """By rank."""

    @property
    def alive(self) -> bool:
        return any(process.poll() is None for process in self.processes)

    def poll(self) -> None:
        """Look whether the time for quotas has come. `wait` does it; call it when you wait in another way."""
        if self._throttle_when is not None:
            with contextlib.suppress(OSError):
                if self._throttle_when.stat().st_size:
                    self._throttle_when = None
                    self._cluster.throttle()

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait until all workers have ended; once one fails, the others get a while to end by themselves.

        Returns: 0, or the exit code of the worker that failed first (128 + number for a signal).

        Raises:
            TimeoutError: after `timeout_s`; the workers have been killed.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        failed, give_up = 0, float("inf")
        while self.alive:
            self.poll()
            codes = [process.poll() for process in self.processes]
            if not failed and any(codes):
                failed = next(code for code in codes if code)
                give_up = time.monotonic() + _GRACE_S
            if time.monotonic() > give_up:
                self.kill()
            if deadline is not None and time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"the run took longer than {timeout_s:g} s; its workers have been killed")
            time.sleep(_POLL_S)
        failed = failed or next((process.returncode for process in self.processes if process.returncode), 0)
        return 128 - failed if failed < 0 else failed

    def kill(self) -> None:
        """End all workers at once."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        self.reap()

    def reap(self) -> None:
        for process in self.processes:
            process.wait(timeout=_GRACE_S)


def _raise_exit(number: int, _frame: FrameType | None) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def _start_guard(name: str) -> subprocess.Popen[bytes]:
    """A process that removes the cluster when this one is gone, which the end of its input tells."""
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.emulated_cluster.guard", name],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        cwd=Path(__file__).parents[2],
        env={key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"},
        start_new_session=True,
    )
