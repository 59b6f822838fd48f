"""Predictions of expert-parallel steps from measured costs, on profiles that are easy to add up."""

from __future__ import annotations

import pytest

from disagmoe.layout import cut_into_chunks
from disagmoe.simulator.measured_ep import Nic, predict_expert_parallel
from disagmoe.simulator.profile import HopProfile, Profile, StageProfile

MOE = (True,) * 4
ROW_BYTES = 1000.0


def profile(num_chunks: int) -> Profile:
    """Attention and experts of a layer take 1 s forward and 2 s backward; transfers within a layer are equal, those
    between chunks stay on a worker."""
    stages = cut_into_chunks(MOE, num_chunks)
    work = [0.0 if stage.layer is None else 1.0 for stage in stages]
    sizes = [0.0 if stage.kind == "C" else ROW_BYTES for stage in stages]
    return Profile(
        model="m",
        seq_len=8,
        microbatch_samples=1,
        stages=tuple(
            StageProfile(index=i, forward_s=s, backward_input_s=s, backward_weight_s=s) for i, s in enumerate(work)
        ),
        hops=tuple(
            HopProfile(index=i + 1, forward_bytes=size, forward_s=0.0, backward_bytes=size, backward_s=0.0)
            for i, size in enumerate(sizes[:-1])
        ),
    )


def step_s(chunks: int, overlap: str, nic_bytes_per_s: float, **options: int) -> float:
    values = {"pipeline_depth": 1, "chunks_per_rank": chunks, "microbatches": 4, **options}
    result = predict_expert_parallel(
        profile(chunks),
        is_moe_layer=MOE,
        overlap=overlap,  # type: ignore[arg-type]
        nic=Nic(bytes_per_s=nic_bytes_per_s),
        **values,
    )
    return result.makespan_s


def test_without_overlap_everything_adds_up() -> None:
    compute = 4 * 4 * 2 * 3.0  # micro-batches, layers, sublayers, forward and backward
    transfers = 4 * 4 * 4 * 0.5  # four a layer and micro-batch
    assert step_s(1, "none", ROW_BYTES / 0.5) == pytest.approx(compute + transfers)
    assert step_s(1, "none", float("inf")) == pytest.approx(compute)


def test_overlap_hides_what_it_can() -> None:
    compute = 4 * 4 * 2 * 3.0
    exposed = {
        (overlap, parts): step_s(chunks, overlap, ROW_BYTES / 0.5, num_chunks=parts) - compute
        for overlap, chunks, parts in (("none", 1, 1), ("chunked", 1, 2), ("chunked", 1, 4), ("dual_pipe_v", 2, 1))
    }
    assert exposed["none", 1] == pytest.approx(32)
    # Half of a dispatch before the first part's experts, half of a combine after the last one's; both passes.
    assert exposed["chunked", 2] == pytest.approx(16)
    assert exposed["chunked", 4] == pytest.approx(8)
    assert 0 < exposed["dual_pipe_v", 1] < 16


def test_latency_is_paid_by_each_part() -> None:
    def with_latency(overlap: str, parts: int) -> float:
        return predict_expert_parallel(
            profile(1),
            is_moe_layer=MOE,
            pipeline_depth=1,
            chunks_per_rank=1,
            microbatches=1,
            overlap=overlap,  # type: ignore[arg-type]
            num_chunks=parts,
            nic=Nic(bytes_per_s=float("inf"), latency_s=0.125),
        ).makespan_s

    assert with_latency("none", 1) == pytest.approx(24 + 16 * 0.125)
    assert with_latency("chunked", 2) == pytest.approx(24 + 16 * 0.125)


def test_a_profile_of_other_chunks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the profile has 9 stages, 2 chunks of 4 layers have 10: profile a run with"):
        predict_expert_parallel(
            profile(1),
            is_moe_layer=MOE,
            pipeline_depth=2,
            chunks_per_rank=1,
            microbatches=2,
            overlap="none",
        )
