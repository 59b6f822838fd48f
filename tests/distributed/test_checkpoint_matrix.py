"""A checkpoint saved by any layout, loaded by any other: equal bits by name, and training goes on as it would have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.distributed.checkpoint_cases import (
    LAYOUTS,
    SAVED_STEP,
    STEPS,
    Digests,
    config_of,
    merge,
)
from tests.distributed.harness.cases import Case
from tests.distributed.harness.worlds import Worlds

HERE = "tests.distributed.checkpoint_cases"
QUICK = ("none", "uneven_3x2", "ep_2x2", "colocated_replicas")


@dataclass(frozen=True)
class Saved:
    folder: Path
    losses: list[float]
    held: dict[tuple[str, int], str]


class Savers:
    """Runs that save, one a layout, made when first asked for."""

    def __init__(self, worlds: Worlds, documents: Path, root: Path) -> None:
        self._worlds, self._documents, self._root = worlds, documents, root
        self._made: dict[str, Saved] = {}

    def __getitem__(self, layout: str) -> Saved:
        if layout not in self._made:
            folder = self._root / layout
            config = config_of(layout, self._documents, folder)
            result = self._worlds.run(Case(config=config, steps=STEPS, body=f"{HERE}:save_body"))
            held: list[Digests] = [extra[1] for extra in result.extras]
            assert (folder / "checkpoints" / f"step-{SAVED_STEP:08d}").is_dir()
            self._made[layout] = Saved(folder, result.extras[0][0], merge(held))
        return self._made[layout]


@pytest.fixture(scope="module")
def savers(worlds: Worlds, documents: Path, tmp_path_factory: pytest.TempPathFactory) -> Savers:
    return Savers(worlds, documents, tmp_path_factory.mktemp("saved"))


def check_loads(worlds: Worlds, documents: Path, savers: Savers, layout: str, saved_by: list[str], tmp: Path) -> None:
    """Load what the layouts `saved_by` have saved into `layout`, and go on."""
    uninterrupted = savers[layout]
    # A folder of the loader's own; the checkpoints are found through `folders`.
    config = config_of(layout, documents, tmp / "loader", interval=1000)
    folders = {name: str(copy_of(savers[name].folder, tmp / name)) for name in saved_by}
    case = Case(config=config, steps=STEPS, body=f"{HERE}:load_body", hook_arguments={"folders": folders})
    result = worlds.run(case)
    for name in saved_by:
        held = merge([extra[name][0] for extra in result.extras])
        expected = savers[name].held
        differ = [place for place in expected.keys() | held.keys() if expected.get(place) != held.get(place)]
        assert not differ, f"{name} -> {layout}: {len(differ)} of {len(expected)} differ, e.g. {sorted(differ)[:3]}"
        losses, wanted = result.extras[0][name][1], uninterrupted.losses[SAVED_STEP:]
        assert len(losses) == len(wanted) == STEPS - SAVED_STEP
        if name == layout:
            assert losses == wanted, f"{layout}: {losses} after a stop, {wanted} without"
        assert losses == pytest.approx(wanted, rel=1e-6), f"{name} -> {layout}"


def copy_of(folder: Path, target: Path) -> Path:
    """Only the checkpoint of `SAVED_STEP`, by links: a load sets later ones aside."""
    source = folder / "checkpoints" / f"step-{SAVED_STEP:08d}"
    place = target / "checkpoints" / source.name
    place.mkdir(parents=True)
    for file in source.iterdir():
        (place / file.name).hardlink_to(file)
    return target


@pytest.mark.parametrize("number", range(len(QUICK)))
def test_pairs(worlds: Worlds, documents: Path, savers: Savers, number: int, tmp_path: Path) -> None:
    """Each layout loads its own and the next one's."""
    layout, other = QUICK[number], QUICK[(number + 1) % len(QUICK)]
    check_loads(worlds, documents, savers, layout, [layout, other], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_loads_every_other(
    worlds: Worlds, documents: Path, savers: Savers, layout: str, tmp_path: Path
) -> None:
    check_loads(worlds, documents, savers, layout, list(LAYOUTS), tmp_path)
