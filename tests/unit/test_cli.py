"""The `disagmoe` command, in this process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from disagmoe.check import Plan, make_plan, report, stage_params, time_grid
from disagmoe.check_expert_parallel import stage_params as ep_stage_params
from disagmoe.cli import main
from disagmoe.config.load import load_config
from disagmoe.config.recipe import load_recipe, recipe_names
from disagmoe.layout import Role, cut_into_chunks

SHAPES = [(name, flavor) for name in recipe_names() for flavor in load_recipe(name).shapes]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("NGPU", "NNODES", "NODE_RANK", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("disagmoe.config.launch.count_gpus", lambda environ: 0)


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "mine.toml").write_text('[recipe]\nname = "qwen3"\n')
    return "mine.toml"


def plan_for(path: str, *options: str) -> Plan:
    return make_plan(load_config(path, options))


def test_check_prints_the_layout(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", path, "--disagmoe.ffn_depth=2", "--disagmoe.ffn_workers=3"]) == 0
    out = capsys.readouterr().out
    for part in (
        "qwen3-debug: 6 layers",
        "8 processes = replicas 1 x (attn_depth 1 x attn_workers 2 + ffn_depth 2 x ffn_workers 3)",
        "A0 holds embedding, attention of layers 0-5, head",
        "F1 holds experts of layers 1, 3, 5",
        "r0.F1.2    rank 7    experts 6-7 ",
        "deep: 8 micro-batches through 13 stages",
    ):
        assert part in out


def test_check_refuses(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", path, "--training.steps=0"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "command line: training.steps = 0: must be an integer, at least 1\n"


@pytest.mark.parametrize("mode", ["--print-world-size", "--launch"])
@pytest.mark.parametrize(
    ("options", "world_size"),
    [([], "4"), (["--disagmoe.replicas", "2"], "8"), (["--parallelism.mode=none"], "1")],
)
def test_check_prints_a_number(
    path: str, mode: str, options: list[str], world_size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*options, "--disagmoe.microbatches=4"] if "none" not in str(options) else options
    assert main(["check", path, *options, mode]) == 0
    assert capsys.readouterr().out == f"{world_size}\n"


def test_check_follows_the_environment(
    path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NNODES", "2")
    assert main(["check", path, "--launch"]) == 0
    assert capsys.readouterr().out == "2\n"
    assert main(["check", path]) == 0
    assert "rank 3    node 1 " in capsys.readouterr().out
    monkeypatch.setenv("NGPU", "4")
    assert main(["check", path]) == 2
    assert "make 8, but the layout needs 4" in capsys.readouterr().err


def test_a_used_folder_stops_a_launch_but_not_a_check(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("outputs/mine").mkdir(parents=True)
    Path("outputs/mine/config.toml").touch()
    assert main(["check", path]) == 0
    assert "note: default: dump_folder" in capsys.readouterr().err
    assert main(["check", path, "--launch"]) == 2
    assert "add --dump_folder=outputs/mine_2" in capsys.readouterr().err


def test_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "comm"]) == 0
    out = capsys.readouterr().out
    assert "timeout_s (default 300.0): must be a finite number, above 0." in out
    assert "Longest wait on a peer" in out
    assert "[training]" not in out


def test_help_and_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code in ((["--help"], 0), (["check", "--help"], 0), (["chek"], 2), ([], 2), (["check"], 2)):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == code
    assert "check a configuration" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "flavor"), SHAPES)
@pytest.mark.parametrize(("attn_depth", "ffn_depth", "ffn_workers"), [(1, 1, 2), (2, 3, 1), (3, 2, 3)])
def test_workers_hold_the_model_once(
    path: str, name: str, flavor: str, attn_depth: int, ffn_depth: int, ffn_workers: int
) -> None:
    """Over one A-worker a group and all F-workers, parameters add up to the model's, with what is replicated extra."""
    plan = plan_for(
        path,
        f"--recipe.name={name}",
        f"--recipe.flavor={flavor}",
        f"--disagmoe.attn_depth={attn_depth}",
        f"--disagmoe.ffn_depth={ffn_depth}",
        f"--disagmoe.ffn_workers={ffn_workers}",
        "--disagmoe.microbatches=2",
    )
    shape = plan.shape
    total = 0
    for stage in plan.stages:
        if stage.role is Role.ATTN:
            total += stage_params(plan, stage, 0)
            continue
        total += sum(stage_params(plan, stage, index) for index in range(ffn_workers))
        assert stage.moe_layer is not None
        total -= ffn_workers * shape.dim  # the feed-forward norm's second home
        total -= (ffn_workers - 1) * shape.layers[stage.moe_layer].moe.shared_params(shape.dim)
    assert total == shape.num_params
    assert f"({shape.name}" not in report(plan)


