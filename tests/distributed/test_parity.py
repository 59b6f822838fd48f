"""Every layout trains to what the unsplit model trains to, from the same weights, tokens and seed, in float32.

Tolerances are in `harness.compare`. All pairs of settings in the quick suite, all triples with --full, all
combinations with --exhaustive.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.harness.cases import ADAMW, FAMILIES, NUM_STAGES, SGD, Case, make_config
from tests.distributed.harness.compare import assert_same_training
from tests.distributed.harness.cover import cover, product
from tests.distributed.harness.worlds import Worlds

LAYOUTS: dict[str, dict[str, Any]] = {
    "A1xM2-F1xN2": {"layout": (1, 1, 2, 2)},
    "A1xM3-F1xN1": {"layout": (1, 1, 3, 1)},
    "A1xM1-F1xN3": {"layout": (1, 1, 1, 3)},
    "A2xM2-F2xN1": {"layout": (2, 2, 2, 1)},
    "A2xM1-F2xN2": {"layout": (2, 2, 1, 2)},
    "A3xM1-F3xN1": {"layout": (3, 3, 1, 1)},
    "A1xM2-F2xN1": {"layout": (1, 2, 2, 1)},
    "A2xM1-F1xN2": {"layout": (2, 1, 1, 2)},
    "2x(A1xM1-F1xN1)": {"layout": (1, 1, 1, 1), "replicas": 2},
    "colocated": {"layout": (1, 1, 1, 1), "colocate": True, "in_flight": 4},
}
"""Named by p_A x M, p_F x N. N = 3 does not divide the 8 experts; with 13 or 14 micro-batches of 14 samples, workers
have empty slices."""
MICROBATCHES = {"1": 1, "2": 2, "S-1": NUM_STAGES - 1, "S": NUM_STAGES, "S+1": NUM_STAGES + 1}
AXES = {
    "family": FAMILIES,
    "layout": tuple(LAYOUTS),
    "schedule": ("plain", "deep"),
    "order": ("tagged", "strict"),
    "microbatches": tuple(MICROBATCHES),
}
OPTIMIZERS = {"SGD": SGD, "AdamW": ADAMW}


def makes_sense(combination: dict[str, Any]) -> bool:
    """Colocated, nothing is sent, so messages have no order."""
    return not (combination["layout"] == "colocated" and combination["order"] == "strict")


def by_size(combinations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cases of one world size together, so that few worlds are started."""

    def size(combination: dict[str, Any]) -> int:
        layout = LAYOUTS[combination["layout"]]
        attn_depth, ffn_depth, attn_workers, ffn_workers = layout["layout"]
        if layout.get("colocate"):
            return 1
        return int(layout.get("replicas", 1)) * (attn_depth * attn_workers + ffn_depth * ffn_workers)

    return sorted(combinations, key=size)


def full_product() -> list[dict[str, Any]]:
    """All combinations, with the optimizers taking turns."""
    combinations = product(AXES, makes_sense)
    # The last axis varies fastest and has five values: along every other axis the optimizers alternate too.
    return [{**c, "optimizer": tuple(OPTIMIZERS)[i % 2]} for i, c in enumerate(combinations)]


ALL_AXES = {**AXES, "optimizer": tuple(OPTIMIZERS)}
QUICK = by_size(cover(ALL_AXES, makes_sense))
FULL = by_size([c for c in cover(ALL_AXES, makes_sense, strength=3) if c not in QUICK])
EXHAUSTIVE = by_size([c for c in full_product() if c not in QUICK and c not in FULL])


def name_of(combination: dict[str, Any]) -> str:
    return "-".join(combination.values())


def case_of(combination: dict[str, Any], documents: Path) -> Case:
    layout = LAYOUTS[combination["layout"]]
    config = make_config(
        combination["family"],
        documents,
        optimizer=OPTIMIZERS[combination["optimizer"]],
        schedule=combination["schedule"],
        strict_order=combination["order"] == "strict",
        microbatches=MICROBATCHES[combination["microbatches"]],
        global_batch_size=(NUM_STAGES + 1) * layout.get("replicas", 1),
        **layout,
    )
    return Case(config=config)


def check(combination: dict[str, Any], worlds: Worlds, documents: Path) -> None:
    case = case_of(combination, documents)
    expected, result = worlds.reference(case), worlds.run(case)
    optimizer = combination["optimizer"]
    assert_same_training(result, expected, optimizer=optimizer, where=name_of(combination))


@pytest.mark.parametrize("combination", QUICK, ids=name_of)
def test_trains_like_the_unsplit_model(combination: dict[str, Any], worlds: Worlds, documents: Path) -> None:
    check(combination, worlds, documents)


@pytest.mark.full
@pytest.mark.parametrize("combination", FULL, ids=name_of)
def test_trains_like_the_unsplit_model_widely(combination: dict[str, Any], worlds: Worlds, documents: Path) -> None:
    check(combination, worlds, documents)


@pytest.mark.exhaustive
@pytest.mark.parametrize("combination", EXHAUSTIVE, ids=name_of)
def test_trains_like_the_unsplit_model_everywhere(combination: dict[str, Any], worlds: Worlds, documents: Path) -> None:
    check(combination, worlds, documents)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_token_is_nearly_undecided(family: str, optimizer: str, worlds: Worlds, documents: Path) -> None:
    """What the comparisons above rest on; see `SEEDS`. Scores are about 1/8 +- 1e-3 or more; rounding is below 1e-8."""
    for global_batch_size in (NUM_STAGES + 1, 2 * (NUM_STAGES + 1)):
        config = make_config(family, documents, optimizer=OPTIMIZERS[optimizer], global_batch_size=global_batch_size)
        watched = Case(config=config, hook="tests.distributed.harness.hooks:watch_margins")
        assert min(worlds.reference(watched).extras[0]) > 2e-7


@pytest.mark.parametrize(("cases", "strength", "most"), [(QUICK, 2, 80), (QUICK + FULL, 3, 250)])
def test_cases_cover_all_pairs_and_triples(cases: list[dict[str, Any]], strength: int, most: int) -> None:
    for axes in itertools.combinations(ALL_AXES, strength):
        seen = {tuple(c[axis] for axis in axes) for c in cases}
        wanted = {tuple(c[axis] for axis in axes) for c in product(ALL_AXES, makes_sense)}
        assert seen == wanted, (axes, wanted - seen)
    assert len(cases) < most


def test_exhaustive_is_the_rest() -> None:
    def settings(cases: list[dict[str, Any]]) -> set[tuple[Any, ...]]:
        return {tuple(c[axis] for axis in AXES) for c in cases}

    assert settings(QUICK + FULL + EXHAUSTIVE) == settings(product(AXES, makes_sense))
