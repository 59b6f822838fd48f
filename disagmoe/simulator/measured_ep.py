"""What an expert-parallel pipeline would take, from the measured costs of a run in `mode = "ep"`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from disagmoe.layout import ChunkStage, cut_into_chunks
from disagmoe.schedules.chunk_orders import make_order, place_chunks
from disagmoe.simulator.chunks import spell_out
from disagmoe.simulator.costs import NO_HOP, Hop, StageCosts
from disagmoe.simulator.engine import Options, simulate
from disagmoe.simulator.overlap import chunked
from disagmoe.simulator.profile import Profile
from disagmoe.simulator.result import Result


@dataclass(frozen=True, kw_only=True)
class Nic:
    """A worker's network interface, full duplex."""

    bytes_per_s: float
    """Achieved, each way."""
    latency_s: float = 0.0
    """From hand-over to arrival of an empty message."""


def predict_expert_parallel(
    profile: Profile,
    *,
    is_moe_layer: Sequence[bool],
    pipeline_depth: int,
    chunks_per_rank: int,
    microbatches: int,
    overlap: Literal["none", "chunked", "dual_pipe_v"],
    num_chunks: int = 1,
    nic: Nic | None = None,
    options: Options | None = None,
) -> Result:
    """Simulate a step's forwards and backwards; `makespan_s` of the result leaves out gradient sums and the update.

    Args:
        profile: of a run with the same number of chunks and micro-batch size (`[metrics] profile_costs`); whether its
            rows were de-duplicated decides their bytes.
        num_chunks: parts of `overlap = "chunked"`.
        nic: transfers take their measured bytes at this rate; None: their measured times.

    Raises:
        ValueError: the profile is of another number of stages, or there is no such order.
    """
    in_v = overlap == "dual_pipe_v"
    ranks = place_chunks(pipeline_depth, chunks_per_rank, in_v=in_v)
    stages = cut_into_chunks(is_moe_layer, len(ranks))
    if len(stages) != len(profile.stages):
        raise ValueError(
            f"the profile has {len(profile.stages)} stages, {len(ranks)} chunks of {len(is_moe_layer)} layers have "
            f"{len(stages)}: profile a run with pipeline_depth x chunks_per_rank = {len(ranks)}"
        )
    costs = profile.costs()
    if nic is not None:
        costs = replace(
            costs,
            forward_hop=tuple(_at_rate(hop, nic) for hop in costs.forward_hop),
            backward_hop=tuple(_at_rate(hop, nic) for hop in costs.backward_hop),
        )
    if overlap == "chunked":
        costs = _chunked(costs, stages, num_chunks)
    order = make_order(pipeline_depth, chunks_per_rank, microbatches, in_v=in_v)
    schedule = spell_out(order, stages, ranks, name=f"ep-{overlap}", num_microbatches=microbatches)
    return simulate(schedule, costs, options=options)


def _at_rate(hop: Hop, nic: Nic) -> Hop:
    if not hop.send_bytes:
        return NO_HOP
    return Hop(
        send_s=hop.send_bytes / nic.bytes_per_s,
        recv_s=hop.recv_bytes / nic.bytes_per_s,
        latency_s=nic.latency_s,
        send_bytes=hop.send_bytes,
        recv_bytes=hop.recv_bytes,
    )


def _chunked(costs: StageCosts, stages: Sequence[ChunkStage], pieces: int) -> StageCosts:
    """A layer's transfers go into its expert stage, piece by piece; see `overlap.chunked`."""
    forward_s, backward_s, input_s = list(costs.forward_s), list(costs.backward_s), list(costs.backward_input_s)
    forward_hop, backward_hop = list(costs.forward_hop), list(costs.backward_hop)
    exposed_forward, exposed_backward = [0.0] * len(stages), [0.0] * len(stages)
    nic_forward, nic_backward = [0.0] * len(stages), [0.0] * len(stages)
    for index, stage in enumerate(stages):
        if stage.kind != "F":
            continue
        there, back = forward_hop[index], forward_hop[index + 1]
        combine, dispatch = backward_hop[index], backward_hop[index - 1]
        nic_forward[index] = there.send_s + back.send_s
        nic_backward[index] = combine.send_s + dispatch.send_s
        forward = chunked(there, forward_s[index], back, pieces=pieces)
        backward = chunked(combine, backward_s[index], dispatch, pieces=pieces)
        forward_s[index], exposed_forward[index] = forward.total_s, forward.exposed_s
        exposed_backward[index] = backward.exposed_s
        input_s[index] += backward.total_s - backward_s[index]
        backward_s[index] = backward.total_s
        forward_hop[index] = forward_hop[index + 1] = NO_HOP
        backward_hop[index] = backward_hop[index - 1] = NO_HOP
    return replace(
        costs,
        forward_s=tuple(forward_s),
        backward_s=tuple(backward_s),
        backward_input_s=tuple(input_s),
        forward_hop=tuple(forward_hop),
        backward_hop=tuple(backward_hop),
        inner_comm_forward_s=tuple(exposed_forward),
        inner_comm_backward_s=tuple(exposed_backward),
        inner_nic_forward_s=tuple(nic_forward),
        inner_nic_backward_s=tuple(nic_backward),
    )
