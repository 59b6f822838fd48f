"""One candidate in full: packing, NIC share, costs, bound; then its schedule, memory and simulated step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

from disagmoe.allocator.memory import GroupMemory, group_memories
from disagmoe.allocator.question import Candidate, Question, soft_max
from disagmoe.layout import Role
from disagmoe.schedules import Action, Kind
from disagmoe.schedules.af_pipe import ROUND_FACTOR
from disagmoe.simulator.costs import Hop, StageCosts
from disagmoe.simulator.engine import Options, simulate
from disagmoe.simulator.generators import OrderRequest, af_order, af_unchecked
from disagmoe.simulator.result import Result
from disagmoe.simulator.roofline import AFRoofline, Job

SCHEDULES = ("deep", "plain")
"""That need no measured costs."""
LONG = 60_000
"""Compute actions of orders whose memory is first looked at with `FEW_ROUNDS` rounds of micro-batches."""
FEW_ROUNDS = 3


class Placement(NamedTuple):
    """A candidate and how its workers share nodes and their NICs."""

    candidate: Candidate
    rank_order: str
    nics: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A candidate in nodes, with its costs."""

    question: Question
    candidate: Candidate
    rank_order: str
    nics: tuple[int, int]
    """NICs of a node for its A- and its F-workers, where NICs are pooled and nodes mixed; (0, 0): by GPUs."""
    costs: StageCosts
    job: Job
    roofline: AFRoofline
    sync_s: float
    room_override: tuple[float, ...] = ()
    """`room` of the whole model, where this is a part of it."""

    @property
    def placement(self) -> Placement:
        return Placement(self.candidate, self.rank_order, self.nics)

    @cached_property
    def group_of_stage(self) -> tuple[int, ...]:
        layout = self.roofline.layout
        return tuple(layout.pipeline_group(stage.role, stage.group) for stage in self.roofline.stages)

    @cached_property
    def memories(self) -> tuple[GroupMemory, ...]:
        """By pipeline group, of its heaviest worker."""
        return group_memories(self.job, self.roofline, imbalance=self.question.imbalance_factor)

    @property
    def capacity(self) -> tuple[float, ...]:
        """By pipeline group: what a GPU has, less the reserve."""
        pools = {role: self.question.pool(self.candidate.site, role is Role.FFN) for role in Role}
        layout = self.roofline.layout
        return tuple(
            pools[role].gpu.memory_bytes - self.question.reserve_bytes
            for role in Role
            for _ in range(layout.depth_of(role))
        )

    @cached_property
    def room(self) -> tuple[float, ...]:
        """By pipeline group: micro-batches that memory has room for, if each is kept in all stages of the group."""
        if self.room_override:
            return self.room_override
        pairs = zip(self.memories, self.capacity, strict=True)
        return tuple((most - m.fixed_bytes) / max(1.0, m.kept_a_microbatch) for m, most in pairs)

    @property
    def fits(self) -> bool:
        """Whether one micro-batch does."""
        return min(self.room) >= 1

    @cached_property
    def bound_s(self) -> float:
        """No schedule within memory can end earlier; with the sum of gradients. Infinite where nothing fits."""
        return max(_terms_s(self)) + self.sync_s if self.fits else float("inf")

    @cached_property
    def estimate_s(self) -> float:
        """What a step will hardly be shorter than, for the order of trials: terms that are near one another add up, and
        the generators lose more where depths differ."""
        return soft_max(_terms_s(self), self.candidate) + self.sync_s if self.fits else float("inf")

    @property
    def num_gpus(self) -> int:
        return self.roofline.layout.world_size


