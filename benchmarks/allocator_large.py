"""Time and memory of `disagmoe allocate` on a cluster of many nodes, through the real command in its own process."""

from __future__ import annotations

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
    """The command on `nodes` nodes of the shipped cluster: its answer, seconds, and most resident bytes of all its
    processes, pages that they share counted once.

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
        begun, peak = time.monotonic(), 0
        with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True) as process:
            while process.poll() is None:
                peak = max(peak, _resident_bytes(process.pid))
                time.sleep(0.1)
            assert process.stdout is not None
            text = process.stdout.read()
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command, text)
    lines = text.splitlines()
    predicted = next(line for line in lines if line.startswith("Predicted:"))
    layout = lines[lines.index(predicted) - 2]
    return {
        "nodes": nodes,
        "question": " ".join(QUESTION),
        "layout": layout,
        "predicted": predicted,
        "wall_s": time.monotonic() - begun,
        "peak_bytes": peak,
    }


def _resident_bytes(pid: int) -> int:
    """Of a process and its children; a page that n of them have counts as 1 / n of one."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        sizes = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # ended meanwhile
        return 0
    own = sum(int(line.split()[1]) * 1024 for line in sizes if line.startswith("Pss:"))
    return own + sum(_resident_bytes(int(child)) for child in children)


def describe(result: dict[str, Any]) -> str:
    """A sentence or two."""
    return (
        f"`disagmoe allocate {result['question']}` on {result['nodes']:,} nodes ({8 * result['nodes']:,} GPUs): "
        f"{result['wall_s']:.0f} s (limit {MOST_S:.0f}), {result['peak_bytes'] / 2**20:.0f} MiB at most "
        f"(limit {MOST_BYTES / 2**20:.0f}). {result['layout']} {result['predicted']}"
    )
