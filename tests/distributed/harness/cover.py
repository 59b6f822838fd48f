"""Covers: few combinations in which every pair, or triple, of values of different axes occurs."""

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


def cover(
    axes: Mapping[str, Sequence[Any]], keep: Callable[[dict[str, Any]], bool] = lambda _: True, *, strength: int = 2
) -> list[dict[str, Any]]:
    """Greedy, deterministic: takes the combination with the most new groups until all that make sense are covered.

    Args:
        strength: Values a group: 2 for pairs, 3 for triples.
    Raises:
        ValueError: There are fewer axes than that.

    >>> len(cover({"a": [0, 1], "b": [0, 1], "c": [0, 1]}))
    4
    """
    if not 1 <= strength <= len(axes):
        raise ValueError(f"strength = {strength}: must be 1 to {len(axes)}, the number of axes")
    everything = product(axes, keep)
    names = list(itertools.combinations(axes, strength))
    groups = [{(name, *(combination[axis] for axis in name)) for name in names} for combination in everything]
    missing = set().union(*groups)
    chosen = []
    while missing:
        best = max(range(len(everything)), key=lambda i: len(groups[i] & missing))
        missing -= groups[best]
        chosen.append(everything[best])
    return chosen
