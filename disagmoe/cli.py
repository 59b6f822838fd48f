"""The `disagmoe` command: one subcommand a task."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from disagmoe.config.errors import ConfigError


class Command(NamedTuple):
    """A subcommand. `run` gets the arguments that follow its name and returns the exit code."""

    summary: str
    run: Callable[[Sequence[str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; exit code 2 with one line a problem on stderr when a configuration is refused."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="disagmoe",
        description="Train Mixture-of-Experts models with attention and experts on disjoint workers.",
        epilog="\n".join(f"  {name:<10} {command.summary}" for name, command in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, help="see below; disagmoe COMMAND --help tells more")
    chosen = parser.parse_args(arguments[:1])
    try:
        return COMMANDS[chosen.command].run(arguments[1:])
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # e.g. disagmoe keys | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def check(arguments: Sequence[str]) -> int:
    """`disagmoe check`: see the help text below."""
    parser = argparse.ArgumentParser(
        prog="disagmoe check",
        usage="disagmoe check CONFIG [--print-world-size | --launch] [--section.key=value ...]",
        description=(
            "Check a configuration without starting anything and print its layout: which worker holds what, "
            "parameters, memory, schedule. NGPU, NNODES and NODE_RANK are checked against it when set."
        ),
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG", help="a TOML file")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--print-world-size", action="store_true", help="print only the number of processes")
    modes.add_argument(
        "--launch",
        action="store_true",
        help="check also GPUs, the dump folder and the checkpoint to resume from; print only the number of processes "
        "to start on this node and, with checkpoints, the seconds to let them end in",
    )
    flags = ("--help", "-h", "--print-world-size", "--launch")
    overrides = [a for a in arguments[1:] if a not in flags]
    options = parser.parse_args([*arguments[:1], *(a for a in arguments[1:] if a in flags)])

    # Imported here, so that other commands and --help are not kept waiting.
    from disagmoe.check import make_plan, report
    from disagmoe.checkpoint.resume import find_resume_problems
    from disagmoe.config.checks import find_launch_problems
    from disagmoe.config.dump_folder import find_folder_problem
    from disagmoe.config.launch import local_processes, read_launch
    from disagmoe.config.load import load_config

    resolved = load_config(options.config, overrides)
    plan = make_plan(resolved)
    launch = read_launch(os.environ)
    problems = [] if options.print_world_size else list(find_launch_problems(resolved, launch))
    if not options.launch:
        problems = [problem for problem in problems if problem.origin == "environment"]
    # Only one process of a run writes into the folder, and it may be quicker than this check on another node.
    folder = find_folder_problem(resolved) if not options.print_world_size and launch.node_rank == 0 else None
    if folder is not None and options.launch:
        problems.append(folder)
    if options.launch and launch.node_rank == 0:
        problems += find_resume_problems(resolved)
    if problems:
        raise ConfigError(problems)
    if not options.print_world_size:
        from disagmoe.train import check_initial_weights

        check_initial_weights(resolved)

    for warning in plan.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    world_size = plan.layout.world_size
    if options.print_world_size:
        print(world_size)
    elif options.launch:
        processes = local_processes(world_size, launch)
        part = resolved.config.checkpoint
        # Beyond the grace time the workers end by themselves; the launcher only has to outwait them.
        print(f"{processes} {math.ceil(part.grace_s) + 15}" if part.enable else processes)
    else:
        local = local_processes(world_size, launch) if "NGPU" in os.environ or "NNODES" in os.environ else None
        print(report(plan, processes_per_node=local))
        if folder is not None:
            print(f"note: {folder}", file=sys.stderr)
    return 0


def keys(arguments: Sequence[str]) -> int:
    """`disagmoe keys`: every configuration key with its default, what it takes and what it is for."""
    from disagmoe.config.fields import describe_keys, sections

    parser = argparse.ArgumentParser(prog="disagmoe keys", description="List all configuration keys.")
    parser.add_argument("section", nargs="?", choices=sections(), help="only this section")
    print(describe_keys(parser.parse_args(arguments).section))
    return 0


def simulate(arguments: Sequence[str]) -> int:
    """`disagmoe simulate`: predict a step of a configuration and of other systems."""
    from disagmoe.simulate_cli import simulate as run_simulation

    return run_simulation(arguments)


def checkpoint(arguments: Sequence[str]) -> int:
    """`disagmoe checkpoint`: look at checkpoints, verify and convert them."""
    from disagmoe.checkpoint.commands import checkpoint as run_command

    return run_command(arguments)


def allocate(arguments: Sequence[str]) -> int:
    """`disagmoe allocate`: from a model and a cluster to a configuration."""
    from disagmoe.allocate_cli import allocate as run_allocation

    return run_allocation(arguments)


def import_hf(arguments: Sequence[str]) -> int:
    """`disagmoe import-hf`: check published weights and say how to train from them."""
    from disagmoe.hugging_face.commands import import_hf as run_command

    return run_command(arguments)


def export_hf(arguments: Sequence[str]) -> int:
    """`disagmoe export-hf`: a checkpoint's weights for transformers."""
    from disagmoe.hugging_face.commands import export_hf as run_command

    return run_command(arguments)


COMMANDS = {
    "allocate": Command("decide a layout for a model and a cluster, and write the TOML", allocate),
    "check": Command("check a configuration and print its layout, without starting anything", check),
    "keys": Command("list all configuration keys", keys),
    "simulate": Command("predict a step's time, and what other systems would need", simulate),
    "checkpoint": Command("list, show, verify and convert checkpoints", checkpoint),
    "import-hf": Command("check Hugging Face weights and say how to train from them", import_hf),
    "export-hf": Command("write a checkpoint's weights for Hugging Face transformers", export_hf),
}


def run() -> NoReturn:
    """The console script."""
    sys.exit(main())


if __name__ == "__main__":
    run()
