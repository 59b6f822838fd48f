"""Measured costs: the JSON that a run of the trainer writes, and its use in place of the roofline.

    {
      "version": 1,
      "model": "qwen3-debug", "seq_len": 256, "microbatch_samples": 8,
      "stages": [
        {"index": 0, "forward_s": 0.011, "backward_s": 0.023, "backward_input_s": 0.012, "backward_weight_s": 0.011,
         "activation_bytes": 1048576},
        ...
      ],
      "hops": [
        {"index": 1, "forward_bytes": 1.2e6, "forward_s": 0.1, "backward_bytes": 1.2e6, "backward_s": 0.1},
        ...
      ]
    }

A stage has the times of one micro-batch on its slowest worker; a half that was not measured is null. Hop `index` is the
transfer into stage `index` in the forward pass, and of that stage's input gradient back in the backward pass: bytes and
seconds of the worker that receives most, from the last hand-over to arrival, without waiting for another transfer. A
hop may also have `forward_send_bytes` and `backward_send_bytes`: what one worker sends, where groups of different sizes
exchange rows. The seconds are the busier side's; the other card is free for the rest of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from disagmoe.simulator.costs import NO_HOP, Hop, StageCosts

VERSION = 1
_Row = TypeVar("_Row", "StageProfile", "HopProfile")


@dataclass(frozen=True, kw_only=True)
class StageProfile:
    """Times of one micro-batch on the slowest worker of the stage's group."""

    index: int
    forward_s: float
    backward_s: float | None = None
    """Full backward; None: only the halves were measured, or nothing."""
    backward_input_s: float | None = None
    backward_weight_s: float | None = None
    activation_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class HopProfile:
    """The transfer into stage `index`, and of its input gradient back."""

    index: int
    forward_bytes: float
    forward_s: float
    backward_bytes: float
    backward_s: float
    forward_send_bytes: float | None = None
    """Of one sender; None: as much as a worker receives."""
    backward_send_bytes: float | None = None


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What was measured in one layout. `save` and `load` write and read JSON."""

    model: str
    seq_len: int
    microbatch_samples: int
    stages: tuple[StageProfile, ...]
    hops: tuple[HopProfile, ...]

    def costs(self) -> StageCosts:
        """Costs for the engine. A half that is missing is half of the full backward; a full one is the sum of halves.

        Raises:
            ValueError: a stage or hop is missing or there twice, or a stage has no backward at all.
        """
        if [s.index for s in self.stages] != list(range(len(self.stages))):
            raise ValueError("stages: must be all stages from 0 on, each once and in order")
        if [h.index for h in self.hops] != list(range(1, len(self.stages))):
            raise ValueError(f"hops: must be those into stages 1 to {len(self.stages) - 1}, each once and in order")
        halves = [_halves(stage) for stage in self.stages]
        return StageCosts(
            forward_s=tuple(s.forward_s for s in self.stages),
            backward_s=tuple(
                sum(half) if s.backward_s is None else s.backward_s for s, half in zip(self.stages, halves, strict=True)
            ),
            backward_input_s=tuple(half[0] for half in halves),
            backward_weight_s=tuple(half[1] for half in halves),
            forward_hop=(NO_HOP, *(_hop(h.forward_s, h.forward_bytes, h.forward_send_bytes) for h in self.hops)),
            backward_hop=(*(_hop(h.backward_s, h.backward_bytes, h.backward_send_bytes) for h in self.hops), NO_HOP),
            activation_bytes=tuple(s.activation_bytes for s in self.stages),
        )

    def save(self, path: str | Path) -> None:
        """Write JSON; the file appears whole or not at all."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + ".part")
        partial.write_text(json.dumps({"version": VERSION, **asdict(self)}, indent=1), encoding="utf-8")
        os.replace(partial, target)

    @staticmethod
    def load(path: str | Path) -> Profile:
        """Read what `save` wrote.

        Raises:
            ValueError: the file can't be read, or is no profile; the message names file, field and rule.
        """
        try:
            tree = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: can't be read as a profile ({error})") from None
        if not isinstance(tree, dict) or tree.get("version") != VERSION:
            found = tree.get("version") if isinstance(tree, dict) else None
            raise ValueError(f"{path}: version = {found}: must be {VERSION}; write the profile anew")
        for name, kind in (
            ("model", str),
            ("seq_len", int),
            ("microbatch_samples", int),
            ("stages", list),
            ("hops", list),
        ):
            if not isinstance(tree.get(name), kind):
                raise ValueError(f"{path}: {name} is missing or is no {kind.__name__}")
        return Profile(
            model=tree["model"],
            seq_len=tree["seq_len"],
            microbatch_samples=tree["microbatch_samples"],
            stages=tuple(_row(StageProfile, row, f"{path}: stages[{i}]") for i, row in enumerate(tree["stages"])),
            hops=tuple(_row(HopProfile, row, f"{path}: hops[{i}]") for i, row in enumerate(tree["hops"])),
        )


def _halves(stage: StageProfile) -> tuple[float, float]:
    if stage.backward_input_s is not None and stage.backward_weight_s is not None:
        return stage.backward_input_s, stage.backward_weight_s
    if stage.backward_s is None:
        raise ValueError(f"stage {stage.index}: needs backward_s, or both backward_input_s and backward_weight_s")
    if stage.backward_input_s is not None:
        return stage.backward_input_s, max(0.0, stage.backward_s - stage.backward_input_s)
    if stage.backward_weight_s is not None:
        return max(0.0, stage.backward_s - stage.backward_weight_s), stage.backward_weight_s
    return stage.backward_s / 2, stage.backward_s / 2


def _hop(seconds: float, received: float, sent: float | None) -> Hop:
    sent = received if sent is None else sent
    most = max(sent, received)
    send_s, recv_s = (seconds * size / most if most else seconds for size in (sent, received))
    return Hop(send_s=send_s, recv_s=recv_s, send_bytes=sent, recv_bytes=received)


def _row(kind: type[_Row], row: object, where: str) -> _Row:
    """One entry, with exactly the fields of `kind`, numbers at least 0."""
    if not isinstance(row, Mapping):
        raise ValueError(f"{where}: must be an object")
    allowed = {field.name: field for field in fields(kind)}
    unknown = sorted(set(row) - set(allowed))
    if unknown:
        raise ValueError(f"{where}: unknown {', '.join(unknown)}; there is {', '.join(allowed)}")
    values: dict[str, Any] = {}
    for name, value in row.items():
        optional = value is None and "None" in str(allowed[name].type)
        if not optional and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0):
            raise ValueError(f"{where}: {name} = {value}: must be a number, at least 0")
        values[name] = value
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from None
