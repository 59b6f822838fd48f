"""The reproduction document's parts that are cheap to make."""

from __future__ import annotations

import pytest

from benchmarks.paper_intensities import FITTED, figures, intensity_section
from benchmarks.paper_reproduction import ratio_section, run_cell, verdicts
from benchmarks.paper_setting import SETS, model_of


def test_fitted_efficiencies_give_the_papers_attention_shares() -> None:
    shares = [figure for figure in figures() if figure.name.startswith("attention's share")]
    assert [figure.ours[FITTED] for figure in shares] == [pytest.approx(figure.paper, rel=1e-9) for figure in shares]
    assert intensity_section().count("**met**") >= 6


@pytest.mark.full
def test_a_cell_and_what_is_said_of_it() -> None:
    cell = run_cell(model_of("DeepSeek-MoE", True), 4096, SETS[2], tries=1, with_tuned=True)
    cells = {("DeepSeek-MoE", 4096): cell}
    text = "\n".join([*ratio_section(SETS[2], cells), *verdicts({SETS[2].key: cells})])
    assert "1.59-1.81 x megatron" in text and "baselines on their best plan" in text
    assert cell.af.fits
