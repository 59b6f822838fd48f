"""Smoke test of the CUDA path: the debug models on NCCL against the unsplit model on one GPU, in float32.

On a machine with GPUs (2 for the first disaggregated layout, 4 for the second; 1 for the colocated one):

    ./run_tests.sh tests/gpu

and a run of the command that users type, on the same machine:

    ./run_train.sh --training.steps=20

Each layout is skipped, with its reason, where there are fewer GPUs than it has workers.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from disagmoe.config.schema import CommConfig, Config
from tests.distributed.harness.cases import (
    FAMILIES,
    Case,
    RunResult,
    assemble,
    make_config,
    reference_config,
    write_documents,
)
from tests.distributed.harness.compare import distance, loss_distances, worst

ROOT = Path(__file__).parents[2]
STEPS = 3
GRADIENT, LOSS, PARAMETERS = 1e-4, 1e-5, 1e-4
"""Norm-relative. Wider than on CPU: CUDA picks kernels, and with them the order of sums, by shape."""
LAYOUTS = {
    "colocated": (1, {"layout": (1, 1, 1, 1), "colocate": True}),
    "1 A + 1 F": (2, {"layout": (1, 1, 1, 1)}),
    "2 A + 2 F": (4, {"layout": (1, 1, 2, 2)}),
}
"""Number of processes, and `make_config`'s arguments."""


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_same_training_as_the_unsplit_model(family: str, name: str) -> None:
    import torch

    size, _ = LAYOUTS[name]
    if torch.cuda.device_count() < size:
        pytest.skip(f"{name} needs {size} GPUs, this machine has {torch.cuda.device_count()}")
    assert_parity(family, name)


def assert_parity(family: str, name: str) -> None:
    """Train both ways and compare. On a machine without GPUs this compares on CPU."""
    size, arguments = LAYOUTS[name]
    config = make_config(family, _documents(), seq_len=128, microbatches=4, **arguments)  # type: ignore[arg-type]
    result, expected = _run(replace(config, comm=CommConfig()), size), _reference(family)
    assert not result.unequal
    assert worst(result.initial, expected.initial) == (0.0, worst(result.initial, expected.initial)[1])
    gradient, parameter = (worst(result.gradients, expected.gradients), worst(result.parameters, expected.parameters))
    assert max(loss_distances(result, expected)) < LOSS
    assert gradient[0] < GRADIENT, gradient
    assert parameter[0] < PARAMETERS, parameter
    for key, value in expected.biases.items():
        assert distance(result.biases[key], value) < PARAMETERS, key


@cache
def _documents() -> Path:
    return write_documents(Path(mkdtemp(prefix="disagmoe_gpu_"), "documents.jsonl"), num_tokens=20000, longest=200)


@cache
def _reference(family: str) -> RunResult:
    config = make_config(family, _documents(), seq_len=128)
    return _run(reference_config(config), 1)


def _run(config: Config, size: int) -> RunResult:
    """Train under torchrun, one process a worker."""
    folder = Path(mkdtemp(prefix="disagmoe_gpu_"))
    (folder / "case.pickle").write_bytes(pickle.dumps(Case(config=config, steps=STEPS)))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={size}"),
            *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
            *("-m", "tests.gpu.worker", str(folder / "case.pickle"), str(folder)),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return assemble([pickle.loads((folder / f"rank_{rank}.pickle").read_bytes()) for rank in range(size)])
