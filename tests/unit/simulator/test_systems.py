"""Chunk orders against closed forms, overlap formulas, systems against each other, reports."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagmoe.check import make_plan
from disagmoe.cli import main
from disagmoe.config.cluster import load_cluster
from disagmoe.config.load import load_config
from disagmoe.config.recipe import load_recipe
from disagmoe.layout import Layout
from disagmoe.schedules import Kind, Schedule, validate
from disagmoe.simulate_cli import _run as run_by_name
from disagmoe.simulate_cli import make_job
from disagmoe.simulator.chunks import cut_into_chunks, dual_pipe_v, interleaved_1f1b, spell_out, v_rank
from disagmoe.simulator.costs import Hop, StageCosts, uniform_costs
from disagmoe.simulator.engine import simulate
from disagmoe.simulator.expert_parallel import EPPlan
from disagmoe.simulator.generators import af_schedule
from disagmoe.simulator.overlap import best_chunked, chunked, fine_grained
from disagmoe.simulator.profile import HopProfile, Profile, StageProfile
from disagmoe.simulator.report import as_text, events_of, table_rows, write_trace
from disagmoe.simulator.roofline import Job
from disagmoe.simulator.systems import AF_SYSTEMS, BASELINES, AFPlan, run_af_pipe, run_interleaved
from disagmoe.simulator.tuning import tuned, tuned_af, with_least_recompute

from .helpers import af_schedule as small_schedule

JOB = Job(
    model=load_recipe("deepseek_moe").shape("16B-top4"),
    cluster=load_cluster("h800x16"),
    seq_len=4096,
    global_batch=128,
)
CONFIG = Path(__file__).parents[3] / "train_configs" / "debug_qwen3.toml"


def close(value: float) -> object:
    return pytest.approx(value, rel=1e-9, abs=1e-9)


def interleaved(ranks: int, chunks: int, microbatches: int, layers: int) -> tuple[Schedule, StageCosts]:
    stages = cut_into_chunks([True] * layers, ranks * chunks)
    places = [chunk % ranks for chunk in range(ranks * chunks)]
    order = interleaved_1f1b(ranks, chunks, microbatches)
    schedule = spell_out(order, stages, places, name="interleaved", num_microbatches=microbatches)
    forward = [{"A": 1.0, "F": 1.0, "C": 0.0}[stage.kind] for stage in stages]
    return schedule, uniform_costs(len(stages), forward_s=forward, head_s=0.0)


@pytest.mark.parametrize(
    ("ranks", "chunks", "microbatches"), [(4, 1, 8), (4, 1, 3), (4, 2, 8), (2, 3, 8), (8, 2, 32), (3, 4, 9)]
)
def test_interleaved_1f1b_reaches_its_closed_form(ranks: int, chunks: int, microbatches: int) -> None:
    """Bubble (p - 1)(f + b) of one chunk; f + b = 6 for a layer of two stages."""
    schedule, costs = interleaved(ranks, chunks, microbatches, ranks * chunks)
    validate(schedule)
    assert simulate(schedule, costs).makespan_s == close(6 * microbatches * chunks + 6 * (ranks - 1))


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 4), (2, 4), (2, 8), (3, 12), (4, 8), (8, 32)])
def test_dual_pipe_v_reaches_its_closed_form(ranks: int, microbatches: int) -> None:
    """Bubble (p - 1)(F&B + B - 3W), with F = 2, B = 4, W = 2 and F&B = 6 for a layer a chunk."""
    stages = cut_into_chunks([True] * 2 * ranks, 2 * ranks)
    places = [v_rank(chunk, ranks) for chunk in range(2 * ranks)]
    order = dual_pipe_v(ranks, microbatches)
    schedule = spell_out(order, stages, places, name="dualpipev", num_microbatches=microbatches)
    validate(schedule)
    forward = [{"A": 1.0, "F": 1.0, "C": 0.0}[stage.kind] for stage in stages]
    result = simulate(schedule, uniform_costs(len(stages), forward_s=forward, head_s=0.0))
    assert result.bubble_s == close((ranks - 1) * (6 + 4 - 3 * 2))
    with pytest.raises(ValueError, match=f"needs at least {2 * ranks}"):
        dual_pipe_v(ranks, 2 * ranks - 1)


def test_chunks_hold_all_layers_once() -> None:
    stages = cut_into_chunks([False, True, True, False, True, False], 4)
    assert sorted([s.layer for s in stages if s.kind == "F"]) == [1, 2, 4]
    assert sorted(layer for s in stages for layer in s.dense_layers) == [0, 3, 5]
    assert [s.has_embedding for s in stages].count(True) == 1 and stages[0].has_embedding
    assert stages[-1].has_head and [s.has_head for s in stages].count(True) == 1
    with pytest.raises(ValueError, match="7 chunks for 6 layers"):
        cut_into_chunks([True] * 6, 7)
    with pytest.raises(ValueError, match="multiple of 4"):
        interleaved_1f1b(4, 2, 6)


seconds = st.floats(0, 5, allow_nan=False)


@given(d=seconds, e=st.floats(0.01, 5), c=seconds, latency=st.floats(0, 0.1))
@settings(max_examples=100, deadline=None)
def test_overlap_never_beats_its_bounds(d: float, e: float, c: float, latency: float) -> None:
    dispatch, combine = Hop(send_s=d, recv_s=d, latency_s=latency), Hop(send_s=c, recv_s=c, latency_s=latency)
    plain = chunked(dispatch, e, combine, pieces=1)
    assert plain.total_s == close(d + e + c + 2 * latency)
    for overlapped in (best_chunked(dispatch, e, combine), fine_grained(dispatch, e, combine)):
        assert max(e, d + c) - 1e-9 <= overlapped.total_s <= plain.total_s + 1e-9
        assert overlapped.exposed_s == close(overlapped.total_s - e)


@given(
    depth=st.integers(1, 3), layers=st.integers(1, 5), microbatches=st.integers(1, 9), hop=st.sampled_from([0.0, 0.5])
)
@settings(max_examples=60, deadline=None)
def test_weights_put_off_hardly_cost_time(depth: int, layers: int, microbatches: int, hop: float) -> None:
    schedule = small_schedule((depth, depth), layers, microbatches)
    costs = uniform_costs(schedule.num_stages, hop_s=hop)
    layout = Layout(attn_depth=depth, ffn_depth=depth, attn_workers=1, ffn_workers=1)
    split = af_schedule(layout, [True] * layers, costs=costs, order="deep", split=True, num_microbatches=microbatches)
    validate(split)
    kinds = [action.kind for order in split.compute for action in order]
    assert kinds.count(Kind.BACKWARD_WEIGHT) == kinds.count(Kind.BACKWARD_INPUT) == schedule.num_stages * microbatches
    assert simulate(split, costs).makespan_s <= simulate(schedule, costs).makespan_s * 1.05 + 1e-9


def test_every_system_runs_and_counts_the_same_tokens() -> None:
    plan = AFPlan(layout=Layout(attn_depth=2, ffn_depth=2, attn_workers=16, ffn_workers=16), num_microbatches=8)
    runs = [AF_SYSTEMS[name].run(JOB, plan) for name in tuple(AF_SYSTEMS)]
    runs += [BASELINES[name].run(JOB, EPPlan(ranks=2, width=32, ep=16)) for name in BASELINES]
    assert {run.tokens for run in runs} == {128 * 4096} and {run.num_gpus for run in runs} == {64}
    assert len({run.system for run in runs}) == 11
    speed = {run.system: run.tokens_per_s_per_gpu for run in runs}
    assert speed["megatron"] < min(speed["tutel"], speed["comet"])
    assert speed["af-plain"] <= speed["af-deep"] * 1.02
    for run in runs:
        assert run.peak_bytes > 0 and run.step_s >= run.result.makespan_s
        assert 0.99 < run.result.compute_share + run.result.exposed_share + run.result.idle_share < 1.01
    text = as_text(table_rows(runs)).splitlines()
    assert len(text) == 12 and text[0].startswith("system")


def test_without_transfers_overlap_gains_nothing() -> None:
    """One rank, one worker: every expert is at home."""
    job = replace(JOB, global_batch=4)
    runs = [BASELINES[name].run(job, EPPlan(ranks=1, width=1, ep=1)) for name in ("megatron", "tutel", "comet")]
    assert [run.result.makespan_s for run in runs] == [pytest.approx(runs[0].result.makespan_s, rel=0.02)] * 3


def test_plans_that_do_not_divide_are_refused() -> None:
    plan = AFPlan(layout=Layout(attn_depth=1, ffn_depth=1, attn_workers=1, ffn_workers=1), num_microbatches=3)
    with pytest.raises(ValueError, match="global batch of 128 samples: must be a multiple of replicas x micro-batches"):
        run_af_pipe(JOB, plan)
    with pytest.raises(ValueError, match="must be a multiple of workers x samples = 3 x 1"):
        run_interleaved(JOB, EPPlan(ranks=1, width=3, ep=1))
    with pytest.raises(ValueError, match="an even number"):
        BASELINES["dualpipe"].run(JOB, EPPlan(ranks=1, width=8, ep=8))


def test_best_plans_fit_and_recompute_no_more_than_needed() -> None:
    job = replace(JOB, global_batch=64)
    for run in (tuned(job, "megatron", 16, tries=1), tuned_af(job, "af-deep", 16, tries=1)):
        assert run.fits and run.num_gpus == 16
    small = replace(job, cluster=load_cluster("emulated"), dtype="float32")
    never = with_least_recompute(small, lambda j: BASELINES["megatron"].run(j, EPPlan(ranks=1, width=8, ep=8)))
    assert not never.fits and never.recompute == "full"


def test_a_trace_has_every_action(tmp_path: Path) -> None:
    schedule = small_schedule((1, 1), 2, 2)
    result = simulate(schedule, uniform_costs(5, hop_s=0.5))
    events = events_of(result)
    assert sorted(e.name for u in events for e in events[u] if e.category == "compute") == sorted(
        str(action) for order in schedule.compute for action in order
    )
    sends = [e.name for u in events for e in events[u] if e.category == "nic send"]
    assert sorted(sends) == sorted(str(a) for _, a in schedule.actions() if a.kind in (Kind.SEND_F, Kind.SEND_B))
    write_trace(result, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"} == {
        "group 0 (A0)",
        "group 1 (F0)",
    }


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "t.png", tmp_path / "t.json"]
    arguments = ["simulate", str(CONFIG), "--cluster", "h800x1", "--system", "af-plain", "megatron"]
    assert main([*arguments, "--timeline", str(files[0]), "--timeline", str(files[1])]) == 0
    out = capsys.readouterr().out
    assert "qwen3-debug" in out and "\naf-plain" in out and "\nmegatron" in out
    assert all(file.stat().st_size > 1000 for file in files)
    for wrong, message in [
        (["--system", "megatrom"], "no such system; did you mean megatron?"),
        (["--cluster", "h800"], "no such file in clusters/"),
        (["--profile", "none.json"], "none.json: can't be read as a profile"),
        (["--training.steps=0"], "training.steps = 0"),
    ]:
        assert main(["simulate", str(CONFIG), "--cluster", "h800x1", "--system", "af-plain", *wrong]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["in_flight=3"], ["colocate=true", "attn_workers=1", "ffn_workers=1"]])
def test_the_command_simulates_the_order_that_is_run(more: list[str]) -> None:
    plan = make_plan(load_config(str(CONFIG), [f"--disagmoe.{option}" for option in (*more, "schedule=deep")]))
    job = make_job(plan.config, plan.shape, load_cluster("h800x1"))
    simulated = run_by_name(plan, job, "af-deep", None).schedule
    assert plan.schedule is not None and simulated.programs == plan.schedule.programs


def test_a_profile_leaves_baselines_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = make_plan(load_config(str(CONFIG), [])).schedule.num_stages
    stages = tuple(
        StageProfile(
            index=i,
            forward_s=1e-3,
            backward_s=2e-3,
            backward_input_s=None,
            backward_weight_s=None,
            activation_bytes=1e6,
        )
        for i in range(shape)
    )
    hops = tuple(
        HopProfile(index=i, forward_bytes=1e6, forward_s=5e-4, backward_bytes=1e6, backward_s=5e-4)
        for i in range(1, shape)
    )
    file = tmp_path / "costs.json"
    Profile(model="qwen3-debug", seq_len=256, microbatch_samples=8, stages=stages, hops=hops).save(file)
    arguments = ["simulate", str(CONFIG), "--cluster", "h800x1", "--profile", str(file)]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert "\naf-" in printed.out and not any(f"\n{name} " in printed.out for name in BASELINES)
    assert "baselines are left out" in printed.err
    assert main([*arguments, "--system", "af-deep", "tutel"]) == 2
    assert '--system = "tutel": is not measured by --profile' in capsys.readouterr().err


def test_the_library_of_orders_is_complete() -> None:
    with pytest.raises(ValueError, match="must be one of"):
        af_schedule(
            Layout(attn_depth=1, ffn_depth=1, attn_workers=1, ffn_workers=1),
            [True],
            costs=uniform_costs(3),
            order="gpipe",
            split=False,
            num_microbatches=1,
        )
