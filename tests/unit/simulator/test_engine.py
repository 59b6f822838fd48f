"""The engine: closed forms, order and exclusivity on random instances, deadlocks, workers that differ."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings

from disagmoe.schedules import Action, Kind
from disagmoe.schedules.dependencies import input_of, output_of
from disagmoe.simulator.costs import NO_HOP, Hop, StageCosts, Workers, uniform_costs
from disagmoe.simulator.engine import DeadlockError, Options, simulate
from disagmoe.simulator.result import Result

from .helpers import Instance, af_schedule, instances, with_programs

RANDOM = settings(max_examples=120, deadline=None)


def close(value: float) -> object:
    return pytest.approx(value, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("links", ["in_order", "fair", "no_contention"])
@pytest.mark.parametrize("host", ["blocking", "ahead"])
def test_one_microbatch_is_a_chain(links: str, host: str) -> None:
    schedule = af_schedule((2, 2), 3, 1)
    costs = uniform_costs(7, hop_s=0.4, head_s=0.5)
    result = simulate(schedule, costs, options=Options(links=links, host=host))  # type: ignore[arg-type]
    assert result.makespan_s == close(3 * (6 + 0.5) + 2 * 6 * 0.4)
    path = result.critical_path()
    assert sum(s.end_s - s.start_s for s in path) == close(result.makespan_s)
    assert [s.kind for s in path].count("transfer") == 12


@pytest.mark.parametrize(
    ("depth", "layers", "microbatches", "hop"),
    [(1, 6, 16, 0.3), (1, 6, 16, 0.5), (2, 8, 16, 0.3), (2, 8, 16, 0.5), (4, 28, 32, 0.5), (4, 16, 32, 0.5)],
)
def test_deep_reaches_its_closed_form(depth: int, layers: int, microbatches: int, hop: float) -> None:
    """Bubble (2p - 1)(3f + 2c), where the rounds divide and the order has no flaw."""
    schedule = af_schedule((depth, depth), layers, microbatches)
    result = simulate(schedule, uniform_costs(schedule.num_stages, hop_s=hop, head_s=0.0))
    assert result.bubble_s == close((2 * depth - 1) * (3 + 2 * hop))
    assert result.makespan_s == close(3 * microbatches * layers / depth + result.bubble_s)


def test_latency_legs_and_unequal_sides() -> None:
    """Arrival: latency after the slower of sender and receiver, on the slower of both legs."""
    schedule = af_schedule((1, 1), 1, 1)
    hops = [Hop(send_s=2, recv_s=3, latency_s=0.5), Hop(send_s=1, fabric_send_s=4, fabric_recv_s=2, latency_s=0.5)]
    costs = replace(uniform_costs(3), forward_hop=(NO_HOP, *hops), backward_hop=(NO_HOP,) * 3)
    for links in ("in_order", "fair"):
        result = simulate(schedule, costs, options=Options(links=links))  # type: ignore[arg-type]
        assert result.makespan_s == close(9 + 3.5 + 4.5)
        assert result.uses[0].nic_send_s == close(2)
        assert result.uses[1].nic_recv_s == close(3)
        assert result.uses[1].fabric_send_s == close(4)
        assert result.uses[0].exposed_comm_s == close(4.5)
        assert result.uses[1].exposed_comm_s == close(3.5)


def test_links_in_order_and_fair() -> None:
    """Two payloads of one sender, the second handed over while the first is under way."""
    schedule = af_schedule((1, 1), 1, 2, "plain")
    costs = replace(uniform_costs(3, hop_s=0.0), forward_hop=(NO_HOP, Hop(send_s=3, recv_s=3), NO_HOP))
    arrivals = {}
    for links in ("in_order", "fair", "no_contention"):
        result = simulate(schedule, costs, options=Options(links=links))  # type: ignore[arg-type]
        arrivals[links] = [result.arrived_at[2 + m, 1] for m in range(2)]
    # Handed over at 1 and 2. Fair: 1 alone until 2, both at half speed until 6, the second alone.
    assert arrivals == {"in_order": [4, 7], "fair": [close(6), close(7)], "no_contention": [4, 5]}


def test_a_late_post_holds_the_transfer_up() -> None:
    early, late = (
        simulate(af_schedule((1, 1), 4, 8, "plain", hoist=hoist), uniform_costs(9, hop_s=0.8)) for hoist in (8, 0)
    )
    assert early.makespan_s < late.makespan_s


def test_a_host_ahead_hands_a_delayed_send_over_in_time() -> None:
    """With sends after the next compute action, a blocking host holds payloads back and one ahead does not."""
    from disagmoe.layout import Layout
    from disagmoe.schedules import make_schedule

    layout = Layout(attn_depth=2, ffn_depth=2, attn_workers=1, ffn_workers=1)
    at_once, delayed = (
        make_schedule(layout, [True] * 4, name="deep", num_microbatches=8, send_after=n) for n in (0, 1)
    )
    costs = uniform_costs(9, hop_s=0.4)
    blocking, ahead = (simulate(delayed, costs, options=Options(host=h)).makespan_s for h in ("blocking", "ahead"))
    assert ahead < blocking
    assert ahead == close(simulate(at_once, costs, options=Options(host="ahead")).makespan_s)


def check_order(instance: Instance, result: Result) -> None:
    """Every action once and in its program's order, no earlier than its input, one at a time on each engine."""
    schedule = instance.schedule
    ends: dict[tuple[Action, int], float] = {}
    group_units = defaultdict(list)
    for unit, group in enumerate(result.group_of_unit):
        group_units[group].append(unit)
        spans = result.compute_spans[unit]
        assert [s.action for s in spans] == list(schedule.compute[group])
        for before, after in itertools.pairwise(spans):
            assert before.end_s <= after.start_s + 1e-12
        ends.update({(s.action, unit): s.end_s for s in spans})
    makers = {
        output_of(action, schedule.num_stages): action
        for order in schedule.compute
        for action in order
        if output_of(action, schedule.num_stages) is not None
    }
    for unit in range(len(result.group_of_unit)):
        for span in result.compute_spans[unit]:
            message = input_of(span.action, schedule.num_stages)
            if message is not None:
                senders = group_units[schedule.group_of_stage[message.sender]]
                hops = instance.costs.backward_hop if message.backward else instance.costs.forward_hop
                latest = max(ends[makers[message], sender] for sender in senders)
                assert span.start_s >= latest + hops[message.stage].latency_s - 1e-9
    for use in result.uses:
        assert min(use.compute_s, use.exposed_comm_s, use.idle_s + 1e-9) >= 0
        assert use.compute_s + use.exposed_comm_s + use.idle_s == close(result.makespan_s)
        for busy in (use.nic_send_s, use.nic_recv_s, use.fabric_send_s, use.fabric_recv_s):
            # The last payloads may still be received when nobody needs to wait for the rest of them.
            assert instance.options.links == "no_contention" or busy <= result.makespan_s + 20
    path = result.critical_path()
    for earlier, later in itertools.pairwise(path):
        assert earlier.end_s <= later.start_s + 1e-9


