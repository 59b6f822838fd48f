"""The fixed instances of `benchmarks.schedule_quality`: costs, layouts and caps.

Times of made-up instances are in forwards of a stage (f); backward takes 2 f, a hop occupies a sender's and a
receiver's link for c. The search was tuned on others (p, v, micro-batches: 2, 4, 16 and 4, 7, 32), except for the
largest uniform instance, three of the small ones and the cells DeepSeek-MoE 4K, DeepSeek-MoE 16K and GPT-OSS 8K: on
those the search was tuned too, so they are no independent measure of it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from disagmoe.config.cluster import load_cluster
from disagmoe.config.recipe import load_recipe
from disagmoe.layout import Layout, Role, Stage, build_stages
from disagmoe.schedules.costs import OrderCosts, StageTimes, simple_costs
from disagmoe.simulator.roofline import AFRoofline, Job

UNIFORM = ((2, 8, 32), (3, 5, 24), (4, 8, 32), (6, 4, 48), (8, 12, 64))
"""(p, v, micro-batches)."""
HOPS = (0.3, 0.5, 0.65, 0.8)
CELLS = (
    ("DeepSeek-MoE 4K", "deepseek_moe", "16B-top4", 4096),
    ("DeepSeek-MoE 16K", "deepseek_moe", "16B-top4", 16384),
    ("Qwen3 4K", "qwen3", "235B-A22B", 4096),
    ("GPT-OSS 8K", "gpt_oss", "120b", 8192),
)
CELL_DEPTH, CELL_MICROBATCHES, CLUSTER = 4, 32, "h800x16"


@dataclass(frozen=True, kw_only=True)
class Instance:
    name: str
    kind: str
    """`uniform`, `uneven`, `cell` or `small`."""
    layout: Layout
    is_moe_layer: tuple[bool, ...]
    num_microbatches: int
    costs: StageTimes
    caps: tuple[int, ...]
    """Micro-batches in flight, counted in all layers of a group; see `make_fitted`."""

    @property
    def group_of_stage(self) -> tuple[int, ...]:
        stages = build_stages(self.layout, self.is_moe_layer)
        return tuple(self.layout.pipeline_group(stage.role, stage.group) for stage in stages)

    @property
    def num_actions(self) -> int:
        """Compute actions, with whole backwards."""
        return 2 * len(self.costs.forward_s) * self.num_microbatches

    def cap_name(self, cap: int) -> str:
        """`p`, `2p+1`, `4p+2` with p the mean depth, or the number."""
        twice = self.layout.attn_depth + self.layout.ffn_depth
        return {twice // 2: "p", twice + 1: "2p+1", 2 * twice + 2: "4p+2"}.get(cap, str(cap))


def caps_of(attn_depth: int, ffn_depth: int) -> tuple[int, ...]:
    """4p + 2, 2p + 1 and p, with p_A + p_F for 2p."""
    ring = attn_depth + ffn_depth
    return (2 * ring + 2, ring + 1, ring // 2)


def depths(attn: int, ffn: int) -> Layout:
    return Layout(attn_depth=attn, ffn_depth=ffn, attn_workers=1, ffn_workers=1)


def uniform(p: int, v: int, num_microbatches: int, hop: float, *, head: float = 0.0) -> Instance:
    """Equal stages, and a head that takes `head` forwards."""
    forward = [1.0] * (2 * p * v) + [head]
    return Instance(
        name=f"uniform p={p} v={v} m={num_microbatches} c={hop}" + (f" head={head}" if head else ""),
        kind="uniform",
        layout=depths(p, p),
        is_moe_layer=(True,) * (p * v),
        num_microbatches=num_microbatches,
        costs=simple_costs(forward, hop=hop),
        caps=caps_of(p, p),
    )


def uneven() -> Iterator[Instance]:
    """Heavy heads, a dense first layer, layers that do not divide, unequal depths."""
    for attn, ffn, layers, count, hop, head, dense in (
        (2, 2, 9, 24, 0.5, 2.0, 1.5),
        (4, 4, 27, 32, 0.6, 1.0, 1.0),
        (2, 3, 12, 24, 0.5, 0.5, 0.0),
        (4, 2, 16, 32, 0.4, 1.0, 0.5),
    ):
        layout = depths(attn, ffn)
        stages = build_stages(layout, (True,) * layers)
        mean = (attn + ffn) / 2
        forward = [layout.depth_of(stage.role) / mean for stage in stages]
        forward[0] += dense
        forward[-1] = head
        yield Instance(
            name=f"uneven p={attn}+{ffn} layers={layers} m={count} c={hop} head={head} dense={dense}",
            kind="uneven",
            layout=layout,
            is_moe_layer=(True,) * layers,
            num_microbatches=count,
            costs=simple_costs(forward, hop=hop),
            caps=caps_of(attn, ffn),
        )


def small() -> Iterator[Instance]:
    """p = 2, v = 2, 4 micro-batches: CP-SAT proves their optima. Cap 4 holds all."""
    for hop, head in ((0.3, 0.0), (0.5, 0.0), (0.8, 0.0), (0.4, 1.0), (0.7, 0.5)):
        forward = [1.0] * 8 + [head]
        yield Instance(
            name=f"small p=2 v=2 m=4 c={hop}" + (f" head={head}" if head else ""),
            kind="small",
            layout=depths(2, 2),
            is_moe_layer=(True,) * 4,
            num_microbatches=4,
            costs=simple_costs(forward, hop=hop),
            caps=(2, 3, 4),
        )


def cells() -> Iterator[Instance]:
    """The paper's models on 16 x 8 H800: one sequence an A-worker and micro-batch, M : N balanced, p = 4."""
    for name, recipe, flavor, seq_len in CELLS:
        rooflines = [_roofline(recipe, flavor, seq_len, workers) for workers in range(4, 29, 2)]
        best = min(rooflines, key=_busiest)
        layout = best.layout
        yield Instance(
            name=f"{name}, {layout.attn_workers}:{layout.ffn_workers}",
            kind="cell",
            layout=layout,
            is_moe_layer=best.job.model.is_moe_layer,
            num_microbatches=CELL_MICROBATCHES,
            costs=best.costs(),
            caps=caps_of(CELL_DEPTH, CELL_DEPTH),
        )


