"""Removes a cluster when its owner is gone: `python -m benchmarks.emulated_cluster.guard NAME`, started by the owner.

The owner holds the other end of standard input. That ends with the owner, whatever kills it.
"""

from __future__ import annotations

import signal
import sys

from benchmarks.emulated_cluster import ownership


def main() -> None:
    (name,) = sys.argv[1:]
    if not name.startswith(ownership.PREFIX):
        raise SystemExit(f"{name}: not the name of an emulated cluster")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    ownership.remove_everything(name)


if __name__ == "__main__":
    main()