def test_memory_grows_with_what_is_in_flight_and_shrinks_with_recomputation(path: str) -> None:
    def activations(*options: str) -> list[float]:
        text = report(plan_for(path, *options))
        units = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
        return [float(n) * units[unit] for n, unit in re.findall(r"([\d.]+) (\w+) activations", text)]

    base = activations()
    assert len(base) == 4
    assert all(a > b for a, b in zip(base, activations("--disagmoe.in_flight=2"), strict=True))
    ffn = activations("--disagmoe.recompute=ffn")
    assert ffn[:2] == base[:2]
    assert ffn[2] < base[2]
    assert activations("--disagmoe.recompute=full")[0] < base[0]


def test_time_grid_respects_dependencies(path: str) -> None:
    plan = plan_for(path, "--disagmoe.attn_depth=2", "--disagmoe.ffn_depth=2", "--disagmoe.microbatches=3")
    assert plan.schedule is not None
    rows = time_grid(plan.schedule, 10_000)
    start = {cell: slot for row in rows for slot, cell in enumerate(row) if cell not in ".="}
    assert len(start) == 2 * plan.schedule.num_stages * 3
    for stage in range(1, plan.schedule.num_stages):
        for microbatch in range(3):
            assert start[f"{stage}F{microbatch}"] > start[f"{stage - 1}F{microbatch}"]
            assert start[f"{stage - 1}B{microbatch}"] >= start[f"{stage}B{microbatch}"] + 2


def test_expert_parallel_report(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--parallelism.mode=ep", "--expert_parallel.pipeline_depth=2", "--expert_parallel.chunks_per_rank=2"]
    options += ["--expert_parallel.overlap=dual_pipe_v", "--expert_parallel.expert_workers=3"]
    assert main(["check", path, *options, "--print-world-size"]) == 0
    assert capsys.readouterr().out == "6\n"
    assert main(["check", path, *options]) == 0
    out, err = capsys.readouterr()
    assert "6 processes = replicas 1 x pipeline_depth 2 x expert_workers 3" in out
    assert "pipeline rank 0 holds chunk 0: embedding, layers 0-1; chunk 3: layers 5, head" in out
    assert "r0.A1.2    rank 5 " in out
    assert "  rank 0   F0.0  F0.1  F0.2  F3.0  I3.0  W3.0" in out
    assert "expert_workers = 3 but a micro-batch has as few as 2 samples" in err


@pytest.mark.parametrize(("name", "flavor"), SHAPES)
@pytest.mark.parametrize(("chunks", "workers"), [(1, 1), (3, 3), (6, 2)])
def test_expert_parallel_workers_hold_the_model_once(name: str, flavor: str, chunks: int, workers: int) -> None:
    shape = load_recipe(name).shape(flavor)
    stages = cut_into_chunks(shape.is_moe_layer, chunks)
    first = sum(ep_stage_params(shape, stage, workers, 0) for stage in stages)
    others = sum(ep_stage_params(shape, s, workers, i) for s in stages if s.kind == "F" for i in range(1, workers))
    assert first + others == shape.num_params


def test_one_process_report(path: str) -> None:
    assert "one process trains the unsplit model" in report(plan_for(path, "--parallelism.mode=none"))
    colocated = ["--disagmoe.colocate=true", "--disagmoe.attn_workers=1", "--disagmoe.ffn_workers=1"]
    assert "  all " in report(plan_for(path, *colocated))
