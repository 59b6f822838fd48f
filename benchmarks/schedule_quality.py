"""How near schedules come to what is possible: `python -m benchmarks.schedule_quality [--json FILE] [--full]`.

Every generator on every instance of `benchmarks.instances`, at each cap, timed by the simulator, beside the best lower
bound (`disagmoe.simulator.bounds`) and, for small instances, the true optimum. Without --full a quick look with less
search (`QUICK_EFFORT`), in which more may fail. --full searches as much as the generators do by themselves, adds 10,000
random instances and generation times up to 500,000 actions, and writes docs/schedule_quality.md: the better part of an
hour of a core.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.instances import Instance, all_instances, random_instance, uniform
from disagmoe.schedules import Schedule, make_fitted, make_schedule, validate
from disagmoe.schedules.problem import Problem, build_problem, order_fits
from disagmoe.simulator.bounds import lower_bounds
from disagmoe.simulator.costs import Hop, StageCosts
from disagmoe.simulator.engine import Options, simulate
from disagmoe.simulator.exact import Solved, optimum
from disagmoe.simulator.flow import STEPS, flow_bound

ROOT = Path(__file__).parents[1]
KINDS = ("small", "uniform", "uneven", "cell")
SIMPLE = ("plain", "deep")
OPTIMUM_LIMIT_S = 60.0
OPTIMUM_TICKS = 20
"""Ticks of the longest duration, for CP-SAT: exact for all small instances, whose times are multiples of 0.1 f."""
QUICK_EFFORT = 200_000
"""See `make_fitted`."""
QUICK_STEPS = 180
"""See `flow_bound`: a bound about 1 % lower in a quarter of the time."""
EPSILON = 1e-5
UNMET = (
    "",
    "What is known about these: the bound is the best of those named in the table below (cap p on cells: `flow`, where",
    "that is more), no proved optimum. Each takes the way between a group's operations as free of waits.",
    "So neither a schedule within the limit nor a proof that there is none is known. Under tight memory waits anywhere",
    "lengthen the lives of activations everywhere; and a heavy head, with one micro-batch at a time, spreads the first",
    "and the last micro-batches.",
)
GROWTH = ((2, 4, 64), (4, 6, 64), (8, 12, 64), (8, 12, 256), (8, 24, 640))
"""(p, v, micro-batches); quick runs leave out those above 100,000 actions."""


@dataclass(kw_only=True)
class Row:
    """One entry of the JSON file. Times in the unit of the instance's costs."""

    instance: str
    cap: str
    generator: str
    makespan: float | None
    """None: the generator makes no schedule within this cap."""
    bound: float
    """Of all schedules with this kind of backward (whole or split) within the cap."""
    optimum: float | None
    """Proved by CP-SAT; None: not tried, or not proved in time."""
    ratio: float | None
    """Makespan over the optimum, or over the bound where there is none."""
    kind: str
    binding: str
    """Which bound it is."""
    seconds: float
    """To make it."""


@dataclass(kw_only=True)
class Requirement:
    name: str
    limit: float
    worst: float = 0.0
    where: str = ""
    failed: list[str] = field(default_factory=list)

    def add(self, value: float, where: str) -> None:
        if value > self.worst:
            self.worst, self.where = value, where
        if value > self.limit + EPSILON:
            self.failed.append(f"{where}: {value:.3f}")


