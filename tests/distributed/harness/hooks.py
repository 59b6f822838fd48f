"""What cases do with an engine before their first step. Every hook works on the unsplit model and on parts of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.models.common.moe import TokenChoiceTopKRouter

from disagmoe.engine import DisagEngine, Engine
from disagmoe.expert_parallel_engine import EPEngine
from disagmoe.layout import Role
from disagmoe.parallelisms.clock import StepClock
from disagmoe.schedules.actions import Action, Kind
from disagmoe.schedules.chunk_orders import ChunkWork


def prefer_experts(engine: Engine, *, bias: Sequence[float]) -> None:
    """Set every router's bias, by expert: large ones attract every token, very negative ones none."""
    for router in engine.routers:
        assert router.bias_E is not None
        router.bias_E.copy_(torch.tensor(bias))


def tie_all_experts(engine: Engine) -> None:
    """Zero gates: every token scores every expert exactly alike."""
    for name, parameter in _parameters(engine):
        if ".router.gate." in name:
            nn.init.zeros_(parameter)


def record_actions(engine: Engine) -> list[Action]:
    """Note every action of the first step on, in the order in which it begins."""
    assert isinstance(engine, DisagEngine)
    actions: list[Action] = []
    engine.pipeline.runtime.before_action = actions.append
    return actions


def count_tokens(engine: Engine) -> dict[int, list[list[float]]]:
    """By layer, a list a step: tokens by expert that this process counted, as they are when gradients are summed."""
    counts: dict[int, list[list[float]]] = {router.layer: [] for router in engine.routers}
    reduce = engine.gradients.reduce

    def counting_reduce() -> None:
        for router in engine.routers:
            counts[router.layer].append(router.stats.tokens_per_expert_E.tolist())
        reduce()

    engine.gradients.reduce = counting_reduce  # type: ignore[method-assign]
    return counts


def watch_clock(engine: Engine) -> StepClock:
    """The clock, with what it has measured."""
    return engine.clock


def watch_margins(engine: Engine) -> list[float]:
    """A value a router call: the least distance, over tokens, between the last chosen expert and the first not chosen.

    Rounding that is larger than this would send a token elsewhere, which no tolerance could cover.
    """
    margins: list[float] = []

    def watch(router: TokenChoiceTopKRouter, arguments: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        bias_E = arguments[1] if len(arguments) > 1 else None
        choice = output[2] if bias_E is None else output[2] + bias_E
        best = torch.topk(choice.detach().flatten(0, -2), router.top_k + 1, dim=-1).values
        margins.append(float((best[:, -2] - best[:, -1]).min()))

    for module in engine.modules:
        for part in module.modules():
            if isinstance(part, TokenChoiceTopKRouter):
                part.register_forward_hook(watch)
    return margins


def fail(engine: Engine, *, how: str, role: str = "ffn", microbatch: int = 1) -> None:
    """Make the workers of a role fail in a forward: `raise` an error, `hang` for an hour, or `die`."""
    assert isinstance(engine, DisagEngine)
    if engine.workers[0].role is not Role(role) or engine.workers[0].index != 0:
        return

    def before_action(action: Action) -> None:
        if (action.kind, action.microbatch) != (Kind.FORWARD, microbatch):
            return
        if how == "raise":
            raise RuntimeError("a deliberate error")
        if how == "hang":
            time.sleep(3600.0)
        os._exit(7)

    engine.pipeline.runtime.before_action = before_action


def fail_in_chunk(engine: Engine) -> None:
    """Make the last worker of an expert-parallel pipeline raise an error in its second micro-batch."""
    assert isinstance(engine, EPEngine)
    if engine.workers[0].group == 0 or engine.workers[0].index == 0:
        return

    def before_work(work: ChunkWork) -> None:
        if (work.kind, work.microbatch) == ("F", 1):
            raise RuntimeError("a deliberate error")

    engine.pipeline.runtime.before_work = before_work


def _parameters(engine: Engine) -> Iterator[tuple[str, Any]]:
    for module in engine.modules:
        yield from module.named_parameters()
