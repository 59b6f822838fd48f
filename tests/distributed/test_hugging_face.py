"""Training from published weights in any layout: logits are transformers' before and after, and no bit is lost."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from disagmoe.cli import main
from disagmoe.config.checks import build_layout
from disagmoe.config.schema import CheckpointConfig, Config, RecipeConfig
from disagmoe.data import build_dataset
from disagmoe.layout import Role, owned_samples
from tests.distributed.harness.cases import ADAMW, FAMILIES, Case, RunResult, make_config, reference_config
from tests.distributed.harness.compare import WORST
from tests.distributed.harness.worlds import Worlds
from tests.unit.hugging_face.models import reload, save_transformers, their_logits

TOLERANCE = 1e-5
STEPS = 4
"""The last one's logits are those after 3 updates."""
QUICK: list[tuple[str, dict[str, Any]]] = [
    ("deepseek_moe", {"layout": (1, 1, 2, 2)}),
    ("gpt_oss", {"layout": (1, 1, 2, 2)}),
    ("qwen3", {"layout": (1, 1, 2, 2)}),
]
FULL: list[tuple[str, dict[str, Any]]] = [
    (family, layout)
    for family in FAMILIES
    for layout in (
        {"layout": (2, 1, 1, 2)},
        {"layout": (2, 2, 2, 1)},
        {"layout": (1, 2, 1, 3)},
        {"layout": (1, 1, 1, 1), "replicas": 2},
        {"layout": (1, 1, 1, 1), "colocate": True},
    )
]
CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_moe": {},
    "gpt_oss": {"num_local_experts": 7},
    "qwen3": {"tie_word_embeddings": True},
}
"""7 experts: workers hold unequal parts of one published tensor."""


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models as transformers saves them, by family."""
    folders = {family: tmp_path_factory.mktemp("published") / family for family in FAMILIES}
    for family, folder in folders.items():
        save_transformers(family, folder, **CHANGES[family])
    return folders


@pytest.fixture(scope="module")
def one_document(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text without an end: transformers' masks know no documents."""
    path = tmp_path_factory.mktemp("data") / "long.jsonl"
    draw = random.Random(5)
    path.write_text(json.dumps({"text": "".join(draw.choice("abcdefghijklmnopqrst") for _ in range(4000))}))
    return path


def config_for(family: str, folder: Path, data: Path, layout: dict[str, Any]) -> Config:
    config = make_config(
        family, data, optimizer=ADAMW, global_batch_size=8, seq_len=16, training={"load_balance_coeff": 0.0}, **layout
    )
    return replace(
        config,
        recipe=RecipeConfig(name=family, flavor=str(folder)),
        checkpoint=CheckpointConfig(
            initial_load_in_hf=True,
            initial_load_path=str(folder),
            enable=True,
            interval=STEPS - 1,
            async_mode="disabled",
        ),
    )


def step_logits(config: Config, result: RunResult, step: int) -> Tensor:
    """Of a whole step's samples, from the slices of all processes."""
    layout, samples = build_layout(config), config.training.global_batch_size
    found: dict[int, Tensor] = {}
    for rank, logits in enumerate(result.extras):
        for at, microbatch, value in logits:
            if at != step:
                continue
            worker = next(w for w in layout.workers_on(rank) if w.role is Role.ATTN)
            owned = owned_samples(
                layout,
                global_batch_size=samples,
                microbatches=config.disagmoe.microbatches,
                replica=worker.replica,
                worker_index=worker.index,
            )
            found |= dict(zip(owned[microbatch], value, strict=True))
    return torch.stack([found[i] for i in range(samples)])


def step_tokens(config: Config, step: int) -> Tensor:
    training = config.training
    data = build_dataset(config.data, seq_len=training.seq_len, seed=config.debug.seed)
    first = (step - 1) * training.global_batch_size
    batch = data.batch([first + i for i in range(training.global_batch_size)])
    assert bool((batch.positions_BL == torch.arange(training.seq_len)).all())
    return batch.tokens_BL


def distance(value: Tensor, expected: Tensor) -> float:
    return float((value - expected).norm() / expected.norm())


def noted(value: float, where: str) -> float:
    WORST.note("logits, from transformers'", value, where)
    return value


def check(family: str, config: Config, folder: Path, worlds: Worlds, tmp_path: Path) -> None:
    config = replace(config, dump_folder=str(tmp_path / "run"))
    exports = {1: str(tmp_path / "before"), STEPS: str(tmp_path / "after")}
    arguments = {"recipe": family, "flavor": str(folder), "source": str(folder), "exports": exports}
    case = Case(
        config=config,
        steps=STEPS,
        hook="tests.distributed.hf_hooks:watch_and_export",
        hook_arguments=arguments,
    )
    result = worlds.run(case)
    # Before the first step: transformers' logits, and what was read is what is written.
    theirs = their_logits(reload(folder), step_tokens(config, 1))
    assert noted(distance(step_logits(config, result, 1), theirs), family) < TOLERANCE
    before, source = (load_file(place / "model.safetensors") for place in (tmp_path / "before", folder))
    tied = CHANGES[family].get("tie_word_embeddings", False)
    assert before.keys() == source.keys() | ({"lm_head.weight"} if tied else set())
    assert all(torch.equal(before[name], source[name]) for name in source)
    # After three updates: transformers computes from the exported files what is computed here.
    ours = step_logits(config, result, STEPS)
    tokens_BL = step_tokens(config, STEPS)
    assert noted(distance(ours, their_logits(reload(tmp_path / "after"), tokens_BL)), family) < TOLERANCE
    assert distance(ours, their_logits(reload(folder), tokens_BL)) > 1e-3, "training has changed nothing"
    # The checkpoint of that moment holds the same, whatever layout saved it.
    saved, output = str(tmp_path / "run"), str(tmp_path / "saved")
    assert main(["export-hf", saved, output, f"--step={STEPS - 1}", "--dtype=float32"]) == 0
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "saved" / name).read_bytes() == (tmp_path / "after" / name).read_bytes()


def name_of(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    return "-".join(["x".join(map(str, value["layout"])), *(key for key in value if key != "layout")])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_unsplit_model(
    family: str, published: dict[str, Path], one_document: Path, worlds: Worlds, tmp_path: Path
) -> None:
    config = reference_config(config_for(family, published[family], one_document, {}))
    check(family, config, published[family], worlds, tmp_path)


@pytest.mark.parametrize(("family", "layout"), QUICK, ids=name_of)
def test_a_disaggregated_layout(
    family: str,
    layout: dict[str, Any],
    published: dict[str, Path],
    one_document: Path,
    worlds: Worlds,
    tmp_path: Path,
) -> None:
    config = config_for(family, published[family], one_document, layout)
    check(family, config, published[family], worlds, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(("family", "layout"), FULL, ids=name_of)
def test_other_layouts(
    family: str,
    layout: dict[str, Any],
    published: dict[str, Path],
    one_document: Path,
    worlds: Worlds,
    tmp_path: Path,
) -> None:
    config = config_for(family, published[family], one_document, layout)
    check(family, config, published[family], worlds, tmp_path)
