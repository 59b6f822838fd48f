"""The process that `nursery` forks workers from: `python -m benchmarks.emulated_cluster.nursery_server MODULE ...`."""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.emulated_cluster import cgroups, network

_PR_SET_PDEATHSIG = 1


def serve(modules: Sequence[str]) -> None:
    """Import, then fork on demand and report ends, until the client is gone."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what imported modules print is no answer
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()

    def say(message: Mapping[str, Any]) -> None:
        os.write(answers, json.dumps(message).encode() + b"\n")

    say({"ready": True})
    pids: set[int] = set()
    text = b""
    while True:
        if select.select([0], [], [], 0.005)[0]:
            part = os.read(0, 65536)
            if not part:
                os._exit(0)
            *lines, text = (text + part).split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    os.close(answers)
                    _become(json.loads(line), libc)
                pids.add(pid)
                say({"started": pid})
        for pid in list(pids):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                pids.discard(pid)
                say({"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def _become(order: Mapping[str, Any], libc: ctypes.CDLL) -> None:
    """In the child: what the order describes. Does not return."""
    code = 1
    try:
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        os.setsid()
        null, log = os.open(os.devnull, os.O_RDONLY), os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        cgroups.join(Path(order["cgroup"]))
        network.enter(order["namespace"])
        os.chdir(order["cwd"])
        os.environ.update(order["environment"])
        sys.path.insert(0, order["cwd"])
        sys.argv = [order["module"], *order["arguments"]]
        runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1:])
