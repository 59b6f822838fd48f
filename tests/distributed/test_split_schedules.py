"""Fitted schedules and split backward train to what the unsplit model trains to; what is simulated is what runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from disagmoe.config.checks import build_layout, model_shape
from disagmoe.config.schema import Config
from disagmoe.schedules import Kind, Schedule, make_schedule
from disagmoe.simulator.engine import simulate
from disagmoe.simulator.profile import HopProfile, Profile, StageProfile
from tests.distributed.harness.cases import ADAMW, FAMILIES, NUM_STAGES, Case, make_config
from tests.distributed.harness.compare import assert_same_training
from tests.distributed.harness.cover import cover, product
from tests.distributed.harness.worlds import Worlds

SCHEDULES: dict[str, dict[str, Any]] = {
    "plain-split": {"schedule": "plain", "split_backward": True},
    "deep-split": {"schedule": "deep", "split_backward": True},
    "fitted": {"schedule": "fitted"},
    "fitted-split": {"schedule": "fitted", "split_backward": True},
    "fitted-split-capped": {"schedule": "fitted", "split_backward": True, "in_flight": 2},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "A1xM2-F1xN2": {"layout": (1, 1, 2, 2)},
    "A2xM2-F2xN1": {"layout": (2, 2, 2, 1)},
    "A1xM2-F2xN1": {"layout": (1, 2, 2, 1)},
    "A2xM2-F2xN1-placed": {"layout": (2, 2, 2, 1), "attn_placement": [0, 1, 1, 1, 0, 1, 1]},
    "colocated": {"layout": (1, 1, 1, 1), "colocate": True, "in_flight": 3},
}
AXES = {
    "family": FAMILIES,
    "layout": tuple(LAYOUTS),
    "schedule": tuple(SCHEDULES),
    "order": ("tagged", "strict"),
    "recompute": ("none", "full"),
    "microbatches": ("1", "4", "14"),
}
QUICK = cover(AXES, lambda _: True)
FULL = [c for c in product(AXES, lambda _: True) if c not in QUICK][::9]


def name_of(combination: dict[str, Any]) -> str:
    return "-".join(combination.values())


def config_of(combination: dict[str, Any], documents: Path, **more: Any) -> Config:
    return make_config(
        combination["family"],
        documents,
        strict_order=combination["order"] == "strict",
        microbatches=int(combination["microbatches"]),
        recompute=combination["recompute"],
        **{**LAYOUTS[combination["layout"]], **SCHEDULES[combination["schedule"]]},
        **more,
    )


def check(combination: dict[str, Any], worlds: Worlds, documents: Path) -> None:
    case = Case(config=config_of(combination, documents), steps=3)
    assert_same_training(worlds.run(case), worlds.reference(case), optimizer="SGD", where=name_of(combination))


@pytest.mark.parametrize("combination", QUICK, ids=name_of)
def test_trains_like_the_unsplit_model(combination: dict[str, Any], worlds: Worlds, documents: Path) -> None:
    check(combination, worlds, documents)


@pytest.mark.full
@pytest.mark.parametrize("combination", FULL, ids=name_of)
def test_trains_like_the_unsplit_model_widely(combination: dict[str, Any], worlds: Worlds, documents: Path) -> None:
    check(combination, worlds, documents)


def lopsided_profile(path: Path) -> Path:
    """Costs as no roofline would give them: slow experts, a heavy head, hops that differ."""
    Profile(
        model="qwen3-debug",
        seq_len=8,
        microbatch_samples=4,
        stages=tuple(
            StageProfile(index=i, forward_s=(2.0, 5.0)[i % 2] + 4.0 * (i == NUM_STAGES - 1), backward_s=9.0)
            for i in range(NUM_STAGES)
        ),
        hops=tuple(
            HopProfile(index=i, forward_bytes=1.0, forward_s=0.5 + i % 3, backward_bytes=1.0, backward_s=1.0)
            for i in range(1, NUM_STAGES)
        ),
    ).save(path)
    return path


def planned(config: Config) -> tuple[Schedule, Profile]:
    profile = Profile.load(config.disagmoe.costs)
    schedule = make_schedule(
        build_layout(config),
        model_shape(config).is_moe_layer,
        costs=profile.costs(),
        **config.disagmoe.schedule_options(),
    )
    return schedule, profile


@pytest.mark.parametrize("layout", ["A1xM2-F1xN2", "A1xM2-F2xN1"])
def test_what_is_simulated_is_what_runs(layout: str, worlds: Worlds, documents: Path, tmp_path: Path) -> None:
    """One schedule, fitted to measured costs: simulated and executed, with the same order of actions in every group."""
    config = make_config(
        "qwen3",
        documents,
        optimizer=ADAMW,
        microbatches=6,
        costs=str(lopsided_profile(tmp_path / "costs.json")),
        **LAYOUTS[layout],
        **SCHEDULES["fitted-split"],
    )
    schedule, profile = planned(config)
    result = simulate(schedule, profile.costs())
    hook = "tests.distributed.harness.hooks:record_actions"
    run = worlds.run(Case(config=config, steps=1, hook=hook))
    layout_ = build_layout(config)
    for rank, actions in enumerate(run.extras):
        (worker,) = layout_.workers_on(rank)
        group = layout_.pipeline_group(worker.role, worker.group)
        computed = [action for action in actions if action.kind.is_compute]
        simulated = [span.action for span in result.compute_spans[group]]
        assert computed == simulated == list(schedule.compute[group]), f"rank {rank} ({worker})"
        assert actions == list(schedule.programs[group])
    assert any(action.kind is Kind.BACKWARD_WEIGHT for action in schedule.compute[0])
