"""Imported before workers are forked: what building a model imports on top of the trainer, and the workers' speed."""

from benchmarks.side_by_side import pace
from disagmoe.config.recipe import load_recipe
from disagmoe.models.titan import prepare_torchtitan

prepare_torchtitan()
load_recipe("deepseek_moe").model_config("debug")

from torchtitan.components.loss import cross_entropy_loss  # noqa: E402, F401

pace.install()
