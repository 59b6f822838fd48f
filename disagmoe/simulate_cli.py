"""`disagmoe simulate`: a configuration's step, and what other systems would make of the same GPUs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from disagmoe.config.errors import ConfigError, Problem, did_you_mean

if TYPE_CHECKING:
    from disagmoe.check import Plan
    from disagmoe.cluster import Cluster
    from disagmoe.config.schema import Config
    from disagmoe.shapes import ModelShape
    from disagmoe.simulator.costs import StageCosts
    from disagmoe.simulator.roofline import Job
    from disagmoe.simulator.systems import SystemRun

DEFAULT_CLUSTER = "h800x16"


def simulate(arguments: Sequence[str]) -> int:
    """`disagmoe simulate`: see the help text below."""
    parser = _parser()
    options, overrides = parser.parse_known_args(list(arguments))

    from disagmoe.check import make_plan
    from disagmoe.config.cluster import load_cluster
    from disagmoe.config.load import load_config
    from disagmoe.simulator.report import as_text, table_rows

    resolved = load_config(options.config, overrides)
    if resolved.config.parallelism.mode != "disagmoe":
        raise ConfigError(
            [resolved.problem("parallelism.mode", 'must be "disagmoe": there is no pipeline to simulate')]
        )
    plan = make_plan(resolved)
    job = make_job(plan.config, plan.shape, load_cluster(options.cluster))
    if job.cluster.num_gpus < plan.layout.world_size:
        rule = f"has {job.cluster.num_gpus} GPUs, the layout needs {plan.layout.world_size}"
        raise ConfigError(
            [Problem(origin=f"cluster {job.cluster.name}", key="", rule=rule, fix="choose another with --cluster")]
        )
    costs = None if options.profile is None else _measured(options.profile)
    runs = []
    for name in _names(options.system, plan, profiled=costs is not None):
        try:
            runs.append(_run(plan, job, name, costs))
        except ValueError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    if not runs:
        return 1
    print(
        f"{job.model.name}, {job.seq_len} tokens, {job.global_batch} samples a step, {plan.layout.world_size} GPUs of "
        f"{job.cluster.name}, costs: {options.profile or 'roofline'}\n"
    )
    print(as_text(table_rows(runs)))
    for name in options.timeline:
        _draw(runs, Path(name))
    return 0


def _parser() -> argparse.ArgumentParser:
    from disagmoe.simulator.systems import AF_SYSTEMS, BASELINES

    titles = {name: system.title for name, system in AF_SYSTEMS.items()}
    titles.update((name, system.title) for name, system in BASELINES.items())
    parser = argparse.ArgumentParser(
        prog="disagmoe simulate",
        usage="disagmoe simulate CONFIG [--cluster C] [--system S ...] [--timeline FILE ...] [--profile FILE] "
        "[--section.key=value ...]",
        description="Predict a step of a configuration, and of other systems on as many GPUs, each on its best plan. "
        "docs/simulator.md has the model and its assumptions.",
        epilog="systems:\n" + "\n".join(f"  {name:<16} {title}" for name, title in titles.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG", help="a TOML file")
    parser.add_argument("--cluster", default=DEFAULT_CLUSTER, help="a name in clusters/ or a TOML file")
    parser.add_argument(
        "--system",
        nargs="+",
        action="extend",
        default=[],
        help="default: the configuration's own schedule and all baselines",
    )
    parser.add_argument(
        "--timeline", action="append", default=[], metavar="FILE", help=".png: all systems; .json: a trace of the first"
    )
    parser.add_argument(
        "--profile", metavar="FILE", help="measured costs, for AF-Pipe's systems only; baselines are left out"
    )
    return parser


def make_job(config: Config, shape: ModelShape, cluster: Cluster) -> Job:
    """What a configuration trains, on a cluster.

    Raises:
        ValueError: a GPU has no peak for the configuration's dtype.
    """
    from disagmoe.simulator.roofline import BYTES, Job

    width = BYTES[config.training.dtype]
    moments = 2 if config.optimizer.name == "AdamW" else int(config.optimizer.momentum > 0)
    job = Job(
        model=shape,
        cluster=cluster,
        seq_len=config.training.seq_len,
        global_batch=config.training.global_batch_size,
        dtype=config.training.dtype,
        recompute=config.disagmoe.recompute,
        param_bytes=width,
        grad_bytes=width,
        optimizer_bytes=moments * width,
    )
    for pool in cluster.pools:
        pool.gpu.peak(job.dtype)
    return job


def _names(asked: Sequence[str], plan: Plan, *, profiled: bool) -> list[str]:
    """The systems to run. A profile measures AF-Pipe alone: baselines on a roofline beside it would mislead."""
    from disagmoe.simulator.systems import AF_SYSTEMS, BASELINES

    known = [*AF_SYSTEMS, *BASELINES]
    wrong = [name for name in asked if name not in known]
    if wrong:
        problems = [
            Problem(
                origin="command line", key="--system", value=name, rule="no such system", fix=did_you_mean(name, known)
            )
            for name in wrong
        ]
        raise ConfigError(problems)
    own = f"af-{plan.config.disagmoe.schedule}"
    if not profiled:
        return list(dict.fromkeys(asked)) or [own, *BASELINES]
    unmeasured = [name for name in dict.fromkeys(asked) if name in BASELINES]
    if unmeasured:
        rule = "is not measured by --profile: its costs would be the roofline's"
        fix = f"leave out --profile, or choose among {', '.join(AF_SYSTEMS)}"
        raise ConfigError(
            [Problem(origin="command line", key="--system", value=name, rule=rule, fix=fix) for name in unmeasured]
        )
    if not asked:
        print("baselines are left out: --profile measures AF-Pipe alone", file=sys.stderr)
    return list(dict.fromkeys(asked)) or [own]


def _measured(path: str) -> StageCosts:
    from disagmoe.simulator.profile import Profile

    try:
        return Profile.load(path).costs()
    except ValueError as error:
        raise ConfigError([Problem(origin="--profile", key="", rule=str(error))]) from None


def _run(plan: Plan, job: Job, name: str, costs: StageCosts | None) -> SystemRun:
    """A variant of the configuration's layout, or a baseline on its best plan."""
    from disagmoe.simulator.systems import AF_SYSTEMS, AFPlan, run_af_pipe
    from disagmoe.simulator.tuning import tuned

    if name not in AF_SYSTEMS:
        return tuned(job, name, plan.layout.world_size)
    part, system = plan.config.disagmoe, AF_SYSTEMS[name]
    af_plan = AFPlan(
        layout=plan.layout,
        num_microbatches=part.microbatches,
        in_flight=part.most_in_flight,
        hoist=part.hoist,
        send_after=part.send_after,
    )
    return run_af_pipe(job, af_plan, order=system.order, split=system.split, costs=costs)


def _draw(runs: Sequence[SystemRun], path: Path) -> None:
    from disagmoe.simulator.report import write_picture, write_trace

    if path.suffix == ".json":
        write_trace(runs[0].result, path)
    elif path.suffix == ".png":
        write_picture(runs, path)
    else:
        rule = "must end in .png or .json"
        raise ConfigError([Problem(origin="command line", key="--timeline", value=str(path), rule=rule)])
