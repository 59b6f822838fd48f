"""Pairwise cover: few combinations in which every pair of values of two axes occurs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def product(
    axes: Mapping[str, Sequence[Any]], keep: Callable[[dict[str, Any]], bool] = lambda _: True
) -> list[dict[str, Any]]:
    """All combinations that make sense."""
    combinations = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    return [combination for combination in combinations if keep(combination)]


def pairwise_cover(
    axes: Mapping[str, Sequence[Any]], keep: Callable[[dict[str, Any]], bool] = lambda _: True
) -> list[dict[str, Any]]:
    """Greedy, deterministic: takes the combination with the most new pairs until all that make sense are covered.

    >>> len(pairwise_cover({"a": [0, 1], "b": [0, 1], "c": [0, 1]}))
    4
    """
    everything = product(axes, keep)
    names = list(itertools.combinations(axes, 2))

    def pairs(combination: Mapping[str, Any]) -> set[tuple[str, Any, str, Any]]:
        return {(a, combination[a], b, combination[b]) for a, b in names}

    missing = set().union(*map(pairs, everything))
    chosen = []
    while missing:
        best = max(everything, key=lambda combination: len(pairs(combination) & missing))
        missing -= pairs(best)
        chosen.append(best)
    return chosen
