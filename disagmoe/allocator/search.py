"""Candidates in the order of their bounds, placed and simulated until no other can win, or a count is used up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from disagmoe.allocator.candidates import all_tables, likeliest
from disagmoe.allocator.evaluate import SCHEDULES, Outcome, Placed, Placement, placements, shortened, simulate_placed
from disagmoe.allocator.milp import Solution, solve
from disagmoe.allocator.question import Candidate, Question
from disagmoe.simulator.engine import no_garbage_collection

Status = Literal["optimal", "feasible"]
CUTOFF = 2.0
"""Candidates with a bound of up to so many times the least one are considered; where the best of these takes longer
than that, all with a bound below its time; all, where none of these fits."""
MAX_PLACED = 120
"""Candidates whose packings and costs are worked out."""
SCREENED = 20
"""Candidates that are simulated with fewer layers."""
ALIKE = 2
"""Of these with the same depths and replicas."""
ACTIONS = 120_000
"""Compute actions that are scheduled and simulated with fewer layers, and again with all, at most."""
CHEAP = ACTIONS // 20
"""Of one candidate in one packing under all schedules: then none is left out but for its bound."""
UNEQUAL_EFFORT = 4
"""Orders for unequal depths are searched among more waves."""
FINALISTS = 3
"""Candidates that are simulated with all layers, where `HEAVY` lets them; of small models, many more."""
HEAVY = 4 * ACTIONS
SPLIT = 2
"""Of these, with a split backward too."""
SHORT = 12
"""Layers of a shortened model, about."""
CLOSE = 1.03
"""Alternatives within this of the winner are reported."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The winner, what comes next, and how sure that is."""

    question: Question
    outcomes: tuple[Outcome, ...]
    """The best schedule of every candidate that was simulated, fastest first."""
    solution: Solution
    """Of the model without simulation."""
    least_s: float
    """Nothing that was not simulated can have a shorter step: no other candidate, nor a candidate of `outcomes` in
    another packing or under another of `SCHEDULES`, where not all of these were simulated."""

    @property
    def best(self) -> Outcome:
        return self.outcomes[0]

    @property
    def gap(self) -> float:
        """By which the best simulated step may be longer than the shortest there is, at most."""
        return max(0.0, self.best.step_s / min(self.least_s, self.best.step_s) - 1)

    @property
    def status(self) -> Status:
        """`optimal` among all candidates, packings and `SCHEDULES`, or only the best of what was simulated."""
        return "optimal" if self.gap == 0 and self.solution.status == "optimal" else "feasible"


class NothingFits(ValueError):
    """No candidate fits; `diagnose` says why."""


def allocate(question: Question) -> Answer:
    """The layout with the shortest simulated step.

    Raises:
        NothingFits: memory, batch or the runtime's rules leave no layout.
    """
    with no_garbage_collection():
        return _allocate(question)


def _allocate(question: Question) -> Answer:
    solution = solve(question)
    if solution.candidate is None:
        raise NothingFits("no layout fits")
    cutoff_s = solution.step_s * CUTOFF
    search = _Search(question)
    answer = search.run(solution, *_placed(question, cutoff_s))
    if answer.best.step_s > cutoff_s:
        # The bound leaves out what is large here, such as the sum of gradients over slow links.
        answer = search.run(solution, *_placed(question, answer.best.step_s))
    return answer


def _placed(question: Question, likely_s: float) -> tuple[list[Placed], float]:
    """The likeliest candidates in all packings, with costs, likeliest first, with bounds up to `likely_s`, or all if
    none of these fits; and the least bound of all others, as far as they were looked at."""
    for cutoff_s in (likely_s, float("inf")):
        ranked, others_s = likeliest(all_tables(question), cutoff_s, MAX_PLACED)
        found = []
        for r in ranked:
            fitting = sorted((p for p in placements(question, r.candidate) if p.fits), key=lambda p: p.estimate_s)
            # Where simulating is dear, another packing of a candidate is not tried.
            kept = len(fitting) if fitting and _effort(fitting[0], *_variants(question)) <= CHEAP else 1
            others_s = min([others_s, *(p.bound_s for p in fitting[kept:])])
            found += fitting[:kept]
        if found:
            break
    else:
        raise NothingFits("no layout fits")
    return sorted(found, key=lambda p: (p.estimate_s, p.candidate)), others_s


@dataclass(frozen=True, kw_only=True)
class _Trial:
    """A candidate in one packing to simulate with all layers, and the schedules to do it with."""

    estimate_s: float
    placed: Placed
    names: list[str]
    splits: list[bool]
    in_flight: int | None = None


