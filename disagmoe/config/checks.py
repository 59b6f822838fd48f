"""What is wrong with a configuration as a whole: rules over several keys, the model, the machine and the launch.

Types and ranges of single values are checked on loading. Everything here needs no process and no torch, so that a bad
configuration is refused in a second, before anything starts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from disagmoe.config.errors import ConfigError, Problem, did_you_mean, nearest
from disagmoe.config.expert_parallel import expert_parallel_problems, expert_parallel_warnings
from disagmoe.config.hugging_face import find_contradictions
from disagmoe.config.launch import Launch
from disagmoe.config.load import ResolvedConfig
from disagmoe.config.placement import placement_problems, placement_warnings
from disagmoe.config.recipe import Recipe, load_recipe
from disagmoe.config.schema import Config
from disagmoe.layout import RANK_ORDERS, Layout
from disagmoe.shapes import ModelShape

DATA_SUFFIXES = (".txt", ".jsonl", ".parquet")
BUILT_IN_SOURCES = ("python-stdlib", "synthetic")
BYTE_VOCABULARY = 257
"""Ids of the byte tokenizer: the bytes and an end of document."""


def check_config(resolved: ResolvedConfig) -> list[str]:
    """Apply every rule that needs no process; returns warnings about what is allowed but hardly meant.

    Raises:
        ConfigError: with every problem found.
    """
    problems = list(find_problems(resolved))
    if problems:
        raise ConfigError(problems)
    return list(find_warnings(resolved))


def model_shape(config: Config) -> ModelShape:
    """The model that a configuration trains, as numbers; the flavor must exist."""
    return load_recipe(config.recipe.name).shape(config.recipe.flavor)


def build_layout(config: Config) -> Layout:
    """The workers of a configuration; a single colocated replica for `mode = "none"`."""
    if config.parallelism.mode == "none":
        return Layout(attn_depth=1, ffn_depth=1, attn_workers=1, ffn_workers=1, colocate=True)
    if config.parallelism.mode == "ep":
        return config.expert_parallel.layout()
    return config.disagmoe.layout()


def find_problems(resolved: ResolvedConfig) -> Iterator[Problem]:
    """Everything that keeps a configuration from being run."""
    config = resolved.config
    recipe = load_recipe(config.recipe.name)
    shape = None
    try:
        shape = recipe.shape(config.recipe.flavor)
    except ConfigError as error:
        yield from error.problems
    except ValueError:
        rule = f"recipes/{config.recipe.name}.py has no such flavor"
        yield resolved.problem("recipe.flavor", rule, fix=did_you_mean(config.recipe.flavor, recipe.shapes))
    else:
        yield from _model_problems(resolved, shape)
    if config.parallelism.mode == "disagmoe":
        problems = list(placement_problems(resolved, shape))
        yield from problems or _layout_problems(resolved)
        if shape is not None:
            yield from _split_problems(resolved, shape)
    elif config.parallelism.mode == "ep":
        if shape is not None:
            yield from expert_parallel_problems(resolved, shape)
    elif config.metrics.profile_costs:
        rule = f'measures the stages of a disaggregated run, and parallelism.mode is "{config.parallelism.mode}"'
        yield resolved.problem("metrics.profile_costs", rule, fix='leave it out, or set parallelism.mode = "disagmoe"')
    yield from _batch_problems(resolved)
    yield from _comm_problems(resolved)
    yield from _initial_load_problems(resolved, recipe, shape)
    yield from _checkpoint_problems(resolved)
    yield from _source_problems(resolved)
    yield from _tokenizer_problems(resolved, shape)


def find_shape_problems(resolved: ResolvedConfig) -> Iterator[Problem]:
    """What is wrong with a configuration whatever its layout: model, sequence length, data."""
    config = resolved.config
    recipe = load_recipe(config.recipe.name)
    shape = recipe.shapes.get(config.recipe.flavor)
    if shape is None:
        rule = f"recipes/{config.recipe.name}.py has no such flavor"
        yield resolved.problem("recipe.flavor", rule, fix=did_you_mean(config.recipe.flavor, recipe.shapes))
        return
    yield from _model_problems(resolved, shape)
    if not any(shape.is_moe_layer):
        rule = "has no mixture-of-experts layer, so there is nothing to place on F-workers"
        yield resolved.problem("recipe.flavor", rule)


def _model_problems(resolved: ResolvedConfig, shape: ModelShape) -> Iterator[Problem]:
    if resolved.config.training.seq_len > shape.max_seq_len:
        rule = f"must be at most {shape.max_seq_len}, the longest sequence of {shape.name}"
        yield resolved.problem("training.seq_len", rule)


def _layout_problems(resolved: ResolvedConfig) -> Iterator[Problem]:
    part = resolved.config.disagmoe
    if part.colocate:
        for key in ("attn_workers", "ffn_workers"):
            if getattr(part, key) != 1:
                rule = "must be 1 with disagmoe.colocate = true, which puts a whole replica into one process"
                yield resolved.problem(f"disagmoe.{key}", rule, fix=f"set {key} = 1 or colocate = false")
        return
    try:
        build_layout(resolved.config)
    except ValueError as error:
        # The ranges and the placement hold and nothing is colocated: only the order is left.
        near = nearest(part.rank_order, RANK_ORDERS) if isinstance(part.rank_order, str) else None
        rule = str(error).partition(": must ")[2] or str(error)
        rule = f"must {rule}" if isinstance(part.rank_order, str) else rule
        yield resolved.problem("disagmoe.rank_order", rule, fix=f'did you mean "{near}"?' if near else "")


def _split_problems(resolved: ResolvedConfig, shape: ModelShape) -> Iterator[Problem]:
    """Whether the model has as many layers and experts as groups and workers are to share."""
    part = resolved.config.disagmoe
    num_moe = sum(shape.is_moe_layer)
    if num_moe == 0:
        rule = "has no mixture-of-experts layer, so there is nothing to place on F-workers"
        yield resolved.problem("recipe.flavor", rule, fix='set parallelism.mode = "none"')
        return
    experts = min(layer.moe.num_experts for layer in shape.layers if layer.is_moe)
    if part.ffn_workers > experts:
        rule = f"must be at most {experts}, the number of experts of {shape.name}: each F-worker holds at least one"
        yield resolved.problem("disagmoe.ffn_workers", rule)
    if part.ffn_depth > num_moe:
        rule = f"must be at most {num_moe}, the number of expert sublayers of {shape.name}: each F-group holds one"
        yield resolved.problem("disagmoe.ffn_depth", rule)
    if part.attn_depth > num_moe + 1:
        rule = (
            f"must be at most {num_moe + 1}, the number of attention stages of {shape.name} "
            f"({num_moe} and the head): each A-group holds at least one"
        )
        yield resolved.problem("disagmoe.attn_depth", rule)


def _batch_problems(resolved: ResolvedConfig) -> Iterator[Problem]:
    config = resolved.config
    if config.parallelism.mode == "none":
        return
    section = "expert_parallel" if config.parallelism.mode == "ep" else "disagmoe"
    part, samples = getattr(config, section), config.training.global_batch_size
    if part.replicas > samples:
        rule = f"must be at most training.global_batch_size = {samples}: each replica needs a sample a step"
        yield resolved.problem(f"{section}.replicas", rule)
    elif part.microbatches > samples // part.replicas:
        share = samples // part.replicas
        of = f" / {section}.replicas = {part.replicas}" if part.replicas > 1 else ""
        rule = (
            f"must be at most {share}, the samples of a step that a replica gets (training.global_batch_size = "
            f"{samples}{of}): each micro-batch needs one"
        )
        fix = f"set microbatches = {share} or global_batch_size = {part.microbatches * part.replicas}"
        yield resolved.problem(f"{section}.microbatches", rule, fix=fix)


def _comm_problems(resolved: ResolvedConfig) -> Iterator[Problem]:
    comm = resolved.config.comm
    if comm.strict_order and comm.backend == "nccl":
        rule = "is for gloo: NCCL has no tags, so its order is always strict"
        yield resolved.problem("comm.strict_order", rule, fix="leave it out")


def _initial_load_problems(resolved: ResolvedConfig, recipe: Recipe, shape: ModelShape | None) -> Iterator[Problem]:
    """Whether the weights to start from are of this model, by their config.json; tensors are looked at later."""
    part = resolved.config.checkpoint
    if not part.initial_load_in_hf:
        if part.initial_load_path:
            rule = "is read only with checkpoint.initial_load_in_hf = true"
            yield resolved.problem("checkpoint.initial_load_path", rule, fix="set it, or leave this out")
        return
    if not part.initial_load_path:
        rule = "needs checkpoint.initial_load_path"
        yield resolved.problem("checkpoint.initial_load_in_hf", rule, fix="set it to the folder of the weights")
    elif recipe.hugging_face is None:
        rule = f"recipes/{recipe.name}.py does not say how its weights are published"
        yield resolved.problem("checkpoint.initial_load_in_hf", rule, fix="leave it out")
    elif shape is not None:
        try:
            yield from find_contradictions(
                recipe.hugging_face,
                shape,
                part.initial_load_path,
                recipe=recipe.name,
                flavor=resolved.config.recipe.flavor,
            )
        except ConfigError as error:
            yield from error.problems


def resume_step(config: Config) -> int | None:
    """The step that `[checkpoint] resume` asks for, written as a number or as text; None for `auto` and `none`."""
    resume = config.checkpoint.resume
    if isinstance(resume, int):
        return resume
    return int(resume) if resume.isdecimal() else None


def _checkpoint_problems(resolved: ResolvedConfig) -> Iterator[Problem]:
    config = resolved.config
    resume, step = config.checkpoint.resume, resume_step(config)
    if step == 0 or (step is None and resume not in ("auto", "none")):
        near = nearest(resume, ("auto", "none")) if isinstance(resume, str) else None
        fix = f'did you mean "{near}"?' if near else ""
        yield resolved.problem("checkpoint.resume", 'must be "auto", "none" or a step, at least 1', fix=fix)
    elif step is not None and not config.checkpoint.enable:
        yield resolved.problem("checkpoint.resume", "needs checkpoint.enable = true", fix="set it, or leave this out")
    if not config.checkpoint.folder.strip():
        yield resolved.problem("checkpoint.folder", "must be the name of a folder", fix='e.g. "checkpoints"')
    if config.training.stop_after > config.training.steps:
        yield resolved.problem("training.stop_after", f"must be at most training.steps = {config.training.steps}")


def looks_like_path(source: str) -> bool:
    """Whether `[data] source` means a file or folder rather than a Hugging Face dataset."""
    return source.startswith(("/", ".", "~")) or source.endswith((*DATA_SUFFIXES, "/"))


def _source_problems(resolved: ResolvedConfig) -> Iterator[Problem]:
    source = resolved.config.data.source
    key, suffixes = "data.source", " or ".join(DATA_SUFFIXES)
    if source in BUILT_IN_SOURCES:
        return
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix not in DATA_SUFFIXES:
            yield resolved.problem(key, f"must be a file that ends in {suffixes}, or a folder of them")
    elif path.is_dir():
        if not any(p.suffix in DATA_SUFFIXES for p in path.rglob("*")):
            yield resolved.problem(key, f"must be a folder with files that end in {suffixes}")
    elif looks_like_path(source):
        beside = [str(path.parent / p.name) for p in path.parent.iterdir()] if path.parent.is_dir() else []
        near = nearest(str(path), beside)
        fix = f'did you mean "{near}"?' if near else "relative paths start at the current directory"
        yield resolved.problem(key, "there is no such file or folder", fix=fix)
    elif not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?", source):
        choices = " or ".join(f'"{name}"' for name in BUILT_IN_SOURCES)
        yield resolved.problem(key, f"must be {choices}, a path, or the name of a Hugging Face dataset (owner/name)")
    elif "/" not in source and (near := nearest(source, BUILT_IN_SOURCES)):
        rule = "is neither built in nor a path"
        fix = f'did you mean "{near}"? A Hugging Face dataset of that name would be owner/{source}'
        yield resolved.problem(key, rule, fix=fix)


def _tokenizer_problems(resolved: ResolvedConfig, shape: ModelShape | None) -> Iterator[Problem]:
    tokenizer = resolved.config.data.tokenizer
    key = "data.tokenizer"
    vocabulary: int | None = BYTE_VOCABULARY
    if tokenizer != "bytes":
        folder = Path(tokenizer).expanduser()
        if not folder.is_dir():
            near = nearest(tokenizer, ["bytes"])
            fix = 'did you mean "bytes"?' if near else "relative paths start at the current directory"
            yield resolved.problem(key, 'must be "bytes" or a folder with a tokenizer.json, which it is not', fix=fix)
            return
        if not (folder / "tokenizer.json").is_file():
            fix = "copy the file from the model's repository"
            yield resolved.problem(key, "must be a folder with a tokenizer.json, which it has not", fix=fix)
            return
        vocabulary = _vocabulary_of(folder / "tokenizer.json")
        if vocabulary is None:
            yield resolved.problem(key, "its tokenizer.json can't be read: must be one of Hugging Face's tokenizers")
            return
    if shape is not None and vocabulary is not None and vocabulary > shape.vocab_size:
        rule = f"has {vocabulary} token ids, but {shape.name} has room for {shape.vocab_size} (its vocab_size)"
        fix = "choose the model's own tokenizer or a flavor with a larger vocabulary"
        yield resolved.problem(key, rule, fix=fix)


def _vocabulary_of(path: Path) -> int | None:
    """One more than the largest token id in a tokenizer.json; None when the file is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else range(len(vocabulary))
        ids = [*ids, *(token["id"] for token in content.get("added_tokens", []))]
        return max(ids) + 1
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def find_warnings(resolved: ResolvedConfig) -> Iterator[str]:
    """What can be run but was hardly meant."""
    config = resolved.config
    part, training, schedule = config.disagmoe, config.training, config.lr_scheduler
    if config.parallelism.mode == "disagmoe":
        # Batches are cut evenly, larger parts first: the last micro-batch of the last replica is the smallest.
        smallest = training.global_batch_size // part.replicas // part.microbatches
        if part.attn_workers > smallest:
            yield (
                f"disagmoe.attn_workers = {part.attn_workers} but a micro-batch has as few as {smallest} samples: some "
                f"A-workers idle in some micro-batches (samples are not cut)"
            )
        if part.in_flight > part.microbatches:
            yield (
                f"disagmoe.in_flight = {part.in_flight} is more than disagmoe.microbatches = {part.microbatches}: "
                f"there is nothing for it to limit"
            )
        if part.costs and part.schedule != "fitted" and not part.split_backward:
            yield f'disagmoe.costs = "{part.costs}": no effect on disagmoe.schedule = "{part.schedule}" unless split'
        yield from placement_warnings(build_layout(config), model_shape(config), training.seq_len)
    elif config.parallelism.mode == "ep":
        yield from expert_parallel_warnings(resolved)
    if config.checkpoint.initial_load_in_hf and training.load_balance_coeff:
        yield (
            f"training.load_balance_coeff = {training.load_balance_coeff}: router biases will move away from zero, and "
            f"published weights can't hold them; set it to 0 if the result is to be exported unchanged"
        )
    if training.stop_after and not config.checkpoint.enable:
        yield (
            f"training.stop_after = {training.stop_after}: what is trained until then is lost without "
            f"checkpoint.enable = true"
        )
    if schedule.warmup_steps > training.steps:
        yield (
            f"lr_scheduler.warmup_steps = {schedule.warmup_steps} is more than training.steps = {training.steps}: the "
            f"learning rate never reaches optimizer.lr"
        )
    if config.optimizer.name == "AdamW" and config.optimizer.momentum:
        yield f"optimizer.momentum = {config.optimizer.momentum} is for SGD and has no effect on AdamW"
    if config.parallelism.mode == "none":
        sources = resolved.sources.items()
        given = [key for key, source in sources if key.startswith("disagmoe.") and source == "command line"]
        given = [key for key in given if key != "disagmoe.microbatches"]  # cut there too, to save memory
        if given:
            yield f'{", ".join(given)}: no effect with parallelism.mode = "none"'


