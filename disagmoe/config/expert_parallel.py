"""Rules for `[expert_parallel]`: what keeps such a run from being started, and what was hardly meant."""

from __future__ import annotations

from collections.abc import Iterator

from disagmoe.config.errors import Problem
from disagmoe.config.load import ResolvedConfig
from disagmoe.shapes import ModelShape


def expert_parallel_problems(resolved: ResolvedConfig, shape: ModelShape) -> Iterator[Problem]:
    """Whether model, pipeline order and overlap fit together."""
    part = resolved.config.expert_parallel
    if not any(shape.is_moe_layer):
        rule = "has no mixture-of-experts layer, so there are no experts to spread"
        yield resolved.problem("recipe.flavor", rule, fix='set parallelism.mode = "none"')
        return
    experts = min(layer.moe.num_experts for layer in shape.layers if layer.is_moe)
    if part.expert_workers > experts:
        rule = f"must be at most {experts}, the number of experts of {shape.name}: each worker holds at least one"
        yield resolved.problem("expert_parallel.expert_workers", rule)
    num_layers, chunks = len(shape.layers), part.pipeline_depth * part.chunks_per_rank
    if part.pipeline_depth > num_layers:
        rule = f"must be at most {num_layers}, the number of layers of {shape.name}: each pipeline rank holds one"
        yield resolved.problem("expert_parallel.pipeline_depth", rule)
    elif chunks > num_layers:
        rule = (
            f"makes {chunks} chunks with expert_parallel.pipeline_depth = {part.pipeline_depth}, but {shape.name} has "
            f"{num_layers} layers: each chunk holds at least one"
        )
        fix = f"set chunks_per_rank = {num_layers // part.pipeline_depth}"
        yield resolved.problem("expert_parallel.chunks_per_rank", rule, fix=fix)
    yield from _order_problems(resolved)


def _order_problems(resolved: ResolvedConfig) -> Iterator[Problem]:
    part = resolved.config.expert_parallel
    depth = part.pipeline_depth
    if part.overlap == "dual_pipe_v":
        if part.chunks_per_rank != 2:
            rule = 'must be 2 with expert_parallel.overlap = "dual_pipe_v": a way down and a way up'
            yield resolved.problem("expert_parallel.chunks_per_rank", rule, fix="set chunks_per_rank = 2")
        if part.microbatches < 2 * depth:
            rule = (
                f'must be at least {2 * depth} with expert_parallel.overlap = "dual_pipe_v", twice pipeline_depth = '
                f"{depth}: fewer do not fill the V"
            )
            yield resolved.problem("expert_parallel.microbatches", rule, fix=f"set microbatches = {2 * depth}")
    elif part.chunks_per_rank > 1 and part.microbatches % depth:
        near = -(-part.microbatches // depth) * depth
        rule = (
            f"must be a multiple of expert_parallel.pipeline_depth = {depth} when chunks_per_rank = "
            f"{part.chunks_per_rank} are interleaved"
        )
        yield resolved.problem("expert_parallel.microbatches", rule, fix=f"set microbatches = {near}")
    if part.overlap == "chunked" and part.num_chunks < 2:
        rule = 'must be at least 2 with expert_parallel.overlap = "chunked": one part overlaps with nothing'
        yield resolved.problem("expert_parallel.num_chunks", rule, fix='set num_chunks = 2 or overlap = "none"')


def expert_parallel_warnings(resolved: ResolvedConfig) -> Iterator[str]:
    """What can be run but was hardly meant."""
    part, training = resolved.config.expert_parallel, resolved.config.training
    smallest = training.global_batch_size // part.replicas // part.microbatches
    if part.expert_workers > smallest:
        yield (
            f"expert_parallel.expert_workers = {part.expert_workers} but a micro-batch has as few as {smallest} "
            f"samples: some workers have no attention to compute in some micro-batches (samples are not cut)"
        )
    if part.overlap != "chunked" and resolved.sources.get("expert_parallel.num_chunks", "default") != "default":
        yield f'expert_parallel.num_chunks: no effect with expert_parallel.overlap = "{part.overlap}"'
