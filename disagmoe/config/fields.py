"""The configuration's keys as data: which there are, what values each takes, and which one a misspelt one meant."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import types
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from disagmoe.config import schema
from disagmoe.config.errors import did_you_mean, nearest, show
from disagmoe.config.schema import Config

TOP_LEVEL = ("dump_folder",)
"""Keys that stand outside any section."""


@cache
def fields() -> dict[str, Any]:
    """Type hint of every key, by `section.key` (or just `key` at the top level), in the schema's order."""
    hints: dict[str, Any] = {}
    for name, hint in get_type_hints(Config, include_extras=True).items():
        if dataclasses.is_dataclass(hint):
            inner = get_type_hints(hint, include_extras=True)
            hints.update({f"{name}.{key}": inner[key] for key in inner})
        else:
            hints[name] = hint
    return hints


@cache
def sections() -> tuple[str, ...]:
    return tuple(name for name in get_type_hints(Config) if name not in TOP_LEVEL)


def keys_of(section: str) -> list[str]:
    """Keys of one section, without its name."""
    return [key.partition(".")[2] for key in fields() if key.startswith(section + ".")]


def nearest_key(section: str, key: str, *, prefix: str = "") -> str:
    """Advice for the unknown key `section.key`: the nearest key of its section, or the same key in another section.

    `section` may be empty, for a key written outside any section, or unknown itself. `prefix` goes before a key.
    """
    if section in sections():
        near = nearest(key, keys_of(section))
        if near is not None:
            return f"did you mean {prefix}{section}.{near}?"
    elsewhere = [full for full in fields() if full.partition(".")[2] == key]
    if elsewhere:
        return f"did you mean {prefix}{elsewhere[0]}?"
    if section in sections():
        return f"[{section}] has {', '.join(keys_of(section))}"
    near = nearest(section, sections())
    if near is not None and f"{near}.{key}" in fields():
        return f"did you mean {prefix}{near}.{key}?"
    return did_you_mean(section or key, [*sections(), *TOP_LEVEL], prefix=prefix)


def members(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union, or the type itself; ranges stay on."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def choices_of(hint: Any) -> Sequence[str]:
    """The words that a `Literal` key takes; empty for other types."""
    return [str(word) for member in members(hint) if get_origin(member) is Literal for word in get_args(member)]


def takes_bare_text(hint: Any) -> bool:
    """Whether a value on the command line may be text as it stands, without TOML's quotes."""
    return any(member is str or get_origin(member) is Literal for member in members(hint))


def rule_of(hint: Any) -> str:
    """What a key takes, in words: `must be an integer, at least 1`."""
    return "must be " + " or ".join(_describe(member) for member in members(hint))


def _describe(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        base, *bounds = get_args(hint)
        return ", ".join([_describe(base), *(_describe_bound(bound) for bound in bounds)])
    if get_origin(hint) is Literal:
        return " or ".join(f'"{word}"' for word in get_args(hint))
    if get_origin(hint) is list:
        return f"a list of {_PLURAL[get_args(hint)[0]]}"
    return _SINGULAR[hint]


def _describe_bound(bound: object) -> str:
    match bound:
        case Ge(ge=limit):
            return f"at least {limit}"
        case Gt(gt=limit):
            return f"above {limit}"
        case Le(le=limit):
            return f"at most {limit}"
        case Lt(lt=limit):
            return f"below {limit}"
    raise AssertionError(f"no words for {bound}")


_SINGULAR = {bool: "true or false", int: "an integer", float: "a finite number", str: "a string"}
_PLURAL = {int: "integers", float: "numbers", str: "strings"}


def describe_keys(section: str | None = None) -> str:
    """All keys, or those of one section, as text: name, default, what it takes, what it is for."""
    lines: list[str] = []
    for field in dataclasses.fields(Config):
        hint = get_type_hints(Config)[field.name]
        if field.name in TOP_LEVEL or section not in (None, field.name):
            continue
        lines += [f"[{field.name}]"]
        texts = _docstrings()[hint.__name__]
        for key in dataclasses.fields(hint):
            full = f"{field.name}.{key.name}"
            default = "required" if key.default is dataclasses.MISSING else f"default {show(key.default)}"
            lines += [f"  {key.name} ({default}): {rule_of(fields()[full])}."]
            lines += [f"      {line}" for line in texts.get(key.name, "").splitlines()]
        lines += [""]
    return "\n".join(lines).rstrip()


@cache
def _docstrings() -> dict[str, dict[str, str]]:
    """The string under each field of the schema, by class and field; the interpreter does not keep them."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(schema)).body:
        if isinstance(node, ast.ClassDef):
            texts = found[node.name] = {}
            for field, text in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    texts[ast.unparse(field.target)] = inspect.cleandoc(ast.literal_eval(text.value))
    return found
