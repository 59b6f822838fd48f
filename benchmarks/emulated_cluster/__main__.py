"""Runs a command's workers as a small cluster on this machine: `python -m benchmarks.emulated_cluster ... -- CMD`.

    python -m benchmarks.emulated_cluster --nodes 8 --cpu 0.2 --nic 100mbit -- \\
        python -m disagmoe.train --config-file=my.toml --dump_folder=outputs/emulated

CMD is started once a worker, with torchrun's environment variables. Each node is a network namespace with a network
card of the given rate, each worker has a CPU quota. Needs root. docs/emulated_cluster.md says what is emulated.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.emulated_cluster.cluster import EmulatedCluster
from benchmarks.emulated_cluster.self_test import self_test
from benchmarks.emulated_cluster.spec import ClusterSpec, parse_cpus, parse_rates


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    split = words.index("--") if "--" in words else len(words)
    options, command = _parser().parse_args(words[:split]), words[split + 1 :]
    if bool(command) == options.self_test:
        _parser().error("give either a command after -- or --self-test")
    try:
        spec = ClusterSpec(
            nics_bit_per_s=parse_rates(options.nic, options.nodes),
            cpus=parse_cpus(options.cpu, options.nodes),
            workers_per_node=options.workers_per_node,
            period_s=options.period_ms / 1e3,
            charge_transfers=not options.free_transfers,
            burst_bytes=options.burst_bytes,
        )
        ranks = [int(rank) for rank in options.show_ranks.split(",")]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        with EmulatedCluster(spec) as cluster:
            if options.self_test:
                print(self_test(cluster))
                return 0
            return cluster.run(
                command, throttle_when=options.throttle_when, shown_ranks=ranks, timeout_s=options.timeout_s
            )
    except KeyboardInterrupt:
        return 130
    except (OSError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.emulated_cluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--nodes", type=int, default=8, help="nodes (default: 8)")
    add("--workers-per-node", type=int, default=1, help="workers of a node; they share its card (default: 1)")
    add("--cpu", default="0.2", help="cores a worker: one value, or one a node (0.2,0.4,...); 0: no limit")
    add("--nic", default="100mbit", help="rate of a node's card: one value, or one a node; 0: no limit")
    add("--throttle-when", type=Path, metavar="FILE", help="full speed until FILE holds something, e.g. metrics.jsonl")
    add("--show-ranks", default="0", metavar="0,1", help="whose standard output is shown (default: 0)")
    add("--timeout-s", type=float, help="kill the workers after this many seconds")
    add("--period-ms", type=float, default=10.0, help="period of the CPU quotas (default: 10)")
    add("--free-transfers", action="store_true", help="threads that move data are not on the quota (cgroups version 1)")
    add("--burst-bytes", type=int, default=0, help="what a card may send beyond its rate after a pause")
    add("--self-test", action="store_true", help="measure what such a cluster delivers")
    return parser


if __name__ == "__main__":
    sys.exit(main())
