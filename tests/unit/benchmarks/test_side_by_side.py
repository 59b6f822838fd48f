"""Presets are valid and comparable; summaries and pages are made as documented."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.side_by_side import fit, page
from benchmarks.side_by_side.__main__ import Bench
from benchmarks.side_by_side.measure import Launch
from benchmarks.side_by_side.predict import predict_pipeline
from benchmarks.side_by_side.preset import OURS, Preset, layout_text, load_preset, preset_names, resolve
from benchmarks.side_by_side.summary import ceiling, summarise
from benchmarks.side_by_side.tune import tune
from disagmoe.config.checks import build_layout, check_config, model_shape
from disagmoe.layout import build_stages, cut_into_chunks
from disagmoe.simulator.profile import HopProfile, Profile, StageProfile

COMPARED = ("paper_like", "long_sequence", "top_k_1", "top_k_2", "top_k_8", "two_level", "imbalanced")
MORE = {"pipeline_only", "ep_equal_weights", "ep_equal_weights_dedup"}
"""Of some presets, on top of the ratios that all have."""
KEYS = {
    "ep_equal_experts",
    "ep_equal_experts_dedup",
    "ep_best_tuned",
    "ep_best_tuned_dedup",
    "overlap_best_tuned",
    "overlap_best_tuned_dedup",
}


def configured(preset: Preset) -> dict[str, dict[str, object]]:
    """Systems of a preset that need no tuning, by name."""
    names = [name for name, table in preset.tables.items() if "tuned" not in table]
    return {system.name: system.overrides for system in preset.systems(names)}


@pytest.mark.parametrize("name", COMPARED)
def test_presets_are_accepted_by_the_trainer_and_use_every_worker(name: str) -> None:
    preset = load_preset(name)
    overrides = configured(preset)
    ours = {OURS, *(table["against"] for table in preset.tables.values() if "against" in table)}
    assert {"ep_equal_experts", "ep_equal_experts_dedup"} <= overrides.keys() and ours <= set(preset.tables)
    assert set(preset.tables) - ours - MORE == KEYS
    resolved = {system: resolve(own) for system, own in overrides.items()}
    for system, config in resolved.items():
        check_config(config)
        assert build_layout(config.config).world_size == preset.cluster.world_size, system
    for name in ("ep_equal_experts", "ep_equal_experts_dedup"):
        against = preset.tables[name].get("against", OURS)
        part, ep = resolved[against].config.disagmoe, resolved[name].config.expert_parallel
        assert part.ffn_workers == ep.expert_workers  # equal experts a worker
    grids = {table["tuned"] for table in preset.tables.values() if "tuned" in table}
    assert grids == set(preset.grids)
    for grid in grids:
        candidates = list(preset.candidates(grid))
        assert len(candidates) >= 2
        rows = {bool(own.get("expert_parallel.deduplicate", False)) for own in candidates}
        assert rows == {grid.endswith("_dedup")}
        modes = {own["parallelism.mode"] for own in candidates}
        assert modes == {"disagmoe" if grid == "af" else "ep"}


def test_all_presets_are_tested() -> None:
    assert set(preset_names()) == set(COMPARED)


def test_a_missing_preset_names_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"--preset fast: must be one of .*paper_like"):
        load_preset("fast")


def test_layouts_are_told_apart() -> None:
    texts = [layout_text(own) for own in configured(load_preset("paper_like")).values()]
    assert len(set(texts)) == len(texts)


ONE = Launch(
    step_s=10.0, pipeline_s=9.0, compute_s=5.0, exposed_comm_s=1.0, idle_s=3.0, sent_bytes=50e6, nic_bytes=60e6,
    peak_memory_bytes=5e8, tokens_per_s=800.0, predicted_step_s=9.5, loss=5.0, start_s=8.0,
    transfers_cost_s=0.2,
)  # fmt: skip


def result() -> dict[str, object]:
    preset = load_preset("paper_like")
    systems = preset.systems(["af_pipe_equal_experts", "ep_equal_experts", "ep_equal_experts_dedup"])
    dedup = replace(ONE, step_s=12.0, exposed_comm_s=4.0, transfers_cost_s=2.0, nic_bytes=50e6)
    rounds = {
        "af_pipe_equal_experts": [ONE, replace(ONE, step_s=20.0)],
        "ep_equal_experts": [replace(ONE, step_s=15.0), replace(ONE, step_s=24.0)],
        "ep_equal_experts_dedup": [dedup, dedup],
    }
    return summarise(preset, systems, rounds)


def test_ratios_are_paired_within_rounds() -> None:
    found = result()
    assert found["ratios"] == pytest.approx({"ep_equal_experts": 1.35, "ep_equal_experts_dedup": 0.9})
    assert found["ratio_spread"]["ep_equal_experts"] == pytest.approx([1.2, 1.5])  # type: ignore[index]
    assert found["exposed_cut"] == 0.75
    assert found["transfers_cost_cut"] == pytest.approx(0.9)
    values = found["systems"]["ep_equal_experts_dedup"]  # type: ignore[index]
    assert {"step_s", "exposed_comm_s", "idle_s", "sent_bytes", "predicted_step_s", "layout"} <= values.keys()
    # The card's 50 MB in a step of 12 s; ours sends 60.
    share = 50e6 / (load_preset("paper_like").cluster.nics_bit_per_s[0] / 8) / 12
    assert values["wire_share"] == pytest.approx(share)
    expected = ceiling(wire_share=share, nic_bytes_ratio=1.2)
    assert found["ceilings"]["ep_equal_experts_dedup"] == pytest.approx(expected)  # type: ignore[index]


def test_ceiling_is_bounded_by_compute_and_by_bytes() -> None:
    assert ceiling(wire_share=0.5, nic_bytes_ratio=1.5) == pytest.approx(1 / 0.75)
    assert ceiling(wire_share=0.2, nic_bytes_ratio=1.5) == pytest.approx(1 / 0.8)


@pytest.mark.parametrize("name", ["ep_equal_experts_dedup", "pipeline_only", "af_pipe_equal_experts"])
def test_free_transfers_leave_compute(name: str, tmp_path: Path) -> None:
    (system,) = load_preset("paper_like").systems([name])
    config = resolve(system.overrides).config
    is_moe_layer = model_shape(config).is_moe_layer
    if name.startswith("af"):
        microbatches, groups = config.disagmoe.microbatches, config.disagmoe.attn_depth + config.disagmoe.ffn_depth
        num_stages = len(build_stages(build_layout(config), is_moe_layer))
    else:
        part = config.expert_parallel
        microbatches, groups = part.microbatches, part.pipeline_depth
        num_stages = len(cut_into_chunks(is_moe_layer, part.pipeline_depth * part.chunks_per_rank))
    hop = {"forward_bytes": 1e3, "forward_s": 0.05, "backward_bytes": 1e3, "backward_s": 0.05}
    profile = Profile(
        model="m", seq_len=256, microbatch_samples=1,
        stages=tuple(StageProfile(index=i, forward_s=0.01, backward_s=0.02) for i in range(num_stages)),
        hops=tuple(HopProfile(index=i, **hop) for i in range(1, num_stages)),
    )  # fmt: skip
    profile.save(tmp_path / "costs.json")
    passes_s, without_transfers_s = predict_pipeline(system.overrides, tmp_path / "costs.json")
    average_group_s = 0.03 * microbatches * num_stages / groups
    assert without_transfers_s >= average_group_s
    assert passes_s >= without_transfers_s + 2 * (num_stages - 1) * 0.05 * 0.5  # of a micro-batch's way there and back


def test_pages_are_written_again_in_place(tmp_path: Path) -> None:
    preset, found = load_preset("paper_like"), result()
    (tmp_path / "speed.md").write_text("# Speed\n\nwords\n")
    page.write(preset, found, tmp_path)
    once = (tmp_path / "speed.md").read_text()
    page.write(preset, found, tmp_path)
    assert (tmp_path / "speed.md").read_text() == once
    assert once.startswith("# Speed\n\nwords\n")
    assert "| 1.35x (1.20 - 1.50) |" in once
    assert (tmp_path / "speed_paper_like.png").stat().st_size > 1000


def test_costs_are_measured_once_and_evened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fitted order of a preset is made for costs measured in the order deep, in which equal layers cost the same."""
    monkeypatch.setattr(fit, "FOLDER", tmp_path / "a" / "b")
    fit.FOLDER.mkdir(parents=True)
    preset = load_preset("paper_like")
    (system,) = preset.systems(["af_pipe_equal_experts"])
    in_fitted = {**system.overrides, "disagmoe.schedule": "fitted"}
    launched: list[str] = []

    def profiled(own: dict[str, object], path: Path) -> None:
        launched.append(str(own["disagmoe.schedule"]))
        stages = tuple(StageProfile(index=i, forward_s=1.0 + i, backward_s=2.0 + i) for i in range(17))
        hop = {"forward_bytes": 1.0, "forward_s": 1.0, "backward_bytes": 1.0, "backward_s": 1.0}
        hops = tuple(HopProfile(index=i, **hop) for i in range(1, 17))
        Profile(model="bench", seq_len=256, microbatch_samples=2, stages=stages, hops=hops).save(path)

    assert fit.wants_costs(in_fitted) and not fit.wants_costs(system.overrides)
    first = fit.with_costs(preset, in_fitted, profiled)
    assert fit.with_costs(preset, in_fitted, profiled) == first and launched == ["deep"]
    assert not fit.wants_costs(first)
    costs = Profile.load(tmp_path / str(first["disagmoe.costs"])).stages
    # The first stage has the dense layer, the last the head; the others' medians are of stages 2 to 14 and 1 to 15.
    assert [costs[i].forward_s for i in (0, 2, 14, 1, 15, 16)] == [1.0, 9.0, 9.0, 9.0, 9.0, 17.0]


