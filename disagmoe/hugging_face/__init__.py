"""Hugging Face weights in and out of a model of any layout.

    source.py            a folder of published weights, checked against a recipe's flavor
    load.py              into a running engine's modules
    export.py            out of them, every process writing what it holds
    from_checkpoint.py   the same from a checkpoint, in one process
    commands.py          `disagmoe import-hf` and `export-hf`

Names and shapes are in `disagmoe.models.state_dict`, reached through the recipe.
"""
