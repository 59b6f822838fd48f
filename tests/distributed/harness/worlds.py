"""Worlds of processes, forked from a server that has everything loaded; one of each size is kept for the next case."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from disagmoe.config.checks import build_layout
from tests.distributed.harness.cases import Case, RankResult, RunResult, assemble, reference_config

ROOT = Path(__file__).parents[3]
_MOST_WORLDS = 4
"""Alive at once; the one that was used least recently makes room."""
_START_TIMEOUT_S = 90.0


class CaseError(AssertionError):
    """A case failed, died or hung; the text has the worker's traceback or stacks."""


@dataclass(kw_only=True)
class _World:
    processes: Sequence[BaseProcess]
    connections: list[Connection]
    folder: Path

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10.0)
        for connection in self.connections:
            connection.close()


class Worlds:
    """Runs cases; `close` it."""

    def __init__(self) -> None:
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.distributed.harness.worker"])
        self._worlds: dict[int, _World] = {}
        self._references: dict[str, RunResult] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="disagmoe_worlds_")
        self._started = 0

    def run(self, case: Case) -> RunResult:
        """Run a case in the world of its size and put its result together.

        Raises:
            CaseError: It failed, died or hung. Its world is killed; the next case gets a new one.
        """
        size = build_layout(case.config).world_size
        world = self._world(size)
        done = False
        try:
            request = pickle.dumps(case)
            for connection in world.connections:
                connection.send_bytes(request)
            replies = self._collect(world, case)
            done = True
        finally:
            if not done:
                self._worlds.pop(size).kill()
        result = assemble(replies)
        assert not result.unequal, "differ between their homes:\n" + "\n".join(result.unequal)
        return result

    def reference(self, case: Case) -> RunResult:
        """The same training with `mode = "none"`; run once for all cases that differ in their layout only."""
        alone = Case(
            config=reference_config(case.config),
            steps=case.steps,
            hook=case.hook,
            hook_arguments=case.hook_arguments,
        )
        key = repr(alone)
        if key not in self._references:
            self._references[key] = self.run(alone)
        return self._references[key]

    def close(self) -> None:
        for world in self._worlds.values():
            world.kill()
        self._worlds.clear()
        self._folder.cleanup()

    def _world(self, size: int) -> _World:
        world = self._worlds.pop(size, None)
        if world is None:
            while len(self._worlds) >= _MOST_WORLDS:
                self._worlds.pop(next(iter(self._worlds))).kill()
            world = self._start(size)
        self._worlds[size] = world  # now the most recently used
        return world

    def _start(self, size: int) -> _World:
        from tests.distributed.harness.launch import main

        self._started += 1
        folder = Path(self._folder.name, f"world_{self._started}")
        folder.mkdir()
        pairs = [mp.Pipe() for _ in range(size)]
        with _server_finds_tests():
            processes = [
                self._context.Process(target=main, args=(rank, size, theirs, str(folder)), daemon=True)
                for rank, (_, theirs) in enumerate(pairs)
            ]
            for process in processes:
                process.start()
        for _, theirs in pairs:
            theirs.close()
        world = _World(processes=processes, connections=[ours for ours, _ in pairs], folder=folder)
        try:
            port = self._receive(world, 0, time.monotonic() + _START_TIMEOUT_S)
            for connection in world.connections[1:]:
                connection.send(port)
            for rank in range(size):
                self._receive(world, rank, time.monotonic() + _START_TIMEOUT_S)
        except BaseException:
            world.kill()
            raise
        return world

    def _receive(self, world: _World, rank: int, deadline: float) -> object:
        connection = world.connections[rank]
        if not connection.poll(max(0.0, deadline - time.monotonic())):
            raise CaseError(f"rank {rank} did not start within {_START_TIMEOUT_S:.0f} s\n{_log(world, rank)}")
        try:
            return connection.recv()
        except (EOFError, ConnectionResetError):
            raise CaseError(f"rank {rank} ended while it started\n{_log(world, rank)}") from None

    def _collect(self, world: _World, case: Case) -> list[RankResult]:
        """A reply from every rank, or the best explanation of why there is none."""
        deadline = time.monotonic() + case.timeout_s + 5.0
        replies: dict[int, RankResult | str] = {}
        while len(replies) < len(world.connections):
            left = [c for rank, c in enumerate(world.connections) if rank not in replies]
            ready = wait(left, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = world.connections.index(connection)
                try:
                    replies[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    world.processes[rank].join(5.0)
                    replies[rank] = f"cause\nended with exit code {world.processes[rank].exitcode}"
            if any(isinstance(reply, str) for reply in replies.values()):
                # The others end within seconds; their own words may name the cause.
                deadline = min(deadline, time.monotonic() + 5.0)
        failed = {rank: reply for rank, reply in replies.items() if isinstance(reply, str)}
        if failed or len(replies) < len(world.connections):
            raise CaseError(_explain(world, case, failed, replies))
        return [reply for _, reply in sorted(replies.items()) if isinstance(reply, RankResult)]


def _explain(world: _World, case: Case, failed: dict[int, str], replies: dict[int, RankResult | str]) -> str:
    causes = {rank: text for rank, text in failed.items() if text.startswith("cause")}
    shown = causes or failed
    parts = [f"rank {rank}: {text.partition(chr(10))[2]}\n{_log(world, rank)}" for rank, text in sorted(shown.items())]
    if not failed:
        silent = [rank for rank in range(len(world.connections)) if rank not in replies]
        parts.append(f"no reply within {case.timeout_s:.0f} s from ranks {silent}")
        parts += [f"rank {rank}:\n{_read(world.folder / f'rank_{rank}.stacks')}" for rank in silent]
    return "\n".join(parts)


def _log(world: _World, rank: int) -> str:
    return _read(world.folder / f"rank_{rank}.log")


def _read(path: Path) -> str:
    return path.read_text(errors="replace")[-6000:] if path.exists() else ""


@contextmanager
def _server_finds_tests() -> Iterator[None]:
    """The fork server, once started, imports from the project's root whatever directory the tests were started in."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), before)))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