def _terms_s(placed: Placed) -> tuple[float, float, float]:
    """Largest over groups of: work, with the way to its first and from its last stage; use of its links; and the
    room that activations take, by the time from each forward to its backward, over the room that there is."""
    costs, groups, count = placed.costs, placed.group_of_stage, placed.candidate.microbatches
    last = len(groups) - 1
    ready, after = [0.0] * (last + 1), [0.0] * (last + 1)
    for s in range(1, last + 1):
        ready[s] = ready[s - 1] + costs.forward_s[s - 1] + costs.forward_hop[s].alone_s
        back_s = (costs.backward_input_s if _may_split(placed) else costs.backward_s)[s - 1]
        after[s] = after[s - 1] + back_s + costs.backward_hop[s - 1].alone_s
    back_s = (costs.backward_input_s if _may_split(placed) else costs.backward_s)[last]
    chain = ready[last] + costs.forward_s[last] + back_s + after[last]
    busy, link, kept = chain, 0.0, 0.0
    for group, (memory, room) in enumerate(zip(placed.memories, placed.room, strict=True)):
        own = [stage for stage, of in enumerate(groups) if of == group]
        work = sum(costs.forward_s[s] + costs.backward_s[s] for s in own)
        # Weight gradients may come after the last input gradient has left.
        busy = max(busy, count * work + ready[own[0]] + (0.0 if _may_split(placed) else after[own[0]]))
        link = max(link, count * _link_s(costs, own, last))
        if memory.kept_a_microbatch:
            area = sum(memory.kept_bytes[s] * (chain - ready[s] - after[s]) for s in own)
            kept = max(kept, count * area / memory.kept_a_microbatch / room)
    return busy, link, kept


def _may_split(placed: Placed) -> bool:
    return placed.question.pins.split_backward is not False


def _link_s(costs: StageCosts, own: Sequence[int], last: int) -> float:
    """Of a group's busiest link direction, a micro-batch."""
    use = [0.0] * 4
    for s in own:
        outward = [costs.forward_hop[s + 1]] if s < last else []
        outward += [costs.backward_hop[s - 1]] if s else []
        inward = [costs.forward_hop[s], costs.backward_hop[s]]
        use[0] += sum(hop.send_s for hop in outward)
        use[1] += sum(hop.fabric_send_s for hop in outward)
        use[2] += sum(hop.recv_s for hop in inward)
        use[3] += sum(hop.fabric_recv_s for hop in inward)
    return max(use)


def place(question: Question, candidate: Candidate) -> Placed:
    """The packing and NIC share with the least estimate; of equals the first."""
    return min(placements(question, candidate), key=lambda placed: placed.estimate_s)


def placements(question: Question, candidate: Candidate) -> Iterator[Placed]:
    """All packings and NIC shares."""
    base: Placed | None = None
    for order, nics in packings(question, candidate):
        if base is None or base.rank_order != order:
            base = make_placed(question, candidate, order)
        yield _with_nics(base, nics) if any(nics) else base


def packings(question: Question, candidate: Candidate) -> Iterator[tuple[str, tuple[int, int]]]:
    """Rank orders, and numbers of NICs for both roles of a node."""
    nics = question.pool(candidate.site, False).nics
    for order in question.rank_orders(candidate):
        yield order, (0, 0)
        if nics.pooled and order == "mixed":
            yield from ((order, (n, nics.per_node - n)) for n in range(1, nics.per_node))


def make_placed(question: Question, candidate: Candidate, rank_order: str, nics: tuple[int, int] = (0, 0)) -> Placed:
    """A candidate in one packing."""
    job = question.job_for(candidate)
    roofline = AFRoofline(job=job, layout=candidate.layout(rank_order), microbatch_samples=question.samples(candidate))
    placed = Placed(
        question=question,
        candidate=candidate,
        rank_order=rank_order,
        nics=(0, 0),
        costs=roofline.costs(),
        job=job,
        roofline=roofline,
        sync_s=max(map(job.sync_s, roofline.held().values())),
    )
    return _with_nics(placed, nics) if any(nics) else placed


