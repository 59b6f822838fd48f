"""Who writes what, and what a run may be continued with."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from disagmoe.checkpoint.folder import CheckpointError
from disagmoe.checkpoint.resume import changes, describe_run, differences
from disagmoe.checkpoint.state import Holding, Piece, Unit, assign, holdings, unit_bytes, views
from disagmoe.config.schema import (
    Config,
    DataConfig,
    DebugConfig,
    DisagMoEConfig,
    OptimizerConfig,
    RecipeConfig,
    TrainingConfig,
)


def held(*, experts: range | None = None, shared: tuple[str, ...] = (), width: int = 4) -> list[Holding]:
    pieces = [Piece(key=f"model.{k}", start=0, tensor=torch.zeros(width, width), sharded=False) for k in shared]
    if experts is not None:
        tensor = torch.zeros(len(experts), width, width)
        pieces.append(Piece(key="model.w", start=experts.start, tensor=tensor, sharded=True))
    return holdings(pieces)


def test_every_unit_is_written_once_by_a_holder_and_bytes_are_even() -> None:
    draw = random.Random(3)
    for _ in range(50):
        size = draw.randrange(1, 7)
        shared = [f"s{i}" for i in range(draw.randrange(1, 20))]
        homes = {key: draw.sample(range(size), draw.randrange(1, size + 1)) for key in shared}
        by_rank = [held(shared=tuple(k for k in shared if rank in homes[k])) for rank in range(size)]
        result = assign(by_rank)
        written = [unit.key for units in result.by_rank for unit in units]
        assert sorted(written) == sorted(f"model.{k}" for k in shared)
        for rank, units in enumerate(result.by_rank):
            assert all(rank in homes[unit.key.removeprefix("model.")] for unit in units)
    everywhere = assign([held(shared=tuple(f"s{i}" for i in range(30)))] * 4)
    assert max(everywhere.bytes_by_rank) - min(everywhere.bytes_by_rank) <= 4 * 4 * 4


def test_experts_are_units_of_their_own() -> None:
    result = assign([held(experts=range(3)), held(experts=range(3, 5)), held(experts=range(5))])
    assert [(unit.start, unit.shape, unit.full_shape) for unit in result.units] == [
        (row, (1, 4, 4), (5, 4, 4)) for row in range(5)
    ]
    assert sorted(len(units) for units in result.by_rank) == [1, 2, 2]
    assert sum(result.bytes_by_rank) == 5 * unit_bytes(result.units[0]) == 5 * 64


def test_missing_experts_and_disagreement_are_errors() -> None:
    with pytest.raises(CheckpointError, match=r"model.w: no process holds experts \[2\]"):
        assign([held(experts=range(2)), held(experts=range(3, 5))])
    with pytest.raises(CheckpointError, match=r"disagree about the shape of model.s"):
        assign([held(shared=("s",)), held(shared=("s",), width=5)])


def test_views_are_the_memory_itself() -> None:
    w = torch.arange(12.0).reshape(3, 4)
    piece = Piece(key="model.w", start=2, tensor=w, sharded=True)
    (row,) = views([piece], [Unit(key="model.w", start=3, shape=(1, 4), full_shape=(5, 4), dtype="torch.float32")])
    row.zero_()
    assert w[1].tolist() == [0.0] * 4 and w[2].tolist() == [8.0, 9.0, 10.0, 11.0]


CONFIG = Config(recipe=RecipeConfig(name="qwen3"), dump_folder="outputs/x")
STATE = describe_run(CONFIG, step=40, next_sample=640, fingerprint="abc", world_size=4, layout="")


def refused(config: Config, fingerprint: str | None = "abc", state: dict[str, Any] = STATE) -> dict[str, str]:
    return {key: rule for key, rule, _ in differences(config, state, fingerprint=fingerprint)}


def test_layout_batch_and_rates_may_change() -> None:
    changed = replace(
        CONFIG,
        disagmoe=DisagMoEConfig(attn_workers=5, ffn_depth=2, replicas=3, microbatches=1),
        training=replace(CONFIG.training, steps=9, global_batch_size=7, max_grad_norm=0.0),
        optimizer=OptimizerConfig(lr=1.0, weight_decay=0.0),
    )
    assert refused(changed) == {}
    assert changes(changed, STATE) == [
        "training.steps = 9, was 100",
        "training.global_batch_size = 7, was 16",
        "training.max_grad_norm = 0.0, was 1.0",
        "optimizer.lr = 1.0, was 0.001",
        "optimizer.weight_decay = 0.0, was 0.1",
    ]
    assert changes(CONFIG, STATE) == []


@pytest.mark.parametrize(
    ("key", "changed", "said"),
    [
        ("recipe.flavor", {"recipe": RecipeConfig(name="qwen3", flavor="30b_a3b")}, 'must be "debug"'),
        ("training.seq_len", {"training": TrainingConfig(seq_len=64)}, "must be 128 as in step-00000040"),
        ("training.dtype", {"training": TrainingConfig(dtype="bfloat16")}, 'must be "float32"'),
        ("debug.seed", {"debug": DebugConfig(seed=1)}, "the order of the data"),
        ("optimizer.name", {"optimizer": OptimizerConfig(name="SGD")}, 'must be "AdamW"'),
        ("training.load_balance_coeff", {"training": TrainingConfig(load_balance_coeff=0.0)}, "router biases"),
    ],
)
def test_what_would_not_continue_the_run_is_named(key: str, changed: dict[str, Any], said: str) -> None:
    rules = refused(replace(CONFIG, **changed))
    assert list(rules) == [key]
    assert said in rules[key]


def test_momentum_may_not_come_or_go() -> None:
    sgd = replace(CONFIG, optimizer=OptimizerConfig(name="SGD", momentum=0.5))
    state = {**STATE, "config": asdict(sgd)}
    assert refused(replace(sgd, optimizer=OptimizerConfig(name="SGD", momentum=0.9)), state=state) == {}
    assert list(refused(replace(sgd, optimizer=OptimizerConfig(name="SGD")), state=state)) == ["optimizer.momentum"]


def test_data_are_judged_by_what_they_are() -> None:
    moved = replace(CONFIG, data=DataConfig(source="/elsewhere/the_same.jsonl"))
    assert refused(moved) == {}
    assert refused(moved, fingerprint=None) == {}
    assert "whose run has trained 640 samples" in refused(moved, "other")["data.source"]
    assert refused(CONFIG, "other")["data.source"].startswith("has other content now")
    assert list(refused(replace(CONFIG, data=DataConfig(shuffle=False)), "other")) == ["data.shuffle"]
    # Of a stream, only the name is known.
    streamed = {**STATE, "data": {"next_sample": 640, "fingerprint": "c4 seq_len=128 vocab_size=257"}}
    other_split = replace(CONFIG, data=DataConfig(split="validation"))
    assert list(refused(other_split, "c4 seq_len=128 vocab_size=257", streamed)) == ["data.split"]
