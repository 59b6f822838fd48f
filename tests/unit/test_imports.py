"""The rooms of the package import downwards only, declare what they need, and the lower ones never load torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BELOW_TRAINER = ("shapes", "layout", "schedules", "models", "config", "data", "parallelisms", "observability")
ALLOWED: dict[str, set[str]] = {
    "shapes": set(),
    "cluster": set(),
    "layout": set(),
    "memory": {"shapes"},
    "trace": set(),
    "schedules": {"shapes", "cluster", "layout"},
    "models": {"shapes", "cluster", "layout"},
    "config": {"shapes", "cluster", "layout"},
    "data": {"config.schema"},
    "simulator": {"shapes", "cluster", "layout", "trace", "schedules"},
    "allocator": {"shapes", "cluster", "layout", "memory", "schedules", "simulator"},
    "parallelisms": {"shapes", "layout", "schedules", "config.schema"},
    "observability": {"shapes", "layout", "trace", "schedules", "config.schema"},
    # The trainer's parts: everything below, and each other in this order.
    "optimizer": {"config.schema"},
    "api": {*BELOW_TRAINER, "simulator"},
    "engine": {*BELOW_TRAINER, "api"},
    "expert_parallel_engine": {*BELOW_TRAINER, "api", "engine"},
    "world": {*BELOW_TRAINER, "api", "engine"},
    "step_report": {*BELOW_TRAINER, "engine", "world"},
    "cost_profile": {*BELOW_TRAINER, "simulator.profile", "check"},
    "hugging_face": {"shapes", "config", "models", "checkpoint"},
    "trainer": {
        *BELOW_TRAINER,
        "trace",
        "optimizer",
        "engine",
        "expert_parallel_engine",
        "world",
        "step_report",
        "cost_profile",
        "hugging_face.load",
        "checkpoint",
    },
    "checkpoint": {*BELOW_TRAINER, "optimizer", "engine", "world"},
    "check_expert_parallel": {"shapes", "layout", "schedules", "config"},
    "check": {"shapes", "cluster", "layout", "memory", "schedules", "simulator", "config", "check_expert_parallel"},
    "simulate_cli": {"shapes", "cluster", "layout", "trace", "schedules", "simulator", "config", "check"},
    "measure": {"allocator", "config"},
    "allocate_cli": {"cluster", "layout", "allocator", "simulator", "config", "check", "simulate_cli", "measure"},
    "cli": {"*"},
    "train": {"*"},
}
"""By room (a module or folder of the package): the rooms, or modules of rooms, that it may import besides itself."""
TORCH_FREE = ["shapes", "layout", "schedules", "config.load", "config.checks", "config.dump_folder"]
TORCH_FREE += ["check", "cli", "checkpoint.resume"]
INSTALLED_BY_REQUIREMENTS = {"pyarrow": "torchtitan", "datasets": "torchtitan"}
"""Packages that come with a declared one; torchtitan's data loading is built on these two."""


def files() -> list[Path]:
    return sorted((ROOT / "disagmoe").rglob("*.py")) + sorted((ROOT / "recipes").glob("*.py"))


def imported_modules(path: Path) -> Iterator[str]:
    """Full names of all modules (or names in modules) that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(path: Path) -> str:
    """`models` for disagmoe/models/split.py, `recipes` for a recipe."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0] if parts[0] == "recipes" or parts == ("disagmoe", "__init__") else parts[1]


def is_allowed(room: str, module: str) -> bool:
    """Whether a file of `room` may import `module`, a name below `disagmoe.`."""
    below = {"models", "config", "shapes"} if room == "recipes" else ALLOWED[room]
    return "*" in below or any(module == name or module.startswith(f"{name}.") for name in {room, *below})


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downwards(path: Path) -> None:
    room = room_of(path)
    for module in imported_modules(path):
        top, _, below = module.partition(".")
        assert top != "recipes", f"{path} imports {module}: recipes are loaded by name only"
        if top == "disagmoe" and room != "disagmoe":
            assert is_allowed(room, below), f"{room} must not import disagmoe.{below}"
        # DTensor is a type of tensor: what FSDP hands to a module. Groups and communication are for `parallelisms`.
        distributed = module.startswith("torch.distributed") and module != "torch.distributed.tensor.DTensor"
        assert not (room in ("schedules", "models") and distributed), f"{room} must not import {module}"


def test_rooms_are_all_known() -> None:
    assert {room_of(path) for path in files()} <= {*ALLOWED, "disagmoe", "recipes"}


def test_dependencies_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[<>=!~\[; ]", line)[0].replace("-", "_") for line in project["dependencies"]}
    known = declared | {"disagmoe", "recipes"} | set(sys.stdlib_module_names)
    known |= {package for package, parent in INSTALLED_BY_REQUIREMENTS.items() if parent in declared}
    used = {module.partition(".")[0]: path for path in files() for module in imported_modules(path)}
    assert not {name: path for name, path in used.items() if name not in known}


@pytest.mark.parametrize("module", [f"disagmoe.{name}" for name in TORCH_FREE] + ["every recipe"])
def test_loads_without_torch(module: str) -> None:
    load = f"import {module}"
    if module == "every recipe":
        load = "from disagmoe.config.recipe import load_recipe, recipe_names; [load_recipe(n) for n in recipe_names()]"
    script = f"import sys; {load}; print(*({{'torch', 'torchtitan', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == ""
