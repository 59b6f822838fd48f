"""Faults to inject into a worker, and an entry like `disagmoe.train` that injects them.

`python -m tests.distributed.faults '{"kind": "kill", "rank": 3, "action": 40, ...}' --config-file=FILE ...` trains like
`python -m disagmoe.train`, except that one worker fails as told.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STEPS_LIMIT = "--training.steps=200"
TINY = (
    "--training.seq_len=16",
    "--training.global_batch_size=4",
    "--disagmoe.microbatches=2",
    "--data.source=synthetic",
    "--metrics.tensorboard=false",
    "--metrics.timeline_step=0",
    STEPS_LIMIT,
)
"""Overrides that make a debug configuration start and step fast, and never end by itself."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to one worker."""

    kind: str
    """
    `kill`, `stop`: SIGKILL, SIGSTOP before action number `action` (counted from the first step);
    `sleep`: the main thread hangs there, the process stays alive;
    `forward`, `backward`, `expert`: an exception in a stage's module at its `action`-th call, in its backward, in its
    routed experts; `init`: while the model is built; `data`: at the `action`-th batch;
    `stop_collective`: SIGSTOP before gradients are summed; `usr1`: SIGUSR1 to itself before action number `action`;
    `usr1_sleep`: the same, and then the main thread hangs;
    `kill_saving`: SIGKILL at the `action`-th write of a checkpoint; `none`: nothing."""
    rank: int
    action: int = 0
    note: str = ""
    """File into which the worker writes what it was doing, and when, just before."""


def main(argv: list[str]) -> int:
    """Train with the fault that the first argument describes."""
    inject(Fault(**json.loads(argv[0])))
    from disagmoe.train import main as train

    return train(argv[1:])


def encode(fault: Fault) -> str:
    return json.dumps(asdict(fault))


def inject(fault: Fault) -> None:
    """Arrange for `fault` to happen in this process, if it is the one."""
    if int(os.environ["RANK"]) != fault.rank or fault.kind == "none":
        return
    from disagmoe.trainer import Trainer

    build, run = Trainer.__init__, Trainer.run

    def failing_build(self: Trainer, *args: Any, **kwargs: Any) -> None:
        self_world = args[1]
        build(self, *args, **kwargs)
        note(fault, self_world.monitor.status.text)
        raise ValueError("injected into init")

    def failing_run(self: Trainer, *args: Any) -> None:
        _ARM[fault.kind](self, fault)
        run(self, *args)

    if fault.kind == "init":
        Trainer.__init__ = failing_build  # type: ignore[method-assign]
    else:
        Trainer.run = failing_run  # type: ignore[method-assign]


def note(fault: Fault, doing: str) -> None:
    """Leave what the worker is doing, and when, for the test."""
    path = Path(fault.note)
    path.with_suffix(".part").write_text(json.dumps({"doing": doing, "at_s": time.monotonic()}))
    os.replace(path.with_suffix(".part"), path)


def _countdown(fault: Fault, trainer: Any, then: Callable[[], None]) -> Callable[..., None]:
    """A hook whose `fault.action`-th call (from 0) leaves a note and then does `then`."""
    calls = 0

    def hook(*_args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == fault.action + 1:
            note(fault, trainer.world.monitor.status.text)
            then()

    return hook


def _fail(message: str) -> None:
    raise ValueError(message)


def _at_action(then: Callable[[], None]) -> Callable[[Any, Fault], None]:
    def arm(trainer: Any, fault: Fault) -> None:
        trainer.engine.pipeline.runtime.before_action = _countdown(fault, trainer, then)

    return arm


def _in_module(trainer: Any, fault: Fault) -> None:
    """An exception when one of the stages' modules (or its routed experts) is called."""
    hook = _countdown(fault, trainer, lambda: _fail(f"injected into {fault.kind}"))
    for module in trainer.engine.modules:
        found = [m for name, m in module.named_modules() if name.endswith("inner_experts")]
        (found[0] if fault.kind == "expert" else module).register_forward_pre_hook(hook)


def _in_backward(trainer: Any, fault: Fault) -> None:
    hook = _countdown(fault, trainer, lambda: _fail("injected into backward"))
    for module in trainer.engine.modules:
        next(module.parameters()).register_hook(hook)


def _in_data(trainer: Any, fault: Fault) -> None:
    batch = trainer._data.batch
    hook = _countdown(fault, trainer, lambda: _fail("injected into data"))

    def failing(indices: list[int]) -> Any:
        hook()
        return batch(indices)

    trainer._data.batch = failing


def _in_collective(trainer: Any, fault: Fault) -> None:
    reduce = trainer.engine.gradients.reduce
    hook = _countdown(fault, trainer, lambda: os.kill(os.getpid(), signal.SIGSTOP))

    def stopping() -> None:
        hook()
        reduce()

    trainer.engine.gradients.reduce = stopping


def _in_saving(trainer: Any, fault: Fault) -> None:
    from disagmoe.checkpoint import storage

    stream: Any = storage._HashingStream
    write = stream.write
    hook = _countdown(fault, trainer, lambda: os.kill(os.getpid(), signal.SIGKILL))

    def counted(self: Any, data: Any) -> int:
        hook()
        return int(write(self, data))

    stream.write = counted


def _ask_and_hang() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(600)


_ARM: dict[str, Callable[[Any, Fault], None]] = {
    "kill": _at_action(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "stop": _at_action(lambda: os.kill(os.getpid(), signal.SIGSTOP)),
    "sleep": _at_action(lambda: time.sleep(600)),
    "forward": _in_module,
    "expert": _in_module,
    "backward": _in_backward,
    "data": _in_data,
    "stop_collective": _in_collective,
    "usr1_sleep": _at_action(_ask_and_hang),
    "usr1": _at_action(lambda: os.kill(os.getpid(), signal.SIGUSR1)),
    "kill_saving": _in_saving,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
