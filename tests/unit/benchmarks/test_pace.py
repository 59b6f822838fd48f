"""Workers of a lower speed: how long they sleep, and where."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.side_by_side import pace
from benchmarks.side_by_side.pace import Pacer

ROOT = Path(__file__).parents[3]


class World:
    """A CPU clock, a wall clock, and sleeps that are a little too long."""

    def __init__(self, oversleep_s: float = 0.0) -> None:
        self.cpu_s = self.wall_s = 0.0
        self.oversleep_s = oversleep_s
        self.slept_s: list[float] = []

    def work(self, cpu_s: float, waiting_s: float = 0.0) -> None:
        self.cpu_s += cpu_s
        self.wall_s += cpu_s + waiting_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.wall_s += seconds + self.oversleep_s

    def pacer(self, speed: float) -> Pacer:
        return Pacer(speed, cpu_s=lambda: self.cpu_s, wall_s=lambda: self.wall_s, sleep=self.sleep)


def test_work_takes_its_cpu_time_over_the_speed() -> None:
    world = World()
    pacer = world.pacer(0.25)
    world.work(1.0)
    pacer.pay()
    assert world.wall_s == pytest.approx(4.0)
    pacer.pay()  # nothing since
    assert world.slept_s == pytest.approx([3.0])


def test_waiting_for_a_core_is_part_of_the_work() -> None:
    world = World()
    pacer = world.pacer(0.25)
    world.work(1.0, waiting_s=2.0)
    pacer.pay()
    assert world.wall_s == pytest.approx(4.0)


def test_lateness_is_made_up_for() -> None:
    """By long sleeps, or by a machine that is busier than the speed allows: the sum is right in the end."""
    world = World(oversleep_s=0.1)
    pacer = world.pacer(0.5)
    for _ in range(10):
        world.work(1.0)
        pacer.pay()
    assert world.wall_s == pytest.approx(20.0 + 0.1)
    world.work(1.0, waiting_s=3.0)
    pacer.pay()
    world.work(3.0)
    pacer.pay()
    assert world.wall_s == pytest.approx(28.0 + 0.1)


def test_waits_and_transfers_are_no_work() -> None:
    world = World()
    pacer = world.pacer(0.5)
    world.work(1.0)
    pacer.pay()
    world.work(0.5, waiting_s=7.0)
    pacer.mark()
    with pacer.pause():
        world.work(1.0)
    world.work(1.0)
    pacer.pay()
    assert world.slept_s == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("speed", [0.0, -1.0, 1.5])
def test_speeds_out_of_range_are_refused(speed: float) -> None:
    with pytest.raises(ValueError, match="must be above 0 and at most 1"):
        Pacer(speed)


class Recorder:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def pay(self) -> None:
        self.calls.append("pay")

    def mark(self) -> None:
        self.calls.append("mark")

    @contextmanager
    def pause(self) -> Iterator[None]:
        self.calls.append("pause")
        yield
        self.calls.append("resume")


def test_debts_are_paid_before_anything_leaves_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(pace, "_pacer", recorder)

    def act() -> int:
        recorder.calls.append("act")
        return 3

    assert pace._before(act)() == pace._around(act)() == pace._free(act)() == 3
    assert recorder.calls == ["pay", "act", "pay", "act", "mark", "pause", "act", "resume"]
    recorder.calls.clear()
    thread = threading.Thread(target=pace._free(act))
    thread.start()
    thread.join()
    assert recorder.calls == ["act"]


def test_the_whole_trainer_is_wrapped_and_trains_as_before(tmp_path: Path) -> None:
    """Names that the trainer no longer has would fail here; losses are those of an unpaced run."""
    script = (
        "import sys; from benchmarks.side_by_side import pace; pace.install();"
        "from disagmoe.train import main; code = main(sys.argv[1:]) or 0; print('paced:', pace._pacer is not None);"
        "sys.exit(code)"
    )
    losses = []
    for name, speed in (("plain", {}), ("paced", {pace.SPEED: "0.8"})):
        arguments = [
            "--config-file=benchmarks/side_by_side/empty.toml", "--recipe.name=deepseek_moe", "--recipe.flavor=debug",
            "--parallelism.mode=none", "--training.steps=3",
            "--training.seq_len=16", "--training.global_batch_size=2", f"--dump_folder={tmp_path / name}",
            "--data.source=synthetic", "--metrics.tensorboard=false",
        ]  # fmt: skip
        run = subprocess.run(
            [sys.executable, "-c", script, *arguments], cwd=ROOT, env=_environment() | speed, capture_output=True
        )
        assert run.returncode == 0, run.stderr.decode()
        assert f"paced: {bool(speed)}" in run.stdout.decode()
        losses.append([line.split('"loss": ')[1].split(",")[0] for line in _lines(tmp_path / name)])
    assert losses[0] == losses[1] and len(losses[0]) == 3


def _environment() -> dict[str, str]:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONSAFEPATH", pace.SPEED)}
    return environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def _lines(folder: Path) -> list[str]:
    return (folder / "metrics.jsonl").read_text().splitlines()
