"""Expected rows and bytes of a transfer between workers that hold tokens and workers that hold experts.

Routing is taken as uniform: the K experts of a token are a random K-subset of E. Then a worker (or node) with e of them
receives a token with probability 1 - C(E - e, K) / C(E, K).

Rows travel as one of `Rows` says:

| rows | over the network | inside a node |
|---|---|---|
| `copy` | a row for each of the K experts | the same |
| `worker` | a row for each distinct worker | the same |
| `node` | a row for each distinct node, which lands on one of its workers in turn | one for each further worker |

Results come back the same way: sums of a worker's or of a node's experts. So a combine carries as many rows as its
dispatch, and so do both gradients. Metadata is counted as the runtime's wire format has it (headers are left out).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from disagmoe.cluster import Cluster
from disagmoe.shapes import MoEShape
from disagmoe.simulator.costs import Hop

Rows = Literal["copy", "worker", "node"]

TOKEN_BYTES = 4
"""int32 a row: the row's place in its owner's slice. Forward only."""
PAIR_BYTES = {"dispatch": 12, "combine": 0, "combine gradient": 0, "dispatch gradient": 4}
"""A (token, expert) pair: int32 row, int32 expert and float32 weight; the weight's gradient on the way back."""
Message = Literal["dispatch", "combine", "combine gradient", "dispatch gradient"]


def hit_probability(num_experts: int, top_k: int, held: int) -> float:
    """Probability that at least one of a token's K distinct experts is among `held` given ones.

    >>> hit_probability(4, 2, 1), hit_probability(4, 2, 3)
    (0.5, 1.0)
    """
    return 1.0 - math.comb(num_experts - held, top_k) / math.comb(num_experts, top_k)


class Place(NamedTuple):
    """Where a worker is."""

    rank: int
    node: int


@dataclass(frozen=True, kw_only=True)
class Load:
    """Rows and pairs of one worker in one direction, over the network and over its node's fabric."""

    nic_rows: float = 0.0
    nic_pairs: float = 0.0
    fabric_rows: float = 0.0
    fabric_pairs: float = 0.0


def expected_loads(
    owners: Sequence[Place],
    holders: Sequence[Place],
    *,
    tokens: float,
    moe: MoEShape,
    experts: Sequence[int],
    rows: Rows,
) -> tuple[list[Load], list[Load]]:
    """Loads of the dispatch: what each owner sends and each holder receives. Elsewhere the roles change.

    Args:
        owners: workers with `tokens` tokens each.
        holders: workers with `experts[j]` of the experts each. One that is an owner too keeps its own rows.
    """
    hit = [hit_probability(moe.num_experts, moe.top_k, held) for held in experts]
    copies = [moe.top_k * held / moe.num_experts for held in experts]
    to_worker = copies if rows == "copy" else hit
    by_node: dict[int, list[int]] = {}
    for j, holder in enumerate(holders):
        by_node.setdefault(holder.node, []).append(j)
    node_hits = _node_hits(by_node, experts, moe, rows)
    sent = [_sent(owner, holders, to_worker, copies, node_hits, tokens) for owner in owners]
    received = []
    for holder, row, copy in zip(holders, to_worker, copies, strict=True):
        beside = sum(tokens for owner in owners if owner.node == holder.node and owner.rank != holder.rank)
        away = sum(tokens for owner in owners if owner.node != holder.node)
        own = by_node[holder.node]
        if rows == "node":
            landed = hit_probability(moe.num_experts, moe.top_k, sum(experts[j] for j in own)) / len(own)
            # Of the rows that it needs, it finds those that landed on itself.
            fan_out = max(0.0, row - landed)
            pairs = sum(copies[j] for j in own) / len(own)
            received.append(
                Load(nic_rows=away * landed, nic_pairs=away * pairs, fabric_rows=beside * row + away * fan_out,
                     fabric_pairs=beside * copy + away * copy * (1 - 1 / len(own)))
            )  # fmt: skip
        else:
            received.append(
                Load(nic_rows=away * row, nic_pairs=away * copy, fabric_rows=beside * row, fabric_pairs=beside * copy)
            )
    return sent, received


