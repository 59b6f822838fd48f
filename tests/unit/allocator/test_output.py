"""`disagmoe allocate` from the command line to a TOML that the runtime takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagmoe.check import make_plan
from disagmoe.cli import main
from disagmoe.config.load import load_config

DEBUG = ["--recipe", "deepseek_moe", "--flavor", "debug", "--cluster", "emulated", "--dtype", "float32"]


def test_writes_a_configuration_that_check_accepts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "my.toml"
    assert main(["allocate", *DEBUG, "--seq-len", "128", "--global-batch", "16", "--out", str(out)]) == 0
    text, shown = out.read_text(), capsys.readouterr().out
    plan = make_plan(load_config(out))
    assert plan.layout.world_size <= 8 and plan.config.training.global_batch_size == 16
    words = ("Predicted: step", "tokens/s", "MFU", "Bottleneck:", "A-worker:", "F-worker:", "Within 3%", "Not modelled")
    for word in words:
        assert word in text and word in shown
    assert main(["check", str(out)]) == 0
    picture = tmp_path / "my.png"
    again = tmp_path / "again.toml"
    shape = ["--seq-len", "128", "--global-batch", "16"]
    assert main(["allocate", *DEBUG, *shape, "--out", str(again), "--plot", str(picture)]) == 0
    assert picture.stat().st_size > 10_000
    assert again.read_text().replace(str(again), str(out)) == text


def test_pins_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "my.toml"
    pins = ["--attn-workers", "2", "--ffn-workers", "3", "--replicas", "1"]
    pins += ["--recompute", "full", "--schedule", "plain"]
    assert main(["allocate", *DEBUG, "--seq-len", "128", "--global-batch", "12", "--out", str(out), *pins]) == 0
    part = load_config(out).config.disagmoe
    assert (part.attn_workers, part.ffn_workers, part.replicas) == (2, 3, 1)
    assert (part.recompute, part.schedule) == ("full", "plain")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attn-workers", "0"], "--attn-workers = 0: must be at least 1"),
        (["--seq-len", "8192"], "must be at most 4096"),
        (["--cluster", "h800x61"], "did you mean"),
        (["--flavor", "debgu"], "did you mean"),
    ],
)
def test_bad_questions_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    out = tmp_path / "my.toml"
    assert main(["allocate", *DEBUG, *arguments, "--out", str(out)]) == 2
    assert message in capsys.readouterr().err and not out.exists()