def test_tuning_keeps_what_it_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest of a grid is its best; a grid that time ran out on is not stored, and others stay."""
    preset = load_preset("paper_like")
    monkeypatch.setattr(Preset, "tuned_path", property(lambda _: tmp_path / "tuned.json"))
    left = [len(list(preset.candidates("af"))) + 1]

    class Clock:
        @property
        def time_is_up(self) -> bool:
            left[0] -= 1
            return left[0] < 0

    def measure(own: dict[str, object], _place: str) -> Launch:
        return replace(ONE, step_s=10.0 if own["disagmoe.schedule"] == "deep" else 9.0)

    def never_fast(own: dict[str, object], place: str) -> Launch:
        return measure(own, place) if own["parallelism.mode"] == "disagmoe" else ONE

    assert tune(preset, never_fast, Clock()) == 3
    grids = preset.tuned()["grids"]
    assert set(grids) == {"af"} and grids["af"]["best"]["disagmoe.schedule"] == "fitted"
    assert [one["step_s"] for one in grids["af"]["tried"]] == sorted(one["step_s"] for one in grids["af"]["tried"])
    left[0] = 1000
    assert tune(preset, never_fast, Clock()) == 0
    assert set(preset.tuned()["grids"]) == set(preset.grids)
    (tmp_path / "speed.md").write_text("# Speed\n")
    page.write_tuning(preset, tmp_path)
    assert "| 10.0 | 5.0 | 1.0 | 3.0 | 50 | 9.5 (-5%) | 1.11 |" in (tmp_path / "speed.md").read_text()


def test_launches_of_another_version_are_not_recalled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = tmp_path / "raw"
    older = {key: value for key, value in asdict(ONE).items() if key != "transfers_cost_s"}
    raw.write_text("".join(json.dumps({"key": k, "launch": v}) + "\n" for k, v in (("a", older), ("b", asdict(ONE)))))
    bench = Bench(load_preset("paper_like"), Namespace(steps=1, raw=raw, max_seconds=None))
    assert bench._known == {"b": asdict(ONE)}
    assert f"{raw}: launches of another version are measured again" in capsys.readouterr().err
