"""The way from the tests' process to `worker`, which only the fork server and its children import: it takes seconds."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection


def main(rank: int, size: int, connection: Connection, folder: str) -> None:
    """`worker.main`, imported here; output goes to `folder`/rank_N.log."""
    log = os.open(f"{folder}/rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from tests.distributed.harness import worker

    worker.main(rank, size, connection, folder)
