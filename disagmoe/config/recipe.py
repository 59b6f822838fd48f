"""What a recipe is: one model family as sizes, a builder and defaults. Loading one does not import torch."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from disagmoe.config.hugging_face import HuggingFaceFormat, is_config_path, shape_from
from disagmoe.shapes import ModelShape


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A model family, in `recipes/<name>.py` under the name `RECIPE`."""

    name: str
    """As written in `[recipe] name`: the file's name without `.py`."""
    shapes: Mapping[str, ModelShape]
    """The model as numbers, by flavor."""
    build_config: Callable[[ModelShape], Any]
    """Sizes -> torchtitan `Decoder.Config`. Imports torchtitan only when called."""
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Configuration defaults, by section and key, where this family differs from the schema's."""
    hugging_face: HuggingFaceFormat | None = None
    """How this family's published weights look; None: they can't be imported or exported."""

    def shape(self, flavor: str) -> ModelShape:
        """The model as numbers.

        Args:
            flavor: a name in `shapes`, or the path of a config.json or of a folder that has one.
        Raises:
            ValueError: the recipe has no such flavor; a `ConfigError` if a config.json can't be used.
        """
        if flavor not in self.shapes and self.hugging_face is not None and is_config_path(flavor):
            like = next(iter(self.shapes.values()))
            return shape_from(self.hugging_face, flavor, recipe=self.name, like=like)
        if flavor not in self.shapes:
            known = ", ".join(f'"{name}"' for name in self.shapes)
            raise ValueError(f'[recipe] flavor = "{flavor}": recipe "{self.name}" has {known}')
        return self.shapes[flavor]

    def model_config(self, flavor: str) -> Any:
        """A new torchtitan model config of a flavor (imports torch and torchtitan).

        Raises:
            ValueError: the recipe has no such flavor.
        """
        return self.build_config(self.shape(flavor))


def recipe_names() -> tuple[str, ...]:
    """Names of the files in `recipes/`, sorted."""
    package = importlib.import_module("recipes")
    return tuple(sorted(info.name for info in pkgutil.iter_modules(package.__path__) if not info.name.startswith("_")))


def load_recipe(name: str) -> Recipe:
    """The `RECIPE` of `recipes/<name>.py`.

    Raises:
        ValueError: there is no such file, or it defines no `RECIPE`.
    """
    names = recipe_names()
    if name not in names:
        near = get_close_matches(name, names, n=1)
        hint = f'; did you mean "{near[0]}"?' if near else ""
        raise ValueError(f'[recipe] name = "{name}": no such file in recipes/, which has {", ".join(names)}{hint}')
    recipe = getattr(importlib.import_module(f"recipes.{name}"), "RECIPE", None)
    if not isinstance(recipe, Recipe):
        raise ValueError(f"recipes/{name}.py defines no RECIPE = Recipe(...); copy an existing recipe as a start")
    return recipe
