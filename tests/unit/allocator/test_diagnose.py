"""Nothing fits: what binds, what would help, exit code 2, no file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from disagmoe.allocator.diagnose import diagnose
from disagmoe.allocator.question import Pins, Question
from disagmoe.allocator.search import NothingFits, allocate
from disagmoe.cli import main
from tests.unit.allocator.problems import make_question, with_memory


def refused(question: Question) -> str:
    with pytest.raises(NothingFits):
        allocate(question)
    return str(diagnose(question))


@pytest.mark.parametrize(
    ("question", "binding"),
    [
        (make_question(pins=Pins(ffn_workers=9)), "experts: ffn_workers = 9, but a layer has 4"),
        (make_question(pins=Pins(ffn_depth=7)), "layers: ffn_depth = 7, but there are 3"),
        (make_question(pins=Pins(attn_depth=7)), "layers: attn_depth = 7, but there are 4"),
        (make_question(pins=Pins(replicas=2, microbatches=4)), "micro-batches: replicas x microbatches = 2 x 4"),
        (make_question(pins=Pins(attn_workers=3, ffn_workers=2)), "divisibility: no layout of at most 6 GPUs"),
        (make_question(nodes=1, gpus_per_node=1), "GPUs: an A- and an F-worker are needed"),
    ],
)
def test_rules_that_leave_nothing(question: Question, binding: str) -> None:
    assert binding in refused(question)


def test_memory_and_the_least_that_helps() -> None:
    question = with_memory(make_question(expert_dim=1024, experts=8), 2e7)
    text = refused(question)
    assert "memory of " in text and "is short by" in text and "GiB" in text
    factor = float(text.partition("GPUs with ")[2].partition(" times the memory")[0])
    assert allocate(with_memory(question, 2e7 * factor * 1.02)).outcomes
    with pytest.raises(NothingFits):
        allocate(with_memory(question, 2e7 * factor * 0.97))


def test_a_pin_that_is_too_tight_is_named() -> None:
    question = with_memory(make_question(expert_dim=1024, experts=8, layers=4), 1.2e8)
    tight = replace(question, pins=Pins(ffn_workers=1, ffn_depth=1))
    text = refused(tight)
    assert "memory of F-workers" in text
    assert "no pin on ffn_workers (now 1)" in text or "no pin on ffn_depth (now 1)" in text


def test_exit_code_2_and_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "my.toml"
    arguments = ["--recipe", "qwen3", "--flavor", "235B-A22B", "--cluster", "h100x1", "--seq-len", "4096"]
    assert main(["allocate", *arguments, "--global-batch", "16", "--out", str(out)]) == 2
    message = capsys.readouterr().err
    assert "memory of" in message and "GiB" in message and "times the nodes" in message
    assert not out.exists()
