"""What a misspelt tensor name was meant to be, among tens of thousands."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_NUMBER = re.compile(r"\d+")


def suggest(name: str, others: Iterable[str]) -> str:
    """`; did you mean X?` with the nearest of `others`, or nothing.

    Names are compared with their numbers left out, so that there are few; then the numbers must agree.
    """
    numbers = _NUMBER.findall(name)
    by_pattern: dict[str, list[str]] = {}
    for other in others:
        by_pattern.setdefault(_NUMBER.sub("#", other), []).append(other)
    for pattern in difflib.get_close_matches(_NUMBER.sub("#", name), by_pattern, n=3, cutoff=0.6):
        same = [other for other in by_pattern[pattern] if _NUMBER.findall(other) == numbers]
        if same:
            return f"; did you mean {same[0]}?"
    return ""
