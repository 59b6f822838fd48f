"""Documents held in memory, packed into one endless stream and cut into samples with random access.

Epoch e of the stream is all documents in an order of its own; the epochs follow each other without a gap, so a chunk
may straddle two of them. Chunk c is stream tokens [c L, (c + 1) L) with the token after it as last label: every token
is an input once and, unless it begins a document, a label once an epoch. Which chunk is sample i: the chunks that begin
in an epoch are permuted among themselves, so that the samples of one batch come from different documents (a document is
usually much longer than a sample). Without shuffling both orders are the natural ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from disagmoe.data.documents import Document
from disagmoe.data.sample import IntArray, SampleSource, check_index, label_and_position
from disagmoe.data.tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Tokens of all documents in one array. The end-of-document tokens are not stored, only counted."""

    tokens: npt.NDArray[Any]
    """Unsigned ids [n], documents one after another."""
    offsets: IntArray
    """[D + 1]: document d is tokens[offsets[d] : offsets[d + 1]], none of them empty, and then `end_id`."""
    end_id: int

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        """End-of-document tokens included."""
        return len(self.tokens) + self.num_documents


def build_corpus(documents: Iterable[Document], tokenizer: Tokenizer, *, source: str) -> Corpus:
    """Tokenise `documents`; empty ones are left out.

    Raises:
        ValueError: there is no text at all.
    """
    # A bytearray grows in place: no second copy of the corpus at the peak, as a list of arrays would need.
    buffer = bytearray()
    offsets = [0]
    for document in documents:
        buffer += tokenizer.encode(document.text, where=document.where).data
        if len(buffer) > offsets[-1]:
            offsets.append(len(buffer))
    if len(offsets) == 1:
        raise ValueError(
            f'[data] source = "{source}": every document in it is empty; training needs at least one token of text, '
            f"give a source with text"
        )
    return Corpus(
        tokens=np.frombuffer(buffer, dtype=tokenizer.dtype),
        offsets=np.asarray(offsets, dtype=np.int64) // tokenizer.dtype.itemsize,
        end_id=tokenizer.end_id,
    )


def seeded_permutation(size: int, *key: int) -> IntArray:
    """A permutation of range(size) that depends on the integers of `key` only.

    It sorts raw PCG64 output, which numpy guarantees for all versions; `Generator.permutation` may change.
    """
    raw = np.random.PCG64(np.random.SeedSequence(key)).random_raw(size)
    return np.argsort(raw, kind="stable").astype(np.int64, copy=False)


@dataclass(frozen=True, kw_only=True)
class _Epoch:
    order: IntArray
    """[D]: document at each place."""
    starts: IntArray
    """[D + 1]: place in the epoch's stream at which each of them begins."""
    first_chunk: int
    chunk_order: IntArray
    """[number of chunks that begin in this epoch]: chunk, counted from `first_chunk`, at each place."""


class PackedSource(SampleSource):
    """Samples of a `Corpus`, in any order; O(L + log D) each once its epoch is laid out."""

    _KEPT_EPOCHS = 3

    def __init__(self, corpus: Corpus, *, seq_len: int, vocab_size: int, seed: int, shuffle: bool) -> None:
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        self.num_tokens_per_epoch: int = corpus.num_tokens
        self._corpus = corpus
        self._seed = seed
        self._shuffle = shuffle
        self._epochs: dict[int, _Epoch] = {}

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.blake2b(self._corpus.tokens.data, digest_size=8)
        digest.update(self._corpus.offsets.data)
        digest.update(repr((self.seq_len, self.vocab_size, self._seed, self._shuffle)).encode())
        return digest.hexdigest()

    def sample_arrays(self, index: int) -> tuple[IntArray, IntArray, IntArray]:
        check_index(index)
        epoch = self._epoch(index * self.seq_len // self.num_tokens_per_epoch)
        chunk = epoch.first_chunk + int(epoch.chunk_order[index - epoch.first_chunk])
        return label_and_position(*self._read(chunk * self.seq_len, self.seq_len + 1))

    def _epoch(self, number: int) -> _Epoch:
        if number not in self._epochs:
            while len(self._epochs) >= self._KEPT_EPOCHS:
                del self._epochs[next(iter(self._epochs))]
            self._epochs[number] = self._lay_out(number)
        return self._epochs[number]

    def _lay_out(self, number: int) -> _Epoch:
        num_documents = self._corpus.num_documents
        first_chunk = -(-number * self.num_tokens_per_epoch // self.seq_len)
        num_chunks = -(-(number + 1) * self.num_tokens_per_epoch // self.seq_len) - first_chunk
        if self._shuffle:
            order = seeded_permutation(num_documents, self._seed, number, 0)
            chunk_order = seeded_permutation(num_chunks, self._seed, number, 1)
        else:
            order = np.arange(num_documents, dtype=np.int64)
            chunk_order = np.arange(num_chunks, dtype=np.int64)
        starts = np.zeros(num_documents + 1, dtype=np.int64)
        np.cumsum(np.diff(self._corpus.offsets)[order] + 1, out=starts[1:])
        return _Epoch(order=order, starts=starts, first_chunk=first_chunk, chunk_order=chunk_order)

    def _read(self, begin: int, count: int) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """Stream tokens [begin, begin + count) and whether each begins a document."""
        tokens = np.full(count, self._corpus.end_id, dtype=np.int64)
        starts = np.zeros(count, dtype=bool)
        filled = 0
        while filled < count:
            number, place = divmod(begin + filled, self.num_tokens_per_epoch)
            epoch = self._epoch(number)
            slot = int(np.searchsorted(epoch.starts, place, side="right")) - 1
            while filled < count and slot < self._corpus.num_documents:
                document = int(epoch.order[slot])
                within = place - int(epoch.starts[slot])
                content = self._corpus.tokens[
                    self._corpus.offsets[document] + within : self._corpus.offsets[document + 1]
                ][: count - filled]
                tokens[filled : filled + len(content)] = content
                starts[filled] = within == 0
                # One more for the end token, which `tokens` holds already.
                filled += len(content) + 1
                slot += 1
                place = int(epoch.starts[slot])
        return tokens, starts
