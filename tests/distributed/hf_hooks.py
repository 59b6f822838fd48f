"""What the Hugging Face tests do with an engine inside its processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from disagmoe.config.recipe import load_recipe
from disagmoe.engine import DisagEngine, Engine
from disagmoe.hugging_face.export import export_modules
from disagmoe.parallelisms.stage import MicrobatchInput
from disagmoe.schedules.actions import Action

Logits = list[tuple[int, int, Tensor]]
"""(step, micro-batch, logits [B, L, V] of this process's slice of it)."""


def watch_and_export(engine: Engine, *, recipe: str, flavor: str, source: str, exports: dict[int, str]) -> Logits:
    """Note all logits; before the steps in `exports` write the model to their folders."""
    logits: Logits = []
    now = {"step": 0, "microbatch": -1}

    def head_ran(_module: nn.Module, _arguments: Any, output: Tensor) -> None:
        if not isinstance(engine, DisagEngine):
            now["microbatch"] += 1
        logits.append((now["step"], now["microbatch"], output.detach().clone()))

    def before_action(action: Action) -> None:
        now["microbatch"] = action.microbatch

    for module in engine.modules:
        head = getattr(module, "lm_head", None)
        if head is not None:
            head.register_forward_hook(head_ran)
    if isinstance(engine, DisagEngine):
        engine.pipeline.runtime.before_action = before_action
    run = engine.run

    def run_noting_the_step(inputs: Sequence[MicrobatchInput], *, loss_scale: float, step: int) -> Tensor | None:
        now.update(step=step, microbatch=-1)
        if step in exports:
            export_modules(engine.modules, load_recipe(recipe), flavor, exports[step], source=source, dtype="float32")
        return run(inputs, loss_scale=loss_scale, step=step)

    engine.run = run_noting_the_step  # type: ignore[method-assign]
    return logits
