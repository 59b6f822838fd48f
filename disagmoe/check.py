"""`disagmoe check`: what a configuration means, without starting it. Imports no torch.

Memory is an estimate from shapes: parameters, gradients and optimizer states exactly; activations as in `memory`, with
experts loaded equally and fused attention. Workspaces,
communication buffers and fragmentation are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from disagmoe.check_expert_parallel import count_text as _count
from disagmoe.check_expert_parallel import expert_parallel_lines, ranges_text
from disagmoe.check_expert_parallel import size_text as _bytes
from disagmoe.config.checks import build_layout, check_config, describe_world_size, model_shape
from disagmoe.config.errors import ConfigError
from disagmoe.config.load import ResolvedConfig
from disagmoe.config.schema import Config
from disagmoe.layout import Layout, Role, Stage, Worker, build_stages, split_evenly
from disagmoe.memory import Execution, Rows, attention_kept_bytes, expert_kept_bytes, head_passing_bytes
from disagmoe.schedules import Action, Kind, Schedule, make_schedule, peak_microbatches
from disagmoe.schedules.dependencies import Message, input_of
from disagmoe.shapes import ModelShape
from disagmoe.simulator.profile import Profile

BYTES = {"float32": 4, "bfloat16": 2}
GRID_COLUMNS = 24
"""Time slots of the schedule that are drawn."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A configuration with all that follows from it before any process starts."""

    resolved: ResolvedConfig
    shape: ModelShape
    layout: Layout
    stages: tuple[Stage, ...]
    schedule: Schedule | None
    """None for `mode = "none"` and `"ep"`, and where it was not asked for."""
    warnings: tuple[str, ...]

    @property
    def config(self) -> Config:
        return self.resolved.config


def make_plan(resolved: ResolvedConfig, *, with_schedule: bool = True) -> Plan:
    """Check a configuration and make its schedule, which can take some seconds for *fitted*.

    Raises:
        ConfigError: with every problem found.
    """
    warnings = check_config(resolved)
    config, part = resolved.config, resolved.config.disagmoe
    shape, layout = model_shape(config), build_layout(config)
    schedule = None
    if config.parallelism.mode == "disagmoe" and with_schedule:
        try:
            costs = Profile.load(part.costs).costs() if part.costs else None
            schedule = make_schedule(layout, shape.is_moe_layer, costs=costs, **part.schedule_options())
        except ValueError as error:
            raise ConfigError([resolved.problem("disagmoe.schedule", str(error))]) from error
    return Plan(
        resolved=resolved,
        shape=shape,
        layout=layout,
        stages=build_stages(layout, shape.is_moe_layer),
        schedule=schedule,
        warnings=tuple(warnings),
    )


def report(plan: Plan, *, processes_per_node: int | None = None) -> str:
    """The layout in words: model, workers with what they hold and need, and the schedule's first actions."""
    config, shape = plan.config, plan.shape
    lines = [
        f"model     {shape.name}: {len(shape.layers)} layers, {sum(shape.is_moe_layer)} of them MoE, "
        f"{_count(shape.num_params)} parameters ({_count(shape.num_active_params)} active)",
        f"batch     {config.training.global_batch_size} samples of {config.training.seq_len} tokens a step, "
        f"{config.training.dtype}, {config.training.steps} steps",
        f"output    {config.dump_folder}",
    ]
    if config.parallelism.mode == "ep":
        state_bytes = state_bytes_a_parameter(config)
        return "\n".join([*lines, *expert_parallel_lines(config, shape, state_bytes, processes_per_node)])
    if plan.schedule is None:
        state = _bytes(shape.num_params * state_bytes_a_parameter(config))
        lines.append(
            f"layout    one process trains the unsplit model; parameters, gradients and optimizer take {state}"
        )
        return "\n".join(lines)
    lines += [f"layout    {describe_world_size(config).removeprefix('the layout needs ')}", ""]
    lines += _worker_lines(plan, processes_per_node)
    lines += [
        "(samples of a micro-batch; state: parameters, gradients, optimizer; activations: an estimate of their peak, "
        "on F-workers also when every micro-batch sends one of them [comm] imbalance_factor times its share)"
    ]
    lines += ["", *_schedule_lines(plan.schedule, plan.layout)]
    return "\n".join(lines)


