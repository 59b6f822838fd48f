"""The bound *ramp*: work of each group where memory holds up forwards and releases, also those of other groups.

Operations are looked at by group, kind (forwards, input halves or whole backwards, releases) and place: the k-th of
them there, in whatever order a schedule has them. Each place has an earliest start and a least time from its end to the
end of the schedule (tail); both hold for all schedules:

- The k-th is at a stage not before the k-th smallest of the times at which micro-batches can be at the group's stages
  (`Chain.arrivals`); likewise for tails (`Chain.departures`).
- Where a group's memory holds n activations, its (n + k)-th forward follows its k-th release.
- A micro-batch's first l stages there take P(l) bytes together. k forwards take at least k min P(l) / l, all of which
  is within the capacity or has been released; likewise the last k backwards at the end.
- The k-th release follows the k-th backward; where all stages of a group get their inputs from one other group, its
  k-th operation follows the k-th of that one.

Then each group is one machine with these heads and tails. The last stage, whose activations never wait, stands apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from disagmoe.simulator.chain import Chain, Job, preemptive


@dataclass
class _Places:
    """Operations of one kind on one group, by place."""

    duration: int
    """Of the shortest."""
    earliest: list[int]
    """When it starts at the earliest."""
    tail: list[int]
    """Least time from its end to the end of the schedule."""

    def jobs(self) -> Iterator[Job]:
        for time, tail in zip(self.earliest, self.tail, strict=True):
            yield time, self.duration, tail

    def follow(self, before: _Places, lag: int, offset: int = 0) -> bool:
        """The (k + offset)-th of these starts `lag` after the end of the k-th `before` at the earliest; returns whether
        that tightens anything."""
        changed = False
        for k in range(min(len(before.tail), len(self.tail) - offset)):
            start = before.earliest[k] + before.duration + lag
            tail = self.tail[k + offset] + self.duration + lag
            if start > self.earliest[k + offset]:
                self.earliest[k + offset], changed = start, True
            if tail > before.tail[k]:
                before.tail[k], changed = tail, True
        return changed


def ramp_bound(chain: Chain) -> int:
    """The bound in ticks; 0 where no group's memory binds."""
    problem = chain.problem
    total = [one * problem.num_microbatches for one in problem.memory_of_group]
    if all(have >= need for have, need in zip(problem.capacity, total, strict=True)):
        return 0
    return _Ramp(chain).bound()


