"""Time and memory of `disagmoe allocate` on a cluster of many nodes, through the real command in its own process."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CLUSTER = Path(__file__).parents[1] / "clusters" / "h800x16.toml"
QUESTION = ("--recipe", "qwen3", "--flavor", "235B-A22B", "--seq-len", "4096", "--global-batch", "16384")
"""67 million tokens a step."""
MOST_S = 120.0
MOST_BYTES = 2**30


def run_large(nodes: int) -> dict[str, Any]:
    """The command on `nodes` nodes of the shipped cluster: its answer, CPU seconds, and most resident bytes.

    Raises:
        CalledProcessError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        cluster = Path(folder) / f"h800x{nodes}.toml"
        text = CLUSTER.read_text(encoding="utf-8")
        text = text.replace("nodes = 16", f"nodes = {nodes}").replace("h800x16", f"h800x{nodes}")
        cluster.write_text(text, encoding="utf-8")
        command = ["-m", "disagmoe.cli", "allocate", *QUESTION, "--cluster", str(cluster)]
        command += ["--out", str(Path(folder) / "out.toml")]
        begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, *command], check=True, capture_output=True, text=True)
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = done.stdout.splitlines()
    predicted = next(line for line in lines if line.startswith("Predicted:"))
    layout = lines[lines.index(predicted) - 2]
    return {
        "nodes": nodes,
        "question": " ".join(QUESTION),
        "layout": layout,
        "predicted": predicted,
        "wall_s": time.monotonic() - begun,
        "cpu_s": spent.ru_utime + spent.ru_stime - before.ru_utime - before.ru_stime,
        # Of the largest child there was; this one is by far.
        "peak_bytes": spent.ru_maxrss * 1024,
    }


def describe(result: dict[str, Any]) -> str:
    """A sentence or two."""
    return (
        f"`disagmoe allocate {result['question']}` on {result['nodes']:,} nodes ({8 * result['nodes']:,} GPUs): "
        f"{result['cpu_s']:.0f} s of CPU (limit {MOST_S:.0f}), {result['peak_bytes'] / 2**20:.0f} MiB at most "
        f"(limit {MOST_BYTES / 2**20:.0f}). {result['layout']} {result['predicted']}"
    )
