"""What is said of a failure: the errors that it raises, and the notice that the first witness leaves for the others."""

from __future__ import annotations

from dataclasses import dataclass


class WorkerFailure(RuntimeError):
    """A worker of this run has failed; the text names it and what it was doing."""


class TransferTimeout(WorkerFailure):
    """A wait on a peer took longer than `[comm] timeout_s`."""


class PeerLost(WorkerFailure):
    """The connection to a peer broke."""


@dataclass(frozen=True, kw_only=True)
class Notice:
    """What the first witness of a failure tells the others."""

    rank: int | None
    """None: not a worker's failure (launcher, store)."""
    worker: str
    doing: str
    reason: str
    witness: int
    signal: int = 0
    """The signal that `rank` was told to stop with, if that is what happened."""

    def __str__(self) -> str:
        if self.rank is None:
            return f"the run failed (seen by rank {self.witness}): {self.reason}"
        seen = "" if self.witness == self.rank else f" (seen by rank {self.witness})"
        if self.signal:
            return f"worker {self.worker} was {self.reason}{seen}; it was doing: {self.doing}"
        return f"worker {self.worker} failed{seen}: {self.reason}; it was doing: {self.doing}"