def measure(instance: Instance, cap: int, *, effort: int = 0) -> Iterator[Row]:
    """All generators at one cap; effort: that of *fitted*, 0: its own."""
    costs = _simulator_costs(instance)
    for split in (False, True):
        problem = _problem(instance, cap, split)
        bounds = lower_bounds(problem)
        bound, binding = bounds.best_s, bounds.binding
        # A solver's seconds only where memory decides and the limit asks for it.
        wanted = instance.kind == "cell" and instance.cap_name(cap) == "p"
        flow = flow_bound(problem, steps=QUICK_STEPS if effort else STEPS) if wanted else 0.0
        if flow > bound:
            bound, binding = flow, "flow"
        solved = _optimum(instance, cap, split) if instance.kind == "small" else None
        proved = solved.makespan_s if solved is not None and solved.status == "optimal" else None
        for name in (*SIMPLE, "fitted"):
            start = time.process_time()
            schedules = _schedules(instance, name, cap, split, effort)
            seconds = time.process_time() - start
            ends = [
                simulate(schedule, costs, options=Options(record_links=False)).makespan_s
                for schedule in schedules
                if _fits(problem, schedule)
            ]
            end = min(ends) if ends else None
            if end is not None and end < bound * (1 - EPSILON):
                raise AssertionError(
                    f"{instance.name}, cap {cap}, {name}: {end} is below the bound {bound} ({binding})"
                )
            yield Row(
                instance=instance.name,
                cap=instance.cap_name(cap),
                generator=name + ("-split" if split else ""),
                makespan=end,
                bound=bound,
                optimum=proved,
                ratio=None if end is None else end / (proved or bound),
                kind=instance.kind,
                binding=binding,
                seconds=seconds,
            )


def _schedules(instance: Instance, name: str, cap: int, split: bool, effort: int = 0) -> list[Schedule]:
    """The generator's schedules; simple ones as they like it, and with `cap` micro-batches at a time."""
    common = {"num_microbatches": instance.num_microbatches, "split_backward": split, "costs": instance.costs}
    if name == "fitted":
        return [make_fitted(instance.layout, instance.is_moe_layer, cap=cap, effort=effort, **common)]
    limits = dict.fromkeys((0, cap if cap < instance.num_microbatches else 0))
    return [
        make_schedule(instance.layout, instance.is_moe_layer, name=name, in_flight=limit, **common) for limit in limits
    ]


def _problem(instance: Instance, cap: int, split: bool, **options: int) -> Problem:
    return build_problem(
        instance.costs,
        instance.group_of_stage,
        num_groups=instance.layout.num_groups,
        num_microbatches=instance.num_microbatches,
        split_backward=split,
        cap=cap,
        **options,
    )


def _fits(problem: Problem, schedule: Schedule) -> bool:
    return all(
        order_fits(problem, group, [problem.operation(action) for action in order])
        for group, order in enumerate(schedule.compute)
    )


