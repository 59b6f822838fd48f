"""Runs that stop and go on: their data, their files; saving that fails; checkpoints that are damaged."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from disagmoe.checkpoint.convert import convert
from disagmoe.checkpoint.folder import CheckpointError, find_checkpoints
from disagmoe.config.schema import Config, MetricsConfig
from tests.distributed.checkpoint_cases import config_of
from tests.distributed.harness.cases import Case
from tests.distributed.harness.worlds import Worlds

BODY = "tests.distributed.checkpoint_cases:run_body"


def run(worlds: Worlds, config: Config, steps: int, *, folder: Path | None = None, **arguments: Any) -> dict[str, Any]:
    """Rank 0's result."""
    return run_all(worlds, config, steps, folder=folder, **arguments)[0]


def run_all(
    worlds: Worlds, config: Config, steps: int, *, folder: Path | None = None, **arguments: Any
) -> list[dict[str, Any]]:
    case = Case(config=config, steps=steps, body=BODY, hook_arguments=arguments, folder=str(folder or ""))
    return worlds.run(case).extras


def steps_of(folder: Path) -> list[int]:
    """Steps of the complete checkpoints, newest first."""
    return [entry.step for entry in find_checkpoints(folder / "checkpoints") if entry.state == "complete"]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 30 MB of its own, where this user may make one."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=30m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"needs a file system of its own, which this user may not mount: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_each_sample_is_trained_once(worlds: Worlds, documents: Path, tmp_path: Path) -> None:
    """Over a stop, with another batch size and other workers, past the end of an epoch (some 500 samples)."""
    first = run(worlds, config_of("none", documents, tmp_path, global_batch_size=200), 2)
    assert first["indices"] == list(range(400))
    config = config_of("uneven_3x2", documents, tmp_path, global_batch_size=90)
    second = run_all(worlds, config, 4)
    trained = sorted(index for rank in second for index in rank["indices"])
    assert trained == list(range(400, 580))
    assert second[0]["position"].next_sample == 580
    third = run(worlds, config_of("none", documents, tmp_path, global_batch_size=7), 5)
    assert third["indices"] == list(range(580, 587))


def test_other_data_are_refused(worlds: Worlds, documents: Path, tmp_path: Path) -> None:
    run(worlds, config_of("none", documents, tmp_path), 2)
    config = config_of("none", documents, tmp_path)
    other = tmp_path / "other.jsonl"
    other.write_bytes(documents.read_bytes()[:-200])
    wrong = {
        "data.source": replace(config, data=replace(config.data, source=str(other))),
        "data.shuffle": replace(config, data=replace(config.data, shuffle=True)),
        "training.seq_len": replace(config, training=replace(config.training, seq_len=4)),
    }
    for key, bad in wrong.items():
        error = run(worlds, bad, 4)["error"]
        assert key in error and "step-00000002" in error, error
    same = tmp_path / "the_same.jsonl"
    same.write_bytes(documents.read_bytes())
    assert run(worlds, replace(config, data=replace(config.data, source=str(same))), 3)["error"] == ""


