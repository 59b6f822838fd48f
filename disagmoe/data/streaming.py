"""Documents that arrive one after another: a forward-only source, and Hugging Face datasets through it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from disagmoe.data.documents import Document, missing_field_error, record_text
from disagmoe.data.sample import IntArray, SampleSource, check_index, label_and_position
from disagmoe.data.tokenizers import Tokenizer


class StreamedSource(SampleSource):
    """Samples of an endless packed stream, read forward; sample i is tokens [i L, (i + 1) L).

    Indices may skip ahead (what lies between is read and tokenised, because where a sample begins depends on it) and
    may go back by up to `window` samples from the largest one asked for. Resuming at sample i reads everything before
    it again. At its end the stream is opened again with the next epoch's number.
    """

    def __init__(
        self,
        open_epoch: Callable[[int], Iterator[Document]],
        tokenizer: Tokenizer,
        *,
        name: str,
        seq_len: int,
        window: int = 1024,
    ) -> None:
        self.seq_len = seq_len
        self.vocab_size = tokenizer.vocab_size
        self._open_epoch = open_epoch
        self._tokenizer = tokenizer
        self._name = name
        self._window = window
        self._epoch = 0
        self._documents = open_epoch(0)
        self._epoch_had_text = False
        # Kept documents, end tokens included, and where in the stream each begins; `_begins` has one entry more.
        self._kept: list[npt.NDArray[Any]] = []
        self._begins: list[int] = [0]

    @property
    def fingerprint(self) -> str:
        """The stream's name: its content is not known before it is read."""
        return f"{self._name} seq_len={self.seq_len} vocab_size={self.vocab_size}"

    def sample_arrays(self, index: int) -> tuple[IntArray, IntArray, IntArray]:
        check_index(index)
        begin = index * self.seq_len
        if begin < self._begins[0]:
            raise ValueError(
                f'sample index = {index} of the streamed dataset "{self._name}": must not be more than {self._window} '
                f"samples before the latest one, because a stream is only read forward; build the dataset again, or "
                f"save the data as local files, which allow any order"
            )
        end = begin + self.seq_len + 1
        while self._begins[-1] < end:
            # Within the loop: a long skip ahead must not hold all that it passes.
            self._forget_before(begin - self._window * self.seq_len)
            self._append(self._next_document())
        return label_and_position(*self._read(begin, end))

    def _append(self, tokens: npt.NDArray[Any]) -> None:
        self._kept.append(tokens)
        self._begins.append(self._begins[-1] + len(tokens))

    def _forget_before(self, place: int) -> None:
        passed = bisect_right(self._begins, place) - 1
        # In bulk, so that removing from the front of the lists costs O(1) a document.
        if passed > 0 and 2 * passed >= len(self._kept):
            del self._kept[:passed], self._begins[:passed]

    def _next_document(self) -> npt.NDArray[Any]:
        """Tokens of the next document that has any, with the end token."""
        while True:
            for document in self._documents:
                content = self._tokenizer.encode(document.text, where=document.where)
                if len(content):
                    self._epoch_had_text = True
                    # uint32 holds every vocabulary's end token; the byte tokenizer's does not fit its own type.
                    return np.append(content.astype(np.uint32), np.uint32(self._tokenizer.end_id))
            if not self._epoch_had_text:
                raise ValueError(
                    f'[data] source = "{self._name}": the dataset must hold text, but epoch {self._epoch} of the '
                    f"stream ended without any; check [data] split and text_field"
                )
            self._epoch += 1
            self._epoch_had_text = False
            self._documents = self._open_epoch(self._epoch)

    def _read(self, begin: int, end: int) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """Stream tokens [begin, end), all of them kept, and whether each begins a document."""
        first = bisect_right(self._begins, begin) - 1
        pieces: list[npt.NDArray[Any]] = []
        starts = np.zeros(end - begin, dtype=bool)
        place = first
        while self._begins[place] < end:
            document_begin = self._begins[place]
            pieces.append(self._kept[place][max(begin - document_begin, 0) : end - document_begin])
            if document_begin >= begin:
                starts[document_begin - begin] = True
            place += 1
        return np.concatenate(pieces).astype(np.int64), starts


def hugging_face_documents(source: str, *, split: str, text_field: str, epoch: int) -> Iterator[Document]:
    """One epoch of a Hugging Face dataset, streamed in its own order.

    A name that torchtitan knows (`torchtitan.hf_datasets.text_datasets.DATASETS`: c4, ...) is opened its way, which
    fixes subset, split and field. Any other is `name` or `name:subset`, read from `split`.

    Raises:
        ValueError: the dataset can't be opened, or its records lack `text_field`.
    """
    # Imported here: two seconds that other sources need not wait.
    from torchtitan.hf_datasets.text_datasets import DATASETS

    try:
        if known := DATASETS.get(source.lower()):
            records = known.loader(known.path)
        else:
            from datasets import load_dataset

            name, _, subset = source.partition(":")
            records = load_dataset(name, subset or None, split=split, streaming=True)
    except Exception as error:
        # The library's errors are of many kinds (not found, no network, no such split): say which value it was.
        raise ValueError(
            f'[data] source = "{source}", split = "{split}": must be "python-stdlib", "synthetic", an existing path '
            f"or a Hugging Face dataset that can be opened here, but that failed: {type(error).__name__}: {error}; "
            f"correct the name (owner/name, with :subset where the dataset has several), or use a local file"
        ) from error
    if hasattr(records, "set_epoch"):
        records.set_epoch(epoch)
    return _record_documents(records, source, text_field, known.sample_processor if known else None)


def _record_documents(
    records: Any, source: str, text_field: str, text_of: Callable[[dict[str, Any]], str] | None
) -> Iterator[Document]:
    columns = getattr(records, "column_names", None)
    if text_of is None and columns is not None and text_field not in columns:
        raise missing_field_error(f'[data] source = "{source}"', text_field, sorted(columns))
    for number, record in enumerate(records):
        where = f"{source}, record {number}"
        if text_of is not None:
            yield Document(text_of(record).encode("utf-8", "replace"), where)
        else:
            yield Document(record_text(record, text_field=text_field, where=where), where)
