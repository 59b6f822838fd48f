"""What is wrong with a configuration, said so that it can be put right without reading code."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing wrong: where it was written, the key and value, the rule it breaks and what to do instead."""

    origin: str
    """File that the value was read from, `command line`, `default` or `environment`."""
    key: str
    """`section.key`, or the name of a section or an environment variable; empty when the whole file is meant."""
    rule: str
    value: object = None
    """As written; None: there is none, as with a missing key."""
    fix: str = ""
    """E.g. the nearest valid key; empty: the rule says it all."""

    def __str__(self) -> str:
        """E.g. `my.toml: training.steps = 0: must be an integer, at least 1`."""
        what = f"{self.key} = {show(self.value)}" if self.value is not None else self.key
        text = ": ".join(part for part in (self.origin, what, self.rule) if part)
        return f"{text}; {self.fix}" if self.fix else text


class ConfigError(ValueError):
    """A configuration that can't be run; carries every problem found, one a line in its message."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def show(value: object) -> str:
    """`value` as one would write it in TOML, shortened when long."""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 120 else text[:117] + "..."


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that `word` was probably meant to be, whatever its case; None when none is near."""
    lowered = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.55)
    return lowered[near[0]] if near else None


def did_you_mean(word: str, choices: Iterable[str], *, prefix: str = "") -> str:
    """`did you mean X?` with the choice nearest to `word`, or the list of choices when none is near."""
    choices = list(choices)
    near = nearest(word, choices)
    if near is not None:
        return f"did you mean {prefix}{near}?"
    return f"there is {', '.join(prefix + choice for choice in choices)}" if choices else ""
