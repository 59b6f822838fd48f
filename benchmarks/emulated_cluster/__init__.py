"""An emulated cluster: worker processes with a CPU quota and a network card each, on one Linux machine.

See docs/emulated_cluster.md; `python -m benchmarks.emulated_cluster --help`.
"""

from benchmarks.emulated_cluster.cluster import EmulatedCluster, Run, requirements
from benchmarks.emulated_cluster.spec import ClusterSpec, parse_cpus, parse_rates

__all__ = ["ClusterSpec", "EmulatedCluster", "Run", "parse_cpus", "parse_rates", "requirements"]