def check_links(result: Result) -> None:
    """Each direction of each link carries one message at a time (its parts from several senders are one)."""
    by_direction = defaultdict(list)
    for span in result.link_spans:
        by_direction[span.leg, span.sending, span.unit].append(span)
    for spans in by_direction.values():
        spans.sort(key=lambda s: (s.start_s, s.end_s))
        for before, after in itertools.pairwise(spans):
            assert before.end_s <= after.start_s + 1e-9


@given(instance=instances())
@RANDOM
def test_random_instances_keep_order_and_exclusivity(instance: Instance) -> None:
    result = simulate(instance.schedule, instance.costs, workers=instance.workers, options=instance.options)
    check_order(instance, result)
    if instance.options.links == "in_order":
        check_links(result)


@given(instance=instances(alike=True))
@RANDOM
def test_collapsed_agrees_with_full(instance: Instance) -> None:
    full = simulate(instance.schedule, instance.costs, workers=instance.workers, options=instance.options)
    collapsed = simulate(instance.schedule, instance.costs, options=instance.options)
    assert full.makespan_s == close(collapsed.makespan_s)
    for use in full.uses:
        other = collapsed.uses[use.group]
        for field in ("compute_s", "exposed_comm_s", "idle_s", "nic_send_s", "nic_recv_s", "peak_activation_bytes"):
            assert getattr(use, field) == close(getattr(other, field)), field


def test_a_straggler_slows_everybody() -> None:
    schedule = af_schedule((2, 2), 4, 8)
    costs = uniform_costs(9, hop_s=0.3, head_s=0.0)
    makespans = [
        simulate(schedule, costs, workers=Workers(count=(2, 2, 3, 3), slowdown={(2, 1): slow})).makespan_s
        for slow in (1.0, 1.1, 1.5, 3.0)
    ]
    assert makespans == sorted(makespans) and len(set(makespans)) == 4
    assert makespans[-1] >= 3 * 3 * 2 * 8


