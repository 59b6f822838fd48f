"""Candidates in the order of their bounds, placed and simulated until no other can win, or a count is used up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, TypeVar

from disagmoe.allocator.candidates import LARGE, all_tables, likeliest
from disagmoe.allocator.evaluate import SCHEDULES, Outcome, Placed, Placement, placements, shortened, simulate_placed
from disagmoe.allocator.forked import at_once
from disagmoe.allocator.milp import Solution, solve
from disagmoe.allocator.question import Candidate, Question
from disagmoe.simulator.engine import no_garbage_collection

_T = TypeVar("_T")
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
AT_ONCE = 2
"""Candidates that are simulated side by side where that is dear, whatever the number of cores: answers must not depend
on it."""
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
    answer = search.run(solution, cutoff_s)
    if answer.best.step_s > cutoff_s:
        # The bound leaves out what is large here, such as the sum of gradients over slow links.
        answer = search.run(solution, answer.best.step_s)
    return answer


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
        self.tried_split: set[Placement] = set()
        """Simulated with a split backward too."""
        self.looks: dict[Placement, _Look | None] = {}
        """What simulating fewer layers said; None: there are no fewer."""
        self.fitting: dict[Candidate, tuple[list[Placed], float]] = {}
        """Of each candidate that was looked at the packings to try, likeliest first, and the least bound of others."""

    def run(self, solution: Solution, likely_s: float) -> Answer:
        """The likeliest of the candidates with bounds up to `likely_s`, or of all if none of these fits."""
        placed, others_s = self._placed(likely_s)
        for trials in _pairs(self._wanted(self._screened(placed)), lambda t: _effort(t.placed, t.names, t.splits)):
            dear = _effort(trials[0].placed, trials[0].names, trials[0].splits) > CHEAP
            # A dear trial without company has a split backward tried at once, which the best ones get in the end.
            alone = dear and len(trials) == 1 and not self.best
            calls = [
                partial(_simulated, trial, split)
                for trial in trials
                for split in (self.splits if alone else trial.splits)
            ]
            for outcome in self._at_once(calls) if dear else (call() for call in calls):
                self._keep(outcome)
            self.tried_split |= {trial.placed.placement for trial in trials if alone}
            self.complete |= {trial.placed.placement for trial in trials if self._is_full(trial)}
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

    def _at_once(self, calls: Sequence[Callable[[], _T]]) -> list[_T]:
        """Orders of thousands of GPUs take hundreds of megabytes: there, one after the other."""
        return at_once(calls, fork=self.question.job.cluster.num_gpus <= LARGE)

    def _placed(self, likely_s: float) -> tuple[list[Placed], float]:
        """The likeliest candidates in all packings, with costs, likeliest first; and the least bound of all others, as
        far as they were looked at."""
        for cutoff_s in (likely_s, float("inf")):
            ranked, others_s = likeliest(all_tables(self.question), cutoff_s, MAX_PLACED)
            self._pack([r.candidate for r in ranked])
            found = []
            for r in ranked:
                fitting, bound_s = self.fitting[r.candidate]
                others_s = min(others_s, bound_s)
                found += fitting
            if found:
                break
        else:
            raise NothingFits("no layout fits")
        return sorted(found, key=lambda p: (p.estimate_s, p.candidate)), others_s

    def _pack(self, candidates: Sequence[Candidate]) -> None:
        """Work out packings and costs of those that are new."""
        new = [c for c in candidates if c not in self.fitting]
        first, rest = new[:1], new[1:]
        pack = partial(_fitting, self.question, self.names, self.splits)
        self.fitting |= zip(first, pack(first), strict=True)
        dear = any(_effort(p, self.names, self.splits) > CHEAP for c in first for p in self.fitting[c][0])
        lots = [rest[i::AT_ONCE] for i in range(AT_ONCE)] if dear else [rest]
        for lot, fitting in zip(lots, self._at_once([partial(pack, lot) for lot in lots]), strict=True):
            self.fitting |= zip(lot, fitting, strict=True)

    def _is_full(self, trial: _Trial) -> bool:
        return (trial.names, trial.splits) == (self.names, self.splits)

    def _wanted(self, trials: Iterable[_Trial]) -> Iterator[_Trial]:
        """Those that may still win, as long as there is time for them."""
        effort, new = 0, 0
        for trial in trials:
            p = trial.placed
            if p.placement in self.complete or (p.candidate in self.best and not self._is_full(trial)):
                continue
            size = _effort(p, trial.names, trial.splits)
            spent = ACTIONS if new >= FINALISTS else HEAVY if new else float("inf")
            if p.bound_s >= self._shortest_s() or effort + size > spent:
                continue
            effort += size
            new += 1
            yield trial

    def _split_best(self) -> None:
        """The best ones with a split backward too."""
        partly = sorted((o for o in self.best.values() if o.placed.placement not in self.complete), key=_order)
        effort, calls = 0, []
        for whole in partly[:SPLIT]:
            effort += _effort(whole.placed, [whole.schedule])
            split = whole.split_backward or whole.placed.placement in self.tried_split
            if not split and (whole is partly[0] or effort <= HEAVY):
                limit = whole.in_flight or None
                calls.append(partial(simulate_placed, whole.placed, [whole.schedule], split=True, in_flight=limit))
        for outcome in self._at_once(calls):
            self._keep(outcome)

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
        trials: list[_Trial] = []
        estimates: list[float] = []
        for chosen in _pairs(self._to_screen(placed, trials, estimates), lambda of: of[2]):
            missing = [(p, part) for p, part, _ in chosen if part is not None]
            looks = self._at_once([partial(_look, part, self.names) for _, part in missing])
            self.looks |= zip((p.placement for p, _ in missing), looks, strict=True)
            for p, _, _ in chosen:
                look = self.looks[p.placement]
                if look is not None and look.schedule:
                    estimates.append(p.bound_s * look.factor)
                    trials.append(self._trial(p, estimates[-1], [look.schedule], self.splits[:1], look.in_flight))
        return sorted(trials, key=lambda trial: (trial.estimate_s, trial.placed.candidate))

    def _to_screen(
        self, placed: Sequence[Placed], trials: list[_Trial], estimates: Sequence[float]
    ) -> Iterator[tuple[Placed, Placed | None, int]]:
        """Candidates worth simulating with fewer layers, as long as there is time for it; what is left of them then,
        None where that has been simulated; and the effort. Others become `trials` as they are: where simulating is
        cheap, and where no layer can be left out."""
        effort = count = 0
        kinds: Counter[tuple[int, int, int]] = Counter()
        seen: set[Candidate] = set()
        for p in placed:
            if _effort(p, self.names, self.splits) <= CHEAP:
                trials.append(self._trial(p, p.estimate_s, self.names, self.splits))
                count += 1
                continue
            kind = (p.candidate.attn_depth, p.candidate.ffn_depth, p.candidate.replicas)
            hopeless = p.bound_s >= min(estimates, default=float("inf"))
            if hopeless or count >= SCREENED or kinds[kind] >= ALIKE or p.candidate in seen:
                continue
            kinds[kind] += 1
            seen.add(p.candidate)
            look, part = self.looks.get(p.placement), None
            if p.placement not in self.looks:
                part = shortened(p, rounds=max(1, SHORT // max(p.candidate.attn_depth, p.candidate.ffn_depth)))
                self.looks[p.placement] = None
            if look is None and part is None:
                trials.append(self._trial(p, p.estimate_s, self.names, self.splits[:1]))
            else:
                size = look.effort if look else _effort(part or p, self.names[:1])
                if count and effort + size > ACTIONS:
                    del self.looks[p.placement]
                    return
                effort += size
                yield p, part, size
            count += 1

    @staticmethod
    def _trial(
        placed: Placed, estimate_s: float, names: list[str], splits: list[bool], in_flight: int | None = None
    ) -> _Trial:
        return _Trial(estimate_s=estimate_s, placed=placed, names=names, splits=splits, in_flight=in_flight)


class _Look(NamedTuple):
    """What simulating fewer layers said."""

    effort: int
    factor: float
    """Simulated step over bound."""
    schedule: str
    """The first that fits; empty: none does."""
    in_flight: int | None


def _look(part: Placed, names: Sequence[str]) -> _Look:
    outcome, effort = simulate_placed(part, names, first=True), _effort(part, names[:1])
    if outcome is None:
        return _Look(effort, 1.0, "", None)
    return _Look(effort, max(1.0, outcome.step_s / part.bound_s), outcome.schedule, outcome.in_flight or None)


def _fitting(
    question: Question, names: Sequence[str], splits: Sequence[bool], candidates: Sequence[Candidate]
) -> list[tuple[list[Placed], float]]:
    """By candidate, the packings to try of those with room for it, likeliest first, and the least bound of others."""
    found = []
    for candidate in candidates:
        fitting = sorted((p for p in placements(question, candidate) if p.fits), key=lambda placed: placed.estimate_s)
        # Where simulating is dear, another packing of a candidate is not tried.
        kept = 1 if fitting and _effort(fitting[0], names, splits) > CHEAP else len(fitting)
        found.append((fitting[:kept], min((p.bound_s for p in fitting[kept:]), default=float("inf"))))
    return found


def _simulated(trial: _Trial, split: bool) -> Outcome | None:
    return simulate_placed(trial.placed, trial.names, split=split, in_flight=trial.in_flight)


def _pairs(items: Iterator[_T], effort: Callable[[_T], int]) -> Iterator[list[_T]]:
    """Dear items `AT_ONCE` together, cheap ones alone: what one says may spare the next."""
    dear: list[_T] = []
    for item in items:
        if effort(item) <= CHEAP:
            yield [item]
            continue
        dear.append(item)
        if len(dear) == AT_ONCE:
            yield dear
            dear = []
    if dear:
        yield dear


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
