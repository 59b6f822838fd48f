"""torchtitan's optimizers and learning-rate schedules, from our configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

from disagmoe.config.schema import LRSchedulerConfig, OptimizerConfig


class Optimizers(OptimizersContainer):
    """torchtitan's container, which knows no SGD."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        if name == "SGD":
            return torch.optim.SGD
        return OptimizersContainer._resolve_optimizer_factory(name)


def build_optimizers(config: OptimizerConfig, modules: list[nn.Module]) -> Optimizers:
    """One optimizer a stage, fused; parameter names are the unsplit model's, which checkpoints rely on."""
    kwargs: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.name == "AdamW":
        kwargs |= {"betas": (config.beta1, config.beta2), "eps": config.eps}
    else:
        kwargs |= {"momentum": config.momentum}
    groups = [ParamGroupConfig(pattern=".*", optimizer_name=config.name, optimizer_kwargs=kwargs)]
    return Optimizers(Optimizers.Config(param_groups=groups, implementation="fused"), model_parts=modules)


def build_lr_schedulers(config: LRSchedulerConfig, optimizers: Optimizers, steps: int) -> LRSchedulersContainer:
    """Linear warm-up, constant, then decay over the last `decay_ratio` of `steps`."""
    return LRSchedulersContainer.Config(
        warmup_steps=config.warmup_steps,
        decay_ratio=config.decay_ratio,
        decay_type=config.decay_type,
        min_lr_factor=config.min_lr_factor,
    ).build(optimizers=optimizers, training_steps=steps)


def set_schedule_step(lr_schedulers: LRSchedulersContainer, step: int) -> None:
    """Go to where the schedules are after `step` optimizer steps: they are functions of the step alone."""
    for scheduler in lr_schedulers.schedulers:
        scheduler.last_epoch = step
        rates = [base * f(step) for base, f in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        scheduler._last_lr = rates
