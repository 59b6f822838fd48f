"""Which emulated clusters exist on this machine, whose they are, and removing what a dead owner left.

Everything that a cluster makes carries its name: network namespaces `NAME-...`, one cgroup `NAME`, one record here.
The record names the owning process; it is written before anything else is made, and removed last.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

from benchmarks.emulated_cluster import cgroups, network

PREFIX = "dmoe-emu-"
RECORDS = Path("/run/disagmoe-emulated-cluster")


def claim_name() -> str:
    """A new cluster's name, recorded as belonging to this process."""
    RECORDS.mkdir(parents=True, exist_ok=True)
    record = json.dumps({"pid": os.getpid(), "started": started(os.getpid())})
    while True:
        name = f"{PREFIX}{secrets.token_hex(3)}"
        try:
            with (RECORDS / name).open("x") as file:
                file.write(record)
        except FileExistsError:
            continue
        return name


def remove_everything(name: str) -> None:
    """Kill what runs in a cluster and remove all that it made. Safe to call twice, and on half-made clusters."""
    cgroups.remove(name)
    network.remove(name)
    (RECORDS / name).unlink(missing_ok=True)


def remove_leftovers() -> list[str]:
    """Remove the clusters whose owners are gone; returns their names. Those of living owners are left alone."""
    removed = []
    for record in sorted(RECORDS.glob(f"{PREFIX}*")) if RECORDS.exists() else []:
        try:
            text = record.read_text()
            owner = json.loads(text) if text else None
        except (FileNotFoundError, ValueError):
            continue  # its owner is removing it, or writing it
        if owner is None or started(owner["pid"]) == owner["started"]:
            continue
        remove_everything(record.name)
        removed.append(record.name)
    return removed


def started(pid: int) -> str:
    """When a process began, in the kernel's ticks; tells it from a later one with the same id. Empty if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
