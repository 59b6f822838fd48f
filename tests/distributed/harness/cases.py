"""A case (a configuration, a number of steps) and its result by the unsplit model's parameter names."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from disagmoe.config.schema import (
    CommConfig,
    Config,
    DataConfig,
    DebugConfig,
    DisagMoEConfig,
    ExpertParallelConfig,
    LRSchedulerConfig,
    MetricsConfig,
    OptimizerConfig,
    ParallelismConfig,
    RecipeConfig,
    TrainingConfig,
)

FAMILIES = ("deepseek_moe", "gpt_oss", "qwen3")
NUM_STAGES = 13
"""S: stages of every debug flavor, which all have 6 MoE layers."""
SEEDS = {"deepseek_moe": 22, "gpt_oss": 16, "qwen3": 15}
"""Of weights and data, by family. Chosen so that no token of a five-step run is nearly undecided between two experts:
rounding, which differs between layouts, would otherwise send it elsewhere now and then, a discrete change that no
tolerance is meant to cover. `test_parity` checks the margins."""
SGD = OptimizerConfig(name="SGD", lr=0.5, weight_decay=0.01, momentum=0.5)
ADAMW = OptimizerConfig(name="AdamW", lr=1e-3)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one world runs once."""

    config: Config
    steps: int = 5
    hook: str = ""
    """`module:function`, called as function(engine, **hook_arguments) before the first step, in every process. What it
    returns is sent back after the last step, one value a process, in `RunResult.extras`."""
    hook_arguments: Mapping[str, Any] = field(default_factory=dict)
    folder: str = ""
    """Dump folder; empty: nothing is written."""
    body: str = ""
    """`module:function`, called as function(case, world) *instead* of training, in every process. What it returns
    is sent back in `RunResult.extras`; nothing else is."""
    timeout_s: float = 60.0
    """The case counts as hanging after this time."""


@dataclass(kw_only=True)
class Piece:
    """One copy of a parameter (or of a part of its experts) on one process."""

    name: str
    home: str
    """Worker and role, e.g. `r0.F0.1`."""
    experts: tuple[int, int] | None
    """First and one past the last global id, of a stacked expert parameter."""
    value: Tensor


@dataclass(kw_only=True)
class RankResult:
    """What one process sends back."""

    history: list[dict[str, Any]]
    gradients: list[Piece]
    initial: list[Piece]
    parameters: list[Piece]
    biases: list[Piece]
    extra: Any
    seconds: float


@dataclass(kw_only=True)
class RunResult:
    """A case's result. Tensors by unsplit name, expert shards put together by global id."""

    history: list[dict[str, Any]]
    """Metrics of each step."""
    gradients: dict[str, Tensor]
    """Of step 1, summed over all homes, before clipping."""
    initial: dict[str, Tensor]
    parameters: dict[str, Tensor]
    """After the last step."""
    biases: dict[str, Tensor]
    """Router biases after the last step."""
    homes: dict[str, list[str]]
    """By parameter: the workers that hold a copy or a part of it."""
    unequal: list[str]
    """What differs between homes of the same thing, in words; must be empty."""
    extras: list[Any]
    """By process: what the hook returned."""
    seconds: float

    def losses(self) -> list[float]:
        return [step["loss"] for step in self.history]


def assemble(ranks: list[RankResult]) -> RunResult:
    """Put the processes' pieces together and compare the copies bit by bit."""
    homes: dict[str, list[str]] = {}
    unequal: list[str] = []
    joined = {
        what: _join([piece for rank in ranks for piece in getattr(rank, what)], what, homes, unequal)
        for what in ("gradients", "initial", "parameters", "biases")
    }
    for number, rank in enumerate(ranks):
        if rank.history != ranks[0].history:
            unequal.append(f"metrics of rank {number} and rank 0")
    return RunResult(
        history=ranks[0].history,
        homes=homes,
        unequal=unequal,
        extras=[rank.extra for rank in ranks],
        seconds=max(rank.seconds for rank in ranks),
        **joined,
    )


