"""TOML files and the command line to a typed configuration, and back.

Recipe defaults are overridden by the TOML file, which is overridden by the command line. Loading is strict: an unknown
key, a wrong type or a value out of range is an error that says where it is written, which rule it breaks and what was
probably meant. All problems are reported at once. Nothing here imports torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import tomli
from pydantic import TypeAdapter, ValidationError

from disagmoe.config.errors import ConfigError, Problem, did_you_mean, nearest
from disagmoe.config.fields import TOP_LEVEL, choices_of, keys_of, nearest_key, rule_of, sections
from disagmoe.config.fields import fields as key_types
from disagmoe.config.overrides import ORIGIN as COMMAND_LINE
from disagmoe.config.overrides import parse_overrides
from disagmoe.config.recipe import Recipe, load_recipe, recipe_names
from disagmoe.config.schema import Config

Source = Literal["default", "recipe", "toml", "command line"]


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """A configuration and where each of its values comes from."""

    config: Config
    sources: Mapping[str, Source]
    """By `section.key` (or `dump_folder`), for every key there is."""
    path: Path
    """The TOML file."""

    def value(self, key: str) -> Any:
        """Value of `section.key`."""
        section, _, name = key.rpartition(".")
        return getattr(getattr(self.config, section) if section else self.config, name)

    def problem(self, key: str, rule: str, *, fix: str = "") -> Problem:
        """A problem with the value of `key`, which names the place that the value was written at."""
        origin = _origin(self.sources[key], self.path, self.config.recipe.name)
        return Problem(origin=origin, key=key, value=self.value(key), rule=rule, fix=fix)


def load_config(toml_path: str | Path, overrides: Sequence[str] = ()) -> ResolvedConfig:
    """Read a TOML file and command-line overrides (`--section.key=value`) on top of the recipe's defaults.

    Raises:
        ConfigError: with every problem that was found.
    """
    path = Path(toml_path)
    from_toml, toml_problems = _flatten(_read_toml(path), str(path))
    from_command_line, problems = parse_overrides(overrides)
    problems = toml_problems + problems

    chosen = {**from_toml, **from_command_line}
    recipe, recipe_problems = _find_recipe(chosen, path, "recipe.name" in from_command_line)
    from_recipe, default_problems = _flatten(recipe.defaults, f"recipes/{recipe.name}.py") if recipe else ({}, [])
    problems += recipe_problems + default_problems

    layers: list[tuple[Source, Mapping[str, Any]]] = [
        ("recipe", from_recipe),
        ("toml", from_toml),
        ("command line", from_command_line),
    ]
    values: dict[str, Any] = {}
    sources: dict[str, Source] = dict.fromkeys(key_types(), "default")
    for source, layer in layers:
        values.update(layer)
        sources.update(dict.fromkeys(layer, source))
    config, value_problems = _validate(values, sources, path)
    reported = {problem.key for problem in problems}
    problems += [problem for problem in value_problems if problem.key not in reported]
    if problems or config is None:
        raise ConfigError(problems)
    if not config.dump_folder:
        config = replace(config, dump_folder=f"outputs/{path.stem}")
    return ResolvedConfig(config=config, sources=sources, path=path)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        beside = [p.name for p in path.parent.glob("*.toml")] if path.parent.is_dir() else []
        fix = did_you_mean(path.name, beside, prefix="" if str(path.parent) == "." else f"{path.parent}/")
        raise ConfigError([Problem(origin=str(path), key="", rule="there is no such file", fix=fix)]) from None
    except (OSError, UnicodeDecodeError) as error:
        rule = f"can't be read as a text file ({error})"
        raise ConfigError([Problem(origin=str(path), key="", rule=rule)]) from None
    try:
        return tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        lines = text.splitlines()
        line = lines[error.lineno - 1].strip() if error.lineno <= len(lines) else "end of file"
        rule = f"not valid TOML: {error.msg[:1].lower()}{error.msg[1:]}, in `{line}`"
        raise ConfigError([Problem(origin=f"{path}, line {error.lineno}", key="", rule=rule)]) from None


def _flatten(tree: Mapping[str, Any], origin: str) -> tuple[dict[str, Any], list[Problem]]:
    """Sections and keys as `section.key`; unknown ones become problems."""
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, content in tree.items():
        if name in TOP_LEVEL:
            values[name] = content
        elif name not in sections():
            kind = "section" if isinstance(content, Mapping) else "key"
            key, value = (f"[{name}]", None) if kind == "section" else (name, content)
            fix = _section_advice(name) if kind == "section" else nearest_key("", name)
            problems.append(Problem(origin=origin, key=key, value=value, rule=f"unknown {kind}", fix=fix))
        elif not isinstance(content, Mapping):
            fix = f"write [{name}] and below it {', '.join(keys_of(name)[:2])} ..."
            rule = "must be a section, not a value"
            problems.append(Problem(origin=origin, key=name, value=content, rule=rule, fix=fix))
        else:
            for key, value in content.items():
                full = f"{name}.{key}"
                if full in key_types():
                    values[full] = value
                else:
                    fix = nearest_key(name, key)
                    problems.append(Problem(origin=origin, key=full, value=value, rule="unknown key", fix=fix))
    return values, problems


def _section_advice(name: str) -> str:
    near = nearest(name, sections())
    return f"did you mean [{near}]?" if near else "there is " + ", ".join(f"[{section}]" for section in sections())


def _find_recipe(
    chosen: Mapping[str, Any], path: Path, named_on_command_line: bool
) -> tuple[Recipe | None, list[Problem]]:
    """The recipe that the configuration names; whether the name is a string at all is checked with the other values."""
    name = chosen.get("recipe.name")
    if not isinstance(name, str):
        return None, []
    if name not in recipe_names():
        origin = COMMAND_LINE if named_on_command_line else str(path)
        fix = did_you_mean(name, recipe_names())
        problem = Problem(origin=origin, key="recipe.name", value=name, rule="no such file in recipes/", fix=fix)
        return None, [problem]
    return load_recipe(name), []


@cache
def _adapter() -> TypeAdapter[Config]:
    return TypeAdapter(Config)


def _validate(
    values: Mapping[str, Any], sources: Mapping[str, Source], path: Path
) -> tuple[Config | None, list[Problem]]:
    """Types and ranges of all values. JSON is pydantic's strictest mode: there, true is no integer."""
    tree: dict[str, Any] = {section: {} for section in sections()}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (tree[section] if section else tree)[name] = value
    text = json.dumps(tree, default=lambda date: {"date": str(date)})
    bad = {key for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    config = None
    try:
        config = _adapter().validate_json(text, strict=True, extra="forbid")
    except ValidationError as error:
        places = [entry["loc"] for entry in error.errors()]
        bad |= {".".join(map(str, place[: 1 if place[0] in TOP_LEVEL else 2])) for place in places}
    recipe = str(values.get("recipe.name", ""))
    problems = []
    for key, hint in key_types().items():
        if key not in bad:
            continue
        if key not in values:
            fix = f"one of {', '.join(recipe_names())}" if key == "recipe.name" else ""
            problems.append(Problem(origin=str(path), key=key, rule=f"is missing; it {rule_of(hint)}", fix=fix))
            continue
        value = values[key]
        near = nearest(value, choices_of(hint)) if isinstance(value, str) else None
        fix = f'did you mean "{near}"?' if near else ""
        origin = _origin(sources[key], path, recipe)
        problems.append(Problem(origin=origin, key=key, value=value, rule=rule_of(hint), fix=fix))
    return config, problems


def _origin(source: Source, path: Path, recipe: str) -> str:
    return {"toml": str(path), "recipe": f"recipes/{recipe}.py"}.get(source, source)


def write_resolved(path: str | Path, resolved: ResolvedConfig) -> None:
    """Write the configuration as TOML that `load_config` reads to the same values, each with its source."""
    lines = [f"# {resolved.path} as resolved. A comment tells where a value comes from.", ""]
    for field in fields(resolved.config):
        content = getattr(resolved.config, field.name)
        if not is_dataclass(content):
            # Keys outside a section must stand before the first one.
            lines.insert(1, f"{field.name} = {as_toml(content)}  # {resolved.sources[field.name]}")
            continue
        lines += [f"[{field.name}]"]
        for key in fields(content):
            value, source = getattr(content, key.name), resolved.sources[f"{field.name}.{key.name}"]
            lines += [f"{key.name} = {as_toml(value)}  # {source}"]
        lines += [""]
    Path(path).write_text("\n".join(lines), encoding="utf-8")


def as_toml(value: object) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):  # a JSON string is a TOML string, but for one character
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(as_toml(item) for item in value)}]"
    return repr(value)
