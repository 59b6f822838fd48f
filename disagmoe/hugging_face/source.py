"""A folder of published weights, accounted for tensor by tensor against a flavor of a recipe."""

from __future__ import annotations

import shutil
from pathlib import Path

from disagmoe.config.errors import ConfigError, Problem, did_you_mean
from disagmoe.config.hugging_face import (
    CONFIG_NAME,
    HuggingFaceFormat,
    canonical_config,
    find_contradictions,
    read_config,
)
from disagmoe.config.recipe import Recipe, load_recipe, recipe_names
from disagmoe.models.state_dict.files import Weights, WeightsError, match, stored_tensors
from disagmoe.shapes import ModelShape

CARRIED = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "*.model",
    "*.tiktoken",
    "*.py",
    "LICENSE*",
    "NOTICE*",
)
"""Files beside the weights that an export takes along: tokenizer, generation settings, the model's own code."""


def format_of(recipe: Recipe) -> HuggingFaceFormat:
    """How the recipe's models are published.

    Raises:
        ConfigError: the recipe does not say.
    """
    if recipe.hugging_face is None:
        rule = "does not say how its weights are published: it has no hugging_face = HuggingFaceFormat(...)"
        raise ConfigError([Problem(origin=f"recipes/{recipe.name}.py", key="", rule=rule)])
    return recipe.hugging_face


def open_weights(recipe: Recipe, flavor: str, folder: str | Path) -> Weights:
    """Check a folder against a flavor: config.json field by field, then every tensor's name, shape and type.

    Only headers are read. Every process of a run does this for itself.

    Raises:
        ConfigError: with everything that contradicts, is missing, mis-shaped or unexpected.
    """
    form, place = format_of(recipe), Path(folder).expanduser()
    shape = recipe.shape(flavor)
    problems = find_contradictions(form, shape, place / CONFIG_NAME, recipe=recipe.name, flavor=flavor)
    if problems:
        raise ConfigError(problems)
    tied = canonical_config(form, read_config(place)).get("tie_word_embeddings") is True
    try:
        return match(form.parameters(shape), place, stored_tensors(place), tied=tied, ignored=form.ignored)
    except WeightsError as error:
        raise ConfigError([Problem(origin="", key="", rule=line) for line in str(error).splitlines()]) from None


def find_recipe(folder: str | Path) -> Recipe:
    """The recipe for the model type that a folder's config.json names.

    Raises:
        ConfigError: there is no such recipe, or no config.json.
    """
    model_type = read_config(folder).get("model_type")
    recipes = {form.model_type: r for r in map(load_recipe, recipe_names()) if (form := r.hugging_face) is not None}
    if model_type not in recipes:
        rule = "is no model type that a recipe is for"
        fix = did_you_mean(str(model_type), recipes)
        raise ConfigError([Problem(origin=str(folder), key="model_type", value=model_type, rule=rule, fix=fix)])
    return recipes[model_type]


def find_flavor(recipe: Recipe, folder: str | Path) -> str:
    """The recipe's flavor that a folder's config.json describes; the folder itself when none has a name."""
    form = format_of(recipe)
    found = recipe.shape(str(Path(folder) / CONFIG_NAME))
    for flavor, shape in recipe.shapes.items():
        if form.config_of(shape) == form.config_of(found) and shape.rope == found.rope:
            return flavor
    return str(folder)


def carry_files(source: Path, target: Path) -> list[str]:
    """Copy what belongs to a model beside weights and config.json; returns the names."""
    names = sorted({path.name for pattern in CARRIED for path in source.glob(pattern) if path.is_file()})
    for name in names:
        shutil.copyfile(source / name, target / name)
    return names


def describe(weights: Weights, recipe: Recipe, flavor: str, shape: ModelShape) -> str:
    """What was found, in a few lines."""
    stored = weights.stored.values()
    files, dtypes = {tensor.file for tensor in stored}, sorted({tensor.dtype for tensor in stored})
    parts = [part for form in weights.parts.values() for part in form]
    quantised = " (experts in MXFP4)" if any(part.encoding == "mxfp4" for part in parts) else ""
    lines = [
        f"{weights.folder}: recipe {recipe.name}, flavor {flavor}, {shape.num_params / 1e9:.3f} B parameters",
        f"{len(stored)} tensors in {len(files)} files, stored as {', '.join(dtypes)}{quantised}: all accounted for",
    ]
    lines += [f"{name}: tied in the source, here a weight of its own that starts equal" for name in weights.tied]
    return "\n".join(lines)
