"""Qwen3's compute and communication a token and layer, beside the paper's figures."""

from __future__ import annotations

from dataclasses import dataclass, replace

from disagmoe.cluster import Cluster
from disagmoe.config.cluster import load_cluster
from disagmoe.config.recipe import load_recipe
from disagmoe.simulator.report import as_markdown
from disagmoe.simulator.roofline import Compute, Job
from disagmoe.simulator.routing import Place, Rows, expected_loads, hops_of, make_wire

TOLERANCE = 0.15
DEFAULT = "stated efficiencies"
FITTED = "efficiencies fitted to the attention shares"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One of the paper's figures and our reading of it."""

    name: str
    paper: float
    ours: dict[str, float]
    """By set of efficiencies."""
    reading: str


def _layer(cluster: Cluster, length: int) -> tuple[float, float]:
    """Seconds of attention and of experts of one sample on one GPU."""
    model = load_recipe("qwen3").shape("235B-A22B")
    compute = Compute(job=Job(model=model, cluster=cluster, seq_len=length, global_batch=1), pool=cluster.pools[0])
    layer = model.layers[0]
    return compute.attention(layer, 1).forward, compute.experts(layer, length, 1).forward


def _transfer_s(cluster: Cluster, length: int, owners: range, holders: range, rows: Rows) -> float:
    """One dispatch of a sample a worker, without latency."""
    model = load_recipe("qwen3").shape("235B-A22B")
    places = [[Place(rank, cluster.place(rank)[1]) for rank in ranks] for ranks in (owners, holders)]
    moe = model.layers[0].moe
    experts = [moe.num_experts // len(holders)] * len(holders)
    loads = expected_loads(*places, tokens=length, moe=moe, experts=experts, rows=rows)
    hop = hops_of(make_wire(cluster, owners, row_bytes=model.dim * 2, all_to_all=1.0), *loads)["dispatch"]
    return hop.alone_s - hop.latency_s


def _with_fabric(cluster: Cluster, bytes_per_s: float) -> Cluster:
    return replace(
        cluster, pools=tuple(replace(p, fabric=replace(p.fabric, bytes_per_s=bytes_per_s)) for p in cluster.pools)
    )


def _fitted(cluster: Cluster) -> Cluster:
    """GEMM at 0.4; attention and experts so that attention's share is 0.284 at 4K and 0.503 at 32K.

    With p, c, e the seconds of projections, scores and experts at equal efficiency, attention over experts must be
    0.284 / 0.716 at 4K and 0.503 / 0.497 at 32K: (p + c x) / (e y) and (8 p + 64 c x) / (8 e y), linear in x and 1 / y.
    """
    model = load_recipe("qwen3").shape("235B-A22B")
    layer, gemm = model.layers[0], 0.4
    projection = layer.attention_flops(model.dim, 4096) - layer.attention.core_flops(4096)
    core = [layer.attention.core_flops(length) / length * 4096 for length in (4096, 32768)]
    want = [0.284 / 0.716, 0.503 / 0.497]
    # (P + C1 x) / (P + C2 x) = want1 / want2
    slope = want[0] / want[1]
    x = projection * (1 - slope) / (slope * core[1] - core[0])
    y = (projection + core[0] * x) / want[0] / layer.expert_flops(model.dim, 4096)
    return cluster.with_efficiency(gemm=gemm, attention=min(1.0, gemm / x), expert_gemm=min(1.0, gemm / y))


def figures() -> list[Figure]:
    cluster = load_cluster("h800x16")
    sets = {DEFAULT: cluster, FITTED: _fitted(cluster)}
    found: list[Figure] = []

    def add(name: str, paper: float, reading: str, values: list[float]) -> None:
        found.append(Figure(name=name, paper=paper, ours=dict(zip(sets, values, strict=True)), reading=reading))

    for length, paper in ((4096, 0.284), (32768, 0.503)):
        shares = [a / (a + f) for a, f in (_layer(c, length) for c in sets.values())]
        add(f"attention's share of compute, {length // 1024}K", paper, "forward seconds a layer, without head", shares)
    for length, paper in ((4096, 1.08), (32768, 2.78)):
        hops = [_transfer_s(c, length, range(16), range(16, 32), "node") for c in sets.values()]
        values = [_layer(c, length)[0] / hop for c, hop in zip(sets.values(), hops, strict=True)]
        add(f"attention: compute over communication, {length // 1024}K", paper,
            "over one hop between 16 + 16 workers on four nodes, a row a node", values)  # fmt: skip
    for length, paper in ((4096, 0.73), (32768, 0.77)):
        hops = [_transfer_s(c, length, range(16), range(16, 32), "copy") for c in sets.values()]
        values = [_layer(c, length)[1] / hop for c, hop in zip(sets.values(), hops, strict=True)]
        add(f"FFN: compute over communication, {length // 1024}K", paper,
            "over one hop between 16 + 16 workers, a row for each of the 8 experts", values)  # fmt: skip
    for gpus, paper, fabric in ((8, 0.22, 200e9), (8, 0.22, 400e9), (64, 0.78, 200e9)):
        values = []
        for c in sets.values():
            attention, experts = _layer(c, 4096)
            both = 2 * _transfer_s(_with_fabric(c, fabric), 4096, range(gpus), range(gpus), "copy")
            values.append(both / (attention + experts + both))
        add(f"all-to-all's share of a layer's forward, {gpus} GPUs", paper,
            f"EP {gpus}, 4K, a row an expert, NVLink {fabric / 1e9:.0f} GB/s each way", values)  # fmt: skip
    return found


def flops_share(length: int) -> float:
    """Attention's share of a layer's FLOPs."""
    model = load_recipe("qwen3").shape("235B-A22B")
    attention = model.layers[0].attention_flops(model.dim, length)
    return attention / (attention + model.layers[0].expert_flops(model.dim, length))


def formula_growth() -> float:
    """By which the paper's I_a = (H (2 + 2/g) + 4 s) / (2 k) grows from 4K to 32K; H 4096, g 16."""
    projections = 4096 * (2 + 2 / 16)
    return (projections + 4 * 32768) / (projections + 4 * 4096)


def intensity_section() -> str:
    """The table, with what is within 15 %."""
    rows = []
    for figure in figures():
        row = [figure.name, f"{figure.paper:.3g}"]
        for value in figure.ours.values():
            off = value / figure.paper - 1
            row.append(f"{value:.3f} ({off:+.0%}{', **met**' if abs(off) <= TOLERANCE else ''})")
        rows.append([*row, figure.reading])
    efficiency = _fitted(load_cluster("h800x16")).pools[0].efficiency
    table = as_markdown(rows, ["Qwen3-235B", "paper", DEFAULT, FITTED, "our reading"])
    return f"""## Qwen3's intensities

Met: within {TOLERANCE:.0%}. Fitted: GEMM {efficiency.gemm:.2f}, attention {efficiency.attention:.2f},
experts {efficiency.expert_gemm:.2f} of peak.

{table}

By FLOPs alone attention is {flops_share(4096):.2f} of a layer's compute at 4K and {flops_share(32768):.2f} at 32K, so
the paper's shares need experts that run well below the efficiency of attention. With these fitted, the ratios of
compute to communication come out only if attention is measured against a transfer of one row a node, and FFN against
one of a row an expert: no single transfer gives both of them. The paper's own formula for attention's intensity grows
{formula_growth():.1f}-fold from 4K to 32K, its figures {2.78 / 1.08:.1f}-fold. The share of all-to-all on one node is
near the paper's only if NVLink carries 400 GB/s in each direction (that is the sum of both), the one on eight nodes
only if a row travels for each expert.
"""
