"""Workers that start in a moment: forked from a process that has imported everything already.

Importing torch takes each of 8 workers seconds of CPU time; a forked worker has it from the start, and shares the
memory too. For benchmarks that start many runs. The protocol with `nursery_server`, a JSON object a line:

    {"module": "disagmoe.train", "arguments": [...], "environment": {...}, "cwd": "...", "log": "FILE",
     "namespace": "...", "cgroup": "..."}          ->  {"started": PID}
                                                   ->  {"ended": PID, "code": 0}   when it has
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any


class ForkedProcess:
    """As much of subprocess.Popen as a `Run` needs."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery, self.pid = nursery, pid

    @property
    def returncode(self) -> int | None:
        return self._nursery.codes.get(self.pid)

    def poll(self) -> int | None:
        self._nursery.listen(0.0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Raises TimeoutError."""
        self._nursery.listen(timeout, until=self.pid)
        if self.returncode is None:
            raise TimeoutError(f"process {self.pid} has not ended after {timeout:g} s")
        return self.returncode


class Nursery:
    """The process that has imported `modules`, from `with` to its end.

    One thread for compute libraries (OMP_NUM_THREADS = 1), which decide when they are imported.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = list(modules)
        self.codes: dict[int, int] = {}
        """Exit codes by process id, as subprocess has them."""
        self._text = b""

    def __enter__(self) -> Nursery:
        root = str(Path(__file__).parents[2])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.emulated_cluster.nursery_server", *self._modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
            start_new_session=True,
        )
        if self._line() != {"ready": True}:
            raise RuntimeError("the nursery did not start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()  # its children die with it
        self._process.wait()

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        cwd: Path,
        log: Path,
        namespace: str,
        cgroup: Path,
    ) -> ForkedProcess:
        """Fork a worker that runs `python -m module arguments`. Both of its outputs are appended to `log`."""
        order = {"module": module, "arguments": list(arguments), "environment": dict(environment), "cwd": str(cwd)}
        order |= {"log": str(log), "namespace": namespace, "cgroup": str(cgroup)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        while True:
            answer = self._line()
            if "started" in answer:
                return ForkedProcess(self, answer["started"])
            self._note(answer)

    def listen(self, seconds: float, until: int | None = None) -> None:
        """Take in what has been said; with `until`, wait up to `seconds` for the end of that process."""
        assert self._process.stdout is not None
        while until is None or until not in self.codes:
            if not select.select([self._process.stdout], [], [], seconds)[0]:
                return
            self._note(self._line())

    def _note(self, message: Mapping[str, Any]) -> None:
        self.codes[message["ended"]] = message["code"]

    def _line(self) -> dict[str, Any]:
        """The next message. Read byte by byte from the descriptor, so that `select` knows what is left."""
        assert self._process.stdout is not None
        text = b""
        while not text.endswith(b"\n"):
            byte = os.read(self._process.stdout.fileno(), 1)
            if not byte:
                raise RuntimeError("the nursery has ended unexpectedly")
            text += byte
        message: dict[str, Any] = json.loads(text)
        return message
