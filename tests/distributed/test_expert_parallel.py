"""Every expert-parallel baseline trains to what the unsplit model trains to; tolerances are in `harness.compare`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from disagmoe.config.checks import model_shape
from disagmoe.config.schema import ExpertParallelConfig, ParallelismConfig
from disagmoe.cost_profile import expert_parallel_profile
from disagmoe.simulator.measured_ep import Nic, predict_expert_parallel
from tests.distributed.harness.cases import ADAMW, FAMILIES, NUM_STAGES, SGD, Case, make_config
from tests.distributed.harness.compare import assert_same_training, loss_distances
from tests.distributed.harness.cover import cover
from tests.distributed.harness.worlds import CaseError, Worlds

LAYOUTS: dict[str, dict[str, int]] = {
    "PP1xEP1": {"pipeline_depth": 1, "expert_workers": 1, "microbatches": 2},
    "PP1xEP3": {"pipeline_depth": 1, "expert_workers": 3, "microbatches": 7},
    "PP2xEP2": {"pipeline_depth": 2, "expert_workers": 2, "microbatches": 5},
    "PP3xEP1": {"pipeline_depth": 3, "expert_workers": 1, "microbatches": 6},
    "2x(PP1xEP2)": {"pipeline_depth": 1, "expert_workers": 2, "microbatches": 3, "replicas": 2},
    "2x(PP2xEP1)": {"pipeline_depth": 2, "expert_workers": 1, "microbatches": 4, "replicas": 2},
}
"""Three workers do not divide the 8 experts, and have empty slices of micro-batches of 2 samples; 3 ranks, and 4
chunks, do not divide the layers evenly."""
SYSTEMS: dict[str, dict[str, Any]] = {
    "stock": {},
    "dedup": {"deduplicate": True},
    "interleaved-dedup": {"deduplicate": True, "chunks_per_rank": 2},
    "chunked": {"overlap": "chunked", "num_chunks": 3},
    "chunked-dedup": {"overlap": "chunked", "num_chunks": 2, "deduplicate": True},
    "dual_pipe_v": {"overlap": "dual_pipe_v", "chunks_per_rank": 2},
    "dual_pipe_v-dedup": {"overlap": "dual_pipe_v", "chunks_per_rank": 2, "deduplicate": True},
}
OPTIMIZERS = {"SGD": SGD, "AdamW": ADAMW}
AXES = {
    "family": FAMILIES,
    "layout": tuple(LAYOUTS),
    "system": tuple(SYSTEMS),
    "recompute": ("none", "ffn", "full"),
    "order": ("tagged", "strict"),
    "optimizer": tuple(OPTIMIZERS),
}


def makes_sense(combination: dict[str, Any]) -> bool:
    """Interleaving wants a multiple of the ranks."""
    layout, system = LAYOUTS[combination["layout"]], SYSTEMS[combination["system"]]
    interleaved = system.get("chunks_per_rank", 1) > 1 and "overlap" not in system
    return not (interleaved and layout["microbatches"] % layout["pipeline_depth"])


def by_size(combinations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cases of one world size together, so that few worlds are started."""

    def size(combination: dict[str, Any]) -> int:
        layout = LAYOUTS[combination["layout"]]
        return layout.get("replicas", 1) * layout["pipeline_depth"] * layout["expert_workers"]

    return sorted(combinations, key=size)


FULL = cover(AXES, makes_sense)
QUICK = by_size(
    [
        dict(zip(AXES, values.split(), strict=True))
        for values in (
            "deepseek_moe PP1xEP3 stock none tagged SGD",
            "deepseek_moe PP2xEP2 dual_pipe_v-dedup none strict SGD",
            "gpt_oss PP1xEP3 chunked-dedup none tagged SGD",
            "gpt_oss 2x(PP1xEP2) dual_pipe_v full tagged AdamW",
            "qwen3 PP2xEP2 stock none strict AdamW",
            "qwen3 PP3xEP1 interleaved-dedup ffn tagged SGD",
            "qwen3 2x(PP1xEP2) chunked none tagged SGD",
            "deepseek_moe PP1xEP1 dedup none tagged SGD",
        )
    ]
)
REST = by_size([combination for combination in FULL if combination not in QUICK])


def name_of(combination: dict[str, Any]) -> str:
    return "-".join(combination.values())


def case_of(combination: dict[str, Any], documents: Path, **case: Any) -> Case:
    layout = LAYOUTS[combination["layout"]]
    config = make_config(
        combination["family"],
        documents,
        optimizer=OPTIMIZERS[combination["optimizer"]],
        strict_order=combination["order"] == "strict",
        global_batch_size=(NUM_STAGES + 1) * layout.get("replicas", 1),
    )
    part = ExpertParallelConfig(**layout, **SYSTEMS[combination["system"]], recompute=combination["recompute"])
    return Case(config=replace(config, parallelism=ParallelismConfig(mode="ep"), expert_parallel=part), **case)


def check(combination: dict[str, Any], worlds: Worlds, documents: Path) -> None:
    case = case_of(combination, documents)
    expected, result = worlds.reference(case), worlds.run(case)
    assert_same_training(result, expected, optimizer=combination["optimizer"], where=name_of(combination))
    layout = LAYOUTS[combination["layout"]]
    assert (result.history[-1]["attn.sent_bytes.max"] > 0) == (layout["pipeline_depth"] * layout["expert_workers"] > 1)


