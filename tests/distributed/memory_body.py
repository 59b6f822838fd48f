"""Case bodies that measure."""

from __future__ import annotations

from typing import Any

from disagmoe.trainer import Trainer
from disagmoe.world import World
from tests.distributed.harness.cases import Case
from tests.distributed.live_memory import LiveBytes


def peak_live_bytes(case: Case, world: World) -> dict[str, Any]:
    """Most bytes of tensors alive during forward and backward of the second step, on this process."""
    peaks: list[int] = []
    with LiveBytes() as live:
        trainer = Trainer(case.config, world, folder=None)
        run = trainer.engine.run

        def measured(*args: Any, **kwargs: Any) -> Any:
            live.restart()
            result = run(*args, **kwargs)
            peaks.append(live.peak)
            return result

        trainer.engine.run = measured  # type: ignore[method-assign]
        trainer.run(2)
        trainer.close()
    return {"worker": trainer.engine.workers[0], "peak": peaks[-1]}
