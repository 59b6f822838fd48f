"""Which A-group holds which A-stage: rules for `[disagmoe] attn_placement`, and advice where groups are uneven."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from disagmoe.config.errors import Problem
from disagmoe.config.load import ResolvedConfig
from disagmoe.layout import Layout, Role, build_stages
from disagmoe.shapes import ModelShape

WORTHWHILE = 1.15
"""A placement is advised if the heaviest A-group has that many times the work that it would leave it."""


def placement_problems(resolved: ResolvedConfig, shape: ModelShape | None) -> Iterator[Problem]:
    """Whether a placement names the A-groups there are, and all A-stages have a place."""
    part, key = resolved.config.disagmoe, "disagmoe.attn_placement"
    if not part.attn_placement:
        return
    if set(part.attn_placement) != set(range(part.attn_depth)):
        rule = (
            f"must name each A-group from 0 to {part.attn_depth - 1} at least once and no other "
            f"(disagmoe.attn_depth = {part.attn_depth})"
        )
        fix = f"leave it out, or set attn_depth = {max(part.attn_placement) + 1}"
        yield resolved.problem(key, rule, fix=fix)
    elif shape is not None and any(shape.is_moe_layer) and len(part.attn_placement) != sum(shape.is_moe_layer) + 1:
        num_moe = sum(shape.is_moe_layer)
        rule = (
            f"has {len(part.attn_placement)} entries and must have {num_moe + 1}: an A-group for the attention of each "
            f"of the {num_moe} MoE layers of {shape.name}, and one for the head"
        )
        yield resolved.problem(key, rule)


def placement_warnings(layout: Layout, shape: ModelShape, seq_len: int) -> Iterator[str]:
    """A-groups with very different work, with the placement that evens it out if there is one."""
    stages = build_stages(layout, shape.is_moe_layer)
    held = [sum(s.role is Role.FFN and s.group == g for s in stages) for g in range(layout.ffn_depth)]
    if max(held) >= 2 * min(held):
        yield f"F-groups hold {' / '.join(map(str, held))} stages: the largest one sets the pace"
    work = attention_stage_flops(shape, seq_len)
    now = max(_loads(work, [s.group for s in stages if s.role is Role.ATTN], layout.attn_depth))
    better = balanced_placement(work, layout.attn_depth)
    then = max(_loads(work, better, layout.attn_depth))
    if now >= WORTHWHILE * then:
        mean = sum(work) / layout.attn_depth
        yield (
            f"the heaviest A-group has {now / mean:.2f} times the work of the average one and sets the pace; with "
            f"disagmoe.attn_placement = {list(better)} it would have {then / mean:.2f} times"
        )


def attention_stage_flops(shape: ModelShape, seq_len: int) -> tuple[int, ...]:
    """Forward FLOPs a sequence of each A-stage, the one with the head last (the embedding has none)."""
    stages = build_stages(Layout(attn_depth=1, ffn_depth=1, attn_workers=1, ffn_workers=1), shape.is_moe_layer)
    work = []
    for stage in (s for s in stages if s.role is Role.ATTN):
        held = [*stage.dense_layers, *([] if stage.moe_layer is None else [stage.moe_layer])]
        flops = sum(shape.layers[i].attention_flops(shape.dim, seq_len) for i in held)
        work.append(flops + (seq_len * shape.head_flops if stage.has_head else 0))
    return tuple(work)


def balanced_placement(work: Sequence[float], depth: int) -> tuple[int, ...]:
    """A-group of each A-stage: stages go to the group with least work so far, the heaviest first.

    Equal stages keep the model's order, so that neighbours go to different groups. Groups are numbered by their first
    stage. Every group gets one if there are as many stages.

    >>> balanced_placement([3, 1, 1, 1, 1, 1], 3)
    (0, 1, 2, 1, 2, 1)
    """
    groups = [0] * len(work)
    loads = [0.0] * depth
    counts = [0] * depth
    for stage in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        group = min(range(depth), key=lambda g: (loads[g], counts[g], g))
        groups[stage] = group
        loads[group] += work[stage]
        counts[group] += 1
    number: dict[int, int] = {}
    return tuple(number.setdefault(group, len(number)) for group in groups)


def _loads(work: Sequence[float], groups: Sequence[int], depth: int) -> list[float]:
    return [sum(w for w, owner in zip(work, groups, strict=True) if owner == group) for group in range(depth)]
