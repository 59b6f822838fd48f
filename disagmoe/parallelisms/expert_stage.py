"""An F-stage: from dispatched rows, through the worker's experts, to rows with partial sums.

Shape suffixes as in `stage`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from disagmoe.parallelisms.stage import DisagStage
from disagmoe.parallelisms.transfer.wire import Counts


@dataclass(kw_only=True)
class _Received:
    """What an F-stage knows of its rows between receiving them and sending their gradient."""

    counts: list[Counts]
    token_by_peer: list[Tensor]
    pair_row_Q: Tensor
    pair_expert_Q: Tensor
    primary_P: Tensor
    out_RD: Tensor | None = field(default=None)


class ExpertStage(DisagStage):
    """ffn_norm, this worker's experts and (for primary rows) shared experts and residual of one layer."""

    def __init__(self, **common: Any) -> None:
        super().__init__(**common)
        self._received: dict[int, _Received] = {}
        self._num_rows = 0

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        self._received.clear()

    def forward(self, microbatch: int) -> Tensor | None:
        try:
            return super().forward(microbatch)
        except torch.OutOfMemoryError as error:
            raise RuntimeError(
                f"out of memory in {self.spec}, micro-batch {microbatch}, which sent {self._num_rows} rows here: "
                "compare with what `disagmoe check` plans at [comm] imbalance_factor; use smaller micro-batches, more "
                'ffn_workers, a smaller in_flight, or recompute = "ffn"'
            ) from error

    def _compute(self, microbatch: int, *args: Tensor) -> tuple[Tensor, ...]:
        meta = self._received[microbatch]
        return (self.submod(args[0], args[1], meta.pair_row_Q, meta.pair_expert_Q, meta.primary_P),)

    def _take_input(self, microbatch: int) -> tuple[Tensor, ...] | None:
        assert self.links.forward_in is not None
        arrival = self._receive(self.links.forward_in, (self.spec.index - 1, microbatch))
        num_rows = sum(c.num_rows for c in arrival.counts)
        rows_RD = torch.empty(num_rows, self._dim, dtype=self._row_dtype, device=self.device)
        tokens, pair_rows, pair_experts, weights, primaries = [], [], [], [], []
        start = 0
        for count, views in zip(arrival.counts, arrival.views, strict=True):
            if not views:
                tokens.append(torch.empty(0, dtype=torch.int32, device=self.device))
                continue
            rows_RD[start : start + count.num_rows] = views["rows"]
            tokens.append(views["token"].clone())
            pair_rows.append(views["pair_row"].long() + start)
            pair_experts.append(views["pair_expert"].long())
            weights.append(views["weights"])
            primaries.append(torch.arange(start, start + count.num_primary, device=self.device))
            start += count.num_rows
        self._num_rows = num_rows
        received = _Received(
            counts=arrival.counts,
            token_by_peer=tokens,
            pair_row_Q=_cat(pair_rows, torch.int64, self.device),
            pair_expert_Q=_cat(pair_experts, torch.int64, self.device),
            primary_P=_cat(primaries, torch.int64, self.device),
        )
        weights_Q = _cat(weights, torch.float32, self.device)
        self._received[microbatch] = received
        self.links.forward_in.release(arrival)
        if num_rows == 0:
            return None
        return rows_RD.requires_grad_(), weights_Q.requires_grad_()

    def _keep_output(self, microbatch: int, outputs: tuple[Tensor, ...]) -> None:
        self._received[microbatch].out_RD = outputs[0].detach()

    def send_forward(self, microbatch: int) -> None:
        received = self._received[microbatch]
        pack = self._pack_slices(received.counts, received.out_RD, received.token_by_peer)
        counts = [Counts(c.num_rows, c.num_primary, 0) for c in received.counts]
        assert self.links.forward_out is not None
        self.links.forward_out.send((self.spec.index, microbatch), counts, pack)
        received.out_RD = None

    def _gradient_counts(self, microbatch: int) -> list[Counts]:
        return self._received[microbatch].counts

    def _take_gradient(self, microbatch: int) -> tuple[Tensor, ...]:
        assert self.links.backward_in is not None
        arrival = self._receive(self.links.backward_in, (self.spec.index, microbatch))
        rows = [views["rows"] for views in arrival.views if views]
        grad_RD = torch.cat(rows) if rows else torch.empty(0, self._dim, dtype=self._row_dtype, device=self.device)
        self.links.backward_in.release(arrival)
        return (grad_RD,)

    def send_backward(self, microbatch: int) -> None:
        received = self._received.pop(microbatch)
        grads = self.bwd_cache.pop(microbatch, None)
        grad_RD, grad_Q = grads if grads is not None else (None, None)
        pack_rows = self._pack_slices(received.counts, grad_RD, None)
        starts = _starts(c.num_pairs for c in received.counts)

        def pack(peer: int, views: dict[str, Tensor]) -> None:
            assert grad_Q is not None
            pack_rows(peer, views)
            views["weights"].copy_(grad_Q[starts[peer] : starts[peer] + received.counts[peer].num_pairs])

        assert self.links.backward_out is not None
        self.links.backward_out.send((self.spec.index - 1, microbatch), received.counts, pack)

    @staticmethod
    def _pack_slices(
        counts: Sequence[Counts], rows_RD: Tensor | None, tokens: Sequence[Tensor] | None
    ) -> Callable[[int, dict[str, Tensor]], None]:
        starts = _starts(c.num_rows for c in counts)

        def pack(peer: int, views: dict[str, Tensor]) -> None:
            assert rows_RD is not None
            views["rows"].copy_(rows_RD[starts[peer] : starts[peer] + counts[peer].num_rows])
            if tokens is not None:
                views["token"].copy_(tokens[peer])

        return pack


def _starts(sizes: Iterable[int]) -> list[int]:
    starts, total = [], 0
    for size in sizes:
        starts.append(total)
        total += size
    return starts


def _cat(parts: list[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Concatenate; always a new tensor, so that the buffers behind `parts` can be given back."""
    if not parts:
        return torch.empty(0, dtype=dtype, device=device)
    return torch.cat(parts) if len(parts) > 1 else parts[0].clone()
