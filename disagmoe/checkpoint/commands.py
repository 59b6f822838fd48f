"""`disagmoe checkpoint`: look at checkpoints, verify and convert them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from disagmoe.checkpoint.folder import (
    CheckpointError,
    Found,
    file_problems,
    find_checkpoints,
    read_manifest,
    read_state,
)

_EPILOG = """DIR is a checkpoint, a folder of them, or a run's dump folder.

  ls       all that is there: step, state, size, when, who saved it
  show     what the newest complete one (or the one given) says of its run, and its tensors
  verify   read every file and compare its checksum; exit code 1 if anything differs
  convert  the model's weights as one file of torch (.pt) or safetensors, by the unsplit model's names
"""


def checkpoint(arguments: Sequence[str]) -> int:
    """`disagmoe checkpoint`: see the help text above."""
    parser = argparse.ArgumentParser(
        prog="disagmoe checkpoint",
        description="Look at checkpoints, verify and convert them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("action", choices=("ls", "show", "verify", "convert"))
    parser.add_argument("folder", metavar="DIR", type=Path)
    parser.add_argument("--to", type=Path, metavar="FILE", help="convert: the file to write, .pt or .safetensors")
    parser.add_argument("--step", type=int, help="the checkpoint of this step (default: the newest complete one)")
    options = parser.parse_args(arguments)
    if (options.action == "convert") != (options.to is not None):
        parser.error("convert needs --to=FILE" if options.action == "convert" else "--to is for convert")
    try:
        found = look(options.folder)
        if options.action == "ls":
            return _list(found)
        if options.action == "verify":
            return _verify([choose(found, options.step)] if options.step is not None else found)
        chosen = choose(found, options.step)
        if options.action == "show":
            return _show(chosen)
        from disagmoe.checkpoint.convert import convert

        written = convert(chosen.path, options.to)
        size = sum(tensor.numel() for tensor in written.values())
        print(f"{options.to}: {len(written)} tensors, {size:,} values, from {chosen.path}")
        return 0
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1


def look(folder: Path) -> list[Found]:
    """What is at `folder`, newest first.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder")
    places = [folder, folder / "checkpoints", *(path for path in sorted(folder.iterdir()) if path.is_dir())]
    for place in places:
        if found := find_checkpoints(place):
            return found
    beside = [entry for entry in find_checkpoints(folder.resolve().parent) if entry.path == folder.resolve()]
    if not beside:
        raise CheckpointError(f"{folder}: holds no checkpoint")
    return beside


def choose(found: list[Found], step: int | None) -> Found:
    """The newest complete checkpoint, or the one of a step.

    Raises:
        CheckpointError: there is none.
    """
    usable = [entry for entry in found if entry.state == "complete" or len(found) == 1]
    if step is not None:
        usable = [entry for entry in found if entry.step == step and entry.state in ("complete", "damaged")]
    if not usable:
        there = ", ".join(f"{entry.path.name} ({entry.state})" for entry in found)
        raise CheckpointError(f"no {'such' if step is not None else 'complete'} checkpoint; there is {there}")
    return usable[0]


def _list(found: list[Found]) -> int:
    for entry in found:
        line = f"{entry.path}  {entry.state}"
        if entry.state in ("complete", "superseded"):
            try:
                size = sum(file["bytes"] for file in read_manifest(entry.path)["files"].values())
                layout = read_state(entry.path)["layout"]
                line += f"  {size / 1e6:,.1f} MB  mode = {layout['mode']}, processes: {layout['world_size']}"
            except CheckpointError as error:
                line += f"  {error}"
        print(line)
        for problem in entry.problems:
            print(f"  {problem}")
    return 0


def _show(entry: Found) -> int:
    if entry.problems:
        raise CheckpointError("; ".join(entry.problems))
    problems = file_problems(entry.path)  # tensor names are in a pickle: not before it is known to be ours
    if problems:
        raise CheckpointError("; ".join(problems))
    from disagmoe.checkpoint.storage import stored_keys

    print(json.dumps(read_state(entry.path), indent=2))
    for key, shape in sorted(stored_keys(entry.path).items()):
        print(f"{key}  {list(shape)}")
    return 0


def _verify(found: list[Found]) -> int:
    """All that claim to be whole."""
    bad = 0
    for entry in found:
        if entry.state not in ("complete", "damaged", "superseded"):
            print(f"{entry.path}: {entry.state}, not verified")
            continue
        problems = list(entry.problems) or file_problems(entry.path)
        print(f"{entry.path}: {'ok' if not problems else 'DAMAGED'}")
        for problem in problems:
            print(f"  {problem}")
        bad += bool(problems)
    return 1 if bad else 0
