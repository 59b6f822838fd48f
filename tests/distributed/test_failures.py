"""A worker that fails ends all workers, soon, with a message that names it: real processes, real signals.

Most runs are forked from a process that has loaded everything (`nursery`); nothing stops their workers from outside.
The others are started by torchrun, as users do.
"""

from __future__ import annotations

import json
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from disagmoe.simulator.profile import Profile
from tests.distributed.fault_runs import LAYOUT, LIMIT_S, NAMES, Nursery, Outcome, torchrun
from tests.distributed.faults import Fault

GONE = "its process is gone"
full = pytest.mark.full


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    made = Nursery(tmp_path_factory.mktemp("runs"))
    yield made
    made.close()


def check_survivors(outcome: Outcome, faulty: int, *parts: str) -> None:
    """All but the faulty worker ended in time, not with 0, and said once what happened to whom doing what."""
    role = f"{LAYOUT.workers_on(faulty)[0].role.letter}-worker"
    parts = (f"worker {NAMES[faulty]} (rank {faulty}, {role}) failed", *parts, f"it was doing: {outcome.doing}")
    for rank in range(LAYOUT.world_size):
        if rank == faulty:
            continue
        assert outcome.codes[rank] == 1, outcome.errors[rank]
        assert outcome.seconds[rank] < LIMIT_S
        said = outcome.lines(rank)
        assert len(said) == 1, outcome.errors[rank]
        assert said[0].startswith(f"[{NAMES[rank]}] ending: "), said
        assert all(part in said[0] for part in parts), (said, parts)


def check_position(doing: str) -> None:
    """Step, action, layer, role, stage and micro-batch are all there."""
    layer = r"(embedding \+ )?layer \d+ (attention|experts)|head"
    assert re.search(rf"step \d+, [A-Z_]+ of ({layer}) \(stage \d+\), micro-batch \d+", doing), doing


def random_kills(count: int) -> list[tuple[int, int]]:
    """(rank, action), every rank in turn; the first two steps have about 2 x 100 actions a worker."""
    draw = random.Random(7)
    return [(i % LAYOUT.world_size, draw.randrange(1, 180)) for i in range(count)]


@pytest.mark.parametrize(
    ("rank", "action"), [pytest.param(*kill, marks=() if i < 2 else full) for i, kill in enumerate(random_kills(10))]
)
def test_worker_killed(nursery: Nursery, rank: int, action: int) -> None:
    outcome = nursery.run(Fault(kind="kill", rank=rank, action=action))
    assert outcome.codes[rank] == -signal.SIGKILL
    check_position(outcome.doing)
    check_survivors(outcome, rank, GONE)


@pytest.mark.parametrize(
    ("kind", "rank", "action"),
    [
        pytest.param("forward", 1, 9),
        pytest.param("backward", 3, 20),
        pytest.param("expert", 2, 5, marks=full),
        pytest.param("forward", 0, 20, marks=full),
        pytest.param("init", 1, 0, marks=full),
        pytest.param("data", 1, 3),
    ],
)
def test_exception(nursery: Nursery, kind: str, rank: int, action: int) -> None:
    outcome = nursery.run(Fault(kind=kind, rank=rank, action=action))
    check_survivors(outcome, rank, f"failed: ValueError: injected into {kind}")
    assert outcome.codes[rank] == 1
    assert outcome.seconds[rank] < LIMIT_S
    said = "\n".join(outcome.lines(rank))
    assert said.count("Traceback (most recent call last)") == 1, said
    assert f"[{NAMES[rank]}] ValueError: injected into {kind}" in said
    assert outcome.lines(rank)[-1].startswith(f"[{NAMES[rank]}] worker {NAMES[rank]} (rank {rank}, ")
    if kind in ("forward", "backward", "expert"):
        check_position(outcome.doing)


@pytest.mark.parametrize("kind", ["stop", pytest.param("sleep", marks=full)])
def test_wait_longer_than_the_limit(nursery: Nursery, kind: str) -> None:
    """The worker that waits says over which edge and for whom."""
    outcome = nursery.run(Fault(kind=kind, rank=3, action=60), "--comm.timeout_s=3")
    assert outcome.codes[3] == (None if kind == "stop" else 1)
    waiters = [rank for rank in range(3) if any("timeout_s" in line for line in outcome.lines(rank))]
    assert waiters
    for rank in range(3):
        assert outcome.codes[rank] == 1
        assert 2.5 < outcome.seconds[rank] < LIMIT_S
        (said,) = outcome.lines(rank)
        if "from worker r0.F0.1" in said:
            assert "from worker r0.F0.1 (rank 3, F-worker), which is doing: " + outcome.doing in said
            assert kind != "stop" or "(its process is stopped)" in said
        else:  # somebody was late on a busy machine: the worker that is waited for says that it waits in turn
            assert re.search(r"which is doing: .*, waiting on edge .* for worker r0\.F0\.1 \(rank 3", said), said
        assert re.search(
            r"failed: waited longer than \[comm\] timeout_s = 3 s on edge (M2N|N2M) (forward|backward) \w0 -> \w0 "
            r"for the (input|output gradient) of layer \d+ (attention|experts), micro-batch \d+ from worker r0",
            said,
        ), said