def find_launch_problems(resolved: ResolvedConfig, launch: Launch) -> Iterator[Problem]:
    """Whether the processes and devices asked for are those that the layout needs."""
    config = resolved.config
    world_size, needs = build_layout(config).world_size, describe_world_size(config)
    asked = launch.ngpu
    if asked is not None and asked * launch.nnodes != world_size:
        nodes = f" on each of NNODES = {launch.nnodes} nodes" if launch.nnodes > 1 else ""
        fix = (
            f"set NGPU={world_size // launch.nnodes}"
            if world_size % launch.nnodes == 0
            else f"choose NNODES so that it divides {world_size}"
        )
        if config.parallelism.mode != "none":
            section = "expert_parallel" if config.parallelism.mode == "ep" else "disagmoe"
            fix += f", or change [{section}] to a layout of {asked * launch.nnodes}"
        rule = f"processes{nodes} make {asked * launch.nnodes}, but {needs}"
        yield Problem(origin="environment", key="NGPU", value=asked, rule=rule, fix=fix)
        return
    if world_size % launch.nnodes:
        rule = f"must divide the number of processes: {needs}"
        yield Problem(origin="environment", key="NNODES", value=launch.nnodes, rule=rule)
        return
    local = world_size // launch.nnodes
    backend = config.comm.backend
    if backend == "nccl" and launch.num_gpus == 0:
        rule = "needs CUDA devices that torch can use, and this machine has none"
        yield resolved.problem("comm.backend", rule, fix='set it to "gloo" or "auto" to train on the CPU')
    elif backend != "gloo" and 0 < launch.num_gpus < local:
        rule = f"uses one GPU a process: {local} are started on this node, which has {launch.num_gpus}"
        fix = "choose a smaller layout, spread it over NNODES nodes, or train on the CPU with --comm.backend=gloo"
        yield resolved.problem("comm.backend", rule, fix=fix)


def describe_world_size(config: Config) -> str:
    """In words, e.g. `the layout needs 3 processes = replicas 1 x (attn_depth 1 x attn_workers 2 + ...)`."""
    part = config.disagmoe
    if config.parallelism.mode == "none":
        return 'parallelism.mode = "none" trains in 1 process'
    world_size = build_layout(config).world_size
    if config.parallelism.mode == "ep":
        ep = config.expert_parallel
        return (
            f"the layout needs {world_size} processes = replicas {ep.replicas} x pipeline_depth {ep.pipeline_depth} x "
            f"expert_workers {ep.expert_workers}"
        )
    if part.colocate:
        return f"the layout needs {world_size} processes, one a replica (disagmoe.colocate = true)"
    return (
        f"the layout needs {world_size} processes = replicas {part.replicas} x (attn_depth {part.attn_depth} x "
        f"attn_workers {part.attn_workers} + ffn_depth {part.ffn_depth} x ffn_workers {part.ffn_workers})"
    )
