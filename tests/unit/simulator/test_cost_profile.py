"""How measured actions and transfers become a profile's stages and hops."""

from __future__ import annotations

import pytest

from disagmoe.cost_profile import _hops, _stages, _with_senders
from disagmoe.parallelisms.clock import CostSamples
from disagmoe.simulator.profile import HopProfile


def test_a_stage_is_its_slowest_workers_mean_with_handling_of_messages() -> None:
    fast = CostSamples(actions_s={("FORWARD", 0): [1.0, 1.0], ("FULL_BACKWARD", 0): [2.0]})
    slow = CostSamples(
        actions_s={
            ("FORWARD", 0): [1.0, 3.0],
            ("FULL_BACKWARD", 0): [4.0],
            ("SEND_F", 0): [0.25],
            ("RECV_F", 0): [0.125],
            ("SEND_B", 0): [0.5],
            ("RECV_B", 0): [0.0625],
        }
    )
    (stage,) = _stages([fast, slow], [7.0])
    assert stage.forward_s == pytest.approx(2.0 + 0.25 + 0.125)
    assert stage.backward_s == pytest.approx(4.0 + 0.5 + 0.0625)
    assert stage.backward_input_s is None and stage.activation_bytes == 7.0


def test_handling_of_messages_goes_to_the_half_that_is_in_time_for_the_sender() -> None:
    samples = CostSamples(
        actions_s={("BACKWARD_INPUT", 0): [1.0], ("BACKWARD_WEIGHT", 0): [0.75], ("SEND_B", 0): [0.5]}
    )
    (stage,) = _stages([samples], [0.0])
    assert (stage.backward_s, stage.backward_input_s, stage.backward_weight_s) == (None, 1.5, 0.75)


def test_a_stage_that_was_never_run_takes_no_time() -> None:
    (stage,) = _stages([CostSamples()], [0.0])
    assert (stage.forward_s, stage.backward_s) == (0.0, 0.0)


def test_a_hop_is_an_undisturbed_transfer_of_the_worker_that_receives_slowest() -> None:
    """The first quartile of 20 transfers is the sixth: those that met others do not count."""
    quiet = [(100.0, seconds) for seconds in (*[0.1] * 5, 0.2, *[5.0] * 14)]
    slower = [(300.0, 0.3)] * 20
    (hop,) = _hops([CostSamples(transfers={(0, False): quiet}), CostSamples(transfers={(0, False): slower})], 2, {})
    assert (hop.index, hop.forward_s, hop.forward_bytes) == (1, 0.3, 300.0)
    (alone,) = _hops([CostSamples(transfers={(0, False): quiet})], 2, {})
    assert (alone.forward_s, alone.forward_bytes, alone.backward_s) == (0.2, 100.0, 0.0)


def test_pieces_of_a_transfer_are_added_up_before_one_is_typical() -> None:
    """Of two pieces the first is always quick: twice a quick one would be half of what both take."""
    pieces = [(100.0, 0.1), (60.0, 0.3)] * 8
    (hop,) = _hops([CostSamples(transfers={(0, True): pieces})], 2, {0: 2})
    assert (hop.backward_s, hop.backward_bytes, hop.forward_s) == pytest.approx((0.4, 160.0, 0.0))


def test_a_sender_of_a_smaller_group_sends_more_than_its_peers_receive() -> None:
    hop = HopProfile(index=1, forward_bytes=6.0, forward_s=0.4, backward_bytes=12.0, backward_s=0.2)
    one_to_two = _with_senders(hop, 1, 2)
    assert (one_to_two.forward_send_bytes, one_to_two.backward_send_bytes) == (12.0, 6.0)
