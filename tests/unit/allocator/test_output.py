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


def test_a_placement_is_dropped_aloud(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, out = tmp_path / "given.toml", tmp_path / "my.toml"
    shape = ["--seq-len", "128", "--global-batch", "12"]
    assert main(["allocate", *DEBUG, *shape, "--attn-depth", "1", "--out", str(given)]) == 0
    stages = sum(make_plan(load_config(given)).shape.is_moe_layer) + 1
    text = given.read_text()
    given.write_text(text.replace("attn_depth = 1\n", f"attn_depth = 1\nattn_placement = {[0] * stages}\n"))
    assert load_config(given).config.disagmoe.attn_placement == [0] * stages
    capsys.readouterr()
    assert main(["allocate", str(given), "--cluster", "emulated", "--attn-depth", "2", "--out", str(out)]) == 0
    assert "attn_placement of the given configuration is dropped" in capsys.readouterr().err
    assert load_config(out).config.disagmoe.attn_placement == []
    words = " ".join(out.read_text().replace("#", " ").split())
    assert "attn_placement of the given configuration is dropped" in words
    assert "attn_placement =" not in out.read_text()


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