@pytest.mark.parametrize("combination", QUICK, ids=name_of)
def test_trains_like_the_unsplit_model(combination: dict[str, Any], worlds: Worlds, documents: Path) -> None:
    check(combination, worlds, documents)


@pytest.mark.full
@pytest.mark.parametrize("combination", REST, ids=name_of)
def test_trains_like_the_unsplit_model_everywhere(combination: dict[str, Any], worlds: Worlds, documents: Path) -> None:
    check(combination, worlds, documents)


@pytest.mark.parametrize("system", ["stock", "chunked-dedup", "dual_pipe_v-dedup", "dual_pipe_v"])
def test_workers_whose_experts_get_no_tokens(system: str, worlds: Worlds, documents: Path) -> None:
    """Experts 0 and 1, both on worker 0, get everything: the others send rows and receive none."""
    combination = {"family": "deepseek_moe", "layout": "PP1xEP3", "system": system, "recompute": "none"}
    bias = [10.0 - expert if expert < 2 else 0.0 for expert in range(8)]
    case = case_of(
        {**combination, "order": "tagged", "optimizer": "SGD"},
        documents,
        steps=2,
        hook="tests.distributed.harness.hooks:prefer_experts",
        hook_arguments={"bias": bias},
    )
    result = worlds.run(case)
    assert_same_training(result, worlds.reference(case), optimizer="SGD", where=f"{system}, two experts")
    assert result.history[0]["rows_per_token"] == (1.0 if "dedup" in system else 2.0)


@pytest.mark.full
@pytest.mark.parametrize("system", ["stock", "dual_pipe_v", "chunked-dedup"])
def test_bfloat16(system: str, worlds: Worlds, documents: Path) -> None:
    """Losses of three steps within 2 % of the unsplit bfloat16 model's."""
    combination = {"family": "deepseek_moe", "layout": "PP2xEP2", "system": system, "recompute": "none"}
    case = case_of({**combination, "order": "tagged", "optimizer": "AdamW"}, documents, steps=3)
    training = replace(case.config.training, dtype="bfloat16")
    case = replace(case, config=replace(case.config, training=training))
    result = worlds.run(case)
    assert all(p.dtype is torch.bfloat16 for p in result.parameters.values())
    assert max(loss_distances(result, worlds.reference(case))) <= 0.02


def test_fewer_bytes_without_duplicates(worlds: Worlds, documents: Path) -> None:
    """Rows once a worker, and what accompanies them, weigh less than a row for each expert."""
    common = {"family": "qwen3", "layout": "PP1xEP3", "recompute": "none", "order": "tagged", "optimizer": "SGD"}
    sent = {
        system: worlds.run(case_of({**common, "system": system}, documents, steps=1)).history[0]["attn.sent_bytes.mean"]
        for system in ("stock", "dedup", "chunked")
    }
    assert sent["dedup"] < sent["stock"]
    assert sent["chunked"] == pytest.approx(sent["stock"], rel=0.02)  # counts are sent for each part


@pytest.mark.parametrize("system", ["stock", "dual_pipe_v-dedup"])
def test_a_failing_worker_ends_all(system: str, worlds: Worlds, documents: Path) -> None:
    combination = {
        "family": "qwen3",
        "layout": "PP2xEP2",
        "system": system,
        "recompute": "none",
        "order": "tagged",
        "optimizer": "SGD",
    }
    hook = "tests.distributed.harness.hooks:fail_in_chunk"
    with pytest.raises(CaseError, match="a deliberate error"):
        worlds.run(case_of(combination, documents, hook=hook, timeout_s=45.0))


@pytest.mark.parametrize("system", ["stock", "chunked-dedup", "dual_pipe_v-dedup"])
def test_measured_costs_describe_the_run(system: str, worlds: Worlds, documents: Path) -> None:
    """The profile's bytes are those sent, its times those computed, and the simulator runs its system with it."""
    combination = {"family": "deepseek_moe", "layout": "PP2xEP2", "system": system, "recompute": "none"}
    case = case_of({**combination, "order": "tagged", "optimizer": "SGD"}, documents, steps=4)
    config = replace(case.config, metrics=replace(case.config.metrics, profile_costs="costs.json"))
    result = worlds.run(replace(case, config=config, hook="tests.distributed.harness.hooks:watch_clock"))
    part, shape = config.expert_parallel, model_shape(config)
    profile = expert_parallel_profile(config, shape, [clock.samples for clock in result.extras])
    last = result.history[-1]
    received = part.microbatches * sum(hop.forward_bytes + hop.backward_bytes for hop in profile.hops)
    sent = part.pipeline_depth * last["attn.sent_bytes.mean"]
    assert 0.8 < received / sent < 1.5  # medians of whoever receives most
    computed = part.pipeline_depth * last["attn.compute_s.mean"]
    costs = profile.costs()
    assert part.microbatches * (sum(costs.forward_s) + sum(costs.backward_s)) > 0.5 * computed
    options: dict[str, Any] = {
        "is_moe_layer": shape.is_moe_layer,
        "pipeline_depth": part.pipeline_depth,
        "chunks_per_rank": part.chunks_per_rank,
        "microbatches": part.microbatches,
        "overlap": part.overlap,
        "num_chunks": part.num_chunks,
    }
    measured = predict_expert_parallel(profile, **options).makespan_s
    fast = predict_expert_parallel(profile, nic=Nic(bytes_per_s=1e12), **options).makespan_s
    slow = predict_expert_parallel(profile, nic=Nic(bytes_per_s=1e5), **options).makespan_s
    assert fast <= measured
    assert fast < slow
