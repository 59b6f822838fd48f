"""What a trainer gets from the data: samples, batches, and the source that gives them by global index.

Shape suffixes: B samples of a batch, L tokens of a sample.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IGNORE_INDEX = -100
"""Label of a token whose prediction does not count; torch's and torchtitan's cross entropy skip it."""

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sample; int64 tensors on the CPU."""

    tokens_L: Tensor
    labels_L: Tensor
    """The next token of each token, or `IGNORE_INDEX` where that belongs to another document."""
    positions_L: Tensor
    """Distance from the start of the document, or from the start of the sample where the document began earlier. Zero
    exactly where attention must not look further back."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Samples stacked in the order asked for; int64 tensors on the CPU. B may be 0."""

    tokens_BL: Tensor
    labels_BL: Tensor
    positions_BL: Tensor

    @property
    def num_valid_tokens(self) -> int:
        """Tokens whose prediction counts in the loss."""
        return int((self.labels_BL != IGNORE_INDEX).sum())


class SampleSource(ABC):
    """Samples by global index 0, 1, 2, ...; index i means the same tokens whoever asks."""

    seq_len: int
    vocab_size: int
    """One more than the largest token id. A model's vocabulary must be at least this large."""
    num_tokens_per_epoch: int | None = None
    """Tokens of all documents, end-of-document tokens included; None where only reading to the end would tell."""

    @abstractmethod
    def sample_arrays(self, index: int) -> tuple[IntArray, IntArray, IntArray]:
        """Tokens, labels and positions of sample `index`, each int64 [L].

        Raises:
            ValueError: the index is negative, or a forward-only source has passed it already.
        """

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Short text that differs when the data differ, e.g. between machines with different Python versions."""

    def sample(self, index: int) -> Sample:
        tokens_L, labels_L, positions_L = self.sample_arrays(index)
        return Sample(
            tokens_L=torch.from_numpy(tokens_L),
            labels_L=torch.from_numpy(labels_L),
            positions_L=torch.from_numpy(positions_L),
        )

    def batch(self, indices: Sequence[int]) -> Batch:
        """The samples at `indices`, in that order. Forward-only sources want indices that increase over calls."""
        stacked_3BL = torch.empty((3, len(indices), self.seq_len), dtype=torch.int64)
        view_3BL = stacked_3BL.numpy()
        for row, index in enumerate(indices):
            for part, array_L in enumerate(self.sample_arrays(index)):
                view_3BL[part, row] = array_L
        tokens_BL, labels_BL, positions_BL = stacked_3BL.unbind(0)
        return Batch(tokens_BL=tokens_BL, labels_BL=labels_BL, positions_BL=positions_BL)


def check_index(index: int) -> None:
    if index < 0:
        raise ValueError(f"sample index = {index}: must be at least 0")


def label_and_position(tokens: IntArray, starts: npt.NDArray[np.bool_]) -> tuple[IntArray, IntArray, IntArray]:
    """Make a sample of L + 1 consecutive tokens of the packed stream.

    Args:
        tokens: int64 [L + 1].
        starts: bool [L + 1], true where a document begins.

    >>> tokens, labels, positions = label_and_position(np.array([7, 8, 256, 5, 6]), np.array([0, 0, 0, 1, 0], bool))
    >>> labels.tolist(), positions.tolist()
    ([8, 256, -100, 6], [0, 1, 2, 0])
    """
    labels_L = np.where(starts[1:], IGNORE_INDEX, tokens[1:])
    place_L = np.arange(len(tokens) - 1, dtype=np.int64)
    # The most recent document start at or before each token; the sample's own start counts as one.
    last_start_L = np.maximum.accumulate(np.where(starts[:-1], place_L, 0))
    return tokens[:-1], labels_L, place_L - last_start_L