def _optimum(instance: Instance, cap: int, split: bool) -> Solved:
    return optimum(_problem(instance, cap, split, ticks=OPTIMUM_TICKS // (2 if split else 1)), limit_s=OPTIMUM_LIMIT_S)


def _simulator_costs(instance: Instance) -> StageCosts:
    costs = instance.costs
    if isinstance(costs, StageCosts):
        return costs
    forward_hop, backward_hop = (
        tuple(Hop(h.send_s, h.recv_s, h.fabric_send_s, h.fabric_recv_s, h.latency_s) for h in hops)
        for hops in (costs.forward_hop, costs.backward_hop)
    )
    return StageCosts(
        forward_s=tuple(costs.forward_s),
        backward_s=tuple(costs.backward_s),
        backward_input_s=tuple(costs.backward_input_s),
        backward_weight_s=tuple(costs.backward_weight_s),
        forward_hop=forward_hop,
        backward_hop=backward_hop,
        activation_bytes=tuple(costs.activation_bytes) or (1.0,) * len(costs.forward_s),
    )


def requirements(rows: Sequence[Row]) -> list[Requirement]:
    """What is asked for, and the worst that was found.

    Of all generators the best one counts, against the lowest bound: that with split backward, which whole backwards
    keep too.
    """
    at_deep = Requirement(name="uniform, cap 4p+2", limit=1.01)
    at_deep_cells = Requirement(name="real cells, cap 4p+2", limit=1.06)
    at_plain = Requirement(name="cap 2p+1", limit=1.10)
    at_tight = Requirement(name="cap p, split backward", limit=1.20)
    small = Requirement(name="over the optimum, p = 2, v = 2, 4 micro-batches", limit=1.03)
    simpler = Requirement(name="fitted over the best simpler generator at equal cap", limit=1.0)
    by_case: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        by_case.setdefault((row.instance, row.cap), []).append(row)
    for (instance, cap), case in by_case.items():
        where, kind = f"{instance}, cap {cap}", case[0].kind
        best = min(row.makespan for row in case if row.makespan is not None)
        ratio = best / min(row.bound for row in case)
        for row in case:
            if row.generator.startswith("fitted") and row.makespan is not None:
                others = [
                    other.makespan
                    for other in case
                    if other.generator.endswith("-split") == row.generator.endswith("-split")
                    and other is not row
                    and other.makespan is not None
                ]
                if others:
                    simpler.add(row.makespan / min(others), f"{where}, {row.generator}")
                if row.optimum is not None:
                    small.add(row.makespan / row.optimum, f"{where}, {row.generator}")
        if kind == "small":
            continue
        if cap == "4p+2" and kind in ("uniform", "cell"):
            (at_deep if kind == "uniform" else at_deep_cells).add(ratio, where)
        elif cap == "2p+1":
            at_plain.add(ratio, where)
        elif cap == "p":
            at_tight.add(ratio, where)
    return [at_deep, at_deep_cells, at_plain, at_tight, small, simpler]


def try_random(count: int) -> int:
    """Random instances, fitted in a hurry; returns how many there were. Any deadlock or cap broken raises."""
    rng = random.Random(0)
    for _ in range(count):
        instance, cap = random_instance(rng)
        split = rng.random() < 0.5
        schedule = make_fitted(
            instance.layout,
            instance.is_moe_layer,
            costs=instance.costs,
            num_microbatches=instance.num_microbatches,
            cap=cap,
            split_backward=split,
            effort=1,
        )
        validate(schedule)
        if not _fits(_problem(instance, cap, split), schedule):
            raise AssertionError(f"a cap of {cap} micro-batches is broken: {instance}")
    return count


def growth(full: bool) -> Iterator[tuple[int, float, float]]:
    """(Compute actions, seconds to generate *fitted*, seconds to simulate it)."""
    for p, v, count in GROWTH:
        instance = uniform(p, v, count, 0.5)
        if instance.num_actions > 100_000 and not full:
            continue
        start = time.process_time()
        (schedule,) = _schedules(instance, "fitted", 4 * p + 2, split=False)
        made = time.process_time()
        simulate(schedule, _simulator_costs(instance), options=Options(record_links=False))
        yield instance.num_actions, made - start, time.process_time() - made


def report(
    rows: Sequence[Row], checks: Sequence[Requirement], num_random: int, curve: Sequence[tuple], made: str
) -> str:
    """The Markdown document. made: how, in a few words."""
    lines = [
        "# Schedule quality",
        "",
        "Generated by `python -m benchmarks.schedule_quality --full`; do not edit. Instances:",
        "`benchmarks/instances.py`; bounds: `disagmoe/simulator/bounds.py`. All makespans are the simulator's. Caps:",
        "micro-batches of activations that a group may keep, counted in all its layers; p: mean depth. Of all",
        "generators the best one counts, against the bound with split backward, which holds for whole backwards too.",
        "The search was tuned on some of these instances (see the docstring there), among them three of the cells.",
        f"Made {made}.",
        "",
        "| required | at most | worst | where | met |",
        "|---|---|---|---|---|",
    ]
    for check in checks:
        met = "yes" if not check.failed else f"no: {len(check.failed)} cases"
        lines.append(f"| {check.name} | {check.limit:.2f} | {check.worst:.4f} | {check.where} | {met} |")
    lines.append(f"| deadlocks and broken caps on {num_random:,} random instances | 0 | 0 | | yes |")
    for check in checks:
        lines += ["", f"Above {check.limit:.2f}, {check.name}:", ""] if check.failed else []
        lines += [f"- {failure}" for failure in check.failed]
    lines += UNMET if any(check.failed for check in checks) else ()
    lines += ["", "| compute actions | generated in s | simulated in s |", "|---|---|---|"]
    lines += [f"| {size:,} | {generated:.1f} | {simulated:.1f} |" for size, generated, simulated in curve]
    lines += ["", "## All cases", "", "Ratio to the optimum where one is proved, else to the bound.", ""]
    names = list(dict.fromkeys(row.generator for row in rows))
    lines.append("| instance | cap | bound (whole) | bound (split) | " + " | ".join(names) + " |")
    lines.append("|---" * (4 + len(names)) + "|")
    by_case: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        by_case.setdefault((row.instance, row.cap), {})[row.generator] = row
    for (instance, cap), case in by_case.items():
        limits = [case[name] for name in ("fitted", "fitted-split")]
        shown = [f"{r.optimum:.5g} (optimum)" if r.optimum else f"{r.bound:.5g} ({r.binding})" for r in limits]
        ratios = [case[name].ratio for name in names]
        cells = ["-" if ratio is None else f"{ratio:.3f}" for ratio in ratios]
        lines.append(f"| {instance} | {cap} | " + " | ".join([*shown, *cells]) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write JSON and (with --full) the page, print the summary; returns how many requirements fail."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all rows there")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="only these; writes no document")
    parser.add_argument(
        "--resume", action="store_true", help="keep the cases that --json FILE has, of the same code and options"
    )
    parser.add_argument(
        "--full", action="store_true", help="whole effort, 10,000 random instances, 500,000 actions; writes the page"
    )
    options = parser.parse_args(arguments)
    known: dict[tuple[str, str], list[Row]] = {}
    if options.resume:
        if options.json is None:
            parser.error("--resume needs --json FILE: the file to go on with")
        for entry in json.loads(options.json.read_text(encoding="utf-8")) if options.json.exists() else ():
            known.setdefault((entry["instance"], entry["cap"]), []).append(Row(**entry))
    resumed = bool(known)
    rows: list[Row] = []
    for instance in all_instances(options.kinds):
        for cap in instance.caps:
            case = known.pop((instance.name, instance.cap_name(cap)), None) or list(
                measure(instance, cap, effort=0 if options.full else QUICK_EFFORT)
            )
            rows += case
            if options.json:
                # Those still to come are kept too, for a run that is stopped here.
                everything = [asdict(row) for row in (*rows, *(row for left in known.values() for row in left))]
                options.json.write_text(json.dumps(everything, indent=1), encoding="utf-8")
            found = ", ".join(f"{row.generator} {row.ratio:.3f}" for row in case if row.ratio is not None)
            print(f"{instance.name}, cap {instance.cap_name(cap)}: {found}", file=sys.stderr, flush=True)
    checks = requirements(rows)
    if tuple(options.kinds) == KINDS:
        num_random = try_random(10_000 if options.full else 1_000)
        curve = list(growth(options.full))
        minutes = time.process_time() / 60
        made = "in several sittings of the same code" if resumed else f"in one run of {minutes:.0f} minutes of a core"
        if options.full:
            document = report(rows, checks, num_random, curve, made)
            (ROOT / "docs" / "schedule_quality.md").write_text(document, encoding="utf-8")
        print(f"made {made}; no deadlock and no cap broken on {num_random:,} random instances")
    for check in checks:
        state = "ok" if not check.failed else "FAILS in " + "; ".join(check.failed)
        print(f"{check.name}: worst {check.worst:.4f} ({check.where}), required {check.limit:.2f}: {state}")
    return sum(bool(check.failed) for check in checks)


if __name__ == "__main__":
    raise SystemExit(main())