def _worker_lines(plan: Plan, processes_per_node: int | None) -> Iterator[str]:
    """A paragraph a group: what it holds, then a line a worker."""
    layout = plan.layout
    assert plan.schedule is not None
    for role in Role:
        for group in range(layout.depth_of(role)):
            held = [s for s in plan.stages if s.role is role and s.group == group]
            yield f"{role.letter}{group} holds {_describe_stages(held)}"
            for worker in (w for w in layout.workers if w.role is role and w.group == group):
                rank = layout.rank_of(worker)
                node = "" if processes_per_node is None else f" node {rank // processes_per_node:<3}"
                params = sum(stage_params(plan, stage, worker.index) for stage in held)
                state = params * state_bytes_a_parameter(plan.config)
                activations = f"{_bytes(peak_activation_bytes(plan, worker)):>9} activations"
                if role is Role.FFN:
                    load = plan.config.comm.imbalance_factor
                    activations += f", {_bytes(peak_activation_bytes(plan, worker, load=load))} at {load:g}x load"
                yield (
                    f"  {worker!s:<10} rank {rank:<4}{node} {_share(plan, held, worker):<17} "
                    f"{_count(params):>9} parameters  {_bytes(state):>9} state  {activations}"
                )


def _share(plan: Plan, held: Sequence[Stage], worker: Worker) -> str:
    """Samples of a micro-batch, or experts of a layer, that a worker has."""
    if worker.role is Role.ATTN:
        mine, total = _samples(plan, worker.index), _microbatch_samples(plan.config)
        return f"{mine} of {total} samples"
    sizes = {experts_of(plan, stage.moe_layer, worker.index) for stage in held if stage.moe_layer is not None}
    return "experts " + " / ".join(f"{e.start}-{e.stop - 1}" for e in sorted(sizes, key=lambda e: e.start))


def experts_of(plan: Plan, layer: int, index: int) -> range:
    """Global ids of the experts of `layer` on worker `index` of its F-group."""
    return split_evenly(plan.shape.layers[layer].moe.num_experts, plan.layout.ffn_workers)[index]


def _describe_stages(stages: Sequence[Stage]) -> str:
    parts = ["embedding"] if any(stage.has_embedding for stage in stages) else []
    dense = [layer for stage in stages for layer in stage.dense_layers]
    parts += [f"dense layers {ranges_text(dense)}"] if dense else []
    moe = [stage.moe_layer for stage in stages if stage.moe_layer is not None]
    kind = "attention" if stages and stages[0].role is Role.ATTN else "experts"
    parts += [f"{kind} of layers {ranges_text(moe)}"] if moe else []
    parts += ["head"] if any(stage.has_head for stage in stages) else []
    return ", ".join(parts)


def stage_params(plan: Plan, stage: Stage, index: int) -> int:
    """Parameters of `stage` on worker `index` of its group."""
    shape = plan.shape
    if stage.role is Role.FFN:
        assert stage.moe_layer is not None
        experts = experts_of(plan, stage.moe_layer, index)
        return shape.layers[stage.moe_layer].expert_sublayer_params(shape.dim, len(experts))
    count = sum(shape.layers[layer].num_params(shape.dim) for layer in stage.dense_layers)
    if stage.moe_layer is not None:
        count += shape.layers[stage.moe_layer].attention_sublayer_params(shape.dim)
    return count + stage.has_embedding * shape.embedding_params + stage.has_head * shape.head_params


def state_bytes_a_parameter(config: Config) -> int:
    """Bytes a parameter: itself, its gradient, and the optimizer's states, all in the training dtype."""
    states = 2 if config.optimizer.name == "AdamW" else int(config.optimizer.momentum > 0)
    return (2 + states) * BYTES[config.training.dtype]