def _with_nics(placed: Placed, nics: tuple[int, int]) -> Placed:
    """A node's NICs divided otherwise than by GPUs."""
    c = placed.candidate
    width = c.attn_gpus + c.ffn_gpus
    share = (nics[0] / sum(nics) * width / c.attn_gpus, nics[1] / sum(nics) * width / c.ffn_gpus)

    def scaled(hops: Sequence[Hop]) -> tuple[Hop, ...]:
        found = []
        for stage, hop in zip(placed.roofline.stages, hops, strict=True):
            sender, receiver = share if stage.role is Role.FFN else share[::-1]
            found.append(hop._replace(send_s=hop.send_s / sender, recv_s=hop.recv_s / receiver))
        return tuple(found)

    costs = placed.costs
    costs = replace(costs, forward_hop=scaled(costs.forward_hop), backward_hop=scaled(costs.backward_hop))
    found = replace(placed, nics=nics, costs=costs)
    vars(found)["memories"] = placed.memories  # does not depend on NICs
    return found


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A simulated step."""

    placed: Placed
    schedule: str
    split_backward: bool
    in_flight: int
    """As in the configuration; 0: the schedule's own."""
    result: Result
    memory_bytes: tuple[float, ...]
    """By group: of its heaviest worker, with the reserve."""

    @property
    def step_s(self) -> float:
        return self.result.makespan_s + self.placed.sync_s

    @property
    def tokens_per_s(self) -> float:
        return self.placed.question.job.tokens / self.step_s

    @property
    def num_actions(self) -> int:
        return sum(map(len, self.result.schedule.compute))


def simulate_placed(
    placed: Placed, names: Sequence[str], *, split: bool = False, in_flight: int | None = None, first: bool = False
) -> Outcome | None:
    """The fastest of schedules that fit, each with as many micro-batches in flight as it likes; where none fits so, the
    last one with as many as memory has room for. None where not one micro-batch fits.

    in_flight: to be tried where all that a schedule likes do not fit. first: take the first schedule that fits.
    """
    if not placed.fits:
        return None
    wanted = [placed.question.pins.in_flight or 0]
    if in_flight and wanted == [0]:
        wanted.append(in_flight)
    found = []
    for name, limit in product(_fitting(placed, names, split), wanted):
        if _may_fit(placed, name, split, limit) and _use(placed, name, split, limit) <= 1:
            found.append(_simulate(placed, name, split, limit))
            if first or in_flight:
                break
    if not found and not placed.question.pins.in_flight:
        most = _room_in_flight(placed, names[-1], split)
        if _use(placed, names[-1], split, most) > 1:
            # Fewer micro-batches said that it would fit. Within the room any order does.
            most = min(int(min(placed.room)), placed.candidate.microbatches)
        found.append(_simulate(placed, names[-1], split, most))
    return min(found, key=lambda outcome: outcome.step_s, default=None)


def _fitting(placed: Placed, names: Sequence[str], split: bool) -> Sequence[str]:
    """Without *deep*, which keeps more micro-batches than *plain*, where that does not fit either."""
    layout, m = placed.roofline.layout, placed.candidate.microbatches
    pinned = placed.question.pins.in_flight
    if "plain" not in names or len(names) < 2 or pinned or min(placed.room) >= min(m, 2 * layout.num_groups):
        return names
    return names if _may_fit(placed, "plain", split, 0) else [name for name in names if name != "deep"]


def _may_fit(placed: Placed, name: str, split: bool, in_flight: int) -> bool:
    """What a few rounds say of whether an order fits."""
    return _use(placed, name, split, in_flight, few=True) <= 1


def _room_in_flight(placed: Placed, name: str, split: bool) -> int:
    """Micro-batches in flight with which an order fits that does not with as many as it likes, by a few rounds.

    Within the room any order fits. Orders rarely keep all their micro-batches in all stages, so more are tried first:
    what memory takes grows about as their number does.
    """
    count = placed.candidate.microbatches
    surely = min(int(min(placed.room)), count)
    liked = _in_flight(af_order(_request(placed, name, split, 0, few=True)))
    tried = min(int(liked / _use(placed, name, split, 0, few=True)), count)
    if surely < tried and _may_fit(placed, name, split, tried):
        return tried
    tried = min(int(surely / _use(placed, name, split, surely, few=True)), tried - 1)
    if surely < tried and _may_fit(placed, name, split, tried):
        return tried
    return surely


