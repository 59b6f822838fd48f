"""Published weights into the modules of a running engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import nn

from disagmoe.config.recipe import Recipe
from disagmoe.hugging_face.source import open_weights
from disagmoe.models.state_dict.load import load_parameters


def load_hugging_face(
    modules: Sequence[nn.Module],
    recipe: Recipe,
    flavor: str,
    folder: str | Path,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> int:
    """Fill the parameters that this process holds; router biases become zero. Not collective.

    Args:
        modules: of an engine (`Engine.modules`) in any mode and layout.
        folder: published weights of exactly this flavor, on a file system that this process sees.
        progress: told what is being read.

    Returns: bytes of this process's parameters.

    Raises:
        ConfigError: the folder is not this model, as in `open_weights`.
    """
    return load_parameters(modules, open_weights(recipe, flavor, folder), progress=progress)
