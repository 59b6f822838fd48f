"""The exact minimum of the bound over M, N, p_A, p_F, R and node packing, with OR-Tools' CP-SAT.

The terms of `tables` are products of small integers and of table entries, so they are put to the solver as they are: R,
p_A, M, p_F, N and the number of micro-batches m are integers, costs are looked up by p_A and by N, memory is an
inequality a group. Packing enters as the share of a dispatch that stays in a node, which depends on M + N only; where a
node's NICs are pooled their split between the roles is continuous here, and eliminated: all of a node's bytes over all
of its NICs. One thread and a fixed seed, so the same question has the same answer everywhere.

Costs are rounded down to ticks: the minimum is exact for costs that are off by 1e-4 of themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from disagmoe.allocator.candidates import all_tables, attn_worker_counts, coarse, replica_counts
from disagmoe.allocator.question import Candidate, Question
from disagmoe.allocator.tables import INFEASIBLE, AttnDepth, FfnDepth, FfnWorkers, Tables

Status = Literal["optimal", "feasible", "infeasible", "unknown"]
TICKS = 10_000
"""Of the shortest layer or link use; coarser ones are as exact."""
MOST_TICKS = 20_000_000
"""Of the longest step that can be the least."""
MIB = 2**20
LIMIT = 40.0
"""Deterministic time of one solve, in the solver's own unit (about a second)."""
SHARE = 1024
"""Denominator of shares."""


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The least bound, and how it was found."""

    status: Status
    candidate: Candidate | None
    step_s: float
    """The candidate's bound."""
    bound_s: float
    """Proved: no layout has a smaller bound."""

    @property
    def gap(self) -> float:
        return 0.0 if self.candidate is None else max(0.0, 1 - self.bound_s / self.step_s)


def solve(question: Question) -> Solution:
    """Over all recomputation policies and sites."""
    best: Solution | None = None
    least_s, proved = INFEASIBLE, True
    for tables in all_tables(question):
        found = _Model(tables).solve(None if best is None else best.step_s)
        if found is None:  # nothing fits, or nothing better
            continue
        proved = proved and found.status == "optimal"
        least_s = min(least_s, found.bound_s)
        if found.candidate is not None and (best is None or found.step_s < best.step_s):
            best = found
    if best is None:
        status: Status = "infeasible" if proved else "unknown"
        return Solution(status=status, candidate=None, step_s=INFEASIBLE, bound_s=least_s)
    return Solution(
        status="optimal" if proved else "feasible",
        candidate=best.candidate,
        step_s=best.step_s,
        bound_s=best.step_s if proved else min(least_s, best.step_s),
    )