def _join(pieces: list[Piece], what: str, homes: dict[str, list[str]], unequal: list[str]) -> dict[str, Tensor]:
    by_place: dict[tuple[str, tuple[int, int] | None], list[Piece]] = defaultdict(list)
    for piece in pieces:
        by_place[piece.name, piece.experts].append(piece)
        homes.setdefault(piece.name, [])
        if piece.home not in homes[piece.name]:
            homes[piece.name].append(piece.home)
    shards: dict[str, list[tuple[int, int, Tensor]]] = defaultdict(list)
    whole: dict[str, Tensor] = {}
    for (name, experts), copies in by_place.items():
        first = copies[0]
        for other in copies[1:]:
            # Bits, not values: 0 and -0 would be a difference too, and NaN none.
            if not torch.equal(_bits(first.value), _bits(other.value)):
                unequal.append(f"{what}: {name} {experts or ''} on {first.home} and {other.home}")
        if experts is None:
            whole[name] = first.value
        else:
            shards[name].append((*experts, first.value))
    for name, parts in shards.items():
        parts.sort(key=lambda part: part[0])
        stops = [0, *(stop for _, stop, _ in parts)]
        assert [start for start, _, _ in parts] == stops[:-1], f"{name}: expert ranges {[p[:2] for p in parts]}"
        whole[name] = torch.cat([value for _, _, value in parts])
    return whole


def _bits(value: Tensor) -> Tensor:
    return value.contiguous().view(torch.uint8) if value.dim() else value.reshape(1).view(torch.uint8)


def make_config(
    family: str,
    data: Path | str,
    *,
    optimizer: OptimizerConfig = SGD,
    layout: tuple[int, int, int, int] = (1, 1, 1, 1),
    seed: int | None = None,
    seq_len: int = 8,
    global_batch_size: int = 14,
    microbatches: int = 2,
    strict_order: bool = False,
    training: Mapping[str, Any] | None = None,
    **disagmoe: Any,
) -> Config:
    """A small configuration: `layout` is (attn_depth, ffn_depth, attn_workers, ffn_workers).

    The learning rate warms up, so that the schedule takes part.
    """
    attn_depth, ffn_depth, attn_workers, ffn_workers = layout
    return Config(
        recipe=RecipeConfig(name=family, flavor="debug"),
        disagmoe=DisagMoEConfig(
            attn_depth=attn_depth,
            ffn_depth=ffn_depth,
            attn_workers=attn_workers,
            ffn_workers=ffn_workers,
            microbatches=microbatches,
            **disagmoe,
        ),
        # Shorter than a case's own limit: a lost message is then reported with its edge and peer.
        comm=CommConfig(backend="gloo", timeout_s=30.0, heartbeat_timeout_s=30.0, strict_order=strict_order),
        training=TrainingConfig(steps=5, seq_len=seq_len, global_batch_size=global_batch_size, **(training or {})),
        optimizer=optimizer,
        lr_scheduler=LRSchedulerConfig(warmup_steps=2),
        data=DataConfig(source=str(data), shuffle=False),
        metrics=MetricsConfig(tensorboard=False, timeline_step=0),
        debug=DebugConfig(seed=SEEDS[family] if seed is None else seed),
    )


def reference_config(config: Config) -> Config:
    """The same training in one process, with the unsplit model and the whole batch in one micro-batch."""
    return replace(
        config,
        parallelism=ParallelismConfig(mode="none"),
        disagmoe=DisagMoEConfig(attn_workers=1, ffn_workers=1, microbatches=1),
        expert_parallel=ExpertParallelConfig(),
        comm=CommConfig(),
    )


def write_documents(path: Path, *, num_tokens: int = 4000, longest: int = 40) -> Path:
    """A jsonl file of random words in documents of 1 to `longest` bytes: samples differ in their valid tokens."""
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        written = 0
        while written < num_tokens:
            # Runs of tiny documents and of long ones.
            length = draw.choice((1, 2, longest)) if draw.random() < 0.7 else draw.randint(1, longest)
            text = "".join(draw.choice("abcdefghij klmnop qrst uvwxyz") for _ in range(length))
            file.write(json.dumps({"text": text.replace(" ", "_", 1)}) + "\n")
            written += length + 1
    return path


def write_uneven_documents(path: Path, *, seq_len: int, num_samples: int = 60) -> Path:
    """A jsonl file whose samples of `seq_len` (even) tokens are full of one-byte documents, or nearly one document.

    Half of the tokens of the former are document ends, which do not count. Neighbours and pairs differ.
    """
    draw = random.Random(1)
    with path.open("w", encoding="utf-8") as file:
        for sample in range(num_samples):
            tiny = "1101001100101101"[sample % 16] == "1"
            lengths = [1] * (seq_len // 2) if tiny else [seq_len - 1]
            for length in lengths:
                text = "".join(draw.choice("abcdefghijklmnop") for _ in range(length))
                file.write(json.dumps({"text": text}) + "\n")
    return path
