"""Local search on measured step times, the paper's Algorithm 1: neighbours within a radius, at most K trials.

The model leaves things out; short runs do not. A trial is a layout, its measurement a function from a layout to
seconds, which may fail. Nothing here starts a process: `disagmoe.measure` runs `run_train.sh`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from disagmoe.allocator.question import Candidate, Question

KNOBS = ("attn_workers", "ffn_workers", "attn_depth", "ffn_depth")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One measured layout."""

    settings: Mapping[str, object]
    """Of `[disagmoe]`."""
    step_s: float | None
    """None: the run failed."""
    error: str = ""


def neighbours(question: Question, centre: Candidate, radius: int) -> Iterator[Candidate]:
    """Layouts whose workers and depths differ by at most `radius` in all, nearest first; as many replicas, and within
    the cluster, the pins and the runtime's rules."""
    moves = [d for d in product(range(-radius, radius + 1), repeat=len(KNOBS)) if 0 < sum(map(abs, d)) <= radius]
    for move in sorted(moves, key=lambda d: (sum(map(abs, d)), d)):
        values = {name: getattr(centre, name) + step for name, step in zip(KNOBS, move, strict=True)}
        if min(values.values()) < 1:
            continue
        found = replace(centre, **values)
        found = replace(found, microbatches=question.microbatches(found.attn_workers, found.replicas))
        if question.allows(found):
            yield found


def local_search(
    question: Question,
    start: Candidate,
    measure: Callable[[Candidate], Trial],
    *,
    radius: int,
    max_trials: int,
) -> tuple[Candidate | None, list[Trial]]:
    """Measure `start`, then neighbours of the best so far, until none is better or `max_trials` runs were made.

    Returns: the layout with the shortest measured step (None if every run failed), and all trials in order.
    """
    trials = [measure(start)]
    best, best_s = (start, trials[0].step_s) if trials[0].step_s is not None else (None, None)
    seen, centre, moved = {start}, start, True
    while moved and len(trials) < max_trials:
        moved = False
        for candidate in neighbours(question, centre, radius):
            if candidate in seen:
                continue
            if len(trials) >= max_trials:
                break
            seen.add(candidate)
            trials.append(measure(candidate))
            seconds = trials[-1].step_s
            if seconds is not None and (best_s is None or seconds < best_s):
                best, best_s, centre, moved = candidate, seconds, candidate, True
                break
    return best, trials
