"""Forks whole runs from one process that has loaded everything: a run starts in a second, not in ten.

The children are what torchrun would start (same variables, same entry), but nobody stops them when one of them fails:
what ends them is the project's own failure handling.

Protocol, a JSON object a line: {"arguments": [...], "fault": {...}, "world_size": 4, "folder": "...", "limit_s": 30}
in; {"codes": [...], "ended_s": [...], "left": [ranks]} out. `left`: still there at the limit, then killed; stopped
processes too.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    _preload()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)
    os._exit(0)  # nothing to tear down


def _preload() -> None:
    import disagmoe.trainer  # noqa: F401
    from disagmoe.config.recipe import load_recipe

    load_recipe("qwen3").model_config("debug")
    from torchtitan.components.loss import cross_entropy_loss  # noqa: F401

    gc.collect()
    gc.freeze()


def _run(case: dict[str, Any]) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    size = case["world_size"]
    pids = [_fork(case, rank, port) for rank in range(size)]
    codes: list[int | None] = [None] * size
    ended_s = [0.0] * size
    deadline = time.monotonic() + case["limit_s"]
    while any(c is None for c in codes) and time.monotonic() < deadline:
        for rank, pid in enumerate(pids):
            if codes[rank] is None and (status := os.waitpid(pid, os.WNOHANG))[0]:
                codes[rank], ended_s[rank] = os.waitstatus_to_exitcode(status[1]), time.monotonic()
        stopped = [r for r, pid in enumerate(pids) if codes[r] is None and _state(pid) == "T"]
        if stopped and all(codes[r] is not None for r in range(size) if r not in stopped):
            break
        time.sleep(0.02)
    left = [rank for rank in range(size) if codes[rank] is None]
    for rank in left:
        os.kill(pids[rank], signal.SIGKILL)
        os.waitpid(pids[rank], 0)
    return {"codes": codes, "ended_s": ended_s, "left": left}


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def _fork(case: dict[str, Any], rank: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        size = case["world_size"]
        os.environ.update(
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        )
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        error = os.open(Path(case["folder"], f"stderr_{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(error, 2)
        from tests.distributed.faults import main as train

        code = train([json.dumps(case["fault"]), *case["arguments"]])
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