def _microbatch_samples(config: Config) -> int:
    """Samples of the largest micro-batch."""
    share = -(-config.training.global_batch_size // config.disagmoe.replicas)
    return -(-share // config.disagmoe.microbatches)


def _samples(plan: Plan, index: int) -> int:
    """Samples of the largest micro-batch that A-worker `index` owns."""
    return len(split_evenly(_microbatch_samples(plan.config), plan.layout.attn_workers)[index])


def peak_activation_bytes(plan: Plan, worker: Worker, *, load: float = 1.0) -> int:
    """Most bytes of activations at a time: forwards of the worker's stages whose backward is still to come.

    load: how many times the average number of rows an F-worker receives, in every micro-batch.
    """
    assert plan.schedule is not None
    group = plan.layout.pipeline_group(worker.role, worker.group)
    own = [s for s in plan.stages if s.role is worker.role and s.group == worker.group]
    size = {stage.index: activation_bytes(plan, stage, worker.index, load=load) for stage in own}
    alive = peak = 0
    for action in plan.schedule.compute[group]:
        if action.kind is Kind.FORWARD:
            alive += size.get(action.stage, 0)
            peak = max(peak, alive)
        elif action.kind is not Kind.BACKWARD_INPUT:
            alive -= size.get(action.stage, 0)
    return peak


def activation_bytes(plan: Plan, stage: Stage, index: int, *, load: float = 1.0) -> int:
    """Bytes that one micro-batch keeps on worker `index` between forward and backward of `stage`, with its logits."""
    config, shape = plan.config, plan.shape
    how = Execution(
        width=BYTES[config.training.dtype],
        recompute_attention=config.disagmoe.recompute == "full",
        recompute_experts=config.disagmoe.recompute != "none",
    )
    if stage.role is Role.FFN:
        assert stage.moe_layer is not None
        return round(expert_kept_bytes(shape, shape.layers[stage.moe_layer].moe, _rows(plan, stage, index, load), how))
    samples, length = _samples(plan, index), config.training.seq_len
    held = (*stage.dense_layers, *([] if stage.moe_layer is None else [stage.moe_layer]))
    size = sum(attention_kept_bytes(shape, shape.layers[i], samples, length, how) for i in held)
    return round(size + (head_passing_bytes(shape, samples * length, how) if stage.has_head and samples else 0))


def _rows(plan: Plan, stage: Stage, index: int, load: float) -> Rows:
    """What F-worker `index` receives of one micro-batch; primary rows are dealt out equally."""
    assert stage.moe_layer is not None
    workers, moe = plan.layout.ffn_workers, plan.shape.layers[stage.moe_layer].moe
    tokens = _microbatch_samples(plan.config) * plan.config.training.seq_len
    share = len(experts_of(plan, stage.moe_layer, index)) / moe.num_experts
    # A token is here when at least one of its K experts is.
    return Rows(
        rows=tokens * min(1.0, load * max(1 - (1 - share) ** moe.top_k, 1 / workers)),
        pairs=tokens * moe.top_k * min(1.0, load * share),
        primary=tokens / workers,
    )


def _schedule_lines(schedule: Schedule, layout: Layout) -> list[str]:
    """Name, depth in flight and the first actions of each group on a common clock."""
    lines = [
        f"schedule  {schedule.name}: {schedule.num_microbatches} micro-batches through {schedule.num_stages} stages, "
        f"at most {peak_microbatches(schedule)} in flight",
        f"          the first {GRID_COLUMNS} slots of time; 3F0: forward of stage 3, micro-batch 0; B: backward, two",
    ]
    names = [f"{role.letter}{group}" for role in Role for group in range(layout.depth_of(role))]
    rows = time_grid(schedule, GRID_COLUMNS)
    width = max(len(cell) for row in rows for cell in row) + 1
    for name, row in zip(["all"] if layout.colocate else names, rows, strict=True):
        lines.append(f"  {name:<4}" + "".join(f"{cell:<{width}}" for cell in row).rstrip())
    return lines


def time_grid(schedule: Schedule, num_slots: int) -> list[list[str]]:
    """By group: what runs in each of the first time slots, when a forward takes one and a full backward two.

    Transfers take no time here. `.` is an idle slot, `=` the second half of a backward.
    """
    end: dict[Action, int] = {}
    rows: list[list[str]] = [[] for _ in range(schedule.num_groups)]
    position = [0] * schedule.num_groups
    moved = True
    while moved:
        moved = False
        for group, compute in enumerate(schedule.compute):
            row = rows[group]
            while position[group] < len(compute) and len(row) < num_slots:
                action = compute[position[group]]
                ready = _ready(input_of(action, schedule.num_stages), end)
                if ready is None:
                    break
                row += ["."] * (ready - len(row)) + [str(action)] + ["="] * (action.kind is Kind.FULL_BACKWARD)
                end[action] = len(row)
                position[group] += 1
                moved = True
    return [(row + ["."] * num_slots)[:num_slots] for row in rows]


def _ready(message: Message | None, end: Mapping[Action, int]) -> int | None:
    """Slot from which `message` is there; None: not before what is drawn so far."""
    if message is None:
        return 0
    makers = (Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT) if message.backward else (Kind.FORWARD,)
    actions = (Action(kind, message.sender, message.microbatch) for kind in makers)
    return next((end[action] for action in actions if action in end), None)
