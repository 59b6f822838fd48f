"""A folder of checkpoints: what is whole, what is damaged and where, what is kept, what a run continues from."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from disagmoe.checkpoint import folder
from disagmoe.checkpoint.folder import (
    MANIFEST,
    STATE,
    CheckpointError,
    commit,
    file_problems,
    find_checkpoints,
    read_manifest,
    supersede,
    temporary_name,
    tidy,
    write_durably,
    write_manifest,
)
from disagmoe.checkpoint.resume import find_candidates
from disagmoe.config.schema import CheckpointConfig, Config, RecipeConfig

FILES = {"__0_0.distcp": bytes(range(256)) * 20, "__1_0.distcp": b"x" * 100, ".metadata": b"pickle", STATE: b'{"a": 1}'}


def make(root: Path, step: int) -> Path:
    temporary = root / temporary_name(step, "run1")
    temporary.mkdir(parents=True)
    write_manifest(temporary, step, {name: write_durably(temporary / name, data) for name, data in FILES.items()})
    return commit(temporary, step)


def config_for(root: Path, resume: str | int = "auto") -> Config:
    part = CheckpointConfig(enable=True, resume=resume, folder="ck")
    return Config(recipe=RecipeConfig(name="qwen3"), checkpoint=part, dump_folder=str(root))


def states(root: Path) -> list[tuple[int, str]]:
    return [(entry.step, entry.state) for entry in find_checkpoints(root)]


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_every_flipped_byte_is_found_and_its_file_named(tmp_path: Path, name: str) -> None:
    path = make(tmp_path, 40)
    assert not file_problems(path)
    whole = (path / name).read_bytes()
    places = range(len(whole)) if len(whole) < 200 else range(0, len(whole), 37)
    for place in places:
        for bit in (1, 128):
            flipped = bytearray(whole)
            flipped[place] ^= bit
            (path / name).write_bytes(flipped)
            problems = file_problems(path)
            assert len(problems) == 1 and str(path / name) in problems[0], (place, problems)
    (path / name).write_bytes(whole)
    assert not file_problems(path)


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
@pytest.mark.parametrize("how", ["missing", "shorter", "longer", "empty"])
def test_what_sizes_tell_is_told_without_reading(tmp_path: Path, name: str, how: str) -> None:
    path = make(tmp_path, 40)
    whole = (path / name).read_bytes()
    if how == "missing":
        (path / name).unlink()
    else:
        (path / name).write_bytes({"shorter": whole[:-1], "longer": whole + b"\n", "empty": b""}[how])
    (entry,) = find_checkpoints(tmp_path)
    assert entry.state == "damaged"
    assert len(entry.problems) == 1 and str(path / name) in entry.problems[0]


def test_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path, 3)
    monkeypatch.setattr("disagmoe.checkpoint.folder.FORMAT", 2)
    with pytest.raises(CheckpointError, match="format 1, but this version reads format 2"):
        read_manifest(path)


def test_a_step_is_never_written_twice(tmp_path: Path) -> None:
    make(tmp_path, 40)
    with pytest.raises(CheckpointError, match="there is a checkpoint of that step already"):
        make(tmp_path, 40)


def test_only_complete_checkpoints_count_towards_those_kept(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        make(tmp_path, step)
    (tmp_path / "step-00000040" / STATE).unlink()
    supersede(tmp_path / "step-00000030")
    (tmp_path / temporary_name(60, "run1")).mkdir()
    (tmp_path / temporary_name(55, "before")).mkdir()
    (tmp_path / ".removing-step-00000001-ab").mkdir()
    tidy(tmp_path, 2, run="run1")
    assert states(tmp_path) == [
        (60, "unfinished"),  # of this very run, which may be writing it
        (50, "complete"),
        (40, "damaged"),
        (30, "superseded"),
        (20, "complete"),
    ]
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".removing")) == []
    tidy(tmp_path, 0, run="run2")
    assert (20, "complete") in states(tmp_path) and (60, "unfinished") not in states(tmp_path)


def test_superseded_checkpoints_are_kept_side_by_side(tmp_path: Path) -> None:
    for number in (1, 2):
        assert supersede(make(tmp_path, 5)).name == f"step-00000005.superseded-{number}"
    assert states(tmp_path) == [(5, "superseded")] * 2


def test_auto_takes_the_newest_complete_one_and_says_why_others_are_not(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        make(tmp_path / "ck", step)
    (tmp_path / "ck" / "step-00000030" / "__1_0.distcp").write_bytes(b"")
    supersede(tmp_path / "ck" / "step-00000020")
    (tmp_path / "ck" / temporary_name(40, "run1")).mkdir()
    candidates = find_candidates(config_for(tmp_path))
    assert [entry.step for entry in candidates.usable] == [10]
    unfinished, damaged, superseded = candidates.passed_over
    assert ".saving-step-00000040-run1: unfinished" in unfinished
    assert "step-00000030/__1_0.distcp: has 0 bytes, but was written with 100" in damaged
    assert "step-00000020.superseded-1: a later run went back" in superseded


def test_auto_starts_anew_only_where_nothing_was_complete(tmp_path: Path) -> None:
    assert find_candidates(config_for(tmp_path)).usable == ()
    (tmp_path / "ck" / temporary_name(40, "run1")).mkdir(parents=True)
    candidates = find_candidates(config_for(tmp_path))
    assert candidates.usable == () and len(candidates.passed_over) == 1
    (make(tmp_path / "ck", 10) / STATE).unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint there can be used .*state.json: missing.*dump_folder"):
        find_candidates(config_for(tmp_path))


@pytest.mark.parametrize("form", [str, int])
def test_a_requested_checkpoint_is_that_one_or_an_error(tmp_path: Path, form: type) -> None:
    make(tmp_path / "ck", 10)
    broken = make(tmp_path / "ck", 20)
    (broken / STATE).unlink()
    (tmp_path / "ck" / temporary_name(30, "run1")).mkdir()
    assert [entry.step for entry in find_candidates(config_for(tmp_path, form(10))).usable] == [10]
    with pytest.raises(CheckpointError, match=r"step-00000020/state.json: missing"):
        find_candidates(config_for(tmp_path, form(20)))
    for step in (30, 40):
        with pytest.raises(CheckpointError, match=rf"step-000000{step}: there is no such.*ones are of step 10"):
            find_candidates(config_for(tmp_path, form(step)))


def test_none_looks_at_nothing(tmp_path: Path) -> None:
    make(tmp_path / "ck", 10)
    assert find_candidates(config_for(tmp_path, "none")).usable == ()


def test_a_folder_that_cannot_be_listed(tmp_path: Path) -> None:
    (tmp_path / "ck").write_text("")
    with pytest.raises(CheckpointError, match="ck: can't be listed"):
        find_candidates(replace(config_for(tmp_path)))


@pytest.mark.parametrize("window", ["sync_folder", "rename"])
def test_nothing_counts_before_the_rename(tmp_path: Path, window: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends just before or in the middle of a commit leaves the checkpoint before."""
    make(tmp_path, 10)

    def die(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os if window == "rename" else folder, window, die)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, 20)
    monkeypatch.undo()
    assert states(tmp_path) == [(20, "unfinished"), (10, "complete")]
