"""Plans of expert-parallel rows: what owners send is what holders read, without processes."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from disagmoe.layout import split_evenly
from disagmoe.parallelisms.expert_parallel.rows import (
    ReceivePlan,
    SendPlan,
    Shares,
    metadata_slots,
    plan_receive,
    plan_send,
    starts_of,
)

DIM = 4
ROW_BYTES = DIM * 4


def routing(num_tokens: int, num_experts: int, top_k: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(num_experts, generator=draw)[:top_k] for _ in range(num_tokens)]).view(-1, top_k)


def plans_of(ids: list[Tensor], experts: list[range], deduplicate: bool) -> tuple[list[SendPlan], list[ReceivePlan]]:
    shares = Shares(experts, torch.device("cpu"))
    sent = [
        plan_send(i, shares, own=n, deduplicate=deduplicate, row_bytes=ROW_BYTES) if i.numel() else
        plan_send(torch.empty(0, 2, dtype=torch.int64), shares, own=n, deduplicate=deduplicate, row_bytes=ROW_BYTES)
        for n, i in enumerate(ids)
    ]  # fmt: skip
    received = [
        plan_receive([s.counts[n] for s in sent], own=n, deduplicate=deduplicate, row_bytes=ROW_BYTES)
        for n in range(len(experts))
    ]
    return sent, received


@pytest.mark.parametrize("deduplicate", [False, True])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_pair_is_read_once_by_the_holder_of_its_expert(workers: int, deduplicate: bool) -> None:
    experts = split_evenly(8, workers)
    tokens = (5, 0, 9)[:workers]
    ids = [routing(t, 8, 2, seed) if t else torch.empty(0, 2, dtype=torch.int64) for seed, t in enumerate(tokens)]
    sent, received = plans_of(ids, experts, deduplicate)
    seen: list[tuple[int, int, int]] = []
    for n, plan in enumerate(received):
        labels = torch.arange(len(experts[n])).repeat_interleave(plan.counts_e) + experts[n].start
        # What arrives: for each source its pairs in order, each with its row in the source's part.
        token_of_pair, source_of_pair = [], []
        for source, send in enumerate(sent):
            assert (plan.rows[source], plan.pairs[source], plan.slots[source]) == (
                send.rows[n], send.pairs[n], send.slots[n]
            )  # fmt: skip
            start, pair_start = starts_of(send.slots)[n], starts_of(send.pairs)[n]
            part = slice(pair_start, pair_start + send.pairs[n])
            rows = torch.arange(send.pairs[n]) if send.pair_row_Q is None else send.pair_row_Q[part].long()
            token_of_pair += send.token_S[start + rows].tolist()
            source_of_pair += [source] * send.pairs[n]
        for label, index in zip(labels.tolist(), plan.order_Q.tolist(), strict=True):
            seen.append((source_of_pair[index], token_of_pair[index], label))
    wanted = [(n, t, e) for n, i in enumerate(ids) for t, row in enumerate(i.tolist()) for e in row]
    assert sorted(seen) == sorted(wanted)


def test_rows_are_sent_once_a_worker_when_deduplicated() -> None:
    experts = split_evenly(8, 2)
    ids = torch.tensor([[0, 1], [0, 7], [6, 7], [3, 2]])
    shares = Shares(experts, torch.device("cpu"))
    once = plan_send(ids, shares, own=0, deduplicate=True, row_bytes=ROW_BYTES)
    assert once.rows == (3, 2)
    assert once.pairs == (5, 3)
    assert once.slots == (3, 2 + metadata_slots(3, ROW_BYTES))
    assert once.token_S.tolist() == [0, 1, 3, 1, 2, 4, 4]
    assert once.source_S.max() == 3
    each = plan_send(ids, shares, own=0, deduplicate=False, row_bytes=ROW_BYTES)
    assert each.rows == each.slots == (5, 3)
    assert each.token_S.tolist() == [0, 1, 0, 3, 3, 2, 1, 2]


def test_weights_find_their_place() -> None:
    """Pairs in the order of experts, and the way back into [T, K]."""
    shares = Shares(split_evenly(5, 3), torch.device("cpu"))
    for seed, deduplicate in itertools.product(range(3), (False, True)):
        ids = routing(6, 5, 3, seed)
        plan = plan_send(ids, shares, own=1, deduplicate=deduplicate, row_bytes=ROW_BYTES)
        sorted_ids = ids.flatten()[plan.slot_of_pair_Q]
        assert sorted_ids.tolist() == sorted(ids.flatten().tolist())
        back = torch.empty(6 * 3, dtype=torch.int64)
        back[plan.slot_of_pair_Q] = sorted_ids
        assert torch.equal(back.view(6, 3), ids)
