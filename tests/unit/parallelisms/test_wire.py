"""Messages: typed, aligned sections that do not overlap. The pool: sizes, reuse, threads."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from disagmoe.parallelisms.transfer.wire import BufferPool, Counts, MessageKind, WireFormat

SECTIONS = {
    MessageKind.DISPATCH: {"header", "rows", "token", "pair_row", "pair_expert", "weights"},
    MessageKind.COMBINE: {"header", "rows", "token"},
    MessageKind.COMBINE_GRAD: {"header", "rows"},
    MessageKind.DISPATCH_GRAD: {"header", "rows", "weights"},
}


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(MessageKind),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    dim=st.integers(1, 33),
    rows=st.integers(1, 20),
    pairs=st.integers(0, 40),
)
def test_views_are_typed_aligned_and_apart(
    kind: MessageKind, dtype: torch.dtype, dim: int, rows: int, pairs: int
) -> None:
    wire, counts = WireFormat(dim=dim, row_dtype=dtype), Counts(rows, 0, pairs)
    buffer = torch.zeros(wire.num_bytes(kind, counts), dtype=torch.uint8)
    views = wire.views(kind, counts, buffer)
    assert set(views) == SECTIONS[kind]
    assert views["rows"].shape == (rows, dim) and views["rows"].dtype is dtype
    assert views["header"].dtype is torch.float64
    for name in SECTIONS[kind] - {"header", "rows"}:
        assert views[name].shape == (rows if name == "token" else pairs,)
        assert views[name].dtype is (torch.float32 if name == "weights" else torch.int32)
    for number, view in enumerate(views.values(), 1):
        assert (view.data_ptr() - buffer.data_ptr()) % 16 == 0, "16 bytes suit every type and vector load"
        view.view(torch.uint8).fill_(number)
    for number, view in enumerate(views.values(), 1):
        assert (view.view(torch.uint8) == number).all(), "sections overlap"
    assert buffer.numel() < sum(view.nbytes for view in views.values()) + 16 * len(views)


@pytest.mark.parametrize("kind", MessageKind)
def test_no_rows_no_message(kind: MessageKind) -> None:
    assert WireFormat(dim=8, row_dtype=torch.float32).num_bytes(kind, Counts(0, 0, 0)) == 0


def test_pool_reuses_what_it_got_back() -> None:
    pool = BufferPool(torch.device("cpu"))
    first = pool.take(5000)
    assert first.dtype is torch.uint8 and first.numel() == 5000
    address, allocated = first.data_ptr(), pool.allocated_bytes
    other = pool.take(5000)
    assert other.data_ptr() != address, "in use"
    pool.give(first)
    again = pool.take(6000)  # the same size class
    assert again.data_ptr() == address and again.numel() == 6000
    assert pool.allocated_bytes == 2 * allocated


@given(num_bytes=st.integers(0, 10**7))
@settings(max_examples=100, deadline=None)
def test_pool_wastes_little(num_bytes: int) -> None:
    pool = BufferPool(torch.device("cpu"))
    assert pool.take(num_bytes).numel() == num_bytes
    assert 0 <= pool.allocated_bytes - num_bytes < max(4096, pool.allocated_bytes / 5 + 1)


def test_pool_is_thread_safe() -> None:
    """Threads that mark their buffers never see another's mark."""
    pool, wrong = BufferPool(torch.device("cpu")), []

    def work(mark: int) -> None:
        for i in range(300):
            buffer = pool.take(1000 + 4096 * (i % 3))
            buffer.fill_(mark)
            if not (buffer == mark).all():
                wrong.append(mark)
            pool.give(buffer)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert pool.allocated_bytes <= 4 * 3 * 16384
