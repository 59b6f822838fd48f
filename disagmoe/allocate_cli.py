"""`disagmoe allocate`: from a model and a cluster to a TOML that `run_train.sh` takes."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disagmoe.config.errors import ConfigError, Problem

if TYPE_CHECKING:
    from disagmoe.allocator.local_search import Trial
    from disagmoe.allocator.question import Question
    from disagmoe.allocator.search import Answer
    from disagmoe.config.load import ResolvedConfig

DEFAULT_CLUSTER = "h800x16"
PINS = ("attn_depth", "ffn_depth", "attn_workers", "ffn_workers", "replicas", "microbatches", "in_flight")
LAYOUT_KEYS = (*PINS, "schedule", "split_backward", "rank_order", "recompute")
PLACEMENT = "disagmoe.attn_placement"
DROPPED = (
    f"{PLACEMENT} of the given configuration is dropped: layouts are planned and simulated with A-stages on the "
    "A-groups in turn. `disagmoe check` says whether another placement would balance the answer's A-groups."
)
STAND_IN = (
    '# Stand-ins: put your data set and its tokenizer here, e.g. source = "allenai/c4" and '
    'tokenizer = "assets/tokenizer".'
)


def allocate(arguments: Sequence[str]) -> int:
    """`disagmoe allocate`: see the help text below. Exit code 2 where nothing fits."""
    options = _parser().parse_args(list(arguments))

    from disagmoe.allocator.output import HEADER, comment_lines, table_rows
    from disagmoe.allocator.search import NothingFits
    from disagmoe.allocator.search import allocate as find
    from disagmoe.simulator.report import as_text

    resolved = _base(options)
    if _drops_placement(resolved):
        print(f"warning: {DROPPED}", file=sys.stderr)
    question = make_question(resolved, options)
    if options.objective == "paper":
        return _paper(question)
    try:
        answer = find(question)
    except NothingFits:
        from disagmoe.allocator.diagnose import diagnose

        print(f"nothing fits: {diagnose(question)}", file=sys.stderr)
        return 2
    print(as_text(table_rows(answer.outcomes[: options.top]), HEADER), end="\n\n")
    print("\n".join(comment_lines(answer)))
    if options.out is not None:
        write_toml(options.out, resolved, answer)
        print(f"\nwritten: {options.out}")
    if options.plot is not None:
        from disagmoe.allocator.plot import draw

        draw(answer, options.plot)
        print(f"drawn: {options.plot}")
    if options.measure is not None:
        return _measure(options, resolved, answer)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="disagmoe allocate",
        description="Decide how many workers each role gets, how deep the pipeline is and what goes in which node, and "
        "write a TOML that run_train.sh takes. docs/allocation.md has the model and its assumptions.",
        allow_abbrev=False,
    )
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="a TOML whose layout is decided anew")
    parser.add_argument("--recipe", help="instead of CONFIG: a file in recipes/, without .py")
    parser.add_argument("--flavor", help="one of the recipe's sizes")
    parser.add_argument("--cluster", default=DEFAULT_CLUSTER, help="a name in clusters/ or a TOML file")
    parser.add_argument("--seq-len", type=int, metavar="TOKENS")
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument("--global-batch", type=int, metavar="SEQUENCES")
    batch.add_argument("--global-batch-tokens", type=int, metavar="TOKENS")
    parser.add_argument("--microbatch", type=int, default=1, metavar="SEQUENCES", help="of an A-worker (default: 1)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"))
    parser.add_argument("--optimizer", choices=("AdamW", "SGD"))
    pins = parser.add_argument_group("pins: what is given is not searched")
    for name in PINS:
        pins.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N")
    pins.add_argument("--schedule", choices=("deep", "plain"))
    pins.add_argument("--split-backward", action=argparse.BooleanOptionalAction)
    pins.add_argument("--recompute", choices=("none", "ffn", "full"))
    pins.add_argument("--rank-order", choices=("paired", "mixed", "attn_first", "apart"))
    parser.add_argument("--max-gpus", type=int, default=0, metavar="N", help="use at most so many of the cluster's")
    parser.add_argument(
        "--rows", choices=("worker", "node", "copy"), default="worker",
        help="how rows travel: once a worker (as the runtime does), once a node, or once an expert",
    )  # fmt: skip
    parser.add_argument(
        "--objective", choices=("bound", "paper"), default="bound", help="paper: the paper's max(T_a, T_f), simulated"
    )
    parser.add_argument("--measure", metavar="COMMAND", help="run_train.sh, or what takes its options: search on it")
    parser.add_argument("--radius", type=int, default=2, metavar="r", help="changes of a layout at a time (default: 2)")
    parser.add_argument("--trials", type=int, default=12, metavar="K", help="most runs (default: 12)")
    parser.add_argument("--trials-folder", type=Path, metavar="FOLDER", help="where runs and trials.jsonl go")
    parser.add_argument("--measure-steps", type=int, default=8, metavar="N", help="steps of a run (default: 8)")
    parser.add_argument("--measure-timeout-s", type=float, default=900.0, help="longest run (default: 900)")
    parser.add_argument("--top", type=int, default=8, metavar="N", help="rows of the table (default: 8)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="roofline of both pools, step over A:F splits")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the TOML to write")
    return parser


def _base(options: argparse.Namespace) -> ResolvedConfig:
    """The configuration whose layout is to be decided, with the command line's training shape."""
    from disagmoe.config.load import load_config

    overrides = _overrides(options)
    if options.config is not None:
        return load_config(options.config, overrides)
    if options.recipe is None:
        raise ConfigError([Problem(origin="command line", key="", rule="give a CONFIG, or --recipe and --flavor")])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{options.recipe}.toml"
        path.write_text(f'[recipe]\nname = "{options.recipe}"\n', encoding="utf-8")
        return load_config(path, overrides)


