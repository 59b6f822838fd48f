"""The packed stream: masking, positions, epochs, random access, against a plain reference of Python lists."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from disagmoe.data.documents import Document
from disagmoe.data.packing import PackedSource, build_corpus, seeded_permutation
from disagmoe.data.sample import IGNORE_INDEX
from disagmoe.data.streaming import StreamedSource
from disagmoe.data.tokenizers import ByteTokenizer

END = 256


def documents_of(texts: list[bytes]) -> list[Document]:
    return [Document(text, f"document {i}") for i, text in enumerate(texts)]


def packed(texts: list[bytes], *, seq_len: int, seed: int = 0, shuffle: bool = False) -> PackedSource:
    corpus = build_corpus(documents_of(texts), ByteTokenizer(), source="test")
    return PackedSource(corpus, seq_len=seq_len, vocab_size=257, seed=seed, shuffle=shuffle)


def reference_sample(texts: list[bytes], index: int, seq_len: int) -> tuple[list[int], list[int], list[int]]:
    """Unshuffled, by lists: (token, whether it begins a document) repeated for as many epochs as needed."""
    epoch = [(token, place == 0) for text in texts if text for place, token in enumerate([*text, END])]
    count = (index + 1) * seq_len + 1
    stream = (epoch * (count // len(epoch) + 1))[index * seq_len : count]
    tokens = [token for token, _ in stream[:-1]]
    labels = [IGNORE_INDEX if starts else token for token, starts in stream[1:]]
    positions: list[int] = []
    for _, starts in stream[:-1]:
        positions.append(0 if starts or not positions else positions[-1] + 1)
    return tokens, labels, positions


def as_lists(source: PackedSource | StreamedSource, index: int) -> tuple[list[int], list[int], list[int]]:
    sample = source.sample(index)
    return sample.tokens_L.tolist(), sample.labels_L.tolist(), sample.positions_L.tolist()


def test_a_sample_by_hand() -> None:
    source = packed([b"abc", b"de"], seq_len=4)
    a, b, c, d, e = b"abcde"
    # Stream: a b c END d e END | a b c END d e END | ...
    assert as_lists(source, 0) == ([a, b, c, END], [b, c, END, IGNORE_INDEX], [0, 1, 2, 3])
    assert as_lists(source, 1) == ([d, e, END, a], [e, END, IGNORE_INDEX, b], [0, 1, 2, 0])
    assert as_lists(source, 2) == ([b, c, END, d], [c, END, IGNORE_INDEX, e], [0, 1, 2, 0])
    assert source.num_tokens_per_epoch == 7 and source.vocab_size == 257


texts_strategy = st.lists(st.binary(max_size=12), min_size=1, max_size=6).filter(any)


@settings(max_examples=100, deadline=None)
@given(texts=texts_strategy, seq_len=st.integers(1, 20), indices=st.lists(st.integers(0, 30), min_size=1, max_size=8))
def test_random_access_equals_the_reference(texts: list[bytes], seq_len: int, indices: list[int]) -> None:
    source = packed(texts, seq_len=seq_len)
    for index in indices:
        assert as_lists(source, index) == reference_sample(texts, index, seq_len)


@settings(max_examples=100, deadline=None)
@given(texts=texts_strategy, seq_len=st.integers(1, 20), skips=st.lists(st.integers(0, 6), min_size=1, max_size=12))
def test_stream_equals_the_reference(texts: list[bytes], seq_len: int, skips: list[int]) -> None:
    source = StreamedSource(
        lambda epoch: iter(documents_of(texts)), ByteTokenizer(), name="test", seq_len=seq_len, window=2
    )
    for index in np.cumsum(skips).tolist():
        assert as_lists(source, index) == reference_sample(texts, index, seq_len)


@settings(max_examples=60, deadline=None)
@given(texts=texts_strategy, seq_len=st.integers(1, 9), seed=st.integers(0, 5))
def test_shuffled_epochs_repeat_nothing_and_leave_nothing_out(texts: list[bytes], seq_len: int, seed: int) -> None:
    source = packed(texts, seq_len=seq_len, seed=seed, shuffle=True)
    per_epoch = source.num_tokens_per_epoch
    # seq_len epochs are a whole number of samples, so their tokens must be exactly seq_len times those of the texts.
    drawn = [token for index in range(per_epoch) for token in source.sample(index).tokens_L.tolist()]
    expected = [token for text in texts if text for token in [*text, END]] * seq_len
    assert sorted(drawn) == sorted(expected)
    valid = [label for index in range(per_epoch) for label in source.sample(index).labels_L.tolist() if label >= 0]
    assert sorted(valid) == sorted([token for text in texts if text for token in [*text, END][1:]] * seq_len)


def test_each_epoch_has_every_sample_sized_piece_once() -> None:
    texts = [bytes([i, 100 + i, i]) for i in range(32)]  # 4 tokens with the end: one document, one sample
    source = packed(texts, seq_len=4, shuffle=True)
    epochs = [[source.sample(32 * epoch + i).tokens_L[0].item() for i in range(32)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(32)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_batch_mixes_documents() -> None:
    texts = [bytes([i]) * 63 for i in range(32)]  # each document is 8 samples long
    in_order, mixed = (packed(texts, seq_len=8, shuffle=shuffle).batch(range(16)) for shuffle in (False, True))
    assert len(in_order.tokens_BL[:, 0].unique()) == 2
    assert len(mixed.tokens_BL[:, 0].unique()) > 8


def test_order_of_access_does_not_matter_and_seed_does() -> None:
    texts = [bytes(range(i, i + 20)) for i in range(40)]
    forward = packed(texts, seq_len=16, shuffle=True)
    backward = packed(texts, seq_len=16, shuffle=True)
    expected = [as_lists(forward, i) for i in range(300)]
    assert [as_lists(backward, i) for i in reversed(range(300))] == expected[::-1]
    assert [as_lists(packed(texts, seq_len=16, shuffle=True, seed=1), i) for i in range(300)] != expected


def test_any_slicing_of_a_step_gives_the_same_tokens() -> None:
    texts = [bytes(range(i, i + 20)) for i in range(40)]
    whole = packed(texts, seq_len=16, shuffle=True).batch(range(8, 16))
    parts = [packed(texts, seq_len=16, shuffle=True).batch(r) for r in (range(8, 11), range(11, 11), range(11, 16))]
    assert torch.equal(torch.cat([part.tokens_BL for part in parts]), whole.tokens_BL)
    assert torch.equal(torch.cat([part.labels_BL for part in parts]), whole.labels_BL)
    assert torch.equal(torch.cat([part.positions_BL for part in parts]), whole.positions_BL)
    assert parts[1].tokens_BL.shape == (0, 16)
    assert whole.tokens_BL.dtype == whole.labels_BL.dtype == whole.positions_BL.dtype == torch.int64
    assert whole.num_valid_tokens == sum(part.num_valid_tokens for part in parts) < 8 * 16


def test_fingerprint_tells_data_and_settings_apart() -> None:
    base = packed([b"ab", b"c"], seq_len=4)
    assert packed([b"ab", b"c"], seq_len=4).fingerprint == base.fingerprint
    others = [
        packed([b"a", b"bc"], seq_len=4),
        packed([b"ab", b"d"], seq_len=4),
        packed([b"ab", b"c"], seq_len=5),
        packed([b"ab", b"c"], seq_len=4, seed=1),
    ]
    assert len({source.fingerprint for source in [base, *others]}) == 5


def test_seeded_permutation_is_fixed() -> None:
    # Recorded: a change here would change what every earlier run trained on.
    assert seeded_permutation(8, 0, 0, 0).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    assert sorted(seeded_permutation(1000, 3, 1).tolist()) == list(range(1000))
    assert seeded_permutation(0, 1).shape == (0,)


def test_negative_index_is_refused() -> None:
    with pytest.raises(ValueError, match="sample index = -1: must be at least 0"):
        packed([b"ab"], seq_len=4).sample(-1)


def test_stream_window_and_going_back() -> None:
    texts = [bytes(range(200))] * 3
    opened: list[int] = []

    def open_epoch(epoch: int):  # type: ignore[no-untyped-def]
        opened.append(epoch)
        return iter(documents_of(texts))

    source = StreamedSource(open_epoch, ByteTokenizer(), name="web/text", seq_len=10, window=4)
    for index in (0, 1, 500, 497):
        assert as_lists(source, index) == reference_sample(texts, index, 10)
    assert opened == list(range(9))  # 5011 tokens of 603 an epoch: the first and eight more, none opened twice
    with pytest.raises(ValueError, match=r'index = 0 of the streamed dataset "web/text": must not be more than 4'):
        source.sample(0)


def test_stream_keeps_only_its_window() -> None:
    source = StreamedSource(
        lambda epoch: iter(documents_of([b"x" * 9] * 50)), ByteTokenizer(), name="test", seq_len=10, window=4
    )
    for index in range(0, 3000, 7):
        source.sample(index)
        assert len(source._kept) <= 40
    source.sample(20_000)
    assert len(source._kept) <= 40


def test_stream_without_text_is_refused() -> None:
    source = StreamedSource(lambda epoch: iter(documents_of([b"", b""])), ByteTokenizer(), name="void", seq_len=4)
    with pytest.raises(ValueError, match=r'\[data\] source = "void": the dataset must hold text'):
        source.sample(0)
