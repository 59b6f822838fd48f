"""Local search on measured times: pure, and through a command."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from disagmoe.allocator.local_search import Trial, local_search, neighbours
from disagmoe.allocator.question import Candidate, Pins
from disagmoe.cli import main
from disagmoe.measure import Runner
from tests.unit.allocator.problems import make_question

START = Candidate(
    attn_depth=1, ffn_depth=1, attn_workers=3, ffn_workers=3, replicas=1, microbatches=4, recompute="none"
)
NODES = {"batch": 12, "experts": 8, "nodes": 6, "gpus_per_node": 1}


def test_finds_the_best_of_the_neighbourhood_and_survives_failures() -> None:
    question = make_question(**NODES)
    calls: list[Candidate] = []

    def measure(c: Candidate) -> Trial:
        calls.append(c)
        if c.attn_workers == 3:
            return Trial(settings={}, step_s=None, error="out of memory")
        return Trial(settings={}, step_s=1.0 + abs(c.attn_workers - 1) + abs(c.ffn_workers - 5))

    best, trials = local_search(question, START, measure, radius=2, max_trials=20)
    assert best is not None and (best.attn_workers, best.ffn_workers) == (1, 5)
    assert len(trials) == len(calls) == len(set(calls)) <= 20
    assert trials[0].step_s is None


def test_never_more_trials_than_asked_for() -> None:
    best, trials = local_search(
        make_question(**NODES), START, lambda c: Trial(settings={}, step_s=1.0), radius=2, max_trials=4
    )
    assert best == START and len(trials) == 4


def test_neighbours_keep_to_rules_and_pins() -> None:
    question = make_question(**NODES, pins=Pins(ffn_workers=3))
    found = list(neighbours(question, START, 2))
    assert found and all(c.ffn_workers == 3 and question.allows(c) for c in found)


SCRIPT = """
import json, pathlib, sys
options = dict(a[2:].split("=", 1) for a in sys.argv[1:])
folder = pathlib.Path(options["dump_folder"])
workers = int(options["disagmoe.attn_workers"])
if options["disagmoe.ffn_workers"] == "1":
    sys.exit("no memory left")
folder.mkdir(parents=True)
with (folder / "metrics.jsonl").open("w") as file:
    for step in range(1, int(options["training.steps"]) + 1):
        file.write(json.dumps({"step": step, "step_time_s": 9.0 if step <= 2 else 1.0 / workers}) + "\\n")
"""


def test_through_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A stand-in for run_train.sh that fails with one F-worker and is faster the more it has."""
    script, out = tmp_path / "train.py", tmp_path / "my.toml"
    script.write_text(SCRIPT)
    arguments = ["--recipe", "qwen3", "--flavor", "debug", "--cluster", "emulated", "--dtype", "float32"]
    arguments += ["--seq-len", "64", "--global-batch", "8", "--max-gpus", "4", "--replicas", "1", "--out", str(out)]
    arguments += ["--attn-depth", "1", "--ffn-depth", "1"]
    command = f"{sys.executable} {script}"
    assert main(["allocate", *arguments, "--measure", command, "--trials", "6", "--measure-steps", "4"]) == 0
    trials = [json.loads(line) for line in (tmp_path / "my_trials/trials.jsonl").read_text().splitlines()]
    assert 2 <= len(trials) <= 6
    measured = [t["step_s"] for t in trials if t["step_s"] is not None]
    assert measured and all("no memory left" in t["error"] for t in trials if t["step_s"] is None)
    best = min(measured)
    text = out.read_text()
    assert f"# Measured: step {best:.4g} s" in text and f"attn_workers = {round(1 / best)}\n" in text


def test_a_hanging_trial_is_ended(tmp_path: Path) -> None:
    command = f"{sys.executable} -c 'import time; time.sleep(60)'"
    runner = Runner(command=command, config=tmp_path / "c.toml", folder=tmp_path / "t", steps=4, timeout_s=0.5)
    trial = runner.run({"attn_workers": 2})
    assert trial.step_s is None and "took longer than 0.5 s" in trial.error
    assert (
        Runner(command="/no/such/program", config=tmp_path / "c.toml", folder=tmp_path / "t", steps=4, timeout_s=1)
        .run({})
        .error.startswith("can't be started")
    )
