"""One process of a parity run under torchrun: `python -m tests.gpu.worker CASE_FILE OUT_FOLDER`.

The device is what `disagmoe.world` finds, so the same worker runs on CPU, which is how these tests are tested.
"""

from __future__ import annotations

import pickle
import sys
import time
from pathlib import Path

from disagmoe.world import run_guarded, start_world
from tests.distributed.harness import worker
from tests.distributed.harness.cases import Case


def main(case_file: Path, out: Path) -> None:
    case: Case = pickle.loads(case_file.read_bytes())
    world = start_world(case.config, out)

    def body() -> None:
        result = worker._train(case, world, time.monotonic())
        for pieces in (result.gradients, result.initial, result.parameters, result.biases):
            for piece in pieces:
                piece.value = piece.value.cpu()
        (out / f"rank_{world.rank}.pickle").write_bytes(pickle.dumps(result))

    run_guarded(world, body)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
