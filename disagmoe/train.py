"""What torchrun starts: `python -m disagmoe.train --config-file=FILE [--section.key=value ...]` on every process."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence

from disagmoe.checkpoint.resume import find_resume_problems
from disagmoe.config.checks import build_layout, check_config, describe_world_size
from disagmoe.config.dump_folder import claim_dump_folder
from disagmoe.config.errors import ConfigError, Problem
from disagmoe.config.load import ResolvedConfig, load_config
from disagmoe.config.recipe import load_recipe

USAGE = "usage: python -m disagmoe.train --config-file=FILE [--section.key=value ...]"


def main(argv: Sequence[str] | None = None) -> int:
    """Load, check, claim the dump folder (rank 0 of the run) and train.

    Returns 2 with one line a problem on stderr when the configuration is refused. Failures while training are raised:
    Python then ends with a traceback and exit code 1.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    _become_a_world_of_one()
    _hide_output()
    rank = int(os.environ["RANK"])
    with contextlib.ExitStack() as stack:
        try:
            config_file, overrides = _split_arguments(arguments)
            resolved = load_config(config_file, overrides)
            check_config(resolved)
            _check_world_size(resolved)
            check_initial_weights(resolved)
            if rank == 0:
                problems = list(find_resume_problems(resolved))
                if problems:
                    raise ConfigError(problems)
                stack.enter_context(claim_dump_folder(resolved))
        except ConfigError as error:
            if os.environ["LOCAL_RANK"] == "0":  # the same on all processes of a node
                print(error, file=sys.stderr, flush=True)
            return 2
        # Imported here: torch takes seconds, and a bad configuration should not have to wait for it.
        from torch.distributed.elastic.multiprocessing.errors import record

        from disagmoe.trainer import train
        from disagmoe.world import SAID

        try:
            record(train)(resolved)  # so that torchrun's summary shows the error of whichever process failed first
        except BaseException as error:
            if SAID not in getattr(error, "__notes__", ()):
                worker = build_layout(resolved.config).workers_on(rank)[0]
                text = f"{traceback.format_exc()}worker {worker} (rank {rank}) failed before it joined the run\n"
                print(text, end="", file=sys.stderr)
            # Threads may sit in transfers that never complete: do not wait for them.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(130 if isinstance(error, KeyboardInterrupt) else 1)
    return 0


def _become_a_world_of_one() -> None:
    """Without a launcher, be rank 0 of one: for a debugger, with `mode = "none"` or `colocate = true`."""
    if "RANK" not in os.environ:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ.update(alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT", "0")})


def _hide_output() -> None:
    """Drop stdout unless `LOG_RANK` lists this process's local rank. Errors, on stderr, are shown from all."""
    shown = os.environ.get("LOG_RANK", "0").split(",")
    if os.environ["LOCAL_RANK"] not in (rank.strip() for rank in shown):
        sys.stdout.flush()
        # The descriptor, so that what libraries print is dropped too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _split_arguments(arguments: Sequence[str]) -> tuple[str, list[str]]:
    rest = list(arguments)
    for position, argument in enumerate(rest):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") != "--config-file":
            continue
        if equals:
            return value, rest[:position] + rest[position + 1 :]
        if position + 1 < len(rest):
            return rest[position + 1], rest[:position] + rest[position + 2 :]
    raise ConfigError([Problem(origin="command line", key="--config-file", rule="is missing", fix=USAGE)])


def check_initial_weights(resolved: ResolvedConfig) -> None:
    """Look for every tensor of the weights to start from.

    Raises:
        ConfigError: they are not this model's, with the tensors' names.
    """
    config = resolved.config
    if config.checkpoint.initial_load_in_hf:
        # Imported here: it brings torch along.
        from disagmoe.hugging_face.source import open_weights

        open_weights(load_recipe(config.recipe.name), config.recipe.flavor, config.checkpoint.initial_load_path)


def _check_world_size(resolved: ResolvedConfig) -> None:
    started, needed = int(os.environ["WORLD_SIZE"]), build_layout(resolved.config).world_size
    if started != needed:
        needs = describe_world_size(resolved.config)
        rule = f"{started} processes were started, but {needs}"
        fix = f"start {needed}, with ./run_train.sh or torchrun --nproc-per-node={needed}"
        raise ConfigError([Problem(origin="environment", key="WORLD_SIZE", value=started, rule=rule, fix=fix)])


if __name__ == "__main__":
    sys.exit(main())
