"""A model cut into parts and run stage by stage in one process, with a transfer written for clarity, not speed."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from disagmoe.config.recipe import load_recipe
from disagmoe.layout import Layout, Role, build_stages, split_evenly
from disagmoe.models.attention import attention_masks
from disagmoe.models.deferred import WeightGradients
from disagmoe.models.init import build_model, init_parameters, make_portable, materialize
from disagmoe.models.split import Routing, build_attention_part, build_expert_part

FAMILIES = ("deepseek_moe", "gpt_oss", "qwen3")
SEQ_LEN = 48


def debug_config(family: str, **changes: Any) -> Any:
    return make_portable(load_recipe(family).model_config("debug"), seq_len=SEQ_LEN, attention=True, **changes)


def make_batch(batch: int = 3, seq_len: int = SEQ_LEN) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels and positions [B, L]; the second sample holds three documents."""
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(0, 257, (2, batch, seq_len), generator=generator)
    positions = torch.arange(seq_len).repeat(batch, 1)
    positions[1, 7:] -= 7
    positions[1, 30:] -= 23
    return tokens, labels, positions


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


@dataclass
class LocalPipeline:
    """All stages of one A-worker and `ffn_workers` F-workers a group; experts are sharded, rows are de-duplicated."""

    config: Any
    attn_depth: int = 1
    ffn_depth: int = 1
    ffn_workers: int = 1
    dtype: torch.dtype = torch.float32
    recompute: bool = False
    seed: int = 0
    owed: WeightGradients | None = None
    """Given: backward leaves the large weight gradients to its `run`."""
    parts: list[tuple[torch.nn.Module, range | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        layout = Layout(
            attn_depth=self.attn_depth, ffn_depth=self.ffn_depth, attn_workers=1, ffn_workers=self.ffn_workers
        )
        self.stages = build_stages(layout, [layer.moe is not None for layer in self.config.layers])
        self.by_stage: list[list[torch.nn.Module]] = []
        for stage in self.stages:
            if stage.role is Role.ATTN:
                self.by_stage.append([self._add(build_attention_part(self.config, stage), None)])
                continue
            experts = split_evenly(self.config.layers[stage.moe_layer].moe.num_experts, self.ffn_workers)
            self.by_stage.append([self._add(build_expert_part(self.config, stage, e), e) for e in experts])

    def _add(self, part: torch.nn.Module, experts: range | None) -> torch.nn.Module:
        materialize(part, device="cpu", dtype=self.dtype)
        init_parameters(part, self.config, self.seed, experts.start if experts else 0)
        self.parts.append((part, experts))
        return part

    def _call(self, part: torch.nn.Module, *args: Any) -> Any:
        def compute(*inputs: Any) -> Any:
            # Inside what is recomputed, so that the recomputation puts its weight gradients off as well.
            with self.owed.collect() if self.owed else nullcontext():
                return part(*inputs)

        return checkpoint(compute, *args, use_reentrant=False) if self.recompute else compute(*args)

    def _expert_stage(self, parts: list[Any], hidden: Tensor, routing: Routing) -> Tensor:
        x, ids = hidden.flatten(0, 1), routing.expert_ids_TK
        out = torch.zeros_like(x)
        for worker, part in enumerate(parts):
            mine = (ids >= part.experts.start) & (ids < part.experts.stop)
            token, slot = mine.nonzero(as_tuple=True)
            primary = torch.arange(worker, len(x), len(parts))
            rows = torch.unique(torch.cat([token, primary]))
            row_of = torch.full((len(x),), -1)
            row_of[rows] = torch.arange(len(rows))
            local = ids[token, slot] - part.experts.start
            weights = routing.weights_TK[token, slot]
            returned = self._call(part, x[rows], weights, row_of[token], local, row_of[primary])
            out = out.index_add(0, rows, returned)
        return out.view_as(hidden)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits [B, L, V]."""
        masks = attention_masks(self.config, positions)
        hidden: Any = tokens
        routing: Any = None
        for stage, parts in zip(self.stages, self.by_stage, strict=True):
            if stage.role is Role.FFN:
                hidden = self._expert_stage(parts, hidden, routing)
            elif stage.has_head:
                return self._call(parts[0], hidden, positions, masks)
            else:
                hidden, routing = self._call(parts[0], hidden, positions, masks)
        raise AssertionError("the last stage has the head")

    def gradients(self, like: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gradients under unsplit names: expert shards joined, the two homes of ffn_norm summed."""
        total = {name: torch.zeros_like(value) for name, value in like.items()}
        for part, experts in self.parts:
            for name, parameter in part.named_parameters():
                assert parameter.grad is not None, f"{name} has no gradient"
                target = total[name][experts.start : experts.stop] if is_stacked(name) else total[name]
                target += parameter.grad
        return total


def is_stacked(name: str) -> bool:
    """Whether a parameter's first dimension counts experts."""
    return ".inner_experts." in name


def reference(config: Any, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """The unsplit model, initialised."""
    model = build_model(config)
    materialize(model, device="cpu", dtype=dtype)
    init_parameters(model, config, seed)
    return model


def relative(actual: Tensor, expected: Tensor) -> float:
    """Norm-relative difference of two tensors."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))