class _Search:
    """Simulates candidates, and remembers what came of them."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.names, self.splits = _variants(question)
        self.best: dict[Candidate, Outcome] = {}
        """Of each simulated candidate the fastest outcome."""
        self.complete: set[Placement] = set()
        """Simulated under all schedules."""
        self.parts: dict[Placement, Outcome | None] = {}
        """What simulating fewer layers said."""

    def run(self, solution: Solution, placed: list[Placed], others_s: float) -> Answer:
        """The likeliest of `placed`; no other candidate has a step below `others_s`."""
        effort, new = 0, 0
        for trial in self._screened(placed):
            p, full = trial.placed, (trial.names, trial.splits) == (self.names, self.splits)
            if p.placement in self.complete or (p.candidate in self.best and not full):
                continue
            size = _effort(p, trial.names, trial.splits)
            spent = ACTIONS if new >= FINALISTS else HEAVY if new else float("inf")
            if p.bound_s >= self._shortest_s() or effort + size > spent:
                continue
            effort += size
            new += 1
            for split in trial.splits:
                self._keep(simulate_placed(p, trial.names, split=split, in_flight=trial.in_flight))
            if full:
                self.complete.add(p.placement)
        if not self.best:
            raise NothingFits("no layout fits")
        if len(self.splits) > 1:
            self._split_best()
        return Answer(
            question=self.question,
            outcomes=tuple(sorted(self.best.values(), key=_order)),
            solution=solution,
            least_s=min(
                [max(others_s, solution.bound_s), *(p.bound_s for p in placed if p.placement not in self.complete)]
            ),
        )

    def _split_best(self) -> None:
        """The best ones with a split backward too."""
        partly = sorted((o for o in self.best.values() if o.placed.placement not in self.complete), key=_order)
        effort = 0
        for whole in partly[:SPLIT]:
            effort += _effort(whole.placed, [whole.schedule])
            if not whole.split_backward and (whole is partly[0] or effort <= HEAVY):
                limit = whole.in_flight or None
                self._keep(simulate_placed(whole.placed, [whole.schedule], split=True, in_flight=limit))

    def _shortest_s(self) -> float:
        return min((o.step_s for o in self.best.values()), default=float("inf"))

    def _keep(self, outcome: Outcome | None) -> None:
        if outcome is not None:
            before = self.best.get(outcome.placed.candidate, outcome)
            self.best[outcome.placed.candidate] = min(before, outcome, key=lambda o: o.step_s)

    def _screened(self, placed: Sequence[Placed]) -> list[_Trial]:
        """The likeliest candidates, each in its likeliest packing, by what simulating fewer layers says of their step,
        shortest first; where simulating is cheap, all of them in all packings under all schedules, by their
        estimates."""
        names, splits = self.names, self.splits
        trials: list[_Trial] = []
        effort, shortest = 0, float("inf")
        kinds: Counter[tuple[int, int, int]] = Counter()
        seen: set[Candidate] = set()
        for p in placed:
            if _effort(p, names, splits) <= CHEAP:
                trials.append(_Trial(estimate_s=p.estimate_s, placed=p, names=names, splits=splits))
                continue
            kind = (p.candidate.attn_depth, p.candidate.ffn_depth, p.candidate.replicas)
            if p.bound_s >= shortest or len(trials) >= SCREENED or kinds[kind] >= ALIKE or p.candidate in seen:
                continue
            kinds[kind] += 1
            seen.add(p.candidate)
            part = shortened(p, rounds=max(1, SHORT // max(p.candidate.attn_depth, p.candidate.ffn_depth)))
            if part is None:
                trials.append(_Trial(estimate_s=p.estimate_s, placed=p, names=names, splits=splits[:1]))
                continue
            if trials and effort + _effort(part, names[:1]) > ACTIONS:
                break
            effort += _effort(part, names[:1])
            if p.placement not in self.parts:
                self.parts[p.placement] = simulate_placed(part, names, first=True)
            outcome = self.parts[p.placement]
            if outcome is not None:
                estimate = p.bound_s * max(1.0, outcome.step_s / part.bound_s)
                shortest = min(shortest, estimate)
                limit = outcome.in_flight or None
                trials.append(
                    _Trial(estimate_s=estimate, placed=p, names=[outcome.schedule], splits=splits[:1], in_flight=limit)
                )
        return sorted(trials, key=lambda trial: (trial.estimate_s, trial.placed.candidate))


def _variants(question: Question) -> tuple[list[str], list[bool]]:
    """Schedules to try, and whether to split backwards."""
    names = [name for name in SCHEDULES if question.pins.allow("schedule", name)]
    return names, [split for split in (False, True) if question.pins.allow("split_backward", split)]


def _effort(placed: Placed, names: Sequence[str], splits: Sequence[bool] = (False,)) -> int:
    c = placed.candidate
    size = 2 * len(placed.group_of_stage) * c.microbatches * len(names) * len(splits)
    return size * UNEQUAL_EFFORT if c.attn_depth != c.ffn_depth else size


def _order(outcome: Outcome) -> tuple[float, Candidate]:
    return outcome.step_s, outcome.placed.candidate
