"""Rows and bytes of transfers, compute from shapes, memory: against enumeration and arithmetic by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from disagmoe.config.cluster import load_cluster
from disagmoe.config.recipe import load_recipe
from disagmoe.layout import Layout, Role
from disagmoe.shapes import MoEShape
from disagmoe.simulator.expert_parallel import EPPlan, EPRoofline
from disagmoe.simulator.profile import HopProfile, Profile, StageProfile
from disagmoe.simulator.replicated import Replicated, state_bytes, sync_s
from disagmoe.simulator.roofline import AFRoofline, Job
from disagmoe.simulator.routing import Place, Rows, expected_loads, hit_probability

CLUSTER = load_cluster("h800x16")
DEEPSEEK = load_recipe("deepseek_moe").shape("16B-top4")
JOB = Job(model=DEEPSEEK, cluster=CLUSTER, seq_len=4096, global_batch=512)
EXACT = dict.fromkeys(("gemm", "attention", "expert_gemm", "memory", "nic", "fabric"), 1.0)


def close(value: float) -> object:
    return pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize("held", range(7))
def test_hit_probability_counts_subsets(held: int) -> None:
    subsets = list(itertools.combinations(range(6), 3))
    assert hit_probability(6, 3, held) == close(sum(min(s) < held for s in subsets) / len(subsets))


@pytest.mark.parametrize("rows", ["copy", "worker", "node"])
def test_loads_equal_the_average_over_all_routings(rows: Rows) -> None:
    """Two owners and three holders on three nodes; the second owner holds experts itself."""
    owners = [Place(0, 0), Place(1, 1)]
    holders = [Place(1, 1), Place(2, 1), Place(3, 2)]
    experts = [range(2), range(2, 4), range(4, 6)]
    moe = MoEShape(num_experts=6, top_k=2, expert_dim=1)
    sent, received = expected_loads(owners, holders, tokens=30.0, moe=moe, experts=[2, 2, 2], rows=rows)
    nic = [[0.0] * 2, [0.0] * 3]
    fabric_sent = [0.0, 0.0]
    routings = list(itertools.combinations(range(6), 2))
    for chosen, (i, owner) in itertools.product(routings, enumerate(owners)):
        weight = 30 / len(routings)
        landed = set()
        for j, holder in enumerate(holders):
            copies = len(set(chosen) & set(experts[j]))
            count = copies if rows == "copy" else min(copies, 1)
            if not count or holder.rank == owner.rank:
                continue
            if holder.node == owner.node:
                fabric_sent[i] += weight * count
            elif rows != "node":
                nic[0][i] += weight * count
                nic[1][j] += weight * count
            elif holder.node not in landed:
                landed.add(holder.node)
                nic[0][i] += weight
                beside = [k for k, other in enumerate(holders) if other.node == holder.node]
                for k in beside:  # it lands on each of them equally often
                    nic[1][k] += weight / len(beside)
    assert [load.nic_rows for load in sent] == [close(x) for x in nic[0]]
    assert [load.nic_rows for load in received] == [close(x) for x in nic[1]]
    assert [load.fabric_rows for load in sent] == [close(x) for x in fabric_sent]
    assert sum(load.nic_pairs + load.fabric_pairs for load in sent) == close(30 * (2 + 2 * 4 / 6))


def test_stage_seconds_by_hand() -> None:
    job = replace(JOB, cluster=CLUSTER.with_efficiency(**EXACT))
    layout = Layout(attn_depth=4, ffn_depth=4, attn_workers=16, ffn_workers=16)
    costs = AFRoofline(job=job, layout=layout, microbatch_samples=16).costs()
    layer, tokens = DEEPSEEK.layers[1], 4096
    assert costs.forward_s[2] == close(layer.attention_flops(2048, 4096) / 989e12)
    assert costs.forward_s[1] == close(layer.expert_flops(2048, 4096) / 989e12)
    for index in range(1, len(costs.forward_s) - 1):
        assert costs.backward_s[index] == close(2 * costs.forward_s[index])
        assert costs.backward_s[index] == close(costs.backward_input_s[index] + costs.backward_weight_s[index])
    assert costs.forward_s[-1] == close(tokens * DEEPSEEK.head_flops / 989e12)
    dense = DEEPSEEK.layers[0].attention_flops(2048, 4096) / 989e12
    embedding = 2 * tokens * 2048 * 2 / 3.35e12
    assert costs.forward_s[0] == close(costs.forward_s[2] + dense + embedding)
    # Two nodes of 32 experts each: a row to each that is hit, over the NICs, with metadata and pairs.
    rows = 2 * hit_probability(64, 4, 32) * tokens
    assert costs.forward_hop[1].send_bytes == close(rows * (2048 * 2 + 4) + 4 * tokens * 12)
    assert costs.forward_hop[2].recv_bytes == close(rows * (2048 * 2 + 4))
    assert costs.backward_hop[1].send_bytes == close(rows * 2048 * 2)
    assert costs.backward_hop[0].recv_bytes == close(rows * 2048 * 2 + 4 * tokens * 4)
    assert costs.forward_hop[1].send_s == close(costs.forward_hop[1].send_bytes / 50e9)
    assert costs.forward_hop[1].send_bytes == close(costs.forward_hop[1].recv_bytes)


def test_options_move_costs_as_they_should() -> None:
    layout = Layout(attn_depth=2, ffn_depth=2, attn_workers=16, ffn_workers=16)

    def hop(job: Job) -> float:
        return AFRoofline(job=job, layout=layout, microbatch_samples=16).costs().forward_hop[1].send_s

    copy, worker, node = (hop(JOB.with_technology(rows_m2n=rows)) for rows in ("copy", "worker", "node"))
    assert copy > worker > node
    base = AFRoofline(job=JOB, layout=layout, microbatch_samples=16).costs()
    full = AFRoofline(job=replace(JOB, recompute="full"), layout=layout, microbatch_samples=16).costs()
    assert full.backward_s[2] == close(3 * base.forward_s[2])
    assert full.activation_bytes[2] < base.activation_bytes[2]
    uneven = AFRoofline(job=JOB.with_technology(imbalance=1.5), layout=layout, microbatch_samples=16).costs()
    assert uneven.forward_s[1] > base.forward_s[1]
    lost = AFRoofline(job=JOB.with_technology(compute_lost=0.2), layout=layout, microbatch_samples=16).costs()
    assert lost.forward_s[2] == close(base.forward_s[2] / 0.8)


def test_packing_a_group_pair_into_a_node_keeps_dispatch_off_the_network() -> None:
    layout = Layout(attn_depth=2, ffn_depth=2, attn_workers=4, ffn_workers=4)
    costs = AFRoofline(job=JOB, layout=layout, microbatch_samples=4).costs()
    assert costs.forward_hop[1].send_s == 0 and costs.forward_hop[1].fabric_send_s > 0
    # To the next node's attention workers comes one reduced row a token.
    assert costs.forward_hop[2].recv_bytes == close(4096 * (2048 * 2 + 4))


def test_expert_parallel_moves_the_rows_of_its_own_group() -> None:
    plan = EPPlan(ranks=8, width=16, ep=16)
    roofline = EPRoofline(job=JOB, plan=plan, rank_of_chunk=tuple(range(8)))
    costs = roofline.costs()
    first = next(i for i, stage in enumerate(roofline.stages) if stage.kind == "F")
    rows = hit_probability(64, 4, 32) * 4096
    pairs = 4096 * 4 / 2
    assert costs.forward_hop[first].send_bytes == close(rows * (2048 * 2 + 4) + pairs * 12)
    half = JOB.with_technology(all_to_all_of_m2n=0.5)
    slower = EPRoofline(job=half, plan=plan, rank_of_chunk=tuple(range(8))).costs()
    assert slower.forward_hop[first].send_s == close(2 * costs.forward_hop[first].send_s)
    total = sum(
        roofline.job.model.layers[s.layer].num_params(2048) for s in roofline.stages if s.kind == "F" and s.layer
    )
    held = [sum(part.params for part in rank) for rank in roofline.held()]
    assert sum(held) < total
    with pytest.raises(ValueError, match="ep = 3: must divide the 16 workers"):
        EPPlan(ranks=8, width=16, ep=3)


def test_all_parameters_are_held() -> None:
    """Over all workers, each parameter once: shards of experts add up, the rest counts once a group."""
    layout = Layout(attn_depth=3, ffn_depth=2, attn_workers=4, ffn_workers=8)
    held = AFRoofline(job=JOB, layout=layout, microbatch_samples=4).held()
    total = sum(p.params for (role, _), parts in held.items() for p in parts if role is Role.ATTN)
    norms = 27 * 2048  # ffn_norm has a second home on the F side
    for (role, _), parts in held.items():
        if role is Role.FFN:
            total += sum(p.params * (8 if len(p.ranks) == 1 else 1) for p in parts)
    assert total == DEEPSEEK.num_params + norms


def test_state_and_gradient_sums() -> None:
    parts = [Replicated(10.0, [0]), Replicated(8.0, range(16))]
    assert state_bytes(parts, param=2, grad=2, optimizer=4) == close(10 * 8 + 8 * (4 + 4 / 16))
    cluster = CLUSTER.with_efficiency(**EXACT)
    # 16 workers on 2 nodes: 7/8 twice over the fabric, then half of an eighth's all-reduce between nodes.
    assert sync_s(parts, cluster, grad=2) == close(2 * 7 / 8 * 16 / 200e9 + 2 * 1 / 2 * 2 / 50e9)


def profile() -> Profile:
    return Profile(
        model="m",
        seq_len=8,
        microbatch_samples=2,
        stages=(
            StageProfile(index=0, forward_s=1.0, backward_s=2.5),
            StageProfile(index=1, forward_s=1.0, backward_s=2.5, backward_input_s=1.0, activation_bytes=7.0),
            StageProfile(index=2, forward_s=1.0, backward_input_s=1.0, backward_weight_s=0.5),
        ),
        hops=tuple(
            HopProfile(index=i, forward_bytes=9, forward_s=0.1 * i, backward_bytes=8, backward_s=0.2) for i in (1, 2)
        ),
    )


def test_a_profile_survives_its_file_and_fills_gaps(tmp_path: Path) -> None:
    path = tmp_path / "new" / "profile.json"
    profile().save(path)
    assert Profile.load(path) == profile()
    costs = profile().costs()
    assert costs.backward_s == (2.5, 2.5, 1.5)
    assert costs.backward_input_s == (1.25, 1.0, 1.0)
    assert costs.backward_weight_s == (1.25, 1.5, 0.5)
    assert [hop.send_s for hop in costs.forward_hop] == [0.0, 0.1, 0.2]
    assert [hop.send_s for hop in costs.backward_hop] == [0.2, 0.2, 0.0]


def test_the_less_busy_side_of_a_hop_has_its_card_free_for_the_rest() -> None:
    """One worker sends to two: it sends for as long as the transfer takes, each of them receives for half of that."""
    hop = HopProfile(
        index=1, forward_bytes=6.0, forward_s=0.4, backward_bytes=8.0, backward_s=0.2,
        forward_send_bytes=12.0, backward_send_bytes=4.0,
    )  # fmt: skip
    costs = replace(profile(), stages=profile().stages[:2], hops=(hop,)).costs()
    there, back = costs.forward_hop[1], costs.backward_hop[0]
    assert (there.send_s, there.recv_s, there.send_bytes, there.recv_bytes) == pytest.approx((0.4, 0.2, 12.0, 6.0))
    assert (back.send_s, back.recv_s) == pytest.approx((0.1, 0.2))
    assert (there.alone_s, back.alone_s) == pytest.approx((0.4, 0.2))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"version": 1', '"version": 2', "version = 2: must be 1"),
        ('"forward_s": 1.0', '"forward_s": -1.0', r"stages\[0\]: forward_s = -1.0: must be a number, at least 0"),
        ('"forward_s": 1.0', '"forwards": 1.0', r"stages\[0\]: unknown forwards; there is index, forward_s"),
        ('"forward_s": 1.0,', "", r"stages\[0\]: .*forward_s"),
        ('"seq_len": 8', '"seq_len": "8"', "seq_len is missing or is no int"),
        ("{", "", "can't be read as a profile"),
    ],
)
def test_a_wrong_profile_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "profile.json"
    profile().save(path)
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        Profile.load(path)


def test_an_incomplete_profile_has_no_costs() -> None:
    for wrong, message in [
        (replace(profile(), hops=()), "hops: must be those into stages 1 to 2"),
        (replace(profile(), stages=profile().stages[1:]), "stages: must be all stages"),
        (replace(profile(), stages=(StageProfile(index=0, forward_s=1.0),), hops=()), "stage 0: needs backward_s"),
    ]:
        with pytest.raises(ValueError, match=message):
            wrong.costs()
