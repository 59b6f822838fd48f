"""Simulations as a table, a picture and a trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from disagmoe.schedules import Kind
from disagmoe.simulator.network import LEG_NAMES
from disagmoe.simulator.result import Result
from disagmoe.simulator.systems import SystemRun
from disagmoe.trace import Event, write_chrome_trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    Kind.FORWARD: "#4c78a8",
    Kind.FULL_BACKWARD: "#54a24b",
    Kind.BACKWARD_INPUT: "#54a24b",
    Kind.BACKWARD_WEIGHT: "#b5cf6b",
}
EXPOSED_COLOUR, LINK_COLOUR = "#e45756", "#f2a65a"
HEADER = (
    "system", "plan", "recompute", "tokens/s/GPU", "step s", "compute", "exposed", "idle", "gradients",
    "NIC send", "NIC recv", "GB",
)  # fmt: skip


def table_rows(runs: Sequence[SystemRun]) -> list[tuple[str, ...]]:
    """A row a system, as text, under `HEADER`. Shares are of the step, averages over workers; NIC: of the busiest one.

    `exposed`: compute engines wait for payloads under way. `GB`: state and activations of the fullest worker; `!` where
    it is more than a GPU has.
    """
    rows = []
    for run in runs:
        result, share = run.result, run.result.makespan_s / run.step_s
        shares = (result.compute_share, result.exposed_share, result.idle_share)
        nics = (max(use.nic_send_s for use in result.uses), max(use.nic_recv_s for use in result.uses))
        rows.append(
            (
                run.system,
                run.plan,
                run.recompute,
                f"{run.tokens_per_s_per_gpu:,.0f}",
                f"{run.step_s:.3f}",
                *(f"{value * share:.1%}" for value in shares),
                f"{1 - share:.1%}",
                *(f"{busy / run.step_s:.0%}" for busy in nics),
                f"{run.peak_bytes / 1e9:.1f}{'' if run.fits else ' !'}",
            )
        )
    return rows


def as_text(rows: Sequence[Sequence[str]], header: Sequence[str] = HEADER) -> str:
    """Aligned columns, numbers to the right."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = (
        "  ".join(
            cell.ljust(width) if i < 3 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
    return "\n".join(text)


def as_markdown(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def events_of(result: Result) -> dict[int, list[Event]]:
    """By unit: compute, the waits before it, and what its links carried."""
    names = [str(_message_name(result, number)) for number in range(len(result.handover_s))]
    events: dict[int, list[Event]] = {unit: [] for unit in range(len(result.group_of_unit))}
    for unit, spans in enumerate(result.compute_spans):
        for span in spans:
            begun = span.start_s - span.exposed_comm_s
            if span.exposed_comm_s > 0:
                events[unit].append(Event(str(span.action), "exposed communication", begun, span.start_s, {}))
            if span.idle_s > 0:
                events[unit].append(Event(str(span.action), "idle", begun - span.idle_s, begun, {}))
            events[unit].append(Event(str(span.action), "compute", span.start_s, span.end_s, {}))
    for link in result.link_spans:
        category = f"{LEG_NAMES[link.leg]} {'send' if link.sending else 'receive'}"
        events[link.unit].append(Event(names[link.message], category, link.start_s, link.end_s, {}))
    return events


def _message_name(result: Result, number: int) -> str:
    """E.g. `3SEND_F0`."""
    row, microbatch = divmod(number, result.schedule.num_microbatches)
    backward, stage = divmod(row, result.schedule.num_stages)
    return f"{stage + 1}SEND_B{microbatch}" if backward else f"{stage - 1}SEND_F{microbatch}"


def write_trace(result: Result, path: str | Path) -> None:
    """Chrome trace JSON: a process a worker."""
    names = {unit: result.unit_name(unit) for unit in range(len(result.group_of_unit))}
    write_chrome_trace(path, events_of(result), names)


def write_picture(runs: Sequence[SystemRun], path: str | Path) -> None:
    """PNG: a panel a system on a common clock, a row a worker; below each the use of its NIC's directions.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    heights = [len(run.result.uses) for run in runs]
    figure, axes = pyplot.subplots(
        len(runs), 1, figsize=(16, 0.42 * sum(heights) + 1.1 * len(runs) + 0.6), sharex=True, squeeze=False,
        gridspec_kw={"height_ratios": [height + 1 for height in heights]},
    )  # fmt: skip
    for run, axis in zip(runs, axes[:, 0], strict=True):
        _draw(run.result, axis)
        axis.set_title(
            f"{run.system}: {run.plan}, {run.tokens_per_s_per_gpu:,.0f} tokens/s/GPU", loc="left", fontsize=9
        )
    axes[-1, 0].set_xlabel("seconds")
    legend = {
        "forward": COLOURS[Kind.FORWARD],
        "backward": COLOURS[Kind.FULL_BACKWARD],
        "weight gradient": COLOURS[Kind.BACKWARD_WEIGHT],
        "exposed communication": EXPOSED_COLOUR,
        "NIC send / receive": LINK_COLOUR,
    }
    handles = [Patch(color=colour, label=label) for label, colour in legend.items()]
    figure.legend(handles=handles, loc="lower center", ncol=len(handles), fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.35 / figure.get_figheight(), 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw(result: Result, axis: Axes) -> None:
    for unit, spans in enumerate(result.compute_spans):
        for kind, colour in COLOURS.items():
            bars = [(s.start_s, s.end_s - s.start_s) for s in spans if s.action.kind is kind]
            axis.broken_barh(bars, (unit - 0.1, 0.5), facecolors=colour, linewidth=0)
        waits = [(s.start_s - s.exposed_comm_s, s.exposed_comm_s) for s in spans if s.exposed_comm_s > 0]
        axis.broken_barh(waits, (unit - 0.1, 0.5), facecolors=EXPOSED_COLOUR, linewidth=0)
        for sending, bottom in ((True, -0.26), (False, -0.42)):
            bars = [
                (s.start_s, s.end_s - s.start_s)
                for s in result.link_spans
                if s.unit == unit and s.sending is sending and s.leg == 0
            ]
            axis.broken_barh(bars, (unit + bottom, 0.14), facecolors=LINK_COLOUR, linewidth=0)
    axis.set_yticks(range(len(result.group_of_unit)), [result.unit_name(u) for u in range(len(result.group_of_unit))])
    axis.tick_params(labelsize=7)
    axis.set_ylim(len(result.group_of_unit) - 0.4, -0.6)
    axis.set_xlim(left=0)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
