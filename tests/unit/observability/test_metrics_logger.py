"""What a run writes: metrics.jsonl, event files read back with TensorBoard's own reader, the console line."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from disagmoe.observability import MetricsLogger, metrics
from disagmoe.observability.console import console_line


def values_of(step: int, **more: Any) -> dict[str, Any]:
    return {
        "loss": 5.0 - step / 10,
        "step_time_s": 0.5,
        "tokens_per_s": 4096.0,
        "attn.exposed_comm_s.mean": 0.05,
        **more,
    }


def objects(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder / "tb"), size_guidance={"scalars": 0})
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars(tag)]


def logger_in(folder: Path, **fields: Any) -> MetricsLogger:
    arguments: dict[str, Any] = {"enabled": True, "tensorboard": True, "num_steps": 10, "log_freq": 1, **fields}
    return MetricsLogger(folder, **{"stream": io.StringIO(), **arguments})


def test_each_loss_is_in_the_event_files_once(tmp_path: Path) -> None:
    logger = logger_in(tmp_path)
    for step in range(1, 11):
        logger.log(step, values_of(step))
    logger.close()
    logger.close()
    assert scalars(tmp_path, "loss") == [(step, pytest.approx(5.0 - step / 10)) for step in range(1, 11)]
    assert scalars(tmp_path, "attn/exposed_comm_s.mean")[0] == (1, pytest.approx(0.05))
    assert [o["step"] for o in objects(tmp_path)] == list(range(1, 11))
    assert objects(tmp_path)[3] == {"step": 4, **values_of(4)}


def test_a_continued_run_holds_each_step_once(tmp_path: Path) -> None:
    for first, last, offset in ((1, 7, 0.0), (5, 9, 100.0), (8, 10, 200.0)):
        logger = logger_in(tmp_path)
        for step in range(first, last + 1):
            logger.log(step, {"loss": step + offset})
        logger.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "lo')  # as a kill leaves it
    expected = [(s, s + 0.0) for s in range(1, 5)] + [(s, s + 100.0) for s in range(5, 8)]
    expected += [(s, s + 200.0) for s in range(8, 11)]
    assert scalars(tmp_path, "loss") == expected
    logger = logger_in(tmp_path, tensorboard=False)
    logger.log(11, {"loss": 1.0})
    logger.close()
    assert [(o["step"], o["loss"]) for o in objects(tmp_path)] == [*expected, (11, 1.0)]


def test_lines_are_on_disk_at_once(tmp_path: Path) -> None:
    logger = logger_in(tmp_path)
    logger.log(1, values_of(1))
    assert len(objects(tmp_path)) == 1
    assert scalars(tmp_path, "loss") == [(1, pytest.approx(4.9))]
    logger.close()


def test_log_freq_and_last_step(tmp_path: Path) -> None:
    stream = io.StringIO()
    logger = logger_in(tmp_path, log_freq=4, stream=stream)
    for step in range(1, 11):
        logger.log(step, values_of(step))
    logger.close()
    assert [step for step, _ in scalars(tmp_path, "loss")] == [1, 4, 8, 10]
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["1/10", "4/10", "8/10", "10/10"]
    assert len(objects(tmp_path)) == 10


def test_tensors_lists_and_numbers_that_are_not_finite(tmp_path: Path) -> None:
    stream = io.StringIO()
    logger = logger_in(tmp_path, stream=stream)
    logger.log(1, {"loss": torch.tensor(math.nan), "grad_norm": math.inf, "lr": torch.tensor([1.0, math.nan])})
    logger.close()
    assert objects(tmp_path) == [{"step": 1, "loss": None, "grad_norm": None, "lr": [1.0, None]}]
    assert math.isnan(scalars(tmp_path, "loss")[0][1])
    assert "loss     nan" in stream.getvalue()


def test_disabled_writes_nothing(tmp_path: Path) -> None:
    stream = io.StringIO()
    logger = logger_in(tmp_path / "run", enabled=False, stream=stream)
    logger.log(1, values_of(1))
    logger.close()
    assert not (tmp_path / "run").exists()
    assert stream.getvalue() == ""


def test_without_event_files(tmp_path: Path) -> None:
    logger = logger_in(tmp_path, tensorboard=False)
    logger.log(1, values_of(1))
    logger.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_unknown_key_and_bad_frequency(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'metric "atn.compute_s.max": .* nearest: "attn.compute_s.max"'):
        logger_in(tmp_path).log(1, {"atn.compute_s.max": 1.0})
    assert not (tmp_path / "metrics.jsonl").exists()
    with pytest.raises(ValueError, match="log_freq = 0: must be at least 1"):
        logger_in(tmp_path, log_freq=0)


def test_console_columns_line_up(tmp_path: Path) -> None:
    stream = io.StringIO()
    logger = logger_in(tmp_path, tensorboard=False, num_steps=1000, stream=stream)
    for step, time_s in ((1, 12.3), (22, 0.0412), (333, 1.5), (1000, 9.999)):
        per_role = {f"{role}.exposed_comm_s.mean": time_s * share for role, share in (("attn", 0.08), ("ffn", 0.5))}
        speed = {"tokens_per_s": 2048 / time_s, "step_time_s": time_s, "mfu": 0.312}
        logger.log(step, {"loss": 50 / step, "grad_norm": 3 / step, **speed, **per_role})
    logger.close()
    lines = stream.getvalue().splitlines()
    assert len({len(line) for line in lines}) == 1
    assert all(line.endswith("exposed comm attn   8% ffn  50%  mfu 31.2%") for line in lines)
    assert lines[0].startswith(
        "step    1/1000  loss 50.0000  grad norm   3.000        167 tok/s   12.3 s/step  ETA 3:24:48"
    )
    assert "\x1b" not in stream.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_only_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    logger_in(tmp_path, tensorboard=False, stream=terminal).log(1, values_of(1))
    assert "\x1b[32m" in terminal.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    logger_in(tmp_path, tensorboard=False, stream=plain).log(1, values_of(1))
    assert "\x1b" not in plain.getvalue()


def test_console_leaves_out_what_is_not_known() -> None:
    assert console_line({"step": 3}, num_steps=9) == "step 3/9"
    assert console_line({"step": 3, "attn.exposed_comm_s.mean": 1.0, "mfu": None}, num_steps=9) == "step 3/9"


def test_import_stays_light() -> None:
    code = "import sys, disagmoe.observability; print([m for m in ('tensorboard', 'torchtitan') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_docs_have_every_metric() -> None:
    docs = Path(__file__).parents[3] / "docs" / "metrics.md"
    assert docs.read_text() == metrics.metrics_markdown(), "write docs/metrics.md again from metrics_markdown()"