def test_files_of_a_run_that_goes_on(worlds: Worlds, documents: Path, tmp_path: Path) -> None:
    """metrics.jsonl and the event files have each step once; what was trained twice is kept beside."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = config_of("none", documents, tmp_path, async_mode="async")
    config = replace(config, metrics=MetricsConfig(tensorboard=True, timeline_step=0))
    run(worlds, config, 5, folder=tmp_path)
    assert steps_of(tmp_path) == [5, 4, 2]
    before = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    # As if the run had been killed while it saved step 5.
    newest = tmp_path / "checkpoints" / "step-00000005"
    newest.rename(newest.with_name(".saving-step-00000005-0123abcd"))
    run(worlds, config, 7, folder=tmp_path)
    after = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in after] == list(range(1, 8))
    assert after[:4] == before[:4]
    assert [line["loss"] for line in after[4:5]] == [before[4]["loss"]]  # the same layout: the same bits
    aside = [json.loads(line) for line in (tmp_path / "metrics.superseded.jsonl").read_text().splitlines()]
    assert aside == before[4:]
    reader = EventAccumulator(str(tmp_path / "tb"), size_guidance={"scalars": 0})
    reader.Reload()
    assert [event.step for event in reader.Scalars("loss")] == list(range(1, 8))
    # Back to step 2 on purpose: what comes after it is set aside, so that the next start does not find it.
    back = replace(config, checkpoint=replace(config.checkpoint, resume=2))
    assert run(worlds, back, 3, folder=tmp_path)["position"].step == 3
    assert steps_of(tmp_path) == [3, 2]
    assert run(worlds, config, 4, folder=tmp_path)["position"].step == 4


def test_damage_is_found_before_anything_is_loaded(worlds: Worlds, documents: Path, tmp_path: Path) -> None:
    config = config_of("none", documents, tmp_path)
    run(worlds, config, 4)
    file = tmp_path / "checkpoints" / "step-00000004" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    requested = run(worlds, replace(config, checkpoint=replace(config.checkpoint, resume="4")), 5)
    assert requested["error"] == f"{file}: damaged (its checksum differs from the one it was written with)"
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: damaged"):
        convert(file.parent, tmp_path / "out.pt")
    # "auto" goes on from the one before.
    result = run(worlds, config, 3)
    assert (result["error"], result["position"].step, len(result["losses"])) == ("", 3, 1)
    (tmp_path / "checkpoints" / "step-00000002" / ".metadata").write_bytes(b"")
    (tmp_path / "checkpoints" / "step-00000003" / ".metadata").unlink()
    assert "no checkpoint there can be used" in run(worlds, config, 5)["error"]


def test_disk_full(worlds: Worlds, documents: Path, small: Path) -> None:
    """The first checkpoint (some 12 MB) fits, the second one does not; then again with room made on the way."""
    filler = small / "filler"
    filler.write_bytes(bytes(10_000_000))
    config = config_of("none", documents, small, keep_latest_k=1)
    stopped = run(worlds, config, 6)
    assert "the checkpoint of step 4 could not be saved" in stopped["error"]
    assert "No space left on device" in stopped["error"]
    assert (stopped["position"].step, steps_of(small)) == (4, [2])
    assert [p.name for p in (small / "checkpoints").iterdir()] == ["step-00000002"], "nothing half is left"
    going_on = replace(config, checkpoint=replace(config.checkpoint, on_save_failure="continue"))
    result = run(worlds, going_on, 6, unlink_at=(5, str(filler)))
    assert (result["error"], result["position"].step, len(result["losses"])) == ("", 6, 4)
    assert steps_of(small) == [6]


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_a_write_error_of_the_system_is_shown(worlds: Worlds, documents: Path, tmp_path: Path, async_mode: str) -> None:
    config = config_of("none", documents, tmp_path, async_mode=async_mode)
    result = run(worlds, config, 4, largest_file=2_000_000)
    assert "could not be saved: on rank 0" in result["error"] and "File too large" in result["error"]
    assert steps_of(tmp_path) == []
    # The last one must be there, whatever is said about the others.
    going_on = replace(config, checkpoint=replace(config.checkpoint, on_save_failure="continue"))
    result = run(worlds, going_on, 3, largest_file=2_000_000)
    assert "the checkpoint of step 3 could not be saved" in result["error"]


def test_a_folder_that_has_become_read_only(worlds: Worlds, documents: Path, small: Path) -> None:
    config = config_of("none", documents, small)
    run(worlds, config, 2)
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    error = run(worlds, config, 4)["error"]
    assert "the checkpoint of step 4 could not be saved" in error and "Read-only file system" in error
    assert steps_of(small) == [2]


def test_converted_weights_are_the_unsplit_models(worlds: Worlds, documents: Path, tmp_path: Path) -> None:
    """Saved by 5 processes; torch and safetensors alike; what torchtitan's own model loads."""
    run(worlds, config_of("uneven_3x2", documents, tmp_path), 2)
    checkpoint = tmp_path / "checkpoints" / "step-00000002"
    state_dict = convert(checkpoint, tmp_path / "out.pt")
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert loaded.keys() == state_dict.keys() and any(name.endswith("expert_bias_E") for name in loaded)
    convert(checkpoint, tmp_path / "out.safetensors")
    data = (tmp_path / "out.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert header.keys() == state_dict.keys()
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        tensor = torch.frombuffer(bytearray(data[begin:end]), dtype=torch.float32).reshape(entry["shape"])
        assert torch.equal(tensor, state_dict[name]) and torch.equal(tensor, loaded[name])
    with pytest.raises(CheckpointError, match="exists already"):
        convert(checkpoint, tmp_path / "out.pt")
