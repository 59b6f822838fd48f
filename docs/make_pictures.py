"""Draw the README's pictures from the project's own objects: `python docs/make_pictures.py [FOLDER]`.

Needs matplotlib. layout.png: the workers, groups and transfers of a small `Layout`. schedule.png: *plain* and *deep*
as a time grid, from real `Schedule` objects timed with uniform costs. The timing here (`start_times`) knows compute
and a fixed transfer time only: no bandwidth, no sharing of a NIC.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from disagmoe.layout import Layout, Role, Stage, build_stages
from disagmoe.schedules import Action, Kind, Schedule, make_schedule
from disagmoe.schedules.dependencies import Message, input_of, output_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {Role.ATTN: ("#3b76af", "#a9c8e6"), Role.FFN: ("#c8641e", "#f3c195")}
"""By role: forward, backward."""
IDLE = "#ececec"


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Uniform costs, in any one unit."""

    forward: float = 1.0
    backward: float = 2.0
    """Of a full backward; each half of a split one takes half of it."""
    hop: float = 0.0
    head: float = 1.0
    """The last stage's compute as a share of an average stage's."""

    def of(self, action: Action, num_stages: int) -> float:
        share = self.head if action.stage == num_stages - 1 else 1.0
        if action.kind is Kind.FORWARD:
            return self.forward * share
        return self.backward * share * (1.0 if action.kind is Kind.FULL_BACKWARD else 0.5)


DRAWN = Durations(forward=1.0, backward=2.0, hop=0.6, head=0.0)


def start_times(schedule: Schedule, durations: Durations) -> dict[Action, float]:
    """When each compute action starts if every group follows its order and each transfer takes `hop`."""
    starts: dict[Action, float] = {}
    arrived: dict[Message, float] = {}
    free = [0.0] * schedule.num_groups
    position = [0] * schedule.num_groups
    while any(position[g] < len(order) for g, order in enumerate(schedule.compute)):
        for group, order in enumerate(schedule.compute):
            while position[group] < len(order):
                action = order[position[group]]
                needed = input_of(action, schedule.num_stages)
                if needed is not None and needed not in arrived:
                    break
                starts[action] = max(free[group], 0.0 if needed is None else arrived[needed])
                free[group] = starts[action] + durations.of(action, schedule.num_stages)
                made = output_of(action, schedule.num_stages)
                if made is not None:
                    arrived[made] = free[group] + durations.hop
                position[group] += 1
    return starts


def makespan(schedule: Schedule, durations: Durations) -> float:
    """The end of the last compute action."""
    starts = start_times(schedule, durations)
    return max(start + durations.of(action, schedule.num_stages) for action, start in starts.items())


def draw_schedule(path: Path) -> None:
    """Time grid of plain above deep."""
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    layout = Layout(attn_depth=2, ffn_depth=2, attn_workers=2, ffn_workers=2)
    num_layers, num_microbatches = 4, 16
    schedules = [
        make_schedule(layout, [True] * num_layers, name=name, num_microbatches=num_microbatches)
        for name in ("plain", "deep")
    ]
    figure, axes = pyplot.subplots(2, 1, figsize=(15, 6.6), sharex=True)
    for axis, schedule in zip(axes, schedules, strict=True):
        _draw_grid(axis, schedule, layout)
        work = max(sum(DRAWN.of(a, schedule.num_stages) for a in order) for order in schedule.compute)
        end = makespan(schedule, DRAWN)
        title = f"{schedule.name}: {end:.1f} f, of which each group computes for {work:.0f} f ({work / end:.0%})"
        axis.set_title(title, loc="left", fontsize=13)
    axes[1].set_xlabel("time, in forwards of one stage (f); numbers are micro-batches", fontsize=11)
    axes[0].set_xlim(0, max(makespan(s, DRAWN) for s in schedules) * 1.005)
    legend = [
        Patch(color=COLOURS[role][backward], label=f"{name} {'backward' if backward else 'forward'}")
        for role, name in ((Role.ATTN, "attention"), (Role.FFN, "experts"))
        for backward in (False, True)
    ]
    legend.append(Patch(facecolor=IDLE, label="idle"))
    figure.legend(handles=legend, loc="lower left", bbox_to_anchor=(0.02, 0), ncols=5, frameon=False, fontsize=11)
    figure.suptitle(
        f"$p_A = p_F = 2$, {num_layers} MoE layers, {num_microbatches} micro-batches; backward {DRAWN.backward:.0f} f, "
        f"transfer c = {DRAWN.hop} f a hop, the head's time left out",
        x=0.025,
        ha="left",
        fontsize=12,
    )
    figure.tight_layout(rect=(0, 0.05, 1, 0.99))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_grid(axis: Axes, schedule: Schedule, layout: Layout) -> None:
    starts, end = start_times(schedule, DRAWN), makespan(schedule, DRAWN)
    rows = list(_rows(layout))
    for row, (role, group) in enumerate(rows):
        axis.barh(row, end, height=0.84, color=IDLE)
        for action in schedule.compute[layout.pipeline_group(role, group)]:
            width = DRAWN.of(action, schedule.num_stages)
            if not width:
                continue
            backward = action.kind is not Kind.FORWARD
            colour, ink = COLOURS[role][backward], "black" if backward else "white"
            axis.barh(row, width, left=starts[action], height=0.84, color=colour, edgecolor="white", linewidth=0.5)
            middle = starts[action] + width / 2
            axis.text(middle, row, str(action.microbatch), ha="center", va="center", fontsize=7, color=ink)
    axis.set_yticks(range(len(rows)), [f"{role.letter}$_{group}$" for role, group in rows], fontsize=13)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.axvline(end, color="black", linewidth=1.2)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.tick_params(axis="y", length=0)


