"""Requests to stop, and kills, while checkpoints are on: real processes, real signals."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from disagmoe.checkpoint.folder import file_problems, find_checkpoints
from tests.distributed.fault_runs import ENVIRONMENT, LIMIT_S, ROOT, Nursery, torchrun
from tests.distributed.faults import Fault

SAVING = ("--checkpoint.enable=true", "--training.steps=100000")
full = pytest.mark.full


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    made = Nursery(tmp_path_factory.mktemp("runs"))
    yield made
    made.close()


def complete(dump: Path) -> list[int]:
    """Steps of the complete checkpoints, which must also be whole, newest first."""
    found = [entry for entry in find_checkpoints(dump / "checkpoints") if entry.state == "complete"]
    assert not [problem for entry in found for problem in file_problems(entry.path)]
    return [entry.step for entry in found]


def steps(dump: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (dump / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("rank", "action"), [(3, 250), pytest.param(0, 60, marks=full)])
def test_one_worker_is_asked_to_stop(nursery: Nursery, tmp_path: Path, rank: int, action: int) -> None:
    """All end after the same step, cleanly, with a checkpoint of it; the run goes on from there."""
    dump = tmp_path / "dump"
    outcome = nursery.run(Fault(kind="usr1", rank=rank, action=action), *SAVING, f"--dump_folder={dump}")
    assert outcome.codes == [0, 0, 0, 0], outcome.errors
    (step,) = complete(dump)
    # Noticed within the step or soon after, however busy the machine is.
    asked = int(re.findall(r"step (\d+)", outcome.doing)[0])
    assert asked <= step <= asked + 40 and steps(dump) == list(range(1, step + 1))
    again = nursery.run(
        Fault(kind="none", rank=0), *SAVING, f"--dump_folder={dump}", f"--training.stop_after={step + 2}"
    )
    assert again.codes == [0, 0, 0, 0], again.errors
    assert steps(dump) == list(range(1, step + 3)) and complete(dump) == [step + 2, step]


@pytest.mark.parametrize(
    ("rank", "write"), [(2, 900), pytest.param(0, 3000, marks=full), pytest.param(1, 1, marks=full)]
)
def test_killed_while_saving(nursery: Nursery, tmp_path: Path, rank: int, write: int) -> None:
    """What was complete before stays, and the next start continues from it without being told more."""
    dump = tmp_path / "dump"
    options = (*SAVING, "--checkpoint.interval=2", f"--dump_folder={dump}")
    outcome = nursery.run(Fault(kind="kill_saving", rank=rank, action=write), *options)
    assert outcome.codes[rank] == -signal.SIGKILL
    assert [code for r, code in enumerate(outcome.codes) if r != rank] == [1, 1, 1]
    done = complete(dump)
    again = nursery.run(Fault(kind="none", rank=0), *options, "--training.stop_after=20")
    assert again.codes == [0, 0, 0, 0], again.errors
    after = complete(dump)
    assert after[0] == 20 and after[-1] == (done[-1] if done else 2)
    assert steps(dump) == list(range(1, 21))
    assert not [p for p in (dump / "checkpoints").iterdir() if p.name.startswith(".")]


def test_torchrun_is_asked_to_stop(tmp_path: Path) -> None:
    """It passes the signal on; the workers save and end cleanly, whatever it makes of that itself."""
    with torchrun(tmp_path, Fault(kind="none", rank=0), *SAVING) as run:
        run.wait_for_steps(2)
        told_s = time.monotonic()
        run.process.send_signal(signal.SIGTERM)
        assert run.wait_until_gone(told_s) < LIMIT_S
    (step,) = complete(tmp_path / "dump")
    assert steps(tmp_path / "dump") == list(range(1, step + 1))
    assert "stopped by SIGTERM" not in run.error() and "[r0." not in run.error()


@full
def test_no_checkpoint_when_a_worker_has_failed(tmp_path: Path) -> None:
    """torchrun then sends SIGTERM to the others: they end as ever."""
    with torchrun(tmp_path, Fault(kind="kill", rank=3, action=260), *SAVING) as run:
        run.wait_until_gone(run.wait_for_fault())
        assert run.process.returncode not in (0, None)
    assert complete(tmp_path / "dump") == []
    assert "ending: worker r0.F0.1 (rank 3, F-worker) failed" in run.error()


@full
def test_no_time_left_to_save(nursery: Nursery, tmp_path: Path) -> None:
    """A worker that does not come to the end of its step within the grace time ends, and so do all."""
    options = (*SAVING, f"--dump_folder={tmp_path / 'dump'}", "--checkpoint.grace_s=1.5")
    outcome = nursery.run(Fault(kind="usr1_sleep", rank=2, action=250), *options)
    assert all(outcome.codes) and outcome.seconds[2] > 1.4, outcome
    assert "stopped by SIGUSR1 after [checkpoint] grace_s = 1.5 s" in outcome.errors[2]
    assert complete(tmp_path / "dump") == []


def kills(folder: Path, count: int, seed: int) -> list[str]:
    command = [sys.executable, "-m", "tests.distributed.checkpoint_kills", str(folder / "ck"), str(count), str(seed)]
    environment = {**ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(("count", "seed"), [(4, 1), pytest.param(36, 2, marks=full)])
def test_killed_at_random_moments(tmp_path: Path, count: int, seed: int) -> None:
    """See `checkpoint_kills`."""
    lines = kills(tmp_path, count, seed)
    assert len(lines) == count
    newest = [int(line.split()[0]) for line in lines]
    assert newest == sorted(newest)
    if count > 10:  # kills did come while something was being written, and checkpoints were made between them
        assert sum("unfinished" in line for line in lines) > count / 3 and newest[-1] >= 10
