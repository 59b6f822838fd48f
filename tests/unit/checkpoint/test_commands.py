"""`disagmoe checkpoint` and what is refused before a process starts, on checkpoints without tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from disagmoe.checkpoint.folder import STATE, commit, temporary_name, write_durably, write_manifest
from disagmoe.checkpoint.resume import describe_run
from disagmoe.cli import main
from disagmoe.config.dump_folder import CONFIG_NAME, claim_dump_folder, find_folder_problem
from disagmoe.config.load import ResolvedConfig, load_config
from disagmoe.config.schema import TrainingConfig


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("NGPU", "NNODES", "NODE_RANK", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("disagmoe.config.launch.count_gpus", lambda environ: 0)
    Path("mine.toml").write_text('dump_folder = "out"\n[recipe]\nname = "qwen3"\n[checkpoint]\nenable = true\n')


def resolved(*options: str) -> ResolvedConfig:
    return load_config("mine.toml", options)


def make(step: int, *, seq_len: int = 128) -> Path:
    """A checkpoint of `mine.toml`'s run, in its dump folder."""
    with claim_dump_folder(resolved()):
        pass
    folder = Path("out/checkpoints")
    temporary = folder / temporary_name(step, "run1")
    temporary.mkdir(parents=True)
    config = replace(resolved().config, training=TrainingConfig(seq_len=seq_len))
    state = describe_run(config, step=step, next_sample=16 * step, fingerprint="abc", world_size=4, layout="")
    files = {STATE: json.dumps(state).encode(), "__0_0.distcp": b"tensors"}
    write_manifest(temporary, step, {name: write_durably(temporary / name, data) for name, data in files.items()})
    return commit(temporary, step)


def run(*arguments: str) -> int:
    return main(list(arguments))


def test_ls_and_verify(capsys: pytest.CaptureFixture[str]) -> None:
    make(10)
    damaged = make(20) / "__0_0.distcp"
    damaged.write_bytes(b"tensorS")
    (make(30) / STATE).unlink()
    for folder in ("out", "out/checkpoints", "."):
        if folder != ".":
            assert run("checkpoint", "ls", folder) == 0
            lines = capsys.readouterr().out.splitlines()
            assert [line.split()[1] for line in lines if line.startswith("out")] == ["damaged", "complete", "complete"]
            assert lines[1].strip() == f"out/checkpoints/step-00000030/{STATE}: missing"
    assert run("checkpoint", "verify", "out") == 1
    out = capsys.readouterr().out
    assert "out/checkpoints/step-00000010: ok" in out
    assert f"out/checkpoints/step-00000020: DAMAGED\n  {damaged}: damaged (its checksum differs" in out
    assert run("checkpoint", "verify", "out", "--step=10") == 0
    assert run("checkpoint", "verify", "out/checkpoints/step-00000010") == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("ls", "nowhere"), "nowhere: there is no such folder"),
        (("ls", "empty"), "empty: holds no checkpoint"),
        (("show", "out", "--step=7"), "no such checkpoint; there is step-00000010 (complete)"),
        (("convert", "out", "--to=model.bin"), "model.bin: must end in .pt or .safetensors"),
    ],
)
def test_what_is_not_there(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str) -> None:
    make(10)
    Path("empty").mkdir()
    assert run("checkpoint", *arguments) == 1
    assert said in capsys.readouterr().err


def test_convert_needs_a_target(capsys: pytest.CaptureFixture[str]) -> None:
    make(10)
    with pytest.raises(SystemExit):
        run("checkpoint", "convert", "out")
    assert "convert needs --to=FILE" in capsys.readouterr().err


def test_launch_says_how_long_to_wait_for_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", "mine.toml", "--launch", "--checkpoint.grace_s=60") == 0
    assert capsys.readouterr().out == "4 75\n"
    assert run("check", "mine.toml", "--launch", "--checkpoint.enable=false") == 0
    assert capsys.readouterr().out == "4\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), ""),
        (("--checkpoint.resume=10",), ""),
        (("--checkpoint.resume=20",), 'checkpoint.resume = "20": out/checkpoints/step-00000020: there is no such'),
        (("--checkpoint.resume=none",), "holds an earlier run, which is never overwritten"),
        (("--checkpoint.enable=false",), "holds an earlier run, which is never overwritten"),
        (("--training.seq_len=64",), "command line: training.seq_len = 64: must be 128 as in step-00000010"),
        (("--optimizer.name=SGD",), 'optimizer.name = "SGD": must be "AdamW" as in step-00000010'),
    ],
)
def test_what_would_not_continue_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said: str
) -> None:
    make(10)
    assert run("check", "mine.toml", "--launch", *options) == (2 if said else 0)
    assert said in capsys.readouterr().err


def test_a_folder_for_checkpoints_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with claim_dump_folder(resolved()):
        pass
    Path("out/checkpoints").mkdir()
    Path("out/other").write_text("")
    assert run("check", "mine.toml", "--launch", "--checkpoint.folder=other") == 2
    assert 'checkpoint.folder = "other": out/other must be a folder that you may' in capsys.readouterr().err


def test_a_run_without_checkpoints_is_not_continued() -> None:
    with claim_dump_folder(resolved()):
        pass
    assert "holds an earlier run" in str(find_folder_problem(resolved()))


def test_the_earlier_configuration_is_kept() -> None:
    make(10)
    with claim_dump_folder(resolved("--optimizer.lr=0.5")) as folder:
        kept = sorted(path.name for path in folder.glob("config*.toml"))
    assert kept == ["config.1.toml", CONFIG_NAME]
    assert load_config("out/config.1.toml").config.optimizer.lr != 0.5
    assert load_config("out/config.toml").config.optimizer.lr == 0.5