@full
def test_stopped_before_a_collective(nursery: Nursery) -> None:
    outcome = nursery.run(Fault(kind="stop_collective", rank=3, action=1), "--comm.timeout_s=3")
    for rank in range(3):
        assert outcome.codes[rank] == 1
        assert 2.5 < outcome.seconds[rank] < LIMIT_S
        (said,) = outcome.lines(rank)
        assert "waited longer than [comm] timeout_s = 3 s in a collective; not there: r0.F0.1 (rank 3" in said
        assert "step 2, summing gradients (its process is stopped)" in said


def test_no_sign_of_life(nursery: Nursery) -> None:
    outcome = nursery.run(Fault(kind="stop", rank=2, action=10), "--comm.heartbeat_timeout_s=3")
    assert outcome.codes[2] is None
    check_survivors(outcome, 2, "no sign of life for 3 s")


def test_good_run_leaves_nothing_behind(nursery: Nursery, tmp_path: Path) -> None:
    """Nobody takes a worker that has finished for a dead one; the status files are removed, measured costs written."""
    costs = tmp_path / "costs.json"
    outcome = nursery.run(Fault(kind="none", rank=0), "--training.steps=3", f"--metrics.profile_costs={costs}")
    assert outcome.codes == [0, 0, 0, 0]
    profile = Profile.load(costs)
    assert min(s.forward_s for s in profile.stages) > 0 and min(s.backward_s or 0 for s in profile.stages) > 0
    assert min(h.forward_bytes for h in profile.hops) > 0 and min(h.backward_bytes for h in profile.hops) > 0
    assert profile.costs().num_stages == len(profile.stages) == len(profile.hops) + 1
    assert not any(outcome.lines(rank) for rank in range(4))
    (folder,) = [p for p in nursery.folder.iterdir() if not (p / "note").exists()]
    assert not (folder / "dump" / ".status").exists()


# -- with torchrun ---------------------------------------------------------------------------------------------------


def test_torchrun_worker_killed(tmp_path: Path) -> None:
    """torchrun stops the others at once; their message must come all the same."""
    with torchrun(tmp_path, Fault(kind="kill", rank=3, action=60)) as run:
        run.wait_until_gone(run.wait_for_fault())
        assert run.process.returncode not in (0, None)
    doing = json.loads((tmp_path / "note").read_text())["doing"]
    for rank in range(3):
        wanted = rf"^\[{NAMES[rank]}\] ending: worker r0.F0.1 \(rank 3, F-worker\) failed \(seen by rank \d\): {GONE}.*"
        assert len(re.findall(wanted + re.escape(f"it was doing: {doing}") + "$", run.error(), re.M)) == 1, run.error()


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=full), pytest.param(signal.SIGKILL, marks=full)]
)
def test_torchrun_told_to_stop(tmp_path: Path, number: signal.Signals) -> None:
    """No orphans, also when torchrun itself is killed."""
    with torchrun(tmp_path, Fault(kind="none", rank=0)) as run:
        run.wait_for_steps(1)
        told_s = time.monotonic()
        run.process.send_signal(number)
        assert run.wait_until_gone(told_s) < LIMIT_S
        assert run.process.returncode != 0
    for name in NAMES:
        said = [line for line in run.error().splitlines() if line.startswith(f"[{name}]")]
        assert len(said) == 1, run.error()
        if number == signal.SIGKILL:
            assert "the launcher of this process (torchrun) is gone" in said[0] or "the store" in said[0], said
        else:
            assert re.search(rf"stopped by {number.name}; it was doing: step \d+", said[0]), said


@full
def test_torchrun_exception(tmp_path: Path) -> None:
    with torchrun(tmp_path, Fault(kind="forward", rank=2, action=5)) as run:
        assert run.wait_until_gone(run.wait_for_fault()) < LIMIT_S
        assert run.process.returncode not in (0, None)
    error = run.error()
    assert len(re.findall(r"^\[r0.F0.0\] ValueError: injected into forward$", error, re.M)) == 1, error
    for rank in (0, 1, 3):
        wanted = rf"^\[{NAMES[rank]}\] ending: worker r0.F0.0 \(rank 2, F-worker\) failed: ValueError: injected"
        assert len(re.findall(wanted, error, re.M)) == 1, error
    assert re.search(r"Root Cause.*injected into forward", error, re.S), error