def _drops_placement(resolved: ResolvedConfig) -> bool:
    return bool(resolved.config.disagmoe.attn_placement)


def _overrides(options: argparse.Namespace) -> list[str]:
    given: dict[str, Any] = {
        "recipe.flavor": options.flavor,
        "training.seq_len": options.seq_len,
        "training.global_batch_size": options.global_batch,
        "training.dtype": options.dtype,
        "optimizer.name": options.optimizer,
    }
    if options.config is not None and options.recipe is not None:
        given["recipe.name"] = options.recipe
    if options.config is None and options.dtype is None:
        given["training.dtype"] = "bfloat16"
    if options.global_batch_tokens is not None:
        if options.seq_len is None or options.global_batch_tokens % options.seq_len:
            rule = "must be a multiple of --seq-len, which must be given too"
            value = options.global_batch_tokens
            raise ConfigError([Problem(origin="command line", key="--global-batch-tokens", value=value, rule=rule)])
        given["training.global_batch_size"] = options.global_batch_tokens // options.seq_len
    return [f"--{key}={value}" for key, value in given.items() if value is not None]


def make_question(resolved: ResolvedConfig, options: argparse.Namespace) -> Question:
    """What the command line asks.

    Raises:
        ConfigError: a model or batch that can't be trained at all, or a pin out of range.
    """
    from dataclasses import replace

    from disagmoe.allocator.question import Pins, Question
    from disagmoe.config.checks import find_shape_problems, model_shape
    from disagmoe.config.cluster import load_cluster
    from disagmoe.simulate_cli import make_job
    from disagmoe.simulator.roofline import Technology

    problems = list(find_shape_problems(resolved))
    for name in (*PINS, "microbatch", "max_gpus"):
        value = getattr(options, name)
        if value is not None and value < (0 if name == "max_gpus" else 1):
            key = f"--{name.replace('_', '-')}"
            problems.append(Problem(origin="command line", key=key, value=value, rule="must be at least 1"))
    if problems:
        raise ConfigError(problems)
    try:
        job = make_job(resolved.config, model_shape(resolved.config), load_cluster(options.cluster))
        # As the runtime does: every worker keeps the optimizer states of all that it holds.
        job = replace(job, shard_optimizer=False, technology=Technology(rows_m2n=options.rows))
        return Question(
            job=job,
            pins=Pins(**{name: getattr(options, name) for name in LAYOUT_KEYS}),
            microbatch_samples=options.microbatch,
            max_gpus=options.max_gpus,
        )
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError([Problem(origin="allocate", key="", rule=str(error))]) from None


def _paper(question: Question) -> int:
    from disagmoe.allocator.output import HEADER, table_rows
    from disagmoe.allocator.paper import allocate_paper
    from disagmoe.simulator.report import as_text

    outcome = allocate_paper(question)
    if outcome is None:
        print("nothing fits under the paper's objective", file=sys.stderr)
        return 2
    print("the paper's objective, max(T_a, T_f), then MFU; simulated:\n")
    print(as_text(table_rows([outcome]), HEADER))
    return 0


