"""Who does what: workers, groups, stages, expert ranges and batch slices, as plain data.

Everything here is a pure function of a few integers and imports nothing of ours, so that the configuration checks,
the schedules, the simulator, the allocator and the runtime all read one and the same layout.

Words (paper section 3): an *A-group* is the set of workers that hold the attention sublayers of some layers, an
*F-group* the set that holds the same kind of share of the FFN (expert) sublayers. `attn_depth` (p_A) A-groups of
`attn_workers` (M) workers and `ffn_depth` (p_F) F-groups of `ffn_workers` (N) workers make one *replica* of the
pipeline; `replicas` (R) of them train data-parallel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

RANK_ORDERS = ("paired", "mixed", "attn_first", "apart")
"""Orders by name; see `Layout.rank_order`."""


class Role(Enum):
    """What a worker computes."""

    ATTN = "attn"
    FFN = "ffn"

    @property
    def letter(self) -> str:
        """`A` or `F`, as used in worker names."""
        return "A" if self is Role.ATTN else "F"


class Edge(Enum):
    """Physical direction of a transfer, the same in both passes."""

    M2N = "m2n"
    """From an A-group to an F-group."""
    N2M = "n2m"
    """From an F-group to an A-group."""


@dataclass(frozen=True, order=True)
class Worker:
    """One role on one process: worker `index` of group `group` of replica `replica`."""

    replica: int
    role_letter: str
    group: int
    index: int

    @property
    def role(self) -> Role:
        return Role.ATTN if self.role_letter == "A" else Role.FFN

    def __str__(self) -> str:
        """E.g. `r0.A1.2`: replica 0, A-group 1, worker 2."""
        return f"r{self.replica}.{self.role_letter}{self.group}.{self.index}"


def split_evenly(total: int, parts: int) -> list[range]:
    """Cut `range(total)` into `parts` contiguous ranges whose sizes differ by at most one, larger ones first.

    >>> split_evenly(8, 3)
    [range(0, 3), range(3, 6), range(6, 8)]
    >>> split_evenly(1, 2)
    [range(0, 1), range(1, 1)]
    """
    if parts < 1 or total < 0:
        raise ValueError(f"split_evenly needs total >= 0 and parts >= 1, got total={total}, parts={parts}")
    base, extra = divmod(total, parts)
    starts = [i * base + min(i, extra) for i in range(parts + 1)]
    return [range(starts[i], starts[i + 1]) for i in range(parts)]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The workers of a run and the process (global rank) that each one lives on.

    World size is R (p_A M + p_F N), or R when `colocate` folds a whole replica into one process.
    """

    attn_depth: int
    ffn_depth: int
    attn_workers: int
    ffn_workers: int
    replicas: int = 1
    colocate: bool = False
    rank_order: str | tuple[str, ...] = "paired"
    """`paired`: A0 F0 A1 F1 ..., so an A-group and its F-group are neighbours. `mixed`: as `paired`, but A- and
    F-workers alternate in proportion, so that every node has a share of both. `attn_first`: all A-groups, then all
    F-groups. In these, replicas are contiguous. `apart`: all A-workers of all replicas, then all F-workers. Or the
    names of all workers (see `Worker.__str__`) in rank order."""
    attn_placement: tuple[int, ...] = ()
    """A-group of each A-stage in forward order, the one with the head last; empty: one group after the other."""

    def __post_init__(self) -> None:
        for name in ("attn_depth", "ffn_depth", "attn_workers", "ffn_workers", "replicas"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} = {value}: must be at least 1")
        if self.colocate and (self.attn_workers, self.ffn_workers) != (1, 1):
            raise ValueError(
                f"colocate = true puts a whole replica into one process and so needs attn_workers = 1 and "
                f"ffn_workers = 1, got attn_workers = {self.attn_workers}, ffn_workers = {self.ffn_workers}; "
                f"set both to 1, or colocate = false"
            )
        if self.attn_placement and set(self.attn_placement) != set(range(self.attn_depth)):
            raise ValueError(
                f"attn_placement = {list(self.attn_placement)}: must name each A-group from 0 to {self.attn_depth - 1} "
                "at least once, and no other"
            )
        object.__setattr__(self, "_order", self._rank_order())
        object.__setattr__(self, "_rank", {w: r for r, w in enumerate(self._order)})  # type: ignore[attr-defined]

    def _rank_order(self) -> tuple[Worker, ...]:
        names: list[Worker] = []
        for replica in range(self.replicas):
            groups = [(Role.ATTN, g) for g in range(self.attn_depth)] + [(Role.FFN, g) for g in range(self.ffn_depth)]
            if self.rank_order == "paired":
                groups.sort(key=lambda rg: (rg[1], rg[0] is Role.FFN))
            for role, group in groups:
                names += [Worker(replica, role.letter, group, i) for i in range(self.workers_of(role))]
        if isinstance(self.rank_order, str):
            if self.rank_order not in RANK_ORDERS:
                known = ", ".join(f'"{name}"' for name in RANK_ORDERS)
                raise ValueError(f'rank_order = "{self.rank_order}": must be {known} or a list of all worker names')
            if self.rank_order == "mixed":
                names.sort(key=lambda w: (w.replica, self._share_before(w), w.role is Role.FFN))
            elif self.rank_order == "apart":
                names.sort(key=lambda w: w.role is Role.FFN)
            return tuple(names)
        by_name = {str(w): w for w in names}
        listed = list(self.rank_order)
        unknown = [n for n in listed if n not in by_name]
        missing = [n for n in by_name if n not in set(listed)]
        twice = sorted({n for n in listed if listed.count(n) > 1})
        if unknown or missing or twice:
            raise ValueError(
                f"rank_order must list each of the {len(names)} workers once: "
                f"unknown {unknown}, missing {missing}, repeated {twice}"
            )
        return tuple(by_name[n] for n in listed)

    def _share_before(self, worker: Worker) -> int:
        """Where a worker stands among those of its role and replica, in parts so small that both roles have whole
        numbers of them."""
        other = Role.FFN if worker.role is Role.ATTN else Role.ATTN
        place = worker.group * self.workers_of(worker.role) + worker.index
        return (2 * place + 1) * self.depth_of(other) * self.workers_of(other)

    def workers_of(self, role: Role) -> int:
        """M or N."""
        return self.attn_workers if role is Role.ATTN else self.ffn_workers

    def depth_of(self, role: Role) -> int:
        """p_A or p_F."""
        return self.attn_depth if role is Role.ATTN else self.ffn_depth

    @property
    def num_groups(self) -> int:
        """Number of pipeline ranks (component groups) of one replica: p_A + p_F, or 1 when colocated."""
        return 1 if self.colocate else self.attn_depth + self.ffn_depth

    @property
    def world_size(self) -> int:
        if self.colocate:
            return self.replicas
        return self.replicas * (self.attn_depth * self.attn_workers + self.ffn_depth * self.ffn_workers)

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All workers; in rank order unless colocated."""
        return self._order  # type: ignore[attr-defined]

    def rank_of(self, worker: Worker) -> int:
        """Global rank of the process that `worker` lives on."""
        return worker.replica if self.colocate else self._rank[worker]  # type: ignore[attr-defined]

    def workers_on(self, rank: int) -> tuple[Worker, ...]:
        """The workers on process `rank`: one, or a whole replica's when colocated."""
        if self.colocate:
            return tuple(w for w in self.workers if w.replica == rank)
        return (self.workers[rank],)

    def group_ranks(self, role: Role, group: int, replica: int) -> tuple[int, ...]:
        """Global ranks of one group, by worker index."""
        return tuple(self.rank_of(Worker(replica, role.letter, group, i)) for i in range(self.workers_of(role)))

    def pipeline_group(self, role: Role, group: int) -> int:
        """Index of a component group among the pipeline ranks: A-groups first, then F-groups; 0 when colocated."""
        if self.colocate:
            return 0
        return group if role is Role.ATTN else self.attn_depth + group


