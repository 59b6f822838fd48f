"""A model's `config.json` as Hugging Face's transformers writes it: read, compared with a flavor, turned into one.

What each family calls its sizes is the recipe's knowledge (`HuggingFaceFormat`); here is what all share: the file, the
two spellings of rotary embeddings (`rope_theta` with `rope_scaling`, or `rope_parameters`), the comparison. Nothing
here imports torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from disagmoe.config.errors import ConfigError, Problem, did_you_mean
from disagmoe.shapes import LayerShape, ModelShape, RopeShape

CONFIG_NAME = "config.json"
_YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}


@dataclass(frozen=True, kw_only=True)
class HuggingFaceFormat:
    """How a family's models look on the Hugging Face Hub."""

    model_type: str
    architecture: str
    """Class of transformers, or of the code beside the weights, that runs the model."""
    config_of: Callable[[ModelShape], dict[str, Any]]
    """The fields of config.json that decide what a model computes; without rotary embeddings, which are all alike."""
    shape_of: Callable[[str, Mapping[str, Any]], ModelShape]
    """(name, canonical config) -> sizes, with rotary embeddings left at their default."""
    defaults: Callable[[Mapping[str, Any]], dict[str, Any]]
    """What fields mean that a config.json leaves out."""
    parameters: Callable[[ModelShape], Sequence[Any]]
    """Every parameter of the unsplit model with the published tensors that hold it: `ParameterMap`s of
    `disagmoe.models.state_dict` (imports torch)."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other spellings of fields: spelling -> field."""
    ignored: Sequence[str] = ()
    """Regular expressions of published names that hold no weights, such as caches."""


def shape_of_layers(name: str, config: Mapping[str, Any], layers: Sequence[LayerShape]) -> ModelShape:
    """The sizes of a family's model around its `layers`, which all families spell alike in config.json."""
    return ModelShape(
        name=name,
        dim=config["hidden_size"],
        vocab_size=config["vocab_size"],
        layers=tuple(layers),
        max_seq_len=config["max_position_embeddings"],
        norm_eps=config["rms_norm_eps"],
        init_std=config["initializer_range"],
    )


def is_config_path(flavor: str) -> bool:
    """Whether `[recipe] flavor` means a config.json, or a folder that has one, rather than a name."""
    return flavor.endswith(".json") or "/" in flavor or (Path(flavor) / CONFIG_NAME).is_file()


def read_config(path: str | Path) -> dict[str, Any]:
    """The content of a config.json, given by its own path or its folder's.

    Raises:
        ConfigError: there is none, or it is not a JSON object.
    """
    place = Path(path).expanduser()
    file = place / CONFIG_NAME if place.is_dir() else place
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        fix = "give the folder of a model as published on the Hugging Face Hub, with its config.json"
        raise ConfigError([Problem(origin=str(file), key="", rule="there is no such file", fix=fix)]) from None
    except (OSError, ValueError) as error:
        raise ConfigError([Problem(origin=str(file), key="", rule=f"can't be read as JSON ({error})")]) from None
    if not isinstance(content, dict):
        raise ConfigError([Problem(origin=str(file), key="", rule="must hold a JSON object")])
    return content


def shape_from(form: HuggingFaceFormat, path: str | Path, *, recipe: str, like: ModelShape) -> ModelShape:
    """The model that a config.json describes.

    Args:
        like: any model of the family, whose fields are of the types that they must be of.

    Raises:
        ConfigError: another family's, a field missing or of the wrong type, or something this family can't do.
    """
    config, origin = read_config(path), _origin(path)
    _check_family(form, config, origin, recipe)
    canonical = canonical_config(form, config)
    problems = [
        Problem(origin=origin, key=key, value=_shown(canonical[key]), rule=f"must be {_kind(ours)}")
        for key, ours in form.config_of(like).items()
        if key in canonical and _kind(canonical[key]) != _kind(ours)
    ]
    if problems:
        raise ConfigError(problems)
    try:
        shape = form.shape_of(Path(origin).parent.name or recipe, canonical)
        shape = _with_rope(shape, canonical)
    except KeyError as error:
        problem = Problem(origin=origin, key=str(error.args[0]), rule=f'is missing; recipe "{recipe}" needs it')
        raise ConfigError([problem]) from None
    except (TypeError, ValueError) as error:
        raise ConfigError([Problem(origin=origin, key="", rule=f"holds a value that can't be used: {error}")]) from None
    problems = _differences(form, shape, config, origin, f'the only one that recipe "{recipe}" knows', "")
    if problems:
        raise ConfigError(problems)
    return shape


def find_contradictions(
    form: HuggingFaceFormat, shape: ModelShape, path: str | Path, *, recipe: str, flavor: str
) -> list[Problem]:
    """Where a config.json describes another model than a flavor: each field with both values.

    Raises:
        ConfigError: the file can't be read or is another family's.
    """
    config, origin = read_config(path), _origin(path)
    _check_family(form, config, origin, recipe)
    fix = f'choose the flavor that these weights are of, or set recipe.flavor = "{Path(origin).parent}"'
    return _differences(form, shape, config, origin, f'as in flavor "{flavor}" of recipe "{recipe}"', fix)


