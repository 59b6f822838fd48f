"""A folder of safetensors files: what is in it, and whether that is a model, tensor by tensor.

Only headers are read here. A safetensors file is 8 bytes of length, a JSON header with type, shape and place of each
tensor, and the data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from disagmoe.models.state_dict.maps import ParameterMap, Part, Published
from disagmoe.models.state_dict.names import suggest

INDEX_NAME = "model.safetensors.index.json"
MOST_LISTED = 20
"""Names of one kind of problem that a message lists; the rest is counted."""
_LARGEST_HEADER_BYTES = 100_000_000


class WeightsError(ValueError):
    """Published weights that can't be used; carries every problem found, one a line in its message."""

    def __init__(self, folder: str | Path, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(f"{folder}: {problem}" for problem in problems))


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor in a file, from its header."""

    file: Path
    dtype: str
    """As safetensors calls it."""
    shape: tuple[int, ...]
    offset: int
    """Of its first byte in the file."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A folder's tensors, and for each parameter of a model the form in which they hold it."""

    folder: Path
    stored: Mapping[str, Stored]
    parts: Mapping[str, tuple[Part, ...]]
    """By the unsplit model's parameter name."""
    maps: Mapping[str, ParameterMap]
    tied: Sequence[str] = field(default=())
    """Parameters that are read from another one's tensor."""


def stored_tensors(folder: str | Path) -> dict[str, Stored]:
    """All tensors of the safetensors files that the folder's index names, or of all such files without an index.

    Raises:
        WeightsError: no safetensors files, one that is missing, cut off or no such file, or an index that is not true.
    """
    place = Path(folder).expanduser()
    index = place / INDEX_NAME
    listed: dict[str, str] = {}
    if index.is_file():
        try:
            listed = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise WeightsError(index, [f"must be JSON with a weight_map: {error!r}"]) from None
        files = sorted({place / name for name in listed.values()})
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise WeightsError(place, [f"{name}: is missing; {INDEX_NAME} names it" for name in absent])
    else:
        files = sorted(place.glob("*.safetensors"))
    if not files:
        other = sorted(file.name for file in place.glob("*.bin")) if place.is_dir() else []
        advice = f"; there is {other[0]}: convert it with transformers' save_pretrained" if other else ""
        raise WeightsError(place, [f"must be a folder with *.safetensors files{advice}"])
    found: dict[str, Stored] = {}
    problems: list[str] = []
    for file in files:
        for name, tensor in read_header(file).items():
            if name in found:
                problems.append(f"{name}: is in {found[name].file.name} and in {file.name}")
            found[name] = tensor
            if listed and listed.get(name) != file.name:
                problems.append(f"{name}: is in {file.name}, but {INDEX_NAME} says {listed.get(name, 'nothing of it')}")
    absent = sorted(listed.keys() - found.keys())
    problems += [f"{name}: {INDEX_NAME} says it is in {listed[name]}, which has it not" for name in absent]
    if problems:
        raise WeightsError(place, shortened(problems))
    return found


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of one safetensors file.

    Raises:
        WeightsError: it is none, or it is cut off.
    """
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _LARGEST_HEADER_BYTES):
                raise ValueError("the header is longer than the file")
            header: dict[str, Any] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
        tensors = {
            name: Stored(
                file=file,
                dtype=str(entry["dtype"]),
                shape=tuple(map(int, entry["shape"])),
                offset=8 + length + int(entry["data_offsets"][0]),
            )
            for name, entry in header.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(file, [f"is no safetensors file ({error})"]) from None
    if size != end:
        raise WeightsError(file, [f"has {size} bytes, but its header speaks of {end}: copy it again"])
    return tensors


def match(
    maps: Sequence[ParameterMap],
    folder: str | Path,
    stored: Mapping[str, Stored],
    *,
    tied: bool,
    ignored: Sequence[str] = (),
) -> Weights:
    """Account for every tensor: each parameter has exactly what it needs, and nothing is left over.

    Args:
        maps: every parameter of the model.
        tied: whether the model's config.json ties the head to the embedding.
        ignored: regular expressions of names that may be there and are not read.

    Raises:
        WeightsError: tensors missing, of another shape or type, or unexpected.
    """
    parts = {entry.name: _choose(entry, stored, tied=tied) for entry in maps}
    needed = {tensor.name: tensor for form in parts.values() for part in form for tensor in part.tensors}
    left = [name for name in stored if name not in needed]
    unexpected = [name for name in left if not any(re.fullmatch(pattern, name) for pattern in ignored)]
    missing = [name for name in needed if name not in stored]
    wrong = [_compare(needed[name], stored[name]) for name in needed if name in stored]
    problems = shortened([f"{name}: is missing{suggest(name, unexpected)}" for name in missing[:MOST_LISTED]])
    problems += _rest(missing, "missing")
    problems += shortened([problem for problem in wrong if problem])
    problems += [f"{name}: is unexpected{suggest(name, missing)}" for name in unexpected[:MOST_LISTED]]
    problems += _rest(unexpected, "unexpected")
    if problems:
        raise WeightsError(folder, problems)
    return Weights(
        folder=Path(folder),
        stored=stored,
        parts=parts,
        maps={entry.name: entry for entry in maps},
        tied=[entry.name for entry in maps if entry.tied and parts[entry.name] == entry.tied],
    )


def _choose(entry: ParameterMap, stored: Mapping[str, Stored], *, tied: bool) -> tuple[Part, ...]:
    """The form that is there in full; else the one most of which is there, for the message."""

    def present(form: tuple[Part, ...]) -> tuple[bool, int]:
        names = [tensor.name for part in form for tensor in part.tensors]
        found = sum(name in stored for name in names)
        return found == len(names), found

    best = max(entry.forms, key=present)
    if tied and entry.tied and not present(best)[0]:
        return entry.tied
    return best


def _compare(needed: Published, stored: Stored) -> str:
    if stored.shape != needed.shape:
        return f"{needed.name}: has shape {list(stored.shape)}, must be {list(needed.shape)}"
    if stored.dtype not in needed.dtypes:
        return f"{needed.name}: is stored as {stored.dtype}, must be {' or '.join(needed.dtypes)}"
    return ""


def _rest(names: Sequence[str], what: str) -> list[str]:
    more = len(names) - MOST_LISTED
    return [f"and {more} more are {what}, the last of them {names[-1]}"] if more > 0 else []


def shortened(problems: Sequence[str]) -> list[str]:
    """The first problems, and how many there are besides."""
    more = len(problems) - MOST_LISTED
    return [*problems[:MOST_LISTED], *([f"and {more} more like these"] if more > 0 else [])]
