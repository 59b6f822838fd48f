"""The full-size TOMLs in train_configs/ are the allocator's output for a shipped cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagmoe.cli import main

ROOT = Path(__file__).parents[3]
SHIPPED = {"deepseek_moe_16b": "h800x1", "gpt_oss_120b": "h800x16", "qwen3_235b": "h800x16"}
"""By TOML: the cluster that it is for."""


def test_all_full_size_configurations_are_known() -> None:
    found = {path.stem for path in (ROOT / "train_configs").glob("*.toml") if not path.stem.startswith("debug_")}
    assert found == set(SHIPPED)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n.startswith("deepseek") else pytest.mark.full) for n in SHIPPED]
)
def test_regenerated_it_is_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    shipped, again = Path("train_configs") / f"{name}.toml", tmp_path / f"{name}.toml"
    assert main(["allocate", str(shipped), "--cluster", SHIPPED[name], "--out", str(again)]) == 0
    assert again.read_text().replace(str(again), str(shipped)) == shipped.read_text()
