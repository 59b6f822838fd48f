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
from disagmoe.allocator.tables import INFEASIBLE, Tables

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
        if not (tables.attn_depths and tables.ffn_workers and replica_counts(tables)):
            return None
        widest = attn_worker_counts(tables, min(replica_counts(tables)))
        if not widest:
            return None
        smallest = min(t.compute_s for t in tables.ffn_workers.values())
        upper_s = min(self._upper_s(), INFEASIBLE if cutoff_s is None else cutoff_s)
        self.tick_s = max(smallest / TICKS * max(1, tables.samples), upper_s / MOST_TICKS)
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
        self.attn_depth = self._of(list(tables.attn_depths), "p_A")
        self.attn_workers = self._of(widths, "M")
        self.ffn_workers = self._of(list(tables.ffn_workers), "N")
        depths = range(1, min(question.num_moe, tables.ffn_gpus) + 1)
        self.ffn_depth = self._of([p for p in depths if question.pins.allow("ffn_depth", p)], "p_F")
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
        # m M u is at least a replica's share of the batch, m one less is too few.
        batch, u = question.job.global_batch, tables.samples
        share = self._int(1, batch)
        most = batch + max(tables.attn_gpus, 1) * u
        shares = {r: -(-batch // r) for r in replica_counts(tables)}
        model.add_element(self.replicas, [shares.get(i, 0) for i in range(max(shares) + 1)], share)
        covered = self._product([self.count, self.attn_workers], most)
        model.add(u * covered >= share)
        model.add(u * covered - u * self.attn_workers < share)
        if question.pins.microbatches is not None:
            model.add(self.count == question.pins.microbatches)

    def _memory(self) -> None:
        """Of every group of the A side and of the fullest F-group; `room` has SHARE parts a micro-batch."""
        tables, model = self.tables, self.model
        self.room = self._int(SHARE, SHARE * 4096, "K")
        keys = list(tables.attn_depths)
        for place in range(max(len(t.memory) for t in tables.attn_depths.values())):
            memory = {p: t.memory[min(place, len(t.memory) - 1)] for p, t in tables.attn_depths.items()}
            fixed = self._lookup(self.attn_depth, keys, lambda p, m=memory: m[p][0] / MIB)  # type: ignore[misc]
            kept = self._lookup(self.attn_depth, keys, lambda p, m=memory: m[p][1] / MIB)  # type: ignore[misc]
            free = int(tables.capacity[0] / MIB)
            used = self._product([self.room, kept], SHARE * free)
            model.add(used + SHARE * fixed <= SHARE * free)
        workers = list(tables.ffn_workers)
        state = self._lookup(self.ffn_workers, workers, lambda n: tables.ffn_workers[n].state_bytes / MIB)
        kept = self._lookup(
            self.ffn_workers, workers, lambda n: tables.ffn_workers[n].kept_bytes * tables.samples / MIB * SHARE
        )
        free = int(tables.capacity[1] / MIB)
        depths = range(1, self.question.num_moe + 1)
        self.ffn_layers = self._lookup(self.ffn_depth, depths, tables.ffn_layers)
        fixed = self._product([self.ffn_layers, state], free)
        used = self._product([self.ffn_layers, self.attn_workers, kept], SHARE * free)
        alive = self._product([used, self.room], SHARE * SHARE * free)
        passing = self._lookup(
            self.ffn_workers, workers, lambda n: tables.ffn_workers[n].passing_bytes * tables.samples / MIB * SHARE
        )
        once = self._product([self.attn_workers, passing], SHARE * free)
        model.add(alive + SHARE * once + SHARE * SHARE * fixed <= SHARE * SHARE * free)

    def _ticks(self, seconds: float) -> int:
        return int(seconds / self.tick_s)

    def _compute_terms(self) -> None:
        tables, model, high = self.tables, self.model, self.horizon
        work = self._lookup(
            self.attn_depth, list(tables.attn_depths), lambda p: tables.attn_depths[p].work_s / self.tick_s
        )
        layer = self._lookup(
            self.ffn_workers,
            list(tables.ffn_workers),
            lambda n: tables.ffn_workers[n].compute_s * tables.samples / self.tick_s,
        )
        a = self._ticks(tables.attn_layer_s)
        f = self._product([self.attn_workers, layer], high)
        most = self.question.num_moe
        ahead = self._lookup(self.attn_depth, list(tables.attn_depths), lambda p: min(p, most) - 1)
        model.add(self.time >= self._product([self.count, work], high) + a * ahead + self._product([ahead, f], high))
        turns = self._product([self.count, self.ffn_layers, f], high)
        fill = self._product([self.ffn_depth, f], high)
        model.add(self.time >= turns + a * self.ffn_depth + fill - f)
        chain = self._int(0, high)
        model.add(chain == self._ticks(tables.chain_attn_s) + most * f)
        model.add(self.time >= chain)
        alive = self._product([self.count, chain], 8192 * high)
        model.add(2 * self._product([self.time, self.room], SHARE * 4096 * high) >= SHARE * alive)

    def _link_terms(self) -> None:
        tables, model, high = self.tables, self.model, self.horizon
        workers = list(tables.ffn_workers)
        table = tables.ffn_workers
        attn = self._lookup(self.ffn_workers, workers, lambda n: table[n].attn_link_s * tables.samples / self.tick_s)
        ffn = self._lookup(self.ffn_workers, workers, lambda n: table[n].ffn_link_s * tables.samples / self.tick_s)
        layers = self._lookup(self.attn_depth, list(tables.attn_depths), lambda p: tables.attn_depths[p].layers)
        leaving = self._leaving()
        attn_time = self._product([self.count, layers, attn], 64 * high)
        ffn_time = self._product([self.count, self.ffn_layers, self.attn_workers, ffn], 64 * high)
        if tables.pools[0].nics.pooled and tables.site.shared:
            both = self._product([attn_time, self.attn_workers], 64 * 1024 * high)
            both += self._product([ffn_time, self.ffn_workers], 64 * 1024 * high)
            total = self._int(0, 128 * 1024 * high)
            model.add(total == both)
            width = self._int(2, 1024)
            model.add(width == self.attn_workers + self.ffn_workers)
            model.add(
                SHARE * self._product([self.time, width], 1024 * high)
                >= self._product([total, leaving], 128 * 1024 * SHARE * high)
            )
            return
        for used in (attn_time, ffn_time):
            model.add(SHARE * self.time >= self._product([used, leaving], 64 * SHARE * high))

    def _leaving(self) -> Any:
        """q in SHARE parts: 0 where a replica fits into a node, else by M + N and whether each role has one group."""
        tables, model = self.tables, self.model
        if not tables.site.shared:
            return model.new_constant(SHARE)
        single = model.new_bool_var("depth 1")
        model.add(self.attn_depth + self.ffn_depth == 2).only_enforce_if(single)
        model.add(self.attn_depth + self.ffn_depth >= 3).only_enforce_if(~single)
        width = self._int(2, 2 * (max(tables.attn_gpus, tables.ffn_gpus) + 1))
        model.add(width == self.attn_workers + self.ffn_workers)
        size = tables.pools[0].gpus_per_node
        most = 2 * (max(tables.attn_gpus, tables.ffn_gpus) + 1)
        nodes = [max(1, -(-w // size)) for w in range(most + 1)]
        deep, flat, share = self._int(0, SHARE), self._int(0, SHARE), self._int(0, SHARE)
        model.add_element(width, [int(SHARE * (1 - 0.5 / n)) for n in nodes], deep)
        model.add_element(width, [int(SHARE * (1 - 1 / n)) for n in nodes], flat)
        replica = self._product([self.attn_depth, self.attn_workers], tables.attn_gpus)
        replica += self._product([self.ffn_depth, self.ffn_workers], tables.ffn_gpus)
        inside = model.new_bool_var("replica in a node")
        model.add(replica <= size).only_enforce_if(inside)
        model.add(replica > size).only_enforce_if(~inside)
        model.add(share == 0).only_enforce_if(inside)
        model.add(share == flat).only_enforce_if(single, ~inside)
        model.add(share == deep).only_enforce_if(~single, ~inside)
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
