"""The generated part of docs/speed.md: a section a preset, with a table and a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.pages import insert
from benchmarks.side_by_side.preset import Preset
from benchmarks.side_by_side.summary import DEDUPLICATED, EQUAL


def section(preset: Preset, result: Mapping[str, Any]) -> str:
    """Markdown of a preset's result."""
    spec = preset.cluster
    rates = sorted({rate / 1e6 for rate in spec.nics_bit_per_s})
    lines = [
        f"## {preset.title}",
        "",
        preset.description,
        "",
        f"Preset `{preset.name}`: {spec.nodes} nodes x {spec.workers_per_node} workers, "
        f"{' / '.join(f'{rate:g}' for rate in rates)} Mbit/s, "
        f"{workers_text(preset)}; {rounds_text(result['num_rounds'])}. Made by:",
        "",
        "```",
        f"python -m benchmarks.side_by_side --preset {preset.name} --rounds {result['num_rounds']} --docs docs",
        "```",
        "",
        "| system | step, s | compute | exposed comm. | idle | transfers cost | sent, MB | peak memory, MB | "
        "tokens/s | simulated, s | ours is faster | at most |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, values in result["systems"].items():
        if name not in result["ratios"]:
            ratio, most = "", ""
        else:
            low, high = result["ratio_spread"][name]
            ratio, most = f"{result['ratios'][name]:.2f}x ({low:.2f} - {high:.2f})", f"{result['ceilings'][name]:.2f}x"
        simulated = f"{values['predicted_step_s']:.2f} ({values['predicted_error']:+.0%})"
        lines.append(
            f"| {values['title']}: {values['layout']} | {values['step_s']:.2f} | {values['compute_s']:.2f} | "
            f"{values['exposed_comm_s']:.2f} | {values['idle_s']:.2f} | {values['transfers_cost_s']:.2f} | "
            f"{values['sent_bytes'] / 1e6:.1f} | "
            f"{values['peak_memory_bytes'] / 1e6:.0f} | {values['tokens_per_s']:.0f} | {simulated} | {ratio} | {most} |"
        )
    lines += ["", f"![Compute, exposed communication and idle time of each system](speed_{preset.name}.png)", ""]
    systems = result["systems"]
    if EQUAL in systems:
        lines += [
            "The payload of de-duplicated expert parallelism at equal experts a worker takes, at the cards' rate, "
            f"{systems[EQUAL]['payload_wire_share']:.0%} of its step.",
            "",
        ]
    baseline = next((systems[name]["title"] for name in DEDUPLICATED if name in systems), "")
    for key, what in (
        ("exposed_cut", "Exposed communication is"),
        ("transfers_cost_cut", "What transfers add to the step, simulated, is"),
    ):
        if key in result:
            cut = result[key]
            lines += [f"{what} {abs(cut):.0%} {'less' if cut >= 0 else 'more'} than that of {baseline}.", ""]
    return "\n".join(lines)


def rounds_text(number: int) -> str:
    return "1 round" if number == 1 else f"{number} rounds"


def workers_text(preset: Preset) -> str:
    """How fast a preset's workers are."""
    if preset.speed < 1.0:
        return f"workers at {preset.speed:g} of a core's speed"
    return f"{' / '.join(f'{cpu:g}' for cpu in sorted(set(preset.cluster.cpus)))} cores a worker"


def tuning_section(preset: Preset) -> str:
    """Markdown of all that tuning a preset has tried, the fastest of each grid first."""
    tuned = preset.tuned()
    lines = [
        f"## What tuning `{preset.name}` tried",
        "",
        f"A launch each, made by `{tuned['command']}`. Ours is grid `af`; steps are compared with its fastest.",
        "",
        "| grid | layout | step, s | compute | exposed comm. | idle | sent, MB | simulated, s | step / ours |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    grids = tuned["grids"]
    ours = grids["af"]["tried"][0]["step_s"] if "af" in grids else None
    for name, grid in grids.items():
        for one in grid["tried"]:
            error = one["predicted_step_s"] / one["step_s"] - 1
            ratio = f"{one['step_s'] / ours:.2f}" if ours else ""
            lines.append(
                f"| {name} | {one['layout']} | {one['step_s']:.1f} | {one['compute_s']:.1f} | "
                f"{one['exposed_comm_s']:.1f} | {one['idle_s']:.1f} | {one['sent_bytes'] / 1e6:.0f} | "
                f"{one['predicted_step_s']:.1f} ({error:+.0%}) | {ratio} |"
            )
    return "\n".join(lines)


def write_tuning(preset: Preset, docs: Path) -> None:
    """Put what was tried into docs/speed.md."""
    path = docs / "speed.md"
    path.write_text(insert(path.read_text(), f"preset {preset.name}, tuning", tuning_section(preset)))


def write(preset: Preset, result: Mapping[str, Any], docs: Path) -> None:
    """Put the section into docs/speed.md and draw its picture."""
    path = docs / "speed.md"
    page = path.read_text() if path.exists() else "# Speed, side by side\n"
    path.write_text(insert(page, f"preset {preset.name}", section(preset, result)))
    draw(result, docs / f"speed_{preset.name}.png")


def draw(result: Mapping[str, Any], path: Path) -> None:
    """A bar a system: where the average worker's time goes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    systems = list(result["systems"].values())[::-1]
    parts = {
        "compute": ("#3b6ea5", [s["compute_s"] for s in systems]),
        "exposed communication": ("#c8621b", [s["exposed_comm_s"] for s in systems]),
        "idle": ("#cccccc", [s["idle_s"] for s in systems]),
        "outside the passes": (
            "#888888",
            [max(0.0, s["step_s"] - s["compute_s"] - s["exposed_comm_s"] - s["idle_s"]) for s in systems],
        ),
    }
    figure, axis = pyplot.subplots(figsize=(9, 0.5 * len(systems) + 1.4))
    left = [0.0] * len(systems)
    for label, (colour, widths) in parts.items():
        axis.barh([s["title"] for s in systems], widths, left=left, color=colour, label=label, height=0.7)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axis.set_xlabel("seconds a step, average worker")
    axis.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=4, frameon=False, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