def _in_flight(compute: Sequence[Sequence[Action]]) -> int:
    """Most micro-batches between their first forward and their last backward."""
    alive = most = 0
    for kind, stage, _ in next(order for order in compute if any(action.stage == 0 for action in order)):
        if stage == 0 and kind is not Kind.BACKWARD_INPUT:
            alive += 1 if kind is Kind.FORWARD else -1
            most = max(most, alive)
    return most


def _simulate(placed: Placed, name: str, split: bool, in_flight: int) -> Outcome:
    schedule = af_unchecked(_request(placed, name, split, in_flight))
    return Outcome(
        placed=placed,
        schedule=name,
        split_backward=split,
        in_flight=in_flight,
        result=simulate(schedule, placed.costs, options=Options(record_links=False)),
        memory_bytes=tuple(
            memory.peak_bytes(order) + placed.question.reserve_bytes
            for memory, order in zip(placed.memories, schedule.compute, strict=True)
        ),
    )


def _request(placed: Placed, name: str, split: bool, in_flight: int, *, few: bool = False) -> OrderRequest:
    """few: of a long order the usual one of fewer micro-batches, enough of them that activations reach their peaks."""
    count = placed.candidate.microbatches
    few = few and 2 * len(placed.group_of_stage) * count > LONG
    if few:
        turn = ROUND_FACTOR[name] * placed.roofline.layout.num_groups
        count = min(count, FEW_ROUNDS * (min(turn, in_flight) if in_flight else turn))
    return OrderRequest(
        layout=placed.roofline.layout,
        is_moe_layer=placed.job.model.is_moe_layer,
        costs=placed.costs,
        order=name,
        split=split,
        num_microbatches=count,
        in_flight=in_flight,
        usual=few,
    )


def peaks(placed: Placed, compute: Sequence[Sequence[Action]]) -> list[float]:
    """By group: most bytes kept between forwards and backwards at a time."""
    found = []
    for memory, order in zip(placed.memories, compute, strict=True):
        alive = peak = 0.0
        for kind, stage, _ in order:
            if kind is Kind.FORWARD:
                alive += memory.kept_bytes[stage]
                peak = max(peak, alive)
            elif kind is not Kind.BACKWARD_INPUT:
                alive -= memory.kept_bytes[stage]
        found.append(peak)
    return found


def _use(placed: Placed, name: str, split: bool, in_flight: int, *, few: bool = False) -> float:
    """Share of the room for activations that a schedule's fullest group uses."""
    compute = af_order(_request(placed, name, split, in_flight, few=few))
    uses = zip(peaks(placed, compute), placed.memories, placed.room, strict=True)
    return max(peak / max(1.0, memory.kept_a_microbatch) / room for peak, memory, room in uses)


def shortened(placed: Placed, rounds: int) -> Placed | None:
    """The same with fewer layers: `rounds` turns of the deeper role's groups, and what the number of layers leaves
    over, so that all groups are as unevenly full. None where that is no fewer.

    Simulated times of it over its bound are those of the whole model over its own, nearly: what a schedule loses, it
    loses in every turn.
    """
    layers = placed.job.model.layers
    moe = [i for i, layer in enumerate(layers) if layer.is_moe]
    turn = max(placed.candidate.attn_depth, placed.candidate.ffn_depth)
    count = rounds * turn + len(moe) % turn
    count += (len(moe) - count) % 2
    if 3 * count > 2 * len(moe):
        return None
    dropped = set(moe[count:])
    kept = tuple(layer for i, layer in enumerate(layers) if i not in dropped)
    question = replace(placed.question, job=replace(placed.question.job, model=replace(placed.job.model, layers=kept)))
    part = make_placed(question, placed.candidate, placed.rank_order, placed.nics)
    return replace(part, room_override=placed.room)
