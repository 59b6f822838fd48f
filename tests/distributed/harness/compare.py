"""How far two results are apart."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tests.distributed.harness.cases import RunResult

GRADIENT = 1e-5
LOSS_FIRST = 1e-6
LOSS_LAST = 1e-5
PARAMETERS = {"SGD": 1e-5, "AdamW": 1e-3}
"""Tolerances in float32: norm-relative a tensor, relative for losses. Adam amplifies rounding of tiny gradients."""


def distance(value: Tensor, expected: Tensor) -> float:
    """|value - expected| / |expected| in 2-norms; 0 for equal tensors, infinite for a difference from zeros."""
    assert value.shape == expected.shape, f"shape {tuple(value.shape)}, expected {tuple(expected.shape)}"
    difference = float((value.double() - expected.double()).norm())
    norm = float(expected.double().norm())
    return difference / norm if norm else (float("inf") if difference else 0.0)


def worst(values: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest distance, and whose it is. The names must be the same."""
    assert values.keys() == expected.keys(), f"differ in {values.keys() ^ expected.keys()}"
    return max((distance(values[name], expected[name]), name) for name in expected)


def loss_distances(result: RunResult, expected: RunResult) -> list[float]:
    """Relative, by step."""
    pairs = zip(result.losses(), expected.losses(), strict=True)
    return [abs(loss - other) / abs(other) for loss, other in pairs]


class Worst:
    """The largest differences seen in a session, for the summary."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[float, str]] = {}

    def note(self, what: str, value: float, where: str) -> None:
        if value > self.seen.get(what, (-1.0, ""))[0]:
            self.seen[what] = (value, where)


WORST = Worst()


def assert_same_training(result: RunResult, expected: RunResult, *, optimizer: str, where: str) -> None:
    """Gradients, losses and parameters within the tolerances; what is counted and not summed, equal."""
    problems = []

    def check(what: str, value: float, limit: float, name: str = "") -> None:
        WORST.note(what, value, f"{where} {name}".strip())
        if not value <= limit:
            problems.append(f"{what}: {value:.2e} > {limit:.0e} {name}")

    gradient, name = worst(result.gradients, expected.gradients)
    check("gradients at step 1", gradient, GRADIENT, name)
    losses = loss_distances(result, expected)
    check("loss at step 1", losses[0], LOSS_FIRST)
    check("loss, later steps", max(losses), LOSS_LAST)
    parameter, name = worst(result.parameters, expected.parameters)
    check(f"parameters, {optimizer}", parameter, PARAMETERS[optimizer], name)
    if expected.biases:
        # A step of the bias is 1e-3 up or down: rounding alone separates equal ones.
        check("router biases", worst(result.biases, expected.biases)[0], 1e-5)
    for step, (values, others) in enumerate(zip(result.history, expected.history, strict=True), 1):
        counted = [key for key in others if key.startswith("expert_load") or key in ("dead_experts", "valid_tokens")]
        problems += [
            f"step {step}: {key} = {values[key]}, expected {others[key]}"
            for key in counted
            if values[key] != others[key]
        ]
    assert not problems, f"{where}\n" + "\n".join(problems)
