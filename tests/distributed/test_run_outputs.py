"""What a run of several processes leaves in its dump folder, and that it did what its schedule says."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from disagmoe.config.checks import build_layout, model_shape
from disagmoe.config.schema import MetricsConfig
from disagmoe.layout import Role
from disagmoe.schedules import make_schedule
from tests.distributed.harness.cases import Case, make_config
from tests.distributed.harness.worlds import ROOT, Worlds

STEPS = 4


@pytest.fixture(scope="module")
def dump_folder(worlds: Worlds, documents: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run of 4 processes."""
    folder = tmp_path_factory.mktemp("dump")
    config = replace(
        make_config("deepseek_moe", documents, layout=(1, 1, 2, 2), microbatches=4),
        metrics=MetricsConfig(timeline_step=3),
    )
    worlds.run(Case(config=config, steps=STEPS, folder=str(folder)))
    return folder


def lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_event_files_hold_each_loss_once(dump_folder: Path) -> None:
    """Read with TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert len(list((dump_folder / "tb").iterdir())) == 1, "one rank writes"
    reader = EventAccumulator(str(dump_folder / "tb"), size_guidance={"scalars": 0})
    reader.Reload()
    events = reader.Scalars("loss")
    assert [event.step for event in events] == list(range(1, STEPS + 1))
    losses = [line["loss"] for line in lines(dump_folder)]
    assert [event.value for event in events] == pytest.approx(losses, rel=1e-6)  # they hold float32
    assert all(2 < loss < 8 for loss in losses)


def test_metrics_file_has_every_promised_key(dump_folder: Path) -> None:
    """Every key of docs/metrics.md, but for those that it says a run on CPU has no value for."""
    text = (ROOT / "docs" / "metrics.md").read_text()
    run, roles = text.split("## Of each role")
    keys = re.findall(r"^\| `([^`]+)`", run, flags=re.MULTILINE)
    of_roles = re.findall(r"^\| `([^`]+)`", roles, flags=re.MULTILINE)
    assert len(keys) >= 13 and len(of_roles) >= 5
    promised = {key for key in keys if "{layer}" not in key} - {"mfu"}
    promised |= {f"expert_load.layer_{layer}" for layer in range(1, 7)}
    promised |= {f"{role.value}.{key}.{s}" for role in Role for key in of_roles for s in ("mean", "max")}
    for number, line in enumerate(lines(dump_folder), 1):
        assert set(line) == promised
        assert line["step"] == number
        assert all(value is not None and math.isfinite(value) for value in line.values())


def test_metrics_are_plausible(dump_folder: Path) -> None:
    for line in lines(dump_folder):
        assert line["tokens"] == 14 * 8
        assert line["tokens_per_s"] == pytest.approx(line["tokens"] / line["step_time_s"])
        assert 1 <= line["rows_per_token"] <= 2
        assert 0 < line["router_entropy"] <= math.log(8)
        for role in ("attn", "ffn"):
            spent = sum(line[f"{role}.{key}.mean"] for key in ("compute_s", "exposed_comm_s", "idle_s"))
            assert 0 < line[f"{role}.compute_s.mean"] <= spent <= line["step_time_s"]
            assert line[f"{role}.sent_bytes.mean"] <= line[f"{role}.sent_bytes.max"]
        # 64 float32 a row; rows in both passes.
        rows = line["rows_per_token"] * line["tokens"] * 6
        for role in ("attn", "ffn"):
            sent = 2 * line[f"{role}.sent_bytes.mean"]
            assert 2 * rows * 256 < sent < 2 * rows * 256 * 1.5


def test_timeline_has_every_process(dump_folder: Path) -> None:
    trace = json.loads((dump_folder / "timeline.json").read_text())["traceEvents"]
    names = {entry["args"]["name"] for entry in trace if entry["name"] == "process_name"}
    assert names == {"r0.A0.0", "r0.A0.1", "r0.F0.0", "r0.F0.1"}
    forwards = Counter(entry["pid"] for entry in trace if re.fullmatch(r"\d+F\d+", entry["name"]))
    # A: 7 stages, F: 6 stages, 4 micro-batches.
    assert sorted(forwards.values()) == [24, 24, 28, 28]


@pytest.mark.parametrize(
    ("layout", "schedule", "microbatches"),
    [
        ((1, 1, 2, 2), "plain", 3),
        ((2, 2, 2, 1), "deep", 14),
        ((3, 3, 1, 1), "deep", 6),
        ((1, 2, 2, 1), "plain", 12),
        ((2, 1, 1, 2), "deep", 2),
    ],
)
def test_actions_are_the_schedule(
    layout: tuple[int, int, int, int], schedule: str, microbatches: int, worlds: Worlds, documents: Path
) -> None:
    """What every process did, in order, is its group's program, step by step."""
    steps = 2
    config = make_config("qwen3", documents, layout=layout, schedule=schedule, microbatches=microbatches)
    hook = "tests.distributed.harness.hooks:record_actions"
    result = worlds.run(Case(config=config, steps=steps, hook=hook))
    part, layout_ = config.disagmoe, build_layout(config)
    planned = make_schedule(
        layout_,
        model_shape(config).is_moe_layer,
        name=part.schedule,
        num_microbatches=part.microbatches,
        in_flight=part.in_flight,
        hoist=part.hoist,
        send_after=part.send_after,
    )
    for rank, actions in enumerate(result.extras):
        (worker,) = layout_.workers_on(rank)
        program = planned.programs[layout_.pipeline_group(worker.role, worker.group)]
        assert actions == list(program) * steps, f"rank {rank} ({worker})"
