"""The dispatch plan: a row a token and worker, one primary row a token, in nearly equal shares."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from disagmoe.layout import split_evenly
from disagmoe.parallelisms.transfer.plan import choose_primaries, draft_plan, make_plan


@st.composite
def routings(draw: st.DrawFn) -> tuple[torch.Tensor, list[range]]:
    """Distinct expert ids a token, and the experts of each worker."""
    num_experts = draw(st.integers(1, 12))
    num_peers = draw(st.integers(1, num_experts))
    top_k = draw(st.integers(1, min(num_experts, 6)))
    num_tokens = draw(st.integers(0, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    ids_TK = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :top_k].contiguous()
    return ids_TK, split_evenly(num_experts, num_peers)


@settings(max_examples=200, deadline=None)
@given(routing=routings())
def test_plan_is_the_routing(routing: tuple[torch.Tensor, list[range]]) -> None:
    ids_TK, experts_by_peer = routing
    num_tokens, top_k = ids_TK.shape
    plan = make_plan(ids_TK, experts_by_peer)
    assert (plan.num_tokens, plan.top_k, len(plan.peers)) == (num_tokens, top_k, len(experts_by_peer))
    primaries, slots = [], []
    for peer, experts in zip(plan.peers, experts_by_peer, strict=True):
        tokens = peer.token_R.tolist()
        wanted = {t for t in range(num_tokens) if any(e in experts for e in ids_TK[t].tolist())}
        assert len(tokens) == len(set(tokens)) and set(tokens) == wanted, "a row for each token that is routed here"
        primaries += tokens[: peer.num_primary]
        pairs = zip(peer.pair_slot_Q.tolist(), peer.pair_row_Q.tolist(), peer.pair_expert_Q.tolist(), strict=True)
        for slot, row, local in pairs:
            slots.append(slot)
            assert tokens[row] == slot // top_k
            assert experts.start + local == ids_TK.flatten()[slot]
    assert sorted(primaries) == list(range(num_tokens)), "one primary row a token"
    assert sorted(slots) == list(range(num_tokens * top_k)), "each pair once"
    assert plan.num_rows == sum(peer.num_rows for peer in plan.peers)


def test_draft_needs_counts_only() -> None:
    """A draft is completed by its own counts, and equals the plan made at once."""
    ids_TK, experts = torch.tensor([[0, 5], [2, 3], [7, 1]]), split_evenly(8, 3)
    draft = draft_plan(ids_TK, experts)
    assert draft.counts_3N.shape == (3, 3)
    completed, whole = draft.complete(draft.counts_3N.tolist()), make_plan(ids_TK, experts)
    for one, other in zip(completed.peers, whole.peers, strict=True):
        assert one.token_R.tolist() == other.token_R.tolist()
        assert one.pair_slot_Q.tolist() == other.pair_slot_Q.tolist()


@settings(max_examples=100, deadline=None)
@given(routing=routings())
def test_primary_is_among_the_receivers(routing: tuple[torch.Tensor, list[range]]) -> None:
    ids_TK, experts_by_peer = routing
    hit_TN = torch.stack([((ids_TK >= r.start) & (ids_TK < r.stop)).any(1) for r in experts_by_peer], dim=1)
    primary_T = choose_primaries(hit_TN)
    assert hit_TN.gather(1, primary_T[:, None]).all()
    assert torch.equal(primary_T, choose_primaries(hit_TN)), "deterministic"


@pytest.mark.parametrize("num_peers", [2, 3, 4, 8])
@pytest.mark.parametrize("top_k", [2, 4, 6])
def test_primaries_come_in_nearly_equal_shares(num_peers: int, top_k: int) -> None:
    """With random experts, no worker has more than 1.1 times its share; with a favourite expert, 1.25 times."""
    num_tokens, experts = 4096, split_evenly(16, num_peers)
    scores_TE = torch.rand(num_tokens, 16, generator=torch.Generator().manual_seed(0))
    for favour, limit in ((0.0, 1.1), (0.3, 1.25)):
        favoured_TE = scores_TE.clone()
        favoured_TE[:, 0] += favour
        plan = make_plan(favoured_TE.argsort(1, descending=True)[:, :top_k].contiguous(), experts)
        most = max(peer.num_primary for peer in plan.peers)
        assert most <= limit * num_tokens / num_peers, (favour, [peer.num_primary for peer in plan.peers])