@dataclass(frozen=True, kw_only=True)
class ExpertParallelLayout(Layout):
    """Workers that hold whole layers: `attn_depth` pipeline ranks (PP) of `attn_workers` workers (EP) a replica.

    All have the role ATTN; an F-side does not exist. Worker i of every pipeline rank owns slice i of a micro-batch, and
    the i-th share of the experts of the rank's layers. World size is R PP EP; ranks are in the order replica, pipeline
    rank, worker.
    """

    ffn_depth: int = 1
    ffn_workers: int = 1

    def _rank_order(self) -> tuple[Worker, ...]:
        return tuple(
            Worker(replica, Role.ATTN.letter, group, index)
            for replica in range(self.replicas)
            for group in range(self.attn_depth)
            for index in range(self.attn_workers)
        )

    @property
    def num_groups(self) -> int:
        return self.attn_depth

    @property
    def world_size(self) -> int:
        return self.replicas * self.attn_depth * self.attn_workers


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One sublayer of the model on one component group (paper section 3.1; DESIGN: "stage")."""

    index: int
    role: Role
    group: int
    """Group of its role: the layer's ordinal among the MoE layers, modulo the role's depth, unless placed otherwise."""
    dense_layers: tuple[int, ...] = ()
    """Layers with a dense FFN that run whole inside this A-stage, before its attention sublayer."""
    moe_layer: int | None = None
    """The MoE layer whose attention (A) or expert (F) sublayer this is; None for the last A-stage."""
    has_embedding: bool = False
    has_head: bool = False

    def __str__(self) -> str:
        parts = ["embedding"] if self.has_embedding else []
        parts += [f"layer {i} (dense)" for i in self.dense_layers]
        if self.moe_layer is not None:
            parts.append(f"layer {self.moe_layer} {'attention' if self.role is Role.ATTN else 'experts'}")
        if self.has_head:
            parts.append("head")
        return " + ".join(parts)


def build_stages(layout: Layout, is_moe_layer: Sequence[bool]) -> tuple[Stage, ...]:
    """The 2 L_moe + 1 stages of a model, in forward order: A, F, A, F, ..., A.

    A dense layer has no hop: it runs inside the next A-stage. A layer's groups are its ordinal among the MoE layers
    modulo p_A and p_F; the last A-stage (final norm, head, loss) is on the A-group next in line, because every token
    comes home to its owner there. `layout.attn_placement` puts A-stages elsewhere.

    Raises:
        ValueError: the placement is of another number of A-stages.
    """
    placement = layout.attn_placement or tuple(i % layout.attn_depth for i in range(sum(is_moe_layer) + 1))
    if len(placement) != sum(is_moe_layer) + 1:
        raise ValueError(
            f"attn_placement has {len(placement)} entries: must have {sum(is_moe_layer) + 1}, one for each MoE layer's "
            "attention and one for the head"
        )
    stages: list[Stage] = []
    dense: list[int] = []
    ordinal = 0
    for layer, is_moe in enumerate(is_moe_layer):
        if not is_moe:
            dense.append(layer)
            continue
        stages.append(
            Stage(
                index=len(stages),
                role=Role.ATTN,
                group=placement[ordinal],
                dense_layers=tuple(dense),
                moe_layer=layer,
                has_embedding=ordinal == 0,
            )
        )
        stages.append(Stage(index=len(stages), role=Role.FFN, group=ordinal % layout.ffn_depth, moe_layer=layer))
        dense = []
        ordinal += 1
    stages.append(
        Stage(
            index=len(stages),
            role=Role.ATTN,
            group=placement[ordinal],
            dense_layers=tuple(dense),
            has_embedding=ordinal == 0,
            has_head=True,
        )
    )
    return tuple(stages)


@dataclass(frozen=True, kw_only=True)
class ChunkStage:
    """A stage of the chain that all micro-batches go through."""

    chunk: int
    kind: Literal["A", "F", "C"]
    layer: int | None
    """The MoE layer of an A or F; None: the last A, with the head, or a C."""
    dense_layers: tuple[int, ...] = ()
    has_embedding: bool = False
    has_head: bool = False


def cut_into_chunks(is_moe_layer: Sequence[bool], num_chunks: int) -> list[ChunkStage]:
    """All stages. Layers are dealt out evenly, earlier chunks take one more; the last one has the head.

    Raises:
        ValueError: fewer layers than chunks.
    """
    if num_chunks > len(is_moe_layer):
        raise ValueError(f"{num_chunks} chunks for {len(is_moe_layer)} layers: must be at most one a layer")
    stages: list[ChunkStage] = []
    for chunk, layers in enumerate(split_evenly(len(is_moe_layer), num_chunks)):
        dense: list[int] = []
        last = chunk == num_chunks - 1
        for layer in layers:
            if not is_moe_layer[layer]:
                dense.append(layer)
                continue
            first = not stages
            stages.append(
                ChunkStage(chunk=chunk, kind="A", layer=layer, dense_layers=tuple(dense), has_embedding=first)
            )
            stages.append(ChunkStage(chunk=chunk, kind="F", layer=layer))
            dense = []
        if last or dense:
            end = ChunkStage(chunk=chunk, kind="A", layer=None, dense_layers=tuple(dense), has_head=last,
                             has_embedding=not stages)  # fmt: skip
            stages.append(end)
        else:
            stages.append(ChunkStage(chunk=chunk, kind="C", layer=None))
    return stages


def stage_edge(stage: Stage, *, backward: bool = False) -> Edge | None:
    """The edge over which `stage` sends its forward output (`backward`: its input gradient); None at an end."""
    if (stage.has_head and not backward) or (stage.index == 0 and backward):
        return None
    return Edge.M2N if stage.role is Role.ATTN else Edge.N2M


def owned_samples(
    layout: Layout, *, global_batch_size: int, microbatches: int, replica: int, worker_index: int
) -> list[range]:
    """Which samples of a step an A-worker owns, by micro-batch, as indices into the global batch.

    The batch is cut evenly by replica, a replica's share by micro-batch, a micro-batch by worker; slices may be uneven,
    and empty where there are fewer samples than workers. Worker i of *every* A-group of a replica owns the same slice.

    >>> layout = Layout(attn_depth=1, ffn_depth=1, attn_workers=3, ffn_workers=1)
    >>> owned_samples(layout, global_batch_size=8, microbatches=2, replica=0, worker_index=0)
    [range(0, 2), range(4, 6)]
    """
    share = split_evenly(global_batch_size, layout.replicas)[replica]
    owned = []
    for microbatch in split_evenly(len(share), microbatches):
        part = split_evenly(len(microbatch), layout.attn_workers)[worker_index]
        start = share.start + microbatch.start
        owned.append(range(start + part.start, start + part.stop))
    return owned
