"""Cluster descriptions: TOML to `disagmoe.cluster.Cluster`, strict like the configuration itself.

Every problem of a file is reported at once, with where it stands, the rule and the nearest valid key.
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import tomli
from annotated_types import Ge, Gt, Le
from pydantic import TypeAdapter, ValidationError

from disagmoe.cluster import Cluster
from disagmoe.config.errors import ConfigError, Problem, did_you_mean

CLUSTERS = Path(__file__).parents[2] / "clusters"
"""Descriptions that come with the repository."""
_WORDS = {bool: "true or false", int: "an integer", float: "a finite number", str: "a string"}


def cluster_names() -> tuple[str, ...]:
    """Names of the shipped descriptions, sorted."""
    return tuple(sorted(path.stem for path in CLUSTERS.glob("*.toml")))


def load_cluster(name_or_path: str | Path) -> Cluster:
    """Read a description: a name from `clusters/`, or a path that ends in `.toml`.

    Raises:
        ConfigError: with every problem found.
    """
    path = Path(name_or_path)
    if path.suffix != ".toml":
        if str(name_or_path) not in cluster_names():
            fix = did_you_mean(str(name_or_path), cluster_names())
            rule = f'"{name_or_path}": no such file in clusters/, and no path that ends in .toml'
            raise ConfigError([Problem(origin="cluster", key="", rule=rule, fix=fix)])
        path = CLUSTERS / f"{name_or_path}.toml"
    try:
        tree = tomli.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(origin=str(path), key="", rule=f"can't be read ({error})")]) from None
    except tomli.TOMLDecodeError as error:
        raise ConfigError([Problem(origin=str(path), key="", rule=f"not valid TOML: {error}")]) from None
    problems = list(_problems(tree, str(path)))
    if problems:
        raise ConfigError(problems)
    try:
        return _adapter().validate_json(json.dumps(tree), strict=True, extra="forbid")
    except ValidationError as error:
        # Rules over several keys: the dataclasses' own checks.
        rules = [str(entry.get("ctx", {}).get("error", entry["msg"])) for entry in error.errors()]
        raise ConfigError([Problem(origin=str(path), key="", rule=rule) for rule in rules]) from None


@cache
def _adapter() -> TypeAdapter[Cluster]:
    return TypeAdapter(Cluster)


def _problems(tree: Mapping[str, Any], origin: str) -> Iterator[Problem]:
    """Unknown and missing keys, then types and ranges."""
    unknown = list(_unknown(tree, Cluster, ""))
    for key, value, fix in unknown:
        yield Problem(origin=origin, key=key, value=None if isinstance(value, dict | list) else value,
                      rule="unknown key", fix=fix)  # fmt: skip
    try:
        _adapter().validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        for entry in error.errors():
            if entry["type"] == "value_error":
                continue
            key = _key(entry["loc"])
            hint = _hint(entry["loc"])
            if entry["type"] in ("missing", "missing_argument"):
                yield Problem(origin=origin, key=key, rule=f"is missing; it {_rule(hint)}")
            else:
                value = entry["input"]
                shown = None if isinstance(value, dict | list) else value
                yield Problem(origin=origin, key=key, value=shown, rule=_rule(hint))


def _unknown(tree: object, hint: Any, prefix: str) -> Iterator[tuple[str, object, str]]:
    """(key, value, advice) of every key that `hint` has no field for."""
    hint = _bare(hint)
    if dataclasses.is_dataclass(hint) and isinstance(tree, Mapping):
        hints = get_type_hints(hint, include_extras=True)
        for key, value in tree.items():
            if key not in hints:
                yield f"{prefix}{key}", value, did_you_mean(key, hints, prefix=prefix)
            else:
                yield from _unknown(value, hints[key], f"{prefix}{key}.")
    elif get_origin(hint) is tuple and isinstance(tree, list):
        for index, item in enumerate(tree):
            yield from _unknown(item, get_args(hint)[0], f"{prefix[:-1]}[{index}].")


def _bare(hint: Any) -> Any:
    """The type without `Annotated`."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _key(place: tuple[int | str, ...]) -> str:
    """E.g. `pools[0].gpu.name`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")


def _hint(place: tuple[int | str, ...]) -> Any:
    """The type that a value at `place` must have."""
    hint: Any = Cluster
    for part in place:
        bare = _bare(hint)
        if dataclasses.is_dataclass(bare):
            hint = get_type_hints(bare, include_extras=True)[str(part)]
        elif get_origin(bare) is tuple:
            hint = get_args(bare)[0]
        else:
            hint = get_args(bare)[1]
    return hint


def _rule(hint: Any) -> str:
    """In words: `must be an integer, at least 1`."""
    bare = _bare(hint)
    if dataclasses.is_dataclass(bare):
        return f"must be a section with {', '.join(get_type_hints(bare))}"
    if get_origin(bare) is tuple:
        return "must be an array of sections ([[pools]])"
    if get_origin(bare) not in (None, Union, types.UnionType):
        return "must be a section of names with numbers"
    words = [_WORDS[bare]]
    for bound in get_args(hint)[1:] if get_origin(hint) is Annotated else ():
        match bound:
            case Ge(ge=limit):
                words.append(f"at least {limit}")
            case Gt(gt=limit):
                words.append(f"above {limit}")
            case Le(le=limit):
                words.append(f"at most {limit}")
    return "must be " + ", ".join(words)