def config_for(form: HuggingFaceFormat, shape: ModelShape, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A config.json for the weights of `shape` as they are exported: unquantised, head and embedding apart.

    Args:
        base: the config.json that the weights came with, whose other fields are kept; None: there was none.
    """
    if base is None:
        made: dict[str, Any] = {"architectures": [form.architecture], "model_type": form.model_type}
        made |= {**form.config_of(shape), "max_position_embeddings": shape.max_seq_len}
        rope = _rope_of(shape.rope)
        made |= {"initializer_range": shape.init_std, "rope_theta": rope.pop("rope_theta")}
        made["rope_scaling"] = _without(_without(rope, "attention_factor"), "partial_rotary_factor")
        if rope["rope_type"] == "default" and "rope_parameters" not in form.defaults({}):
            made["rope_scaling"] = None  # as such models are published; where YaRN is the default it must be said
    else:
        made = _without(dict(base), "quantization_config")
    return made | {"tie_word_embeddings": False}


def canonical_config(form: HuggingFaceFormat, config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields under their first names, defaults filled in, rotary embeddings as `rope_parameters`."""
    named = {form.aliases.get(key, key): value for key, value in config.items()}
    full = {**form.defaults(named), **{key: value for key, value in named.items() if value is not None}}
    full["rope_parameters"] = _rope_parameters(full)
    return full


def _origin(path: str | Path) -> str:
    place = Path(path).expanduser()
    return str(place / CONFIG_NAME if place.is_dir() else place)


def _check_family(form: HuggingFaceFormat, config: Mapping[str, Any], origin: str, recipe: str) -> None:
    found = config.get("model_type")
    if found != form.model_type:
        rule = f'must be "{form.model_type}", which is what recipe "{recipe}" is for'
        fix = did_you_mean(str(found), [form.model_type]) if isinstance(found, str) else ""
        raise ConfigError([Problem(origin=origin, key="model_type", value=found, rule=rule, fix=fix)])


def _differences(
    form: HuggingFaceFormat, shape: ModelShape, config: Mapping[str, Any], origin: str, why: str, fix: str
) -> list[Problem]:
    found, problems = canonical_config(form, config), []
    written = {form.aliases.get(key, key): key for key in config}
    for key, ours in form.config_of(shape).items():
        if key not in found or not _same(found[key], ours):
            name = written.get(key, key)
            rule = f"must be {json.dumps(ours)}, {why}" if key in found else f"is missing; must be {json.dumps(ours)}"
            problems.append(Problem(origin=origin, key=name, value=_shown(found.get(key)), rule=rule, fix=fix))
    rope = found["rope_parameters"]
    for key, ours in _rope_of(shape.rope).items():
        if not _same(rope.get(key), ours):
            section = "rope_parameters" if "rope_parameters" in config else "rope_scaling"
            name = key if section == "rope_scaling" and key == "rope_theta" else f"{section}.{key}"
            rule = f"must be {json.dumps(ours)}, {why}"
            problems.append(Problem(origin=origin, key=name, value=_shown(rope.get(key)), rule=rule, fix=fix))
    return problems


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    kinds = ((int | float, "a number"), (str, "a string"), (list, "a list"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "null or an object")


def _shown(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value


def _same(found: Any, ours: Any) -> bool:
    if isinstance(ours, bool) or isinstance(found, bool) or not isinstance(ours, int | float):
        return bool(found == ours)
    return isinstance(found, int | float) and math.isclose(found, ours, rel_tol=1e-9)


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary embedding of a config in the newer of its two spellings, with YaRN's defaults filled in."""
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = given.pop("rope_theta", config.get("rope_theta"))
    kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
    made: dict[str, Any] = {"rope_theta": 10000.0 if theta is None else theta, "rope_type": kind}
    made["partial_rotary_factor"] = given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if kind != "yarn":
        return made
    made |= {**_YARN_DEFAULTS, **{key: value for key, value in given.items() if value is not None}}
    if "original_max_position_embeddings" not in made:
        made["original_max_position_embeddings"] = config.get("max_position_embeddings")
    if "attention_factor" not in made and isinstance(made.get("factor"), int | float):
        scale, every = (made.get(name) for name in ("mscale", "mscale_all_dim"))
        stretched = math.log(max(made["factor"], 1.0))
        made["attention_factor"] = 0.1 * stretched + 1.0
        if scale and every:
            made["attention_factor"] = (0.1 * scale * stretched + 1.0) / (0.1 * every * stretched + 1.0)
    return made


def _rope_of(rope: RopeShape) -> dict[str, Any]:
    made: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": "default"}
    if rope.factor > 1.0:
        made |= {
            "rope_type": "yarn",
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_seq_len,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "truncate": rope.truncate,
            "attention_factor": rope.attention_factor,
        }
    return made | {"partial_rotary_factor": 1.0}


def _with_rope(shape: ModelShape, canonical: Mapping[str, Any]) -> ModelShape:
    rope = canonical["rope_parameters"]
    made = RopeShape(theta=float(rope["rope_theta"]))
    if rope["rope_type"] == "yarn":
        made = RopeShape(
            theta=float(rope["rope_theta"]),
            factor=float(rope["factor"]),
            original_seq_len=int(rope["original_max_position_embeddings"]),
            beta_fast=float(rope["beta_fast"]),
            beta_slow=float(rope["beta_slow"]),
            truncate=bool(rope["truncate"]),
        )
    return dataclasses.replace(shape, rope=made)


def _without(values: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != key}
