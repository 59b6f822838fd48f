"""`disagmoe import-hf` and `disagmoe export-hf`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from disagmoe.checkpoint.commands import choose, look
from disagmoe.checkpoint.folder import CheckpointError
from disagmoe.config.recipe import load_recipe
from disagmoe.hugging_face.source import describe, find_flavor, find_recipe, open_weights

DTYPES = ("bfloat16", "float16", "float32")


def import_hf(arguments: Sequence[str]) -> int:
    """Check a folder of published weights, tensor by tensor, and say how to train from it."""
    parser = argparse.ArgumentParser(
        prog="disagmoe import-hf",
        description=(
            "Check a folder of published weights (config.json, safetensors files): every tensor's name, shape and type "
            "against the model, config.json field by field. Prints what to put into a TOML to train from it. Nothing "
            "is converted: each worker reads what it holds from the published files."
        ),
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="as published on the Hugging Face Hub")
    parser.add_argument("--recipe", default="", help="default: the one for config.json's model_type")
    parser.add_argument("--flavor", default="", help="default: the one that config.json describes")
    options = parser.parse_args(arguments)
    folder = options.folder.expanduser().absolute()
    recipe = load_recipe(options.recipe) if options.recipe else find_recipe(folder)
    flavor = options.flavor or find_flavor(recipe, folder)
    weights = open_weights(recipe, flavor, folder)
    print(describe(weights, recipe, flavor, recipe.shape(flavor)))
    print(
        f'\n[recipe]\nname = "{recipe.name}"\nflavor = "{flavor}"\n\n[checkpoint]\ninitial_load_in_hf = true\n'
        f'initial_load_path = "{folder}"'
    )
    return 0


def export_hf(arguments: Sequence[str]) -> int:
    """Write a checkpoint's weights as a folder that transformers loads."""
    parser = argparse.ArgumentParser(
        prog="disagmoe export-hf",
        description=(
            "Write the weights of a checkpoint, saved by any layout, as safetensors files with config.json and, if "
            "there is a source, its tokenizer files. OUTPUT appears under its name only when it is complete."
        ),
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="or a folder of them, or a run's folder")
    parser.add_argument("output", metavar="OUTPUT", type=Path, help="must not exist, or be an empty folder")
    parser.add_argument("--step", type=int, help="the checkpoint of this step (default: the newest complete one)")
    parser.add_argument(
        "--source", type=Path, help="folder with config.json and tokenizer (default: what the run started from, if any)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--shard-gb", type=float, default=5.0, help="most data in a file, in 10^9 bytes")
    parser.add_argument(
        "--drop-router-biases",
        action="store_true",
        help="leave out router biases, which published models don't have, instead of refusing",
    )
    options = parser.parse_args(arguments)
    if options.shard_gb <= 0:
        parser.error(f"argument --shard-gb: must be above 0, not {options.shard_gb}")
    # Imported here: it brings torch along.
    from disagmoe.hugging_face.from_checkpoint import export_checkpoint

    try:
        chosen = choose(look(options.checkpoint), options.step)
        count = export_checkpoint(
            chosen.path,
            options.output,
            source=options.source,
            dtype=options.dtype,
            drop_router_biases=options.drop_router_biases,
            shard_bytes=int(options.shard_gb * 1e9),
        )
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{options.output}: {count} parameters in {options.dtype}, from {chosen.path}")
    return 0