def _node_hits(
    by_node: Mapping[int, Sequence[int]], experts: Sequence[int], moe: MoEShape, rows: Rows
) -> dict[int, float]:
    """Rows a token sends to each node, where nodes get one; empty where workers do."""
    if rows != "node":
        return {}
    return {
        node: hit_probability(moe.num_experts, moe.top_k, sum(experts[j] for j in held))
        for node, held in by_node.items()
    }


def _sent(
    owner: Place,
    holders: Sequence[Place],
    to_worker: Sequence[float],
    copies: Sequence[float],
    node_hits: Mapping[int, float],
    tokens: float,
) -> Load:
    nic_rows = sum(hit for node, hit in node_hits.items() if node != owner.node)
    nic_pairs = fabric_rows = fabric_pairs = 0.0
    for holder, row, copy in zip(holders, to_worker, copies, strict=True):
        if holder.rank == owner.rank:
            continue
        if holder.node == owner.node:
            fabric_rows += row
            fabric_pairs += copy
        else:
            nic_rows += 0.0 if node_hits else row
            nic_pairs += copy
    return Load(
        nic_rows=tokens * nic_rows,
        nic_pairs=tokens * nic_pairs,
        fabric_rows=tokens * fabric_rows,
        fabric_pairs=tokens * fabric_pairs,
    )


@dataclass(frozen=True, kw_only=True)
class Wire:
    """Seconds of a load: row width and achieved rates."""

    row_bytes: float
    nic_bytes_per_s: float
    fabric_bytes_per_s: float
    nic_latency_s: float
    fabric_latency_s: float

    def hop(self, sent: Sequence[Load], received: Sequence[Load], message: Message) -> Hop:
        """The transfer as the most loaded sender and the most loaded receiver see it.

        `sent` and `received` are loads of this message's senders and receivers: swapped for combine and
        dispatch gradient, which go from expert holders to owners.
        """
        send, receive = ([self._bytes(load, message) for load in loads] for loads in (sent, received))
        nic = (max(b for b, _ in send), max(b for b, _ in receive))
        fabric = (max(b for _, b in send), max(b for _, b in receive))
        return Hop(
            send_s=nic[0] / self.nic_bytes_per_s,
            recv_s=nic[1] / self.nic_bytes_per_s,
            fabric_send_s=fabric[0] / self.fabric_bytes_per_s,
            fabric_recv_s=fabric[1] / self.fabric_bytes_per_s,
            latency_s=self.nic_latency_s if max(nic) else self.fabric_latency_s,
            send_bytes=nic[0],
            recv_bytes=nic[1],
        )

    def _bytes(self, load: Load, message: Message) -> tuple[float, float]:
        row = self.row_bytes + (TOKEN_BYTES if message in ("dispatch", "combine") else 0)
        pair = PAIR_BYTES[message]
        return (
            load.nic_rows * row + load.nic_pairs * pair,
            load.fabric_rows * row + load.fabric_pairs * pair,
        )


def make_wire(cluster: Cluster, ranks: Sequence[int], *, row_bytes: float, all_to_all: float | None) -> Wire:
    """Rates between workers on `ranks`: those of the slowest pool among them.

    `all_to_all`: None for a transfer between groups; else a factor on the efficiency of an all-to-all.
    """
    pools = list({cluster.place(rank)[0].name: cluster.place(rank)[0] for rank in ranks}.values())
    eff = [p.efficiency.m2n if all_to_all is None else p.efficiency.all_to_all * all_to_all for p in pools]
    return Wire(
        row_bytes=row_bytes,
        nic_bytes_per_s=min(p.nic_bytes_per_s_per_gpu * p.efficiency.nic * e for p, e in zip(pools, eff, strict=True)),
        fabric_bytes_per_s=min(p.fabric.bytes_per_s * p.efficiency.fabric * e for p, e in zip(pools, eff, strict=True)),
        nic_latency_s=max(p.nics.latency_s for p in pools),
        fabric_latency_s=max(p.fabric.latency_s for p in pools),
    )


def hops_of(wire: Wire, sent: Sequence[Load], received: Sequence[Load]) -> dict[Message, Hop]:
    """All four transfers of a layer, from the loads of its dispatch."""
    return {
        "dispatch": wire.hop(sent, received, "dispatch"),
        "combine": wire.hop(received, sent, "combine"),
        "combine gradient": wire.hop(sent, received, "combine gradient"),
        "dispatch gradient": wire.hop(received, sent, "dispatch gradient"),
    }
