"""What an emulated cluster is made of, as plain data."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

MOST_NODES = 250
"""Addresses that a /24 network has to give."""
LEAST_QUOTA_S = 1e-3
"""The kernel takes no smaller CPU quota a period."""
_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """Nodes with a network card each, workers with a CPU quota each.

    Raises:
        ValueError: a value is out of range.
    """

    nics_bit_per_s: tuple[float, ...]
    """Rate of each node's network card, each direction; 0: not limited. Its length is the number of nodes."""
    cpus: tuple[float, ...]
    """Cores that each worker of a node may use, a fraction or more than one; 0: not limited. One entry a node."""
    workers_per_node: int = 1
    """Workers of one node share its network card, and reach each other over loopback, which is not limited."""
    period_s: float = 0.01
    """CPU quotas are handed out anew this often. Short, so that a worker never pauses for long; longer for quotas so
    small that the kernel would refuse them."""
    charge_transfers: bool = True
    """Whether what threads other than a worker's main one do counts against its quota. With gloo they move the data: a
    worker that sends then computes less. Devices with NCCL or DMA hardly pay for transfers. Threads that exist when
    quotas begin are left out. Needs cgroups version 1."""
    burst_bytes: int = 0
    """What a card that has been quiet may send at once, beyond its rate; 0: 2 ms at its rate, at least 72 kB."""
    queue_s: float = 2.0
    """Longest that a packet waits in a card's queue before it is dropped. Long, since networks of GPUs drop nothing:
    with queues of 50 ms many workers that sent to one lost packets and with them a tenth of their step."""

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MOST_NODES:
            raise ValueError(f"nodes = {self.nodes}: must be from 1 to {MOST_NODES}")
        if len(self.cpus) != self.nodes:
            raise ValueError(f"{len(self.cpus)} CPU quotas for {self.nodes} nodes: must be one for each node")
        if self.workers_per_node < 1:
            raise ValueError(f"workers_per_node = {self.workers_per_node}: must be at least 1")
        for what, values in (("NIC rate", self.nics_bit_per_s), ("CPU quota", self.cpus)):
            for value in values:
                if value < 0:
                    raise ValueError(f"{what} {value:g}: must be positive, or 0 for no limit")

    @property
    def nodes(self) -> int:
        return len(self.nics_bit_per_s)

    @property
    def world_size(self) -> int:
        return self.nodes * self.workers_per_node

    def node_of(self, rank: int) -> int:
        return rank // self.workers_per_node

    def quota_s(self, rank: int) -> tuple[float, float]:
        """CPU seconds of a worker, and the period they are for; (0, period) without a limit."""
        cpus = self.cpus[self.node_of(rank)]
        period_s = max(self.period_s, LEAST_QUOTA_S / cpus) if cpus else self.period_s
        return cpus * period_s, period_s

    def burst(self, node: int) -> int:
        """Bytes that a node's card may send at once; enough for the largest unit that the kernel hands over (64 KiB
        and headers), since cutting it up would cost receivers three times the CPU."""
        return self.burst_bytes or max(72_000, int(0.002 * self.nics_bit_per_s[node] / 8))


def parse_rates(text: str, nodes: int) -> tuple[float, ...]:
    """Bits per second of each node, from `100mbit` for all, or a list such as `100mbit,50mbit`; `0`: not limited.

    >>> parse_rates("100mbit,1gbit", 2)
    (100000000.0, 1000000000.0)
    """
    return _a_node(text, nodes, _rate, "--nic")


def parse_cpus(text: str, nodes: int) -> tuple[float, ...]:
    """Cores a worker of each node, from `0.2` for all, or a list; `0`: not limited.

    >>> parse_cpus("0.2", 3)
    (0.2, 0.2, 0.2)
    """
    return _a_node(text, nodes, _cores, "--cpu")


def _a_node(text: str, nodes: int, parse: Callable[[str], float], option: str) -> tuple[float, ...]:
    values = tuple(parse(part.strip()) for part in text.split(","))
    if len(values) == 1:
        return values * nodes
    if len(values) != nodes:
        raise ValueError(f"{option} {text}: {len(values)} values for {nodes} nodes; give one, or one for each node")
    return values


def _rate(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?bit)", text.lower())
    if match is None and text != "0":
        raise ValueError(f'--nic {text}: must be a number with kbit, mbit or gbit, e.g. "100mbit", or 0 for no limit')
    return float(match[1]) * _UNITS[match[2]] if match else 0.0


def _cores(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e4:
        raise ValueError(f"--cpu {text}: must be a number of cores, e.g. 0.2, or 0 for no limit")
    return value
