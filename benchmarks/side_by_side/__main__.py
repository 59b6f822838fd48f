"""Compares training systems by wall-clock time: `python -m benchmarks.side_by_side --preset NAME`. Needs root.

Every round launches each system of the preset once on an emulated cluster, in turn: it starts and trains a step at full
speed, then one or more steps at the preset's speed of workers and cards, which are measured. docs/speed.md has results.

    python -m benchmarks.side_by_side --preset paper_like --json paper_like.json
    python -m benchmarks.side_by_side --preset paper_like --tune
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from benchmarks.emulated_cluster import EmulatedCluster
from benchmarks.emulated_cluster.nursery import Nursery
from benchmarks.side_by_side import page
from benchmarks.side_by_side.fit import wants_costs, with_costs
from benchmarks.side_by_side.measure import PRELOADED, Launch, launch, quiet_threads
from benchmarks.side_by_side.preset import Overrides, Preset, System, load_preset, preset_names
from benchmarks.side_by_side.summary import summarise
from benchmarks.side_by_side.tune import tune


class Bench:
    """Launches on one cluster, remembered in a file if there is one, until time is up."""

    def __init__(self, preset: Preset, options: argparse.Namespace) -> None:
        self.preset = preset
        self._steps, self._raw = options.steps, options.raw
        self._deadline = time.monotonic() + options.max_seconds if options.max_seconds else float("inf")
        self._known: dict[str, dict[str, Any]] = {}
        if self._raw is not None and self._raw.exists():
            entries = [json.loads(line) for line in self._raw.read_text().splitlines()]
            wanted = {field.name for field in fields(Launch)}
            self._known = {entry["key"]: entry["launch"] for entry in entries if entry["launch"].keys() == wanted}
            if len(self._known) < len({entry["key"] for entry in entries}):
                print(f"{self._raw}: launches of another version are measured again", file=sys.stderr)

    @property
    def time_is_up(self) -> bool:
        return time.monotonic() > self._deadline

    def get(self, cluster: EmulatedCluster, nursery: Nursery, overrides: Overrides, place: str) -> Launch:
        """Measure, or recall what was measured under the same place and configuration."""
        speed = self.preset.speed
        if wants_costs(overrides):

            def profiled(own: Overrides, path: Path) -> None:
                system = System(name="costs", title="", overrides=own)
                launch(cluster, nursery, system, num_steps=1, speed=speed, keep_profile=path)

            overrides = with_costs(self.preset, overrides, profiled)
        key = f"{place} {self._steps} {json.dumps(overrides, sort_keys=True)}"
        if key not in self._known:
            system = System(name=place, title=place, overrides=overrides)
            self._known[key] = asdict(launch(cluster, nursery, system, num_steps=self._steps, speed=speed))
            if self._raw is not None:
                self._raw.parent.mkdir(parents=True, exist_ok=True)
                with self._raw.open("a") as file:
                    file.write(json.dumps({"key": key, "launch": self._known[key]}) + "\n")
        return Launch(**self._known[key])


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    quiet_threads()
    try:
        preset = load_preset(options.preset)
        bench = Bench(preset, options)
        systems = [] if options.tune else preset.systems(options.only.split(",") if options.only else ())
        with Nursery(PRELOADED) as nursery, EmulatedCluster(preset.cluster) as cluster:
            if options.tune:
                code = tune(preset, lambda own, place: bench.get(cluster, nursery, preset.shared | own, place), bench)
                if options.docs and preset.tuned():
                    page.write_tuning(preset, options.docs)
                return code
            rounds = _rounds(bench, cluster, nursery, systems, options.rounds)
    except KeyboardInterrupt:
        return 130
    except (OSError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    if any(len(launches) < options.rounds for launches in rounds.values()):
        print("time is up; start again to go on", file=sys.stderr)
        return 3
    result = summarise(preset, systems, rounds)
    print(page.section(preset, result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.docs:
        page.write(preset, result, options.docs)
    return 0


def _rounds(
    bench: Bench, cluster: EmulatedCluster, nursery: Nursery, systems: list[System], num_rounds: int
) -> dict[str, list[Launch]]:
    """By system, its launches. Each round begins with another system, so that none is always first."""
    rounds: dict[str, list[Launch]] = {system.name: [] for system in systems}
    seen: dict[tuple[int, str], Launch] = {}
    for number in range(num_rounds):
        first = number % len(systems)
        for system in systems[first:] + systems[:first]:
            if bench.time_is_up:
                return rounds
            # A tuned baseline may be the same as another one: measured once.
            key = (number, json.dumps(system.overrides, sort_keys=True))
            if key not in seen:
                seen[key] = bench.get(cluster, nursery, system.overrides, f"round {number}")
                print(_line(number, system.name, seen[key]), file=sys.stderr, flush=True)
            rounds[system.name].append(seen[key])
    return rounds


def _line(number: int, name: str, one: Launch) -> str:
    return (
        f"round {number}  {name:<26} step {one.step_s:6.2f} s  compute {one.compute_s:5.2f}  exposed "
        f"{one.exposed_comm_s:5.2f}  idle {one.idle_s:5.2f}  passes {one.pipeline_s:5.2f}  "
        f"simulated {one.predicted_step_s:.2f}  sent {one.sent_bytes / 1e6:.1f} MB  loss {one.loss:.4f}  "
        f"(start {one.start_s:.0f} s)"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.side_by_side",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--preset", required=True, help=f"one of {', '.join(preset_names())}")
    add("--rounds", type=int, default=5, help="rounds (default: 5)")
    add("--steps", type=int, default=1, help="measured steps of a launch (default: 1)")
    add("--json", type=Path, metavar="FILE", help="write the result there")
    add("--docs", type=Path, metavar="FOLDER", help="put the result into FOLDER/speed.md, with a picture")
    add("--only", metavar="A,B", help="systems to run (default: all)")
    add("--tune", action="store_true", help="tune the preset's grids, and store the result beside the preset")
    add("--raw", type=Path, metavar="FILE", help="remember every launch there; what it has is not run again")
    add("--max-seconds", type=float, help="start no launch after that long; with --raw, a later call goes on")
    return parser


if __name__ == "__main__":
    sys.exit(main())
