"""How the routers behave: expert load and dead experts, from tokens by layer and expert [L, E]."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def expert_load(counts_LE: npt.ArrayLike) -> list[float]:
    """Largest over mean number of tokens of a layer's experts: 1 is balanced, E is all on one; 0 without any tokens.

    >>> expert_load([[2, 2], [4, 0], [0, 0]])
    [1.0, 2.0, 0.0]
    """
    counts = np.asarray(counts_LE, dtype=np.float64)
    means_L = counts.mean(axis=1)
    return (counts.max(axis=1) / np.where(means_L > 0, means_L, 1.0)).tolist()


def dead_experts(counts_LE: npt.ArrayLike) -> int:
    """Experts without a token, over all layers.

    >>> dead_experts([[2, 2], [4, 0], [0, 0]])
    3
    """
    return int((np.asarray(counts_LE) == 0).sum())
