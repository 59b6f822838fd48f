"""`disagmoe import-hf` and `disagmoe export-hf`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from disagmoe.config.recipe import load_recipe
from disagmoe.hugging_face.source import describe, find_flavor, find_recipe, open_weights


def import_hf(arguments: Sequence[str]) -> int:
    """Check a folder of published weights, tensor by tensor, and say how to train from it."""
    parser = argparse.ArgumentParser(
        prog="disagmoe import-hf",
        description=(
            "Check a folder of published weights (config.json, safetensors files): every tensor's name, shape and type "
            "against the model, config.json field by field. Prints what to put into a TOML to train from it; each "
            "worker then reads only what it holds."
        ),
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="FOLDER", help="as published on the Hugging Face Hub")
    parser.add_argument("--recipe", default="", help="default: the one for config.json's model_type")
    parser.add_argument("--flavor", default="", help="default: the one that config.json describes")
    options = parser.parse_args(arguments)
    recipe = load_recipe(options.recipe) if options.recipe else find_recipe(options.folder)
    flavor = options.flavor or find_flavor(recipe, options.folder)
    weights = open_weights(recipe, flavor, options.folder)
    print(describe(weights, recipe, flavor, recipe.shape(flavor)))
    print(
        f'\n[recipe]\nname = "{recipe.name}"\nflavor = "{flavor}"\n\n[checkpoint]\ninitial_load_in_hf = true\n'
        f'initial_load_path = "{Path(options.folder).expanduser().absolute()}"'
    )
    return 0