def _rows(layout: Layout) -> Iterator[tuple[Role, int]]:
    """Groups in ring order: A0 F0 A1 F1 ..."""
    for group in range(max(layout.attn_depth, layout.ffn_depth)):
        for role in Role:
            if group < layout.depth_of(role):
                yield role, group


def draw_layout(path: Path) -> None:
    """Two A-groups of two workers above two F-groups of two, with what each holds and the four hops of the ring."""
    from matplotlib import pyplot

    layout = Layout(attn_depth=2, ffn_depth=2, attn_workers=2, ffn_workers=2)
    stages = build_stages(layout, [True] * 4)
    figure, axis = pyplot.subplots(figsize=(11, 6.0))
    for role, centre in ((Role.ATTN, 3.4), (Role.FFN, 0.0)):
        for group in range(layout.depth_of(role)):
            own = [stage for stage in stages if stage.role is role and stage.group == group]
            _draw_group(axis, layout, own, left=0.3 + 5.4 * group, centre=centre)
    _draw_hops(axis)
    axis.set_xlim(0, 10)
    axis.set_ylim(-1.85, 4.6)
    axis.axis("off")
    axis.set_title(
        "$p_A = 2$ attention groups of $M = 2$ workers, $p_F = 2$ expert groups of $N = 2$; forward pass, 4 MoE layers",
        fontsize=12,
        loc="left",
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_group(axis: Axes, layout: Layout, own: Sequence[Stage], *, left: float, centre: float) -> None:
    """One group, with its stages `own`, as a box with its workers in it."""
    role, group = own[0].role, own[0].group
    dark, light = COLOURS[role]
    _round_box(axis, left, centre - 0.88, 4.0, 1.9 if role is Role.ATTN else 1.6, light, dark)
    layers = " and ".join(str(stage.moe_layer) for stage in own if stage.moe_layer is not None)
    attention = role is Role.ATTN
    lines = [f"{role.letter}$_{group}$: {'attention and router' if attention else 'experts'} of layers {layers}"]
    if any(stage.has_embedding for stage in own):
        lines.append("embedding")
    if any(stage.has_head for stage in own):
        lines.append("head and loss")
    axis.text(left + 2, centre + 0.45, lines[0], ha="center", va="center", fontsize=12, weight="bold")
    if len(lines) > 1:
        axis.text(left + 2, centre + 0.76, ", ".join(lines[1:]), ha="center", va="center", fontsize=11)
    for worker in (w for w in layout.workers if w.role is role and w.group == group):
        x = left + 0.1 + 2.0 * worker.index
        _round_box(axis, x, centre - 0.8, 1.8, 0.92, dark, dark)
        half = ("first", "second")[worker.index]
        holds = f"{half} half of each\nmicro-batch" if attention else f"{half} half of each\nlayer's experts"
        text = f"rank {layout.rank_of(worker)}\n{holds}"
        axis.text(x + 0.9, centre - 0.34, text, ha="center", va="center", fontsize=10, color="white")


def _round_box(axis: Axes, left: float, bottom: float, width: float, height: float, face: str, edge: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0.05"
    axis.add_patch(FancyBboxPatch((left, bottom), width, height, boxstyle=style, facecolor=face, edgecolor=edge))


def _draw_hops(axis: Axes) -> None:
    """The ring A0 -> F0 -> A1 -> F1 -> A0, each hop from all workers of one group to all workers of the next."""
    top, bottom = 2.42, 0.82
    hops = (
        (Role.ATTN, (1.2, top), (1.2, bottom), (0.25, 1.62), "1  M2N"),
        (Role.FFN, (3.4, bottom), (6.6, top), (3.35, 1.16), "2  N2M"),
        (Role.ATTN, (8.8, top), (8.8, bottom), (8.95, 1.62), "3  M2N"),
        (Role.FFN, (6.6, bottom), (3.4, top), (6.65, 1.16), "4  N2M"),
    )
    for role, start, end, (x, y), label in hops:
        colour = COLOURS[role][0]
        arrow = {"arrowstyle": "-|>", "linewidth": 2.4, "mutation_scale": 20, "shrinkA": 0, "shrinkB": 0}
        axis.annotate("", end, start, arrowprops={**arrow, "color": colour})
        align = "right" if x == 3.35 else "left"
        axis.text(x, y, label, ha=align, va="center", fontsize=12, color=colour, weight="bold")
    notes = (
        (Role.ATTN, -1.3, "M2N: a token's hidden state goes once to each worker that has experts for it"),
        (Role.FFN, -1.66, "N2M: weighted sums of the experts' outputs go home to the worker that owns the token"),
    )
    for role, y, note in notes:
        axis.text(0.25, y, note, ha="left", va="center", fontsize=11, color=COLOURS[role][0])


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    import matplotlib

    matplotlib.use("Agg")
    draw_layout(folder / "layout.png")
    draw_schedule(folder / "schedule.png")


if __name__ == "__main__":
    main()
