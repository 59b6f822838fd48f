"""What an emulated cluster delivers, measured from inside it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.emulated_cluster.cluster import EmulatedCluster


def measure(cluster: EmulatedCluster, *, transfer_s: float = 2.0, compute_s: float = 1.0) -> dict[str, Any]:
    """Run the probe on every worker: bandwidths, latency, compute rates, overlap. At least two workers.

    Args:
        transfer_s: about how long each transfer takes at the slowest card's rate.
        compute_s: how long each computation takes.

    Raises:
        RuntimeError: a worker of the probe failed; its message is on stderr.
        ValueError: fewer than two workers.
    """
    spec = cluster.spec
    if spec.world_size < 2:
        raise ValueError("the self-test needs at least 2 workers")
    slowest = min((rate for rate in spec.nics_bit_per_s if rate), default=1e9) / spec.workers_per_node
    options = [f"--bytes={slowest / 8 * transfer_s:.0f}", f"--compute-s={compute_s}"]
    with tempfile.TemporaryFile() as output:
        root = Path(__file__).parents[2]
        code = cluster.run(
            [sys.executable, "-m", "benchmarks.emulated_cluster.probe", *options],
            cwd=root,
            environment={"PYTHONPATH": str(root), "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            stdout=output.fileno(),
            timeout_s=60 + 20 * (transfer_s + compute_s),
        )
        if code:
            raise RuntimeError(f"the self-test's workers failed with exit code {code}")
        output.seek(0)
        found: dict[str, Any] = json.loads(output.read())
        return found


def self_test(cluster: EmulatedCluster) -> str:
    """A table of what `measure` finds."""
    spec, found = cluster.spec, measure(cluster)

    def mb(key: str) -> str:
        values = [value / 1e6 for value in found[key]]
        return f"{median(values):.1f} MB/s a worker ({min(values):.1f} - {max(values):.1f})"

    half = spec.world_size // 2
    share, flops = found["cpu_share"], [value / 1e9 for value in found["flops_per_s"]]
    nics = ", ".join(f"{rate / 8e6:g}" if rate else "no limit" for rate in _short(spec.nics_bit_per_s))
    cpus = ", ".join(f"{cpu:g}" if cpu else "no limit" for cpu in _short(spec.cpus))
    rows = [
        ("cluster", f"{spec.nodes} nodes x {spec.workers_per_node} workers on {os.cpu_count()} cores"),
        ("card, each direction", f"{nics} MB/s"),
        ("CPU quota a worker", f"{cpus} cores"),
        ("one way, all pairs at once", mb("one_way_bytes_per_s")),
        ("both ways at once", f"{mb('duplex_bytes_per_s')} each way"),
        (f"many to many, {half} x {half}", mb("many_to_many_bytes_per_s")),
        ("round trip of a byte", f"{found['round_trip_s'] * 1e3:.2f} ms"),
        ("CPU used by busy workers", f"{median(share):.3f} cores a worker ({min(share):.3f} - {max(share):.3f})"),
        ("compute rate, fp32", f"{median(flops):.2f} GFLOP/s a worker ({min(flops):.2f} - {max(flops):.2f})"),
        ("compute / transfer / both", "{compute_s:.3f} / {transfer_s:.3f} / {together_s:.3f} s".format(**found)),
        ("overlap", f"{found['overlap']:.0%} of the shorter hidden behind the longer"),
    ]
    return "\n".join(f"{name:<28} {value}" for name, value in rows)


def _short(values: tuple[float, ...]) -> list[float]:
    return list(values) if len(set(values)) > 1 else [values[0]]
