"""A cluster as numbers: pools of nodes, their GPUs, links and what share of each peak is reached.

Descriptions live in `clusters/*.toml` and are read by `disagmoe.config.cluster`; everything here is plain data. Rates
are per direction: every link is taken as full duplex. A cluster may have several pools (GPU types); ranks fill the
nodes of the first pool, then those of the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from annotated_types import Ge, Gt, Le

Count = Annotated[int, Ge(1)]
Positive = Annotated[float, Gt(0)]
PositiveOrZero = Annotated[float, Ge(0)]
AtLeastOne = Annotated[float, Ge(1)]
Efficiency = Annotated[float, Gt(0), Le(1)]


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One accelerator."""

    name: str
    memory_bytes: Count
    memory_bytes_per_s: Positive
    """Of its own memory; embeddings are bound by it."""
    peak_flops_per_s: Mapping[str, Positive]
    """Dense peak by dtype, named as in a configuration: `bfloat16`, `float32`, `float8` ..."""

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s of `dtype`.

        Raises:
            ValueError: the description has no such dtype.
        """
        if dtype not in self.peak_flops_per_s:
            known = ", ".join(sorted(self.peak_flops_per_s))
            raise ValueError(
                f"gpu {self.name} has no peak_flops_per_s for dtype {dtype}, only for {known}; "
                f"add it to the cluster's TOML"
            )
        return self.peak_flops_per_s[dtype]


@dataclass(frozen=True, kw_only=True)
class Link:
    """A way out of a GPU or a node."""

    bytes_per_s: Positive
    """Of one link and one direction."""
    latency_s: PositiveOrZero
    """From hand-over to the first byte's arrival, software included."""


@dataclass(frozen=True, kw_only=True)
class Nics:
    """The network interfaces of one node, and the network between nodes."""

    per_node: Count
    bytes_per_s: Positive
    """Of one NIC and one direction."""
    latency_s: PositiveOrZero
    pooled: bool = False
    """False: each GPU has an equal share of its node's NICs, its own where there is one a GPU. True: a node's NICs may
    be divided between its A- and its F-workers in any proportion."""
    oversubscription: AtLeastOne = 1.0
    """Bandwidth of a switch's ports to nodes over its bandwidth upwards; 1: the network carries what all NICs send."""
    rails: Count = 1
    """Above 1: NIC i of every node hangs on switch i (of so many), so that 1 in `rails` transfers meets no
    oversubscription; 1: all transfers between nodes do."""

    @property
    def slowdown(self) -> float:
        """By which a NIC's transfers are slower than its line rate when everybody sends."""
        stays = 1 / self.rails if self.rails > 1 else 0.0
        return stays + (1 - stays) * self.oversubscription


@dataclass(frozen=True, kw_only=True)
class Efficiencies:
    """Share of a peak that is reached. They are assumptions: measure, then write the measured ones down."""

    gemm: Efficiency = 0.5
    """Projections, router, dense layers, shared experts, head."""
    attention: Efficiency = 0.55
    """Scores and weighted values (causal pairs counted once)."""
    expert_gemm: Efficiency = 0.5
    """Grouped matrix products of the routed experts."""
    memory: Efficiency = 0.8
    nic: Efficiency = 0.8
    fabric: Efficiency = 0.8
    m2n: Efficiency = 1.0
    """On top of `nic` and `fabric`, for one-way transfers between two groups."""
    all_to_all: Efficiency = 1.0
    """On top of `nic` and `fabric`, for expert parallelism's transfers within one group."""


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Nodes of one kind."""

    name: str
    nodes: Count
    gpus_per_node: Count
    gpu: Gpu
    fabric: Link
    """Between the GPUs of a node; `bytes_per_s` is what one GPU can send."""
    nics: Nics
    efficiency: Efficiencies = field(default_factory=Efficiencies)

    @property
    def num_gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def nic_bytes_per_s_per_gpu(self) -> float:
        """A GPU's equal share of its node's NICs, at line rate, less what the network is oversubscribed by."""
        return self.nics.per_node * self.nics.bytes_per_s / self.gpus_per_node / self.nics.slowdown


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """All nodes that a run may use."""

    name: str
    pools: tuple[Pool, ...]

    def __post_init__(self) -> None:
        if not self.pools:
            raise ValueError(f"cluster {self.name} has no pools: write at least one [[pools]]")
        names = [pool.name for pool in self.pools]
        if len(set(names)) != len(names):
            raise ValueError(f"cluster {self.name}: pool names must differ, got {', '.join(names)}")

    @property
    def num_gpus(self) -> int:
        return sum(pool.num_gpus for pool in self.pools)

    def place(self, rank: int) -> tuple[Pool, int]:
        """The pool and the node (numbered through all pools) of a rank, when ranks fill nodes in order.

        Raises:
            ValueError: the cluster has fewer GPUs.
        """
        gpu, node = rank, 0
        for pool in self.pools:
            if gpu < pool.num_gpus:
                return pool, node + gpu // pool.gpus_per_node
            gpu -= pool.num_gpus
            node += pool.nodes
        raise ValueError(
            f"rank {rank} has no place: cluster {self.name} has {self.num_gpus} GPUs; "
            f"use fewer workers or a larger cluster"
        )

    def with_efficiency(self, **changes: float) -> Cluster:
        """The same cluster with some efficiencies replaced in every pool.

        Raises:
            ValueError: a value is not in (0, 1].
        """
        for name, value in changes.items():
            if not 0 < value <= 1:
                raise ValueError(f"efficiency {name} = {value}: must be above 0, at most 1")
        pools = tuple(replace(pool, efficiency=replace(pool.efficiency, **changes)) for pool in self.pools)
        return replace(self, pools=pools)
