"""Layers, sources, types on the command line, and the resolved file."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from disagmoe.config.errors import ConfigError
from disagmoe.config.fields import describe_keys, fields, keys_of, sections
from disagmoe.config.load import ResolvedConfig, load_config, write_resolved
from disagmoe.config.overrides import parse_overrides
from disagmoe.config.recipe import Recipe


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text('[recipe]\nname = "qwen3"\n[training]\nsteps = 7\nseq_len = 64\n[optimizer]\nlr = 1\n')
    return path


def test_layers_and_sources(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = {"training": {"steps": 5, "global_batch_size": 24}, "comm": {"timeout_s": 9}}
    recipe = Recipe(name="qwen3", shapes={}, build_config=str, defaults=defaults)
    monkeypatch.setattr("disagmoe.config.load.load_recipe", lambda name: recipe)
    resolved = load_config(toml, ["--training.seq_len=32", "--comm.timeout-s", "8"])
    expected = {
        "training.global_batch_size": (24, "recipe"),
        "training.steps": (7, "toml"),
        "training.seq_len": (32, "command line"),
        "comm.timeout_s": (8.0, "command line"),
        "training.dtype": ("float32", "default"),
        "optimizer.lr": (1.0, "toml"),
        "dump_folder": ("outputs/mine", "default"),
    }
    assert {key: (resolved.value(key), resolved.sources[key]) for key in expected} == expected
    assert set(resolved.sources) == set(fields())
    assert isinstance(resolved.config.optimizer.lr, float)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("--debug.deterministic=true", True),
        ("--debug.deterministic=False", False),
        ("--training.steps=12", 12),
        ("--optimizer.lr=3e-4", 3e-4),
        ("--optimizer.lr=1E-3", 1e-3),
        ("--optimizer.lr=.5", 0.5),
        ("--optimizer.lr=2", 2.0),
        ("--training.max_grad_norm=0", 0.0),
        ("--data.source=./a=b c.txt", "./a=b c.txt"),
        ("--data.source=123", "123"),
        ("--data.text_field=true", "true"),
        ("--training.dtype=bfloat16", "bfloat16"),
        ('--disagmoe.rank_order=["r0.A0.0", "r0.F0.0"]', ["r0.A0.0", "r0.F0.0"]),
        ("--disagmoe.rank_order=attn_first", "attn_first"),
        ("--dump_folder=out", "out"),
        ("--dump-folder=out", "out"),
    ],
)
def test_command_line_values(toml: Path, argument: str, value: object) -> None:
    key, _, text = argument[2:].partition("=")
    for arguments in ([argument], [f"--{key}", text]):
        found = load_config(toml, arguments).value(key.replace("-", "_"))
        assert found == value
        assert type(found) is type(value)


def test_the_later_of_two_options_counts(toml: Path) -> None:
    assert load_config(toml, ["--training.steps=3", "--training.steps=4"]).config.training.steps == 4


def test_a_negative_number_is_a_value_not_an_option() -> None:
    assert parse_overrides(["--optimizer.lr", "-1"]) == ({"optimizer.lr": -1}, [])


def resolve_again(resolved: ResolvedConfig, path: Path) -> ResolvedConfig:
    write_resolved(path, resolved)
    return load_config(path)


def test_resolved_file_is_read_to_the_same_configuration(toml: Path, tmp_path: Path) -> None:
    awkward = 'a"b\\c\té\x7f 中😀'
    overrides = [
        f"--data.text_field={awkward}",
        '--disagmoe.rank_order=["r0.A0.0", "r0.F0.0"]',
        "--optimizer.eps=1e-12",
        f"--optimizer.lr={math.pi}",
        "--debug.deterministic=true",
    ]
    resolved = load_config(toml, overrides)
    again = resolve_again(resolved, tmp_path / "resolved.toml")
    assert again.config == resolved.config
    assert set(again.sources.values()) == {"toml"}
    text = (tmp_path / "resolved.toml").read_text()
    assert "steps = 7  # toml" in text
    assert "eps = 1e-12  # command line" in text
    assert "beta1 = 0.9  # default" in text


def test_every_section_and_key_is_written_and_described(toml: Path, tmp_path: Path) -> None:
    write_resolved(tmp_path / "resolved.toml", load_config(toml))
    text = (tmp_path / "resolved.toml").read_text()
    for section in sections():
        assert f"[{section}]" in text
        listing = describe_keys(section)
        for key in keys_of(section):
            assert f"\n{key} = " in text
            assert f"  {key} (" in listing


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text('[recipe]\nname = "qwen3"\n[training]\nstepz = 3\nseq_len = 0\n[modell]\n')
    with pytest.raises(ConfigError) as error:
        load_config(path, ["--optimizer.lr=fast"])
    assert [problem.key for problem in error.value.problems] == [
        "training.stepz",
        "[modell]",
        "training.seq_len",
        "optimizer.lr",
    ]


def test_a_recipes_defaults_are_checked_and_blamed(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = {"training": {"global_batch_size": "all", "stepz": 3}}
    recipe = Recipe(name="qwen3", shapes={}, build_config=str, defaults=defaults)
    monkeypatch.setattr("disagmoe.config.load.load_recipe", lambda name: recipe)
    with pytest.raises(ConfigError, match=r"recipes/qwen3.py: training.stepz = 3: unknown key; did you mean") as error:
        load_config(toml)
    assert 'recipes/qwen3.py: training.global_batch_size = "all": must be an integer' in str(error.value)


def test_configuration_is_immutable(toml: Path) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_config(toml).config.training.steps = 3  # type: ignore[misc]


def test_one_process_has_one_microbatch_in_flight_unless_told_otherwise(toml: Path) -> None:
    one_process = ["--disagmoe.colocate=true", "--disagmoe.attn_workers=1", "--disagmoe.ffn_workers=1"]

    def in_flight(*more: str) -> int:
        return load_config(toml, list(more)).config.disagmoe.schedule_options()["in_flight"]

    assert in_flight() == 0
    assert in_flight(*one_process) == 1
    assert in_flight(*one_process, "--disagmoe.in_flight=3") == 3
