"""The command line's part of a configuration: `--section.key=value` and `--section.key value`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, get_origin

import tomli

from disagmoe.config.errors import Problem
from disagmoe.config.fields import fields, members, nearest_key, takes_bare_text

ORIGIN = "command line"


def parse_overrides(arguments: Sequence[str]) -> tuple[dict[str, Any], list[Problem]]:
    """Values by `section.key`, and what is wrong with the rest.

    Dashes and underscores in a key are the same. Values are read as TOML where the key's type is not text; their type
    and range are checked with the whole configuration. Of two values for one key the later counts.
    """
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        position += 1
        if not argument.startswith("--") or argument == "--":
            rule = "not an option; options are written --section.key=value"
            problems.append(Problem(origin=ORIGIN, key=argument, rule=rule))
            continue
        name, equals, text = argument[2:].partition("=")
        key = name.replace("-", "_")
        has_value = bool(equals)
        if not has_value and position < len(arguments) and not arguments[position].startswith("--"):
            text, has_value = arguments[position], True
            position += 1
        if key not in fields():
            section, _, last = key.rpartition(".")
            fix = nearest_key(section, last, prefix="--")
            value = text if has_value else None
            problems.append(Problem(origin=ORIGIN, key=f"--{name}", value=value, rule="no such option", fix=fix))
        elif not has_value:
            problems.append(Problem(origin=ORIGIN, key=f"--{name}", rule=f"needs a value: --{name}=VALUE"))
        else:
            values[key] = read_text(text, fields()[key])
    return values, problems


def read_text(text: str, hint: Any) -> Any:
    """The value that `text` stands for in a key of type `hint`; the text itself where it stands for none."""
    may_be_list = any(get_origin(member) is list for member in members(hint))
    if takes_bare_text(hint) and not (may_be_list and text.startswith("[")):
        return text
    for spelling in (text, text.lower()):  # so that Python's True and 1E-3 are understood
        with contextlib.suppress(tomli.TOMLDecodeError):
            parsed = tomli.loads(f"value = {spelling}")
            if list(parsed) == ["value"]:
                return parsed["value"]
    with contextlib.suppress(ValueError):  # .5 and 5. are numbers for Python, but not for TOML
        return float(text)
    return text
