"""Which edge a hop goes over, and which ranks make a mesh."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagmoe.layout import Edge, Layout, Role, build_stages
from disagmoe.parallelisms.mesh import estimate_clock_offsets, hop_edge, mesh_ranks


def layout_of(attn_depth: int, ffn_depth: int, attn_workers: int = 1, ffn_workers: int = 1, **rest: object) -> Layout:
    return Layout(
        attn_depth=attn_depth,
        ffn_depth=ffn_depth,
        attn_workers=attn_workers,
        ffn_workers=ffn_workers,
        **rest,  # type: ignore[arg-type]
    )


def test_hops_of_two_layers() -> None:
    """A0 -> F0 -> A1 -> F1 -> A0, and back."""
    stages = build_stages(layout_of(2, 2), [False, True, True])
    names = [hop_edge(stages, hop, backward=False).name for hop in range(4)]
    assert names == ["M2N forward A0 -> F0", "N2M forward F0 -> A1", "M2N forward A1 -> F1", "N2M forward F1 -> A0"]
    names = [hop_edge(stages, hop, backward=True).name for hop in range(4)]
    assert names == ["N2M backward F0 -> A0", "M2N backward A1 -> F0", "N2M backward F1 -> A1", "M2N backward A0 -> F1"]


def test_attention_stages_go_where_they_are_placed() -> None:
    stages = build_stages(layout_of(2, 1, attn_placement=(0, 1, 1)), [False, True, True])
    assert [s.group for s in stages if s.role is Role.ATTN] == [0, 1, 1] and stages[-1].has_head
    names = [hop_edge(stages, hop, backward=False).name for hop in range(4)]
    assert names == ["M2N forward A0 -> F0", "N2M forward F0 -> A1", "M2N forward A1 -> F0", "N2M forward F0 -> A1"]
    with pytest.raises(ValueError, match="attn_placement has 3 entries: must have 4"):
        build_stages(layout_of(2, 1, attn_placement=(0, 1, 1)), [True, True, True])
    with pytest.raises(ValueError, match=r"attn_placement = \[1, 1\]: must name each A-group from 0 to 1"):
        layout_of(2, 1, attn_placement=(1, 1))


@settings(max_examples=50, deadline=None)
@given(attn_depth=st.integers(1, 4), ffn_depth=st.integers(1, 4), layers=st.lists(st.booleans(), max_size=9))
def test_edges_join_the_groups_of_their_stages(attn_depth: int, ffn_depth: int, layers: list[bool]) -> None:
    stages = build_stages(layout_of(attn_depth, ffn_depth), layers)
    ends: dict[object, set[tuple[int, int]]] = defaultdict(set)
    for hop, (before, after) in enumerate(pairwise(stages)):
        for backward in (False, True):
            key = hop_edge(stages, hop, backward=backward)
            sender, receiver = (after, before) if backward else (before, after)
            assert key.edge is (Edge.M2N if sender.role is Role.ATTN else Edge.N2M)
            assert key.backward is backward
            attn, ffn = (sender, receiver) if sender.role is Role.ATTN else (receiver, sender)
            assert (key.attn_group, key.ffn_group) == (attn.group, ffn.group)
            ends[key].add((sender.group, receiver.group))
    assert all(len(pairs) == 1 for pairs in ends.values()), "an edge has one sender and one receiver group"


@pytest.mark.parametrize("rank_order", ["paired", "attn_first"])
@pytest.mark.parametrize("shape", [(1, 1, 2, 2), (2, 1, 3, 2), (1, 3, 1, 2), (2, 2, 2, 1)])
@pytest.mark.parametrize("replicas", [1, 2])
def test_meshes_share_out_the_ranks(shape: tuple[int, int, int, int], rank_order: str, replicas: int) -> None:
    layout = layout_of(*shape, replicas=replicas, rank_order=rank_order)
    attn, ffn = mesh_ranks(layout, Role.ATTN), mesh_ranks(layout, Role.FFN)
    assert attn.shape == (replicas, shape[0], shape[2]) and ffn.shape == (replicas, shape[1], shape[3])
    assert sorted([*attn.flatten().tolist(), *ffn.flatten().tolist()]) == list(range(layout.world_size))
    for replica in range(replicas):
        for role, ranks in ((Role.ATTN, attn), (Role.FFN, ffn)):
            for group in range(layout.depth_of(role)):
                for index in range(layout.workers_of(role)):
                    (worker,) = layout.workers_on(int(ranks[replica, group, index]))
                    assert (worker.replica, worker.role, worker.group, worker.index) == (replica, role, group, index)


def test_colocated_mesh_is_one_rank_a_replica() -> None:
    layout = layout_of(2, 2, replicas=3, colocate=True)
    assert mesh_ranks(layout, Role.ATTN).tolist() == [[[0]], [[1]], [[2]]]


def test_clock_offsets_alone() -> None:
    assert estimate_clock_offsets(0, 1) == {0: 0.0}