class _Ramp:
    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        problem, groups = chain.problem, range(chain.problem.num_groups)
        head = problem.num_stages - 1
        self.stages = [[s for s in range(head) if problem.group[s] == group] for group in groups]
        self.forwards = [self._places(stages) for stages in self.stages]
        self.backwards = [self._places([chain.last - s for s in stages]) for stages in self.stages]
        self.releases = []
        for stages, places in zip(self.stages, self.backwards, strict=True):
            size = len(places.tail)
            shortest = min((chain.weight(chain.last - s) for s in stages), default=0)
            self.releases.append(_Places(shortest, [0] * size, [0] * size))
        for group in groups:
            self._fill(group)
            self._drain(group)

    def _places(self, positions: Sequence[int]) -> _Places:
        chain = self.chain
        return _Places(
            min((chain.problem.duration[q] for q in positions), default=0),
            sorted(time for q in positions for time in chain.arrivals(q)),
            sorted((time for q in positions for time in chain.departures(q)), reverse=True),
        )

    def _least_memory(self, group: int) -> tuple[int, int]:
        """Memory and number of a micro-batch's first stages on `group`, where their mean is least."""
        taken, best = 0, (0, 0)
        for number, stage in enumerate(self.stages[group], start=1):
            taken += self.chain.problem.memory[stage]
            if number == 1 or taken * best[1] < best[0] * number:
                best = taken, number
        return best

    def _fill(self, group: int) -> None:
        """Forwards need what has been released."""
        chain, problem = self.chain, self.chain.problem
        released = []
        for stage in self.stages[group]:
            position = chain.last - stage
            length = problem.duration[position] + chain.weight(position)
            released += [(time + length, problem.memory[stage]) for time in chain.arrivals(position)]
        earliest = self.forwards[group].earliest
        for place, time in enumerate(self._memory_times(group, released)):
            earliest[place] = max(earliest[place], time)

    def _drain(self, group: int) -> None:
        """What the last backwards release is there before, or comes with forwards after."""
        chain, problem = self.chain, self.chain.problem
        taken = []
        for stage in self.stages[group]:
            length = problem.duration[stage]
            taken += [(time + length, problem.memory[stage]) for time in chain.departures(stage)]
        tail = self.backwards[group].tail
        for place, time in enumerate(self._memory_times(group, taken)):
            tail[-1 - place] = max(tail[-1 - place], time)

    def _memory_times(self, group: int, more: list[tuple[int, int]]) -> list[int]:
        """By number k of operations, when `more` (time, memory) has brought the capacity to what k + 1 take."""
        least, number = self._least_memory(group)
        have, now, times = self.chain.problem.capacity[group], 0, []
        coming = iter(sorted(more))
        for k in range(len(self.forwards[group].tail)):
            while have * number < (k + 1) * least:
                now, memory = next(coming)
                have += memory
            times.append(now)
        return times

    def bound(self) -> int:
        while self._tighten():
            pass
        groups = range(self.chain.problem.num_groups)
        return max(preemptive(jobs) for group in groups for jobs in self._jobs(group) if jobs)

    def _tighten(self) -> bool:
        """Every rule once; whether any changed something."""
        chain, problem = self.chain, self.chain.problem
        changed = False
        for group, stages in enumerate(self.stages):
            forwards, backwards, releases = self.forwards[group], self.backwards[group], self.releases[group]
            changed |= releases.follow(backwards, 0)
            smallest = min((problem.memory[s] for s in stages), default=0)
            if smallest:
                changed |= forwards.follow(releases, 0, problem.capacity[group] // smallest)
            for places, of, positions in (
                (forwards, self.forwards, stages),
                (backwards, self.backwards, [chain.last - s for s in stages]),
            ):
                feeder = self._feeder(positions)
                if feeder >= 0:
                    changed |= places.follow(of[feeder], min(problem.arrival(q - 1) for q in positions))
        return changed

    def _feeder(self, positions: Sequence[int]) -> int:
        """The group whose operations, not those of the last stage, come before all `positions`; -1: none."""
        head = self.chain.problem.num_stages - 1
        if not positions or not all(q > 0 and q - 1 != head + 1 for q in positions):
            return -1
        feeders = {self.chain.problem.group[q - 1] for q in positions}
        return feeders.pop() if len(feeders) == 1 else -1

    def _jobs(self, group: int) -> Iterator[list[Job]]:
        """Two ways to have what is not a forward: by place, where the rest of what is longer than the shortest may be
        done at any time; and by position, without what is known of places."""
        chain, problem = self.chain, self.chain.problem
        count, stages = problem.num_microbatches, self.stages[group]
        forwards, backwards, releases = self.forwards[group], self.backwards[group], self.releases[group]
        common = [*forwards.jobs(), *self._head_jobs(group)]
        common += [(0, problem.duration[s] - forwards.duration, 0) for s in stages for _ in range(count)]
        by_place = [*common, *backwards.jobs(), *releases.jobs()]
        by_position = list(common)
        for q in (chain.last - s for s in stages):
            rest = problem.duration[q] - backwards.duration + chain.weight(q) - releases.duration
            by_place += [(0, rest, 0)] * count
            by_position += self._jobs_at(q)
            by_position += [(time + problem.duration[q], chain.weight(q), 0) for time in chain.arrivals(q)]
        yield by_place
        yield by_position

    def _jobs_at(self, position: int) -> Iterator[Job]:
        tails = reversed(self.chain.departures(position))
        for time, tail in zip(self.chain.arrivals(position), tails, strict=True):
            yield time, self.chain.problem.duration[position], tail

    def _head_jobs(self, group: int) -> list[Job]:
        """Those of the last stage, if it is on `group`. A weight operation there precedes the next forward."""
        chain, problem = self.chain, self.chain.problem
        head = problem.num_stages - 1
        if problem.group[head] != group:
            return []
        jobs = [*self._jobs_at(head), *self._jobs_at(head + 1)]
        following = chain.departures(head)[-2::-1]
        tails = [*(problem.duration[head] + time for time in following), 0]
        for time, tail in zip(chain.arrivals(head + 1), tails, strict=True):
            jobs.append((time + problem.duration[head + 1], chain.weight(head + 1), tail))
        return jobs