class _Model:
    """One recomputation policy and one site."""

    def __init__(self, tables: Tables) -> None:
        from ortools.sat.python import cp_model

        self.cp, self.tables, self.question = cp_model, tables, tables.question
        self.model = cp_model.CpModel()
        self.num_aux = 0

    def solve(self, cutoff_s: float | None) -> Solution | None:
        """The least bound below `cutoff_s`; None where there is none."""
        tables = self.tables
        depths = [t for t in tables.attn_depths.values() if t.least_bytes <= tables.capacity[0]]
        if not (depths and tables.ffn_depths and tables.ffn_workers and replica_counts(tables)):
            return None
        widest = attn_worker_counts(tables, min(replica_counts(tables)))
        if not widest:
            return None
        smallest = min(t.compute_s for t in tables.ffn_workers.values())
        upper_s = min(self._upper_s(), INFEASIBLE if cutoff_s is None else cutoff_s)
        self.tick_s = max(smallest / TICKS, upper_s / MOST_TICKS)
        self.horizon = int(upper_s / self.tick_s) + 2
        self._variables(widest)
        self._batch_and_gpus()
        self._memory()
        self._compute_terms()
        self._link_terms()
        self.model.minimize(self.time)
        return self._run()

    def _upper_s(self) -> float:
        """The best of a coarse grid; where nothing of it fits, all work on one worker and what memory makes of it."""
        tables = self.tables
        found = min((tables.bound_s(c) for c in coarse(tables)), default=INFEASIBLE)
        if found < INFEASIBLE:
            return found
        widest = max(tables.ffn_workers.values(), key=lambda t: t.compute_s)
        samples = self.question.job.global_batch
        return 8 * samples * (tables.chain_attn_s + self.question.num_moe * (widest.compute_s + widest.attn_link_s))

    # -- variables ------------------------------------------------------------------------------------------------

    def _int(self, low: int, high: int, name: str = "") -> Any:
        self.num_aux += 1
        return self.model.new_int_var(low, max(low, high), name or f"v{self.num_aux}")

    def _of(self, values: Sequence[int], name: str) -> Any:
        return self.model.new_int_var_from_domain(self.cp.Domain.from_values(list(values)), name)

    def _variables(self, widths: Sequence[int]) -> None:
        tables, question = self.tables, self.question
        self.replicas = self._of(replica_counts(tables), "R")
        self.attn_depth_keys = [p for p, t in tables.attn_depths.items() if t.least_bytes <= tables.capacity[0]]
        self.attn_depth = self._of(self.attn_depth_keys, "p_A")
        self.attn_workers = self._of(widths, "M")
        self.ffn_workers = self._of(list(tables.ffn_workers), "N")
        self.ffn_depth = self._of(list(tables.ffn_depths), "p_F")
        self.count = self._int(1, question.pins.microbatches or question.job.global_batch, "m")
        self.time = self._int(1, self.horizon, "T")

    def _product(self, factors: Sequence[Any], high: int) -> Any:
        """An upper limit keeps domains small; products above it are cut off, so no solution may need any."""
        result = factors[0]
        for factor in factors[1:]:
            product = self._int(0, high)
            self.model.add_multiplication_equality(product, [result, factor])
            result = product
        return result

    def _lookup(self, index: Any, keys: Sequence[int], value: Callable[[int], float]) -> Any:
        """value(index), rounded down."""
        known = {key: int(value(key)) for key in keys}
        entries = [known.get(i, 0) for i in range(max(keys) + 1)]
        result = self._int(min(entries), max(entries))
        self.model.add_element(index, entries, result)
        return result

    # -- constraints ----------------------------------------------------------------------------------------------

    def _batch_and_gpus(self) -> None:
        tables, question, model = self.tables, self.question, self.model
        self.attn_gpus = self._product([self.attn_depth, self.attn_workers, self.replicas], tables.attn_gpus)
        self.ffn_gpus = self._product([self.ffn_depth, self.ffn_workers, self.replicas], tables.ffn_gpus)
        total = self.attn_gpus + self.ffn_gpus
        model.add(total <= tables.gpus)
        size = tables.pools[0].gpus_per_node
        if tables.site.shared:
            nodes, small = self._int(0, tables.gpus // size), model.new_bool_var("one node")
            model.add(total == size * nodes).only_enforce_if(~small)
            model.add(total <= size).only_enforce_if(small)
        elif tables.pools[1].gpus_per_node != size:
            model.add_bool_or([])
        else:
            model.add(self.attn_gpus == size * self._int(1, tables.attn_gpus // size))
            model.add(self.ffn_gpus == size * self._int(1, tables.ffn_gpus // size))
        # m M u is at least a replica's share of the batch, m one less is too few; some worker has u.
        batch, u = question.job.global_batch, tables.samples
        share = self._int(1, batch)
        most = batch + max(tables.attn_gpus, 1) * u
        shares = {r: -(-batch // r) for r in replica_counts(tables)}
        model.add_element(self.replicas, [shares.get(i, 0) for i in range(max(shares) + 1)], share)
        covered = self._product([self.count, self.attn_workers], most)
        model.add(u * covered >= share)
        model.add(u * covered - u * self.attn_workers < share)
        self.samples = self._int(1, batch, "S")
        shared = self._product([self.count, self.samples], 2 * batch)
        model.add(shared >= share)
        model.add(shared - self.count < share)
        model.add(self.samples > (u - 1) * self.attn_workers)
        if question.pins.microbatches is not None:
            model.add(self.count == question.pins.microbatches)

    def _memory(self) -> None:
        """Of both roles' fullest groups; `room`, of F-groups, has SHARE parts a micro-batch."""
        tables, model = self.tables, self.model
        self.room = self._int(SHARE, SHARE * 4096, "K")
        workers = list(tables.ffn_workers)
        state = self._lookup(self.ffn_workers, workers, lambda n: tables.ffn_workers[n].state_bytes / MIB)
        kept = self._lookup(self.ffn_workers, workers, lambda n: tables.ffn_workers[n].kept_bytes / MIB * SHARE)
        free = int(tables.capacity[1] / MIB)
        self.ffn_layers = self._lookup(self.ffn_depth, list(tables.ffn_depths), lambda p: tables.ffn_depths[p].layers)
        fixed = self._product([self.ffn_layers, state], free)
        used = self._product([self.ffn_layers, self.samples, kept], SHARE * free)
        alive = self._product([used, self.room], SHARE * SHARE * free)
        passing = self._lookup(self.ffn_workers, workers, lambda n: tables.ffn_workers[n].passing_bytes / MIB * SHARE)
        matrix = self._lookup(self.ffn_workers, workers, lambda n: tables.ffn_workers[n].matrix_bytes / MIB * SHARE)
        once = self._product([self.samples, passing], SHARE * free) + matrix
        model.add(alive + SHARE * once + SHARE * SHARE * fixed <= SHARE * SHARE * free)

    def _ticks(self, seconds: float) -> int:
        return int(seconds / self.tick_s)

    def _by_attn_depth(self, value: Callable[[AttnDepth], float]) -> Any:
        depths = self.tables.attn_depths
        return self._lookup(self.attn_depth, self.attn_depth_keys, lambda p: value(depths[p]))

    def _by_ffn_depth(self, value: Callable[[FfnDepth], float]) -> Any:
        depths = self.tables.ffn_depths
        return self._lookup(self.ffn_depth, list(depths), lambda p: value(depths[p]))

    def _by_ffn_workers(self, seconds: Callable[[FfnWorkers], float]) -> Any:
        """Ticks of a sample."""
        table = self.tables.ffn_workers
        return self._lookup(self.ffn_workers, list(table), lambda n: seconds(table[n]) / self.tick_s)

    def _compute_terms(self) -> None:
        tables, model, high = self.tables, self.model, self.horizon
        work, ahead, through = (
            self._product([self.samples, self._by_ffn_workers(part)], high)
            for part in (lambda t: t.compute_s, lambda t: t.ahead_s, lambda t: t.through_s)
        )
        a, tick = self._ticks(tables.attn_ahead_s), self.tick_s
        for place in range(max(len(t.work) for t in tables.attn_depths.values())):
            own = self._by_attn_depth(lambda t, i=place: t.work[min(i, len(t.work) - 1)][0] / tick)  # type: ignore[misc]
            before = self._by_attn_depth(lambda t, i=place: t.work[min(i, len(t.work) - 1)][1])  # type: ignore[misc]
            fill = a * before + self._product([before, ahead], high)
            model.add(self.time >= self._product([self.count, own], high) + fill)
        before = self._by_ffn_depth(lambda t: t.ahead)
        turns = self._product([self.count, self.ffn_layers, work], high)
        model.add(self.time >= turns + a * before + a + self._product([before, ahead], high))
        model.add(self.time >= self._ticks(tables.chain_attn_s) + self.question.num_moe * through)
        self._life_terms(through)

    def _life_terms(self, through: Any) -> None:
        """Time for which activations need the room that they take."""
        tables, model, high, tick = self.tables, self.model, self.horizon, self.tick_s
        for place in range(max(len(t.life) for t in tables.attn_depths.values())):
            own = self._by_attn_depth(lambda t, i=place: t.life[min(i, len(t.life) - 1)][0] / tick)  # type: ignore[misc]
            times = self._by_attn_depth(
                lambda t, i=place: t.life[min(i, len(t.life) - 1)][1] * SHARE * SHARE  # type: ignore[misc]
            )
            both = self._int(0, 2 * SHARE * SHARE * high)
            model.add(both == SHARE * SHARE * own + self._product([times, through], SHARE * SHARE * high))
            model.add(SHARE * SHARE * self.time >= self._product([self.count, both], SHARE * SHARE * high))
        own = self._by_ffn_depth(lambda t: t.life[0] / tick)
        times = self._by_ffn_depth(lambda t: t.life[1] * SHARE)
        both = self._int(0, 8192 * SHARE * high)
        model.add(both == SHARE * own + self._product([times, through], 4096 * SHARE * high))
        alive = self._product([self.count, both], 8192 * SHARE * high)
        model.add(self._product([self.time, self.room], SHARE * 4096 * high) >= alive)

    def _link_terms(self) -> None:
        tables, model, high = self.tables, self.model, self.horizon
        leaving = self._leaving()
        # Times 2 SHARE: half layers, and q in SHARE parts.
        scale = 2 * SHARE
        halves = self._by_attn_depth(lambda t: t.half_layers)
        attn_link = self._by_ffn_workers(lambda t: tables.samples * t.attn_leave_s)
        attn_time = self._product([self.count, halves, leaving, attn_link], scale * high * max(tables.gpus, 1))
        ffn_link = self._by_ffn_workers(lambda t: 2 * t.ffn_leave_s)
        ffn_time = self._product(
            [self.count, self.ffn_layers, self.samples, leaving, ffn_link], scale * high * max(tables.gpus, 1)
        )
        if tables.pools[0].nics.pooled and tables.site.shared:
            width = self._int(2, tables.gpus)
            model.add(width == self.attn_gpus + self.ffn_gpus)
            most = scale * high * tables.gpus
            used = self._product([attn_time, self.attn_gpus], most) + self._product([ffn_time, self.ffn_gpus], most)
            model.add(scale * self._product([self.time, width], tables.gpus * high) >= used)
            return
        for used in (attn_time, ffn_time):
            model.add(scale * self.time >= used)

    def _leaving(self) -> Any:
        """q in SHARE parts: 0 where a replica fits into a node, else by M + N."""
        tables, model = self.tables, self.model
        if not tables.site.shared:
            return model.new_constant(SHARE)
        most = 2 * (max(tables.attn_gpus, tables.ffn_gpus) + 1)
        width = self._int(2, most)
        model.add(width == self.attn_workers + self.ffn_workers)
        size = tables.pools[0].gpus_per_node
        spread, share = self._int(0, SHARE), self._int(0, SHARE)
        model.add_element(width, [max(0, int(SHARE * (1 - size / max(w, 1)))) for w in range(most + 1)], spread)
        replica = self._product([self.attn_depth, self.attn_workers], tables.attn_gpus)
        replica += self._product([self.ffn_depth, self.ffn_workers], tables.ffn_gpus)
        inside = model.new_bool_var("replica in a node")
        model.add(replica <= size).only_enforce_if(inside)
        model.add(replica > size).only_enforce_if(~inside)
        model.add(share == 0).only_enforce_if(inside)
        model.add(share == spread).only_enforce_if(~inside)
        return share

    # -- solving --------------------------------------------------------------------------------------------------

    def _run(self) -> Solution | None:
        solver = self.cp.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.max_deterministic_time = LIMIT
        solver.parameters.cp_model_presolve = True
        status = solver.solve(self.model)
        if status == self.cp.INFEASIBLE:
            return None
        bound_s = max(0.0, solver.best_objective_bound) * self.tick_s
        if status not in (self.cp.OPTIMAL, self.cp.FEASIBLE):
            return Solution(status="unknown", candidate=None, step_s=INFEASIBLE, bound_s=bound_s)
        candidate = Candidate(
            attn_depth=solver.value(self.attn_depth),
            ffn_depth=solver.value(self.ffn_depth),
            attn_workers=solver.value(self.attn_workers),
            ffn_workers=solver.value(self.ffn_workers),
            replicas=solver.value(self.replicas),
            microbatches=solver.value(self.count),
            recompute=self.tables.recompute,
            site=self.tables.site,
        )
        return Solution(
            status="optimal" if status == self.cp.OPTIMAL else "feasible",
            candidate=candidate,
            step_s=self.tables.bound_s(candidate),
            bound_s=bound_s,
        )
