"""Processes that save without end and are killed at a random moment, over and over in one folder.

`python -m tests.distributed.checkpoint_kills FOLDER COUNT SEED`: each round forks three processes that write
checkpoints the way training does, kills one of them or all (SIGKILL) at a random operation of a save or at a random
time, and then looks at what is left: the newest checkpoint must be whole, hold what was saved in that step, and be at
least as new as the last save that was reported as complete. Prints a line a round.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from disagmoe.checkpoint import storage
from disagmoe.checkpoint.folder import file_problems, find_checkpoints, temporary_name, tidy
from disagmoe.checkpoint.state import Piece, assign, holdings, views
from disagmoe.checkpoint.storage import CommittingWriter, read, write

SIZE = 3
KEEP = 2
EXPERTS = 6
_OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.listdir", "shutil.rmtree")


def pieces_of(rank: int, step: int) -> list[Piece]:
    """Two experts a rank and two tensors that all ranks hold, filled with the step."""
    mine = EXPERTS // SIZE
    pieces = [
        Piece(
            key=f"model.layers.{layer}.routed_experts.w",
            start=rank * mine,
            tensor=torch.full((mine, 8, 8), float(step)),
            sharded=True,
        )
        for layer in range(3)
    ]
    shared = [Piece(key=f"model.{n}", start=0, tensor=torch.full((64,), float(step)), sharded=False) for n in "ab"]
    return pieces + shared


ASSIGNMENT = assign([holdings(pieces_of(rank, 0)) for rank in range(SIZE)])


def saver(rank: int, folder: Path, store: str, first_step: int, report: int, die_at: int | None) -> NoReturn:
    """Save step after step; SIGKILL at operation number `die_at`. Reports complete steps, a line each."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # peers that die make torch talk
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(store, SIZE), rank=rank, world_size=SIZE)
    group = dist.group.WORLD
    if die_at is not None:
        _count_down(die_at)
    for step in range(first_step, first_step + 1000):
        writer = CommittingWriter(folder / temporary_name(step, f"run{first_step}"), step, {"step": step})
        units = ASSIGNMENT.by_rank[rank]
        write(writer, units, views(pieces_of(rank, step), units), group=group)
        if rank == 0:
            os.write(report, f"{step}\n".encode())
            tidy(folder, KEEP, run=f"run{first_step}")
    os._exit(0)


def _count_down(operations: int) -> None:
    """Kill this process at one of the coming file operations."""
    left = operations
    lock = threading.Lock()

    def one() -> None:
        nonlocal left
        with lock:
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(lambda event, _arguments: one() if event in _OPERATIONS else None)
    stream: Any = storage._HashingStream
    plain = stream.write

    def counted(self: Any, data: Any) -> int:
        one()
        return int(plain(self, data))

    stream.write = counted


def round_(folder: Path, number: int, draw: random.Random, newest: int) -> str:
    """Fork, kill, look. Returns what happened."""
    victim = draw.randrange(SIZE)
    by_operation, everyone = draw.random() < 0.7, draw.random() < 0.5
    # A save is about 60 operations of rank 0 and 30 of another; the first must not be all that is ever hit.
    die_at = draw.randrange(1, 150) if by_operation else None
    seconds = 0.3 + draw.random() * 0.5
    out, report = os.pipe()
    store = str(folder.parent / f"store_{number}")
    children = []
    for rank in range(SIZE):
        pid = os.fork()
        if pid == 0:
            saver(rank, folder, store, newest + 1, report, die_at if rank == victim else None)
        children.append(pid)
    os.close(report)
    if by_operation:
        os.waitpid(children[victim], 0)
    else:
        time.sleep(seconds)
        os.kill(children[victim], signal.SIGKILL)
        os.waitpid(children[victim], 0)
    # The others: at once, or after they had time to do something about it.
    time.sleep(0.0 if everyone else 0.1)
    for rank, pid in enumerate(children):
        if rank != victim:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    with os.fdopen(out) as lines:
        reported = [int(line) for line in lines.read().splitlines()]
    return look(folder, max([newest, *reported]), f"{'operation' if by_operation else 'time'} of rank {victim}")


def look(folder: Path, reported: int, how: str) -> str:
    """The newest checkpoint is whole and at least `reported`."""
    found = find_checkpoints(folder)
    damaged = [entry for entry in found if entry.state == "damaged"]
    assert not damaged, damaged
    complete = [entry for entry in found if entry.state == "complete"]
    newest = max([entry.step for entry in complete], default=0)
    assert newest >= reported, f"step {reported} was complete, but the newest is {newest}"
    for entry in complete:
        assert not file_problems(entry.path)
        for rank in range(SIZE):
            pieces = pieces_of(rank, 0)
            read(entry.path, pieces, {unit.key: unit.full_shape for unit in ASSIGNMENT.units})
            assert all(bool((piece.tensor == entry.step).all()) for piece in pieces), entry
    left = [entry.state for entry in found if entry.state != "complete"]
    return f"{newest} complete={len(complete)} left={left} killed at an {how}"


def main(folder: Path, count: int, seed: int) -> None:
    torch.set_num_threads(1)
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    newest = 0
    for number in range(count):
        line = round_(folder, number, draw, newest)
        newest = int(line.split()[0])
        print(line, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