def test_uneven_rows_slow_and_cost_memory() -> None:
    schedule = af_schedule((1, 1), 4, 8)
    costs = uniform_costs(9, hop_s=0.3)
    even = simulate(schedule, costs, workers=Workers(count=(2, 2)))
    uneven = simulate(schedule, costs, workers=Workers(count=(2, 2), share={1: (1.5, 0.5)}))
    assert uneven.makespan_s > even.makespan_s
    assert uneven.uses[2].nic_recv_s == close(1.5 * even.uses[2].nic_recv_s)
    assert uneven.uses[2].peak_activation_bytes == close(3 * uneven.uses[3].peak_activation_bytes)


def test_workers_that_do_not_fit_are_refused() -> None:
    schedule, costs = af_schedule((1, 1), 1, 1), uniform_costs(3)
    for workers, message in [
        (Workers(count=(1,)), "count = .* one number a group"),
        (Workers(count=(1, 1), slowdown={(0, 1): 2.0}), "no such worker"),
        (Workers(count=(1, 1), slowdown={(0, 0): 0.0}), "must be above 0"),
        (Workers(count=(1, 2), share={1: (1.0,)}), "one a worker"),
        (Workers(count=(1, 2), share={1: (1.0, 2.0)}), "1 on average"),
    ]:
        with pytest.raises(ValueError, match=message):
            simulate(schedule, costs, workers=workers)
    with pytest.raises(ValueError, match="costs are for 5 stages, the schedule has 3"):
        simulate(schedule, uniform_costs(5))
    with pytest.raises(ValueError, match="forward_s contains -1"):
        uniform_costs(3, forward_s=-1)
    with pytest.raises(ValueError, match="backward_s has 2 entries for 3 stages"):
        replace(costs, backward_s=(1.0, 2.0))


def test_a_deadlock_is_reported_with_its_cycle() -> None:
    """A1 wants micro-batch 1 first, A0's gradient of micro-batch 0 first before it makes micro-batch 1."""
    schedule = af_schedule((1, 1), 1, 2, "plain")
    attention, experts = (list(program) for program in schedule.programs)
    moved = [a for a in attention if a.microbatch == 1 and a.stage == 0 and a.kind in (Kind.FORWARD, Kind.SEND_F)]
    attention = [a for a in attention if a not in moved]
    attention.insert(attention.index(Action(Kind.FULL_BACKWARD, 0, 0)) + 1, moved[0])
    attention.insert(attention.index(moved[0]) + 1, moved[1])
    last = [a for a in attention if a.microbatch == 1 and a not in moved]
    attention = [a for a in attention if a not in last] + last
    forward = experts.index(Action(Kind.FORWARD, 1, 0))
    second = experts.index(Action(Kind.FORWARD, 1, 1))
    experts[forward], experts[second] = experts[second], experts[forward]
    with pytest.raises(DeadlockError) as caught:
        simulate(with_programs(schedule, (attention, experts)), uniform_costs(3))
    assert set(caught.value.cycle) == {0, 1}
    assert "group 0 (A0) at 2F0 waits for 1SEND_F0 of group 1 (F0)" in str(caught.value)
    assert "group 1 (F0) at 1F1 waits for 0SEND_F1 of group 0 (A0)" in str(caught.value)


def test_a_payload_that_is_never_sent_or_never_wanted() -> None:
    schedule = af_schedule((1, 1), 1, 1, "plain")
    attention, experts = (list(program) for program in schedule.programs)
    silent = [a for a in attention if a.kind is not Kind.SEND_F]
    with pytest.raises(DeadlockError, match=r"1F0 waits for 0SEND_F0 of group 0 \(A0\), which never does it"):
        simulate(with_programs(schedule, (silent, experts)), uniform_costs(3))
    deaf = [a for a in experts if a.kind is not Kind.RECV_F]
    with pytest.raises(DeadlockError, match="1RECV_F0"):
        simulate(with_programs(schedule, (attention, deaf)), uniform_costs(3))


def test_communication_inside_a_stage_is_not_compute() -> None:
    schedule = af_schedule((1, 1), 1, 1)
    costs = uniform_costs(3)
    inner = StageCosts(**{**vars(costs), "inner_comm_forward_s": (0.0, 0.25, 0.0), "inner_nic_forward_s": (0, 0.5, 0)})
    use = simulate(schedule, inner).uses[1]
    assert (use.compute_s, use.exposed_comm_s, use.nic_send_s) == (2.75, 0.25, 0.5)