def _measure(options: argparse.Namespace, resolved: ResolvedConfig, answer: Answer) -> int:
    """Local search around the answer on measured steps; the best measured layout is written to `--out`."""
    from dataclasses import replace

    from disagmoe.allocator.evaluate import SCHEDULES, place, simulate_placed
    from disagmoe.allocator.local_search import Trial, local_search
    from disagmoe.allocator.output import disagmoe_section, schedule_name
    from disagmoe.allocator.question import Candidate
    from disagmoe.measure import Runner

    if options.out is None:
        raise ConfigError([Problem(origin="command line", key="--measure", rule="needs --out: trials start from it")])
    folder = options.trials_folder or options.out.with_suffix("").with_name(f"{options.out.stem}_trials")
    runner = Runner(
        command=options.measure, config=options.out, folder=folder, steps=options.measure_steps,
        timeout_s=options.measure_timeout_s,
    )  # fmt: skip
    outcomes = {answer.best.placed.candidate: answer.best}
    names = [name for name in SCHEDULES if answer.question.pins.allow("schedule", name)]

    def measure(candidate: Candidate) -> Trial:
        outcome = outcomes.get(candidate) or simulate_placed(place(answer.question, candidate), names)
        if outcome is None:
            return Trial(settings={}, step_s=None, error=f"{candidate}: by the memory model it does not fit")
        outcomes[candidate] = outcome
        trial = runner.run(disagmoe_section(outcome))
        shown = f"{trial.step_s:.4g} s measured" if trial.step_s is not None else trial.error.partition("\n")[0]
        print(f"{candidate} ({schedule_name(outcome)}): {outcome.step_s:.4g} s predicted, {shown}", flush=True)
        return trial

    best, trials = local_search(
        answer.question, answer.best.placed.candidate, measure, radius=options.radius, max_trials=options.trials
    )
    print(f"{len(trials)} trials, {sum(t.step_s is None for t in trials)} failed; all are in {folder / 'trials.jsonl'}")
    if best is None:
        print("every trial failed: the predicted layout stays", file=sys.stderr)
        return 1
    chosen = [outcomes[best], *(o for o in answer.outcomes if o.placed.candidate != best)]
    write_toml(options.out, resolved, replace(answer, outcomes=tuple(chosen)), measured=trials)
    print(f"best measured: {best}; written: {options.out}")
    return 0


def toml_text(resolved: ResolvedConfig, answer: Answer, *, name: str) -> str:
    """A complete TOML: what was given, the layout, and the prediction as comments."""
    from disagmoe.allocator.output import comment, disagmoe_section
    from disagmoe.config.fields import sections
    from disagmoe.config.load import as_toml

    config = resolved.config
    given: dict[str, dict[str, Any]] = {section: {} for section in sections()}
    for key, source in resolved.sources.items():
        section, _, field = key.rpartition(".")
        decided = section == "disagmoe" and field in LAYOUT_KEYS
        if section and source in ("toml", "command line") and not decided and key != PLACEMENT:
            given[section][field] = resolved.value(key)
    given["recipe"] = {"name": config.recipe.name, "flavor": config.recipe.flavor}
    given["disagmoe"] = {**disagmoe_section(answer.best), **given["disagmoe"]}
    given["comm"] = {"timeout_s": 600.0, **given["comm"]}
    given["data"] = {"source": config.data.source, "tokenizer": config.data.tokenizer, **given["data"]}
    nodes = sum(pool.nodes for pool in answer.best.placed.job.cluster.pools)
    launch = f"NNODES={nodes} NODE_RANK=... MASTER_ADDR=... " if nodes > 1 else ""
    notes = [DROPPED] if _drops_placement(resolved) else []
    lines = [comment(answer, notes), "#", f"#     {launch}CONFIG_FILE={name} ./run_train.sh"]
    for section, values in given.items():
        if not values:
            continue
        stand_in = section == "data" and config.data.source == "python-stdlib"
        lines += ["", *([STAND_IN] if stand_in else []), f"[{section}]"]
        lines += [f"{key} = {as_toml(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def write_toml(path: Path, resolved: ResolvedConfig, answer: Answer, *, measured: Sequence[Trial] = ()) -> None:
    """Write the answer, after checking that the runtime would take it.

    measured: trials on the real cluster; the shortest is noted.

    Raises:
        ConfigError: it would not; nothing is written then.
    """
    from disagmoe.check import make_plan
    from disagmoe.config.load import load_config

    text = toml_text(resolved, answer, name=str(path))
    times = [trial.step_s for trial in measured if trial.step_s is not None]
    if times:
        text = f"# Measured: step {min(times):.4g} s, the shortest of {len(measured)} trials.\n{text}"
    with tempfile.TemporaryDirectory() as folder:
        trial = Path(folder) / path.name
        trial.write_text(text, encoding="utf-8")
        make_plan(load_config(trial))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
