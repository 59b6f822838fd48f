"""What README and docs promise exists: files, options, commands, keys."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from disagmoe.check import make_plan
from disagmoe.cli import COMMANDS
from disagmoe.config.load import load_config
from disagmoe.config.schema import Config

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("run_train.sh", "run_tests.sh", "disagmoe", "python", "tensorboard")


def code_lines(page: Path) -> Iterator[str]:
    """Lines of shell blocks and inline code."""
    text = page.read_text()
    for block in re.findall(r"^```(?:bash|sh)?\n(.*?)^```", text, re.M | re.S):
        yield from block.splitlines()
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def commands(page: Path) -> Iterator[list[str]]:
    """Commands of ours with their words, environment assignments in front."""
    for line in code_lines(page):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        program = next((w for w in words if "=" not in w), "")
        if Path(program).name in PROGRAMS:
            yield words


ALL_COMMANDS = [(page, words) for page in PAGES for words in commands(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_paths_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
    for word in re.findall(r"`([\w.]+(?:/[\w.]+)*/?[\w.]*\.(?:py|md|toml|sh|png))\b", text):
        places = (ROOT / word, page.parent / word, ROOT / "disagmoe" / word, ROOT / "disagmoe/parallelisms" / word)
        written = word in ("config.toml", "my.toml", "my_trainer.py", "recipes/my_model.py") or any(ROOT.rglob(word))
        assert written or any(p.exists() for p in places), f"{page.name} mentions {word}"


def test_the_file_tour_is_true() -> None:
    (tour,) = re.findall(r"^## Files\n+```\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    folder = ROOT
    for line in tour.splitlines():
        names = re.match(r"((?:\s*[\w./]+)+?)(?:  |$)", line)
        assert names is not None, line
        indented = line.startswith(" ")
        for name in names[1].split():
            place = (ROOT / "disagmoe" if indented else ROOT) / name
            assert place.exists(), f"the tour names {name}"
            assert place.is_dir() == name.endswith("/"), name
    assert folder.exists()


@pytest.mark.parametrize(("page", "words"), ALL_COMMANDS, ids=lambda v: v.name if isinstance(v, Path) else " ".join(v))
def test_commands_are_ones_that_exist(page: Path, words: list[str]) -> None:
    environment = dict(w.split("=", 1) for w in words if re.match(r"[A-Z_]+=", w))
    arguments = words[len(environment) :]
    program, rest = Path(arguments[0]).name, arguments[1:]
    if program == "run_train.sh":
        config = environment.get("CONFIG_FILE", "train_configs/debug_deepseek_moe.toml")
        options = [w for w in rest if w.startswith("--") and w not in ("--help",)]
        if config != "my.toml":
            make_plan(load_config(ROOT / config, options))
    elif program == "run_tests.sh":
        assert all(w in ("--full", "--exhaustive", "--help") or (ROOT / w).exists() for w in rest)
    elif program == "disagmoe" and rest:
        check_disagmoe(rest)
    elif program == "python" and rest[:1] == ["-m"]:
        assert (ROOT / (rest[1].replace(".", "/") + ".py")).exists() or (ROOT / rest[1].replace(".", "/")).is_dir()


def check_disagmoe(rest: list[str]) -> None:
    command, *arguments = rest
    assert command in COMMANDS
    if command == "check" and arguments and (ROOT / arguments[0]).exists():
        make_plan(load_config(ROOT / arguments[0], [w for w in arguments[1:] if "." in w]))
    elif command == "keys" and arguments:
        assert hasattr(Config, arguments[0]) or arguments[0] in Config.__dataclass_fields__


def test_there_are_commands_to_look_at() -> None:
    """The patterns above must not go blind."""
    assert len(ALL_COMMANDS) > 12
    assert any(words[0].startswith("CONFIG_FILE=") for _, words in ALL_COMMANDS)