def _roofline(recipe: str, flavor: str, seq_len: int, attn_workers: int) -> AFRoofline:
    cluster = load_cluster(CLUSTER)
    layout = Layout(
        attn_depth=CELL_DEPTH,
        ffn_depth=CELL_DEPTH,
        attn_workers=attn_workers,
        ffn_workers=cluster.num_gpus // CELL_DEPTH - attn_workers,
    )
    job = Job(
        model=load_recipe(recipe).shapes[flavor],
        cluster=cluster,
        seq_len=seq_len,
        global_batch=attn_workers * CELL_MICROBATCHES,
    )
    return AFRoofline(job=job, layout=layout, microbatch_samples=attn_workers)


def _busiest(roofline: AFRoofline) -> float:
    """Time a sample of the busiest group or direction of its links."""
    costs, stages = roofline.costs(), roofline.stages
    load: dict[tuple[str, Role, int], float] = {}

    def add(what: str, stage: Stage, seconds: float) -> None:
        key = (what, stage.role, stage.group)
        load[key] = load.get(key, 0.0) + seconds

    for stage, forward, backward in zip(stages, costs.forward_s, costs.backward_s, strict=True):
        add("compute", stage, forward + backward)
    for before, after in pairwise(stages):
        there, back = costs.forward_hop[after.index], costs.backward_hop[before.index]
        add("send", before, there.send_s)
        add("receive", after, there.recv_s)
        add("send", after, back.send_s)
        add("receive", before, back.recv_s)
    return max(load.values()) / roofline.layout.attn_workers


def random_instance(rng: random.Random) -> tuple[Instance, int]:
    """Any small layout, layers, costs and cap, with the cap in micro-batches."""
    attn, ffn = rng.randint(1, 4), rng.randint(1, 4)
    is_moe = tuple(rng.random() < 0.8 for _ in range(rng.randint(0, 9)))
    layout = depths(attn, ffn)
    stages = build_stages(layout, is_moe)
    forward = [rng.choice((0.0, 0.5, 1.0, rng.uniform(0.2, 3.0))) for _ in stages]
    costs: OrderCosts = simple_costs(
        forward,
        hop=rng.choice((0.0, rng.uniform(0.0, 2.0))),
        activation_bytes=[rng.uniform(0.1, 2.0) for _ in stages],
    )
    count = rng.randint(1, 12)
    instance = Instance(
        name="random", kind="random", layout=layout, is_moe_layer=is_moe, num_microbatches=count, costs=costs, caps=()
    )
    return instance, rng.randint(1, 8)


def all_instances(kinds: Sequence[str]) -> Iterator[Instance]:
    """The fixed instances of these kinds, smaller ones first."""
    if "small" in kinds:
        yield from small()
    if "uniform" in kinds:
        for p, v, count in UNIFORM:
            # The largest one takes a while and shows nothing new at other hops.
            for hop in HOPS if (p, v) != (8, 12) else (0.5,):
                yield uniform(p, v, count, hop)
    if "uneven" in kinds:
        yield from uneven()
    if "cell" in kinds:
        yield from cells()
