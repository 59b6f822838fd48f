"""A dump folder is used by one run at a time and never overwritten."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from disagmoe.config.dump_folder import CONFIG_NAME, LOCK_NAME, STATUS_NAME, claim_dump_folder, find_folder_problem
from disagmoe.config.errors import ConfigError
from disagmoe.config.load import ResolvedConfig, load_config


@pytest.fixture
def resolved(tmp_path: Path) -> ResolvedConfig:
    (tmp_path / "mine.toml").write_text('[recipe]\nname = "qwen3"\n')
    return load_config(tmp_path / "mine.toml", [f"--dump_folder={tmp_path}/out"])


def test_missing_and_empty_folders_are_used(resolved: ResolvedConfig) -> None:
    folder = Path(resolved.config.dump_folder)
    assert find_folder_problem(resolved) is None
    assert not folder.exists()
    folder.mkdir()
    assert find_folder_problem(resolved) is None
    with claim_dump_folder(resolved):
        assert load_config(folder / CONFIG_NAME).config == resolved.config
        assert (folder / LOCK_NAME).exists()
    assert [p.name for p in folder.iterdir()] == [CONFIG_NAME]


def test_an_earlier_run_is_refused_with_what_to_type(resolved: ResolvedConfig) -> None:
    with claim_dump_folder(resolved) as folder:
        pass
    folder.with_name("out_2").mkdir()
    before = (folder / CONFIG_NAME).read_bytes()
    with pytest.raises(ConfigError) as error, claim_dump_folder(resolved):
        pass
    said = str(error.value)
    assert f'command line: dump_folder = "{folder}": holds an earlier run, which is never overwritten' in said
    assert f"--dump_folder={folder}_3" in said
    assert f"rm -r {folder}" in said
    assert (folder / CONFIG_NAME).read_bytes() == before


def test_a_process_that_is_ahead_of_the_claim_is_no_run(resolved: ResolvedConfig) -> None:
    (Path(resolved.config.dump_folder) / STATUS_NAME).mkdir(parents=True)
    assert find_folder_problem(resolved) is None


def test_foreign_files_are_refused(resolved: ResolvedConfig) -> None:
    folder = Path(resolved.config.dump_folder)
    folder.mkdir()
    (folder / "thesis.tex").touch()
    problem = find_folder_problem(resolved)
    assert problem is not None
    assert "files that are not a run's" in str(problem)


def test_files_and_unwritable_places_are_refused(resolved: ResolvedConfig, tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    assert "must be a folder, but is a file" in str(find_folder_problem(resolved))
    inside = load_config(tmp_path / "mine.toml", [f"--dump_folder={tmp_path}/out/of/reach"])
    assert f"can't be made: {tmp_path}/out must be a folder" in str(find_folder_problem(inside))


def test_a_live_run_holds_its_folder_and_a_killed_one_does_not(resolved: ResolvedConfig, tmp_path: Path) -> None:
    script = (
        "import sys, time\n"
        "from disagmoe.config.dump_folder import claim_dump_folder\n"
        "from disagmoe.config.load import load_config\n"
        "with claim_dump_folder(load_config(sys.argv[1], sys.argv[2:])):\n"
        "    print('claimed', flush=True); time.sleep(60)\n"
    )
    arguments = [str(tmp_path / "mine.toml"), f"--dump_folder={tmp_path}/out"]
    holder = subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "claimed\n"
        said = str(find_folder_problem(resolved))
        assert f"still going (process {holder.pid} on " in said
        assert f"--dump_folder={tmp_path}/out_2" in said
    finally:
        holder.kill()
        holder.communicate()
    # Its lock is gone with it, and what it wrote is an earlier run.
    assert "holds an earlier run" in str(find_folder_problem(resolved))
