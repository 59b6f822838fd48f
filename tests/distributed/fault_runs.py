"""Runs with a fault in them: forked from a nursery, or started by torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from disagmoe.layout import Layout
from tests.distributed.faults import TINY, Fault, encode

ROOT = Path(__file__).parents[2]
CONFIG = "--config-file=train_configs/debug_qwen3.toml"
LIMIT_S = 20.0
LAYOUT = Layout(attn_depth=1, ffn_depth=1, attn_workers=2, ffn_workers=2)
NAMES = [str(LAYOUT.workers_on(rank)[0]) for rank in range(LAYOUT.world_size)]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
"""The test scripts set PYTHONSAFEPATH, which takes the current folder off the path: processes find `tests` by this."""


@dataclass(kw_only=True)
class Outcome:
    """How a run with a fault ended."""

    codes: list[int | None]
    """None: still there at the limit."""
    seconds: list[float]
    """By rank: from the fault to the process's end."""
    errors: list[str]
    doing: str
    """What the faulty worker was doing."""

    def lines(self, rank: int) -> list[str]:
        """What the project said in `rank`'s name, tracebacks included."""
        return [line for line in self.errors[rank].splitlines() if line.startswith(f"[{NAMES[rank]}]")]


class Nursery:
    """Client of `tests.distributed.nursery`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=ENVIRONMENT,
        )
        assert self._read() == "ready"

    def run(self, fault: Fault, *arguments: str, limit_s: float = 40.0) -> Outcome:
        """Train with a fault. The dump folder is the argument `--dump_folder`, or a new one."""
        folder = self.folder / uuid.uuid4().hex[:8]
        folder.mkdir()
        fault = replace(fault, note=str(folder / "note"))
        case = {
            "arguments": [CONFIG, *TINY, f"--dump_folder={folder / 'dump'}", *arguments],
            "fault": json.loads(encode(fault)),
            "world_size": LAYOUT.world_size,
            "folder": str(folder),
            "limit_s": limit_s,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        reply = json.loads(self._read())
        note = json.loads((folder / "note").read_text()) if fault.kind != "none" else {"at_s": 0.0, "doing": ""}
        errors = [(folder / f"stderr_{rank}").read_text() for rank in range(LAYOUT.world_size)]
        return Outcome(
            codes=reply["codes"],
            seconds=[ended_s - note["at_s"] for ended_s in reply["ended_s"]],
            errors=errors,
            doing=note["doing"],
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=10)

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


class Torchrun:
    """A run started by torchrun; every process of it carries a mark in its environment."""

    def __init__(self, folder: Path, fault: Fault, *arguments: str) -> None:
        self.folder = folder
        self._fault = replace(fault, note=str(folder / "note"))
        self._mark = f"DISAGMOE_TEST_MARK={uuid.uuid4().hex}"
        name, value = self._mark.split("=")
        self._error = (folder / "stderr").open("w+")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={LAYOUT.world_size}"),
                *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
                "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",  # as run_train.sh does
                *("-m", "tests.distributed.faults", encode(self._fault)),
                *(CONFIG, *TINY, f"--dump_folder={folder / 'dump'}", *arguments),
            ],
            env={**ENVIRONMENT, name: value, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=self._error,
        )

    def processes(self) -> list[int]:
        """All that run, the launcher included."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self._mark.encode() in (path / "environ").read_bytes():
                    found.append(int(path.name))
        return found

    def wait_for_steps(self, count: int) -> None:
        metrics = self.folder / "dump" / "metrics.jsonl"
        self._until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= count, 90.0)

    def wait_for_fault(self) -> float:
        """When it happened, on the machine's monotonic clock."""
        note = self.folder / "note"
        self._until(note.exists, 90.0)
        return float(json.loads(note.read_text())["at_s"])

    def wait_until_gone(self, since_s: float) -> float:
        """Seconds from `since_s` until no process is left."""
        self._until(lambda: self.process.poll() is not None and not self.processes(), LIMIT_S)
        return time.monotonic() - since_s

    def _until(self, condition: Callable[[], bool], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, self.error()
            time.sleep(0.05)

    def error(self) -> str:
        return (self.folder / "stderr").read_text()

    def close(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=10)
        self._error.close()


@contextlib.contextmanager
def torchrun(folder: Path, fault: Fault, *arguments: str) -> Iterator[Torchrun]:
    run = Torchrun(folder, fault, *arguments)
    try:
        yield run
    finally:
        run.close()
