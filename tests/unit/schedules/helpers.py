"""Cases, timing and an independent executor for the schedules' tests."""

from __future__ import annotations

import importlib.util
import random
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from hypothesis import strategies as st

from disagmoe.layout import Layout, stage_edge
from disagmoe.schedules import Action, Kind, Schedule, make_schedule
from disagmoe.schedules.lower import lower


def _load_pictures() -> ModuleType:
    path = Path(__file__).parents[3] / "docs" / "make_pictures.py"
    spec = importlib.util.spec_from_file_location("make_pictures", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["make_pictures"] = module
    spec.loader.exec_module(module)
    return module


pictures = _load_pictures()
"""Its `makespan(schedule, Durations(...))` times a schedule."""


@dataclass(frozen=True, kw_only=True)
class Case:
    attn_depth: int
    ffn_depth: int
    colocate: bool
    is_moe_layer: tuple[bool, ...]
    name: str
    num_microbatches: int
    in_flight: int
    hoist: int
    send_after: int

    def make(self) -> Schedule:
        return make_schedule(
            make_layout(self.attn_depth, self.ffn_depth, colocate=self.colocate),
            self.is_moe_layer,
            name=self.name,
            num_microbatches=self.num_microbatches,
            in_flight=self.in_flight,
            hoist=self.hoist,
            send_after=self.send_after,
        )


cases = st.builds(
    Case,
    attn_depth=st.integers(1, 4),
    ffn_depth=st.integers(1, 4),
    colocate=st.sampled_from([False, False, False, True]),
    is_moe_layer=st.lists(st.sampled_from([True, True, True, False]), max_size=9).map(tuple),
    name=st.sampled_from(["plain", "deep"]),
    num_microbatches=st.integers(1, 40),
    in_flight=st.one_of(st.just(0), st.integers(1, 24)),
    hoist=st.sampled_from([0, 1, 2, 8, 50]),
    send_after=st.sampled_from([0, 1]),
)


def make_layout(attn_depth: int, ffn_depth: int, *, colocate: bool = False) -> Layout:
    return Layout(attn_depth=attn_depth, ffn_depth=ffn_depth, attn_workers=1, ffn_workers=1, colocate=colocate)


def split_backward(schedule: Schedule, *, delay: int, send_after: int = 0) -> Schedule:
    """`schedule` with each backward in two halves, weight halves `delay` compute actions later (or at the end)."""
    compute: list[tuple[Action, ...]] = []
    for order in schedule.compute:
        actions: list[Action] = []
        waiting: deque[Action] = deque()
        for action in order:
            if action.kind is Kind.FULL_BACKWARD:
                actions.append(action._replace(kind=Kind.BACKWARD_INPUT))
                waiting.append(action._replace(kind=Kind.BACKWARD_WEIGHT))
            else:
                actions.append(action)
            if len(waiting) > delay:
                actions.append(waiting.popleft())
        compute.append((*actions, *waiting))
    return rebuild(schedule, compute, send_after=send_after)


def rebuild(schedule: Schedule, compute: Sequence[tuple[Action, ...]], *, send_after: int = 0) -> Schedule:
    """The schedule with another compute order, lowered anew."""
    programs = lower(
        compute,
        stages=schedule.stages,
        group_of_stage=schedule.group_of_stage,
        hoist=4,
        send_after=send_after,
    )
    return Schedule(
        name=schedule.name,
        num_microbatches=schedule.num_microbatches,
        stages=schedule.stages,
        group_of_stage=schedule.group_of_stage,
        num_groups=schedule.num_groups,
        compute=tuple(compute),
        programs=programs,
    )


def execute(schedule: Schedule, *, blocking: bool, seed: int) -> list[tuple[int, Action]]:
    """Run the programs in a random interleaving over *untagged* first-in, first-out channels; return what was done.

    One channel a (A-group, F-group, edge, pass). Each send takes the channel's next posted receive, whatever it was
    meant for: a payload that is not the one wanted fails, as it would on NCCL. With `blocking`, a send waits for that.
    """
    rng = random.Random(seed)
    posted: dict[tuple[object, ...], deque[Action]] = defaultdict(deque)
    in_channel: dict[tuple[object, ...], deque[Action]] = defaultdict(deque)
    arrived: set[Action] = set()
    position = [0] * schedule.num_groups
    done: list[tuple[int, Action]] = []

    def channel(sender: int, backward: bool) -> tuple[object, ...]:
        receiver = sender - 1 if backward else sender + 1
        pair = {schedule.stages[s].role: schedule.stages[s].group for s in (sender, receiver)}
        return (*sorted((role.value, group) for role, group in pair.items()),
                stage_edge(schedule.stages[sender], backward=backward), backward)  # fmt: skip

    def match(key: tuple[object, ...]) -> None:
        while posted[key] and in_channel[key]:
            receive, send = posted[key].popleft(), in_channel[key].popleft()
            backward = send.kind is Kind.SEND_B
            assert receive.kind is (Kind.RECV_B if backward else Kind.RECV_F)
            wanted = (send.stage - 1 if backward else send.stage + 1, send.microbatch)
            assert (receive.stage, receive.microbatch) == wanted, f"{receive} got the payload of {send}"
            arrived.add(receive)

    def can_run(action: Action) -> bool:
        kind, stage, microbatch = action
        if kind is Kind.FORWARD:
            return stage == 0 or Action(Kind.RECV_F, stage, microbatch) in arrived
        if kind in (Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT):
            return stage == schedule.num_stages - 1 or Action(Kind.RECV_B, stage, microbatch) in arrived
        if blocking and kind in (Kind.SEND_F, Kind.SEND_B):
            return bool(posted[channel(stage, kind is Kind.SEND_B)])
        return True

    while True:
        able = [
            group
            for group, program in enumerate(schedule.programs)
            if position[group] < len(program) and can_run(program[position[group]])
        ]
        if not able:
            break
        group = rng.choice(able)
        kind, stage, _microbatch = action = schedule.programs[group][position[group]]
        position[group] += 1
        done.append((group, action))
        if kind in (Kind.SEND_F, Kind.SEND_B):
            key = channel(stage, kind is Kind.SEND_B)
            in_channel[key].append(action)
            match(key)
        elif kind in (Kind.RECV_F, Kind.RECV_B):
            backward = kind is Kind.RECV_B
            key = channel(stage + 1 if backward else stage - 1, backward)
            posted[key].append(action)
            match(key)
    stuck = [str(program[i]) for program, i in zip(schedule.programs, position, strict=True) if i < len(program)]
    assert not stuck, f"stuck at {stuck}"
    return done
