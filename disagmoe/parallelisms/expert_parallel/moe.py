"""The routed experts of one layer over several workers, with transfers that other work can hide.

Everything that travels is gathered and scattered by single indexed operations, outside autograd, on pooled buffers;
the graph has the experts alone. A stage's tokens may be cut into *pieces*: the transfers of one then run behind the
experts' work on another, in both passes. Suffixes as in `rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from disagmoe.layout import split_evenly
from disagmoe.parallelisms.expert_parallel.exchange import Exchange
from disagmoe.parallelisms.expert_parallel.piece import Piece, RoutedOptions
from disagmoe.parallelisms.expert_parallel.protocol import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    Later,
    Meter,
    Wait,
)
from disagmoe.parallelisms.expert_parallel.rows import (
    SendPlan,
    Shares,
    plan_receive,
    plan_send,
    starts_of,
)
from disagmoe.parallelisms.stage import WeightGradientsLike
from disagmoe.parallelisms.transfer.wire import BufferPool


class OverlappedExperts:
    """A layer's routed experts on one worker; implements `protocol.RoutedExperts`.

    Args:
        stage: index of the layer's expert stage in the chain of stages; the hops before and after it are its transfers.
    """

    def __init__(
        self,
        *,
        part: nn.Module,
        shares: Shares,
        exchange: Exchange,
        pool: BufferPool,
        meter: Meter,
        options: RoutedOptions,
        layer: int,
        stage: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._part, self._shares, self._exchange, self._pool, self._meter = part, shares, exchange, pool, meter
        self._options, self._layer, self._stage = options, layer, stage
        self._dim, self._dtype, self._device = dim, dtype, device
        self._row_bytes = dim * dtype.itemsize
        self._own = exchange.group.own
        self._pieces: dict[int, list[Piece]] = {}
        self._shape: dict[int, tuple[int, int]] = {}
        self.num_rows = 0

    def clear(self) -> None:
        self._pieces.clear()
        self._shape.clear()

    # -- forward -------------------------------------------------------------------------------------------------

    def forward(
        self, microbatch: int, n_TD: Tensor, weights_TK: Tensor, expert_ids_TK: Tensor, meanwhile: Callable[[], None]
    ) -> Generator[Wait, None, Tensor]:
        cuts = split_evenly(n_TD.shape[0], self._options.num_pieces)
        self._shape[microbatch] = (weights_TK.shape[0], weights_TK.shape[1])
        pieces: list[Piece] = []
        for cut in cuts:
            tokens = slice(cut.start, cut.stop)
            pieces.append(self._dispatch(microbatch, tokens, n_TD[tokens], weights_TK[tokens], expert_ids_TK[tokens]))
        self._pieces[microbatch] = pieces
        meanwhile()
        for piece in pieces:
            yield partial(self._exchange.wait, piece.dispatch)
            self._compute(microbatch, piece)
        out_TD = torch.zeros(n_TD.shape, dtype=torch.float32, device=self._device)
        for piece in pieces:
            yield partial(self._exchange.wait, piece.combine)
            with self._meter.time(FORWARD, self._stage + 1, microbatch, f"add layer {self._layer}"):
                self._add_returned(piece, out_TD[piece.tokens])
        return out_TD

    def _dispatch(
        self, microbatch: int, tokens: slice, n_TD: Tensor, weights_TK: Tensor, expert_ids_TK: Tensor
    ) -> Piece:
        with self._meter.time(FORWARD, self._stage - 1, microbatch, f"pack layer {self._layer}"):
            plan = plan_send(
                expert_ids_TK,
                self._shares,
                own=self._own,
                deduplicate=self._options.deduplicate,
                row_bytes=self._row_bytes,
            )
            self.num_rows += sum(plan.rows)
            weights_Q = weights_TK.flatten().index_select(0, plan.slot_of_pair_Q)
            piece = Piece(tokens=tokens, send=plan, n_TD=n_TD, weights_Q=weights_Q)
            raw, buffer_SD = self._buffer(sum(plan.slots))
            own = self._own_part(plan.slots)
            for part in (slice(0, own.start), slice(own.stop, None)):
                if plan.source_S[part].numel():
                    torch.index_select(n_TD, 0, plan.source_S[part], out=buffer_SD[part])
            if plan.pair_row_Q is not None:
                self._write_metadata(plan, plan.pair_row_Q, weights_Q, buffer_SD)
            piece.token_R = plan.token_S
            if plan.pair_row_Q is not None:
                piece.token_R = plan.token_S[plan.token_S < plan.num_tokens]

        def make_room(counts: list[Tensor]) -> list[Tensor]:
            piece.receive = plan_receive(
                counts, own=self._own, deduplicate=self._options.deduplicate, row_bytes=self._row_bytes
            )
            piece.arrived = self._buffer(piece.receive.num_slots)
            return list(piece.arrived[1].split(piece.receive.slots))

        with self._meter.time(FORWARD, self._stage - 1, microbatch, f"send layer {self._layer}"):
            piece.dispatch = self._exchange.start_sized(
                f"dispatch of layer {self._layer}, micro-batch {microbatch}",
                (self._stage - 1, False),
                buffer_SD.split(plan.slots),
                plan.counts,
                make_room,
                release=lambda: self._pool.give(raw),
            )
        return piece

    def _write_metadata(self, plan: SendPlan, pair_row_Q: Tensor, weights_Q: Tensor, buffer_SD: Tensor) -> None:
        starts = starts_of(plan.slots)
        rows, weights = pair_row_Q.split(plan.pairs), weights_Q.split(plan.pairs)
        for worker, num_pairs in enumerate(plan.pairs):
            if worker != self._own and num_pairs:
                room = _bytes_of(buffer_SD, starts[worker] + plan.rows[worker], starts[worker] + plan.slots[worker])
                room[: 4 * num_pairs].view(torch.int32).copy_(rows[worker])
                room[4 * num_pairs : 8 * num_pairs].view(torch.float32).copy_(weights[worker])

    def _compute(self, microbatch: int, piece: Piece) -> None:
        """The experts' work on what has arrived, and the start of its way back."""
        plan, received = piece.send, piece.receive
        with self._meter.time(FORWARD, self._stage, microbatch, f"experts {self._layer}"):
            raw, buffer_SD = piece.arrived
            own_sent, own_here = self._own_part(plan.slots), self._own_part(received.slots)
            if plan.rows[self._own]:
                torch.index_select(piece.n_TD, 0, plan.source_S[own_sent], out=buffer_SD[own_here])
            self._read_metadata(piece, buffer_SD)
            x_QD = buffer_SD.index_select(0, piece.slot_Q)
            self._pool.give(raw)
            piece.x_QD = x_QD.requires_grad_()
            counts_e = received.counts_e.to(self._device)
            piece.y_QD = self._run_experts(piece, x_QD, counts_e)
            out_raw, out_RD = self._buffer(sum(received.rows))
            y_QD = piece.y_QD.detach()
            if piece.pair_weights_Q is None:
                out_RD.index_copy_(0, piece.row_Q, y_QD)
            else:
                _sum_rows(out_RD, piece.row_Q, y_QD.float() * piece.pair_weights_Q[:, None])
            piece.returned = self._buffer(sum(plan.rows))
            back = piece.returned[1].split(plan.rows)
            send = out_RD.split(received.rows)
            back[self._own].copy_(send[self._own])
            piece.combine = self._exchange.start(
                f"combine of layer {self._layer}, micro-batch {microbatch}",
                (self._stage, False),
                send,
                back,
                release=lambda: self._pool.give(out_raw),
            )

    def _run_experts(self, piece: Piece, x_QD: Tensor, counts_e: Tensor) -> Tensor:
        compute: Callable[[Tensor, Tensor], Tensor] = self._part
        if self._options.put_off is not None:
            owed = piece.owed = self._options.put_off()

            def compute(x: Tensor, counts: Tensor) -> Tensor:
                with owed.collect():
                    return cast(Tensor, self._part(x, counts))

        if self._options.recompute:
            return cast(Tensor, checkpoint(compute, x_QD, counts_e, use_reentrant=False, preserve_rng_state=False))
        return compute(x_QD, counts_e)

    def _read_metadata(self, piece: Piece, buffer_SD: Tensor) -> None:
        """Where each received pair's row is, and its weight."""
        received, plan = piece.receive, piece.send
        order_Q = received.order_Q.to(self._device)
        if plan.pair_row_Q is None:
            piece.slot_Q = piece.row_Q = order_Q
            return
        rows, weights = [], []
        starts = starts_of(received.slots)
        for worker, num_pairs in enumerate(received.pairs):
            if worker == self._own:
                part = self._own_part(plan.pairs)
                rows.append(plan.pair_row_Q[part])
                weights.append(piece.weights_Q[part])
                continue
            start = starts[worker]
            room = _bytes_of(buffer_SD, start + received.rows[worker], start + received.slots[worker])
            rows.append(room[: 4 * num_pairs].view(torch.int32))
            weights.append(room[4 * num_pairs : 8 * num_pairs].view(torch.float32))
        row_Q = torch.cat(rows).long()
        pairs_N = torch.tensor(received.pairs, device=self._device)
        for name, sizes in (("slot_Q", received.slots), ("row_Q", received.rows)):
            begin_Q = torch.tensor(starts_of(sizes), device=self._device).repeat_interleave(pairs_N)
            setattr(piece, name, (row_Q + begin_Q).index_select(0, order_Q))
        piece.pair_weights_Q = torch.cat(weights).index_select(0, order_Q)

    def _add_returned(self, piece: Piece, out_TD: Tensor) -> None:
        raw, returned_RD = piece.returned
        if piece.pair_weights_Q is None:
            # Kept: the weights' gradients need them.
            out_TD.index_add_(0, piece.token_R, returned_RD.float() * piece.weights_Q[:, None])
        else:
            out_TD.index_add_(0, piece.token_R, returned_RD.float())
            self._pool.give(raw)

    # -- backward ------------------------------------------------------------------------------------------------

    def backward(
        self,
        microbatch: int,
        grad_TD: Tensor,
        meanwhile: Callable[[], None],
        later: Later | None,
    ) -> Generator[Wait, None, tuple[Tensor, Tensor]]:
        pieces = self._pieces.pop(microbatch)
        num_tokens, top_k = self._shape.pop(microbatch)
        for piece in pieces:
            self._return_gradient(microbatch, piece, grad_TD[piece.tokens])
        meanwhile()
        for piece in pieces:
            yield partial(self._exchange.wait, piece.gradient)
            self._experts_backward(microbatch, piece)
            if piece.owed is not None:
                if later is None:
                    self._weight_gradient(microbatch, piece.owed)
                else:
                    later.append(partial(self._weight_gradient, microbatch, piece.owed))
        grad_n_TD = torch.zeros(num_tokens, self._dim, dtype=torch.float32, device=self._device)
        grad_weights_TK = torch.zeros(num_tokens, top_k, dtype=torch.float32, device=self._device)
        for piece in pieces:
            yield partial(self._exchange.wait, piece.gradient)
            with self._meter.time(self._options.owner_kind, self._stage - 1, microbatch, f"add back {self._layer}"):
                self._add_gradient(piece, grad_n_TD[piece.tokens], grad_weights_TK[piece.tokens])
        return grad_n_TD, grad_weights_TK

    def _return_gradient(self, microbatch: int, piece: Piece, grad_TD: Tensor) -> None:
        """Start the gradients of the rows that came back on their way to the experts."""
        plan, received = piece.send, piece.receive
        kind = self._options.owner_kind
        with self._meter.time(kind, self._stage + 1, microbatch, f"pack back {self._layer}"):
            raw, send_RD = self._buffer(sum(plan.rows))
            grad_RD = None
            if piece.pair_weights_Q is None:
                grad_RD = grad_TD.index_select(0, piece.token_R)
                send_RD.copy_(grad_RD.float() * piece.weights_Q[:, None])
            elif piece.token_R.numel():
                torch.index_select(grad_TD, 0, piece.token_R, out=send_RD)
            piece.arrived = self._buffer(sum(received.rows))
            send, receive = send_RD.split(plan.rows), piece.arrived[1].split(received.rows)
            receive[self._own].copy_(send[self._own])
            piece.gradient = self._exchange.start(
                f"combine gradient of layer {self._layer}, micro-batch {microbatch}",
                (self._stage, True),
                send,
                receive,
                release=lambda: self._pool.give(raw),
            )
        if grad_RD is not None:
            with self._meter.time(kind, self._stage + 1, microbatch, f"weights' gradients {self._layer}"):
                returned_raw, returned_RD = piece.returned
                piece.grad_weights_Q = (grad_RD.float() * returned_RD.float()).sum(-1)
                self._pool.give(returned_raw)

    def _experts_backward(self, microbatch: int, piece: Piece) -> None:
        """Back through the experts, and the start of their rows' gradients on the way to the owners."""
        plan, received = piece.send, piece.receive
        kind = FULL_BACKWARD if piece.owed is None else BACKWARD_INPUT
        with self._meter.time(kind, self._stage, microbatch, f"experts back {self._layer}"):
            raw, grad_RD = piece.arrived
            grad_QD = grad_RD.index_select(0, piece.row_Q)
            self._pool.give(raw)
            grad_pairs_Q = None
            if piece.pair_weights_Q is not None:
                grad_pairs_Q = (piece.y_QD.detach().float() * grad_QD.float()).sum(-1)
                grad_QD = (grad_QD.float() * piece.pair_weights_Q[:, None]).to(self._dtype)
            piece.y_QD.backward(grad_QD)
            assert piece.x_QD.grad is not None
            out_raw, out_SD = self._buffer(received.num_slots)
            if grad_pairs_Q is None:
                out_SD.index_copy_(0, piece.slot_Q, piece.x_QD.grad)
            else:
                _sum_rows(out_SD, piece.slot_Q, piece.x_QD.grad.float())
                self._write_pair_gradients(piece, grad_pairs_Q, out_SD)
            del piece.x_QD, piece.y_QD
            piece.arrived = self._buffer(sum(plan.slots))
            send = self._gradient_parts(out_SD, received.slots, received.rows, received.pairs)
            back = self._gradient_parts(piece.arrived[1], plan.slots, plan.rows, plan.pairs)
            back[self._own].copy_(send[self._own])
            piece.gradient = self._exchange.start(
                f"dispatch gradient of layer {self._layer}, micro-batch {microbatch}",
                (self._stage - 1, True),
                send,
                back,
                release=lambda: self._pool.give(out_raw),
            )

    def _weight_gradient(self, microbatch: int, owed: WeightGradientsLike) -> None:
        with self._meter.time(BACKWARD_WEIGHT, self._stage, microbatch, f"experts' weights {self._layer}"):
            owed.run()

    def _write_pair_gradients(self, piece: Piece, grad_pairs_Q: Tensor, out_SD: Tensor) -> None:
        received = piece.receive
        arrival_Q = torch.empty_like(grad_pairs_Q)
        arrival_Q[received.order_Q.to(self._device)] = grad_pairs_Q
        starts = starts_of(received.slots)
        for worker, grad in enumerate(arrival_Q.split(received.pairs)):
            if worker == self._own:
                piece.own_grad_weights_Q = grad
            elif grad.numel():
                start = starts[worker] + received.rows[worker]
                room = _bytes_of(out_SD, start, starts[worker] + received.slots[worker])
                room[: 4 * grad.numel()].view(torch.float32).copy_(grad)

    def _gradient_parts(
        self, buffer_SD: Tensor, slots: tuple[int, ...], rows: tuple[int, ...], pairs: tuple[int, ...]
    ) -> list[Tensor]:
        """Of each worker's slots those that go back: the rows, and the weights' gradients if they are sent."""
        parts = []
        for worker, start in enumerate(starts_of(slots)):
            size = rows[worker]
            if slots[worker] > size:
                size += -(-4 * pairs[worker] // self._row_bytes)
            parts.append(buffer_SD[start : start + size])
        return parts

    def _add_gradient(self, piece: Piece, grad_n_TD: Tensor, grad_weights_TK: Tensor) -> None:
        plan = piece.send
        raw, arrived_SD = piece.arrived
        if piece.grad_weights_Q is None:
            piece.grad_weights_Q = self._read_pair_gradients(piece, arrived_SD)
            # One token more, for slots that hold no row.
            padded = torch.zeros(plan.num_tokens + 1, self._dim, dtype=torch.float32, device=self._device)
            padded.index_add_(0, plan.token_S, arrived_SD.float())
            grad_n_TD.copy_(padded[: plan.num_tokens])
        else:
            grad_n_TD.index_add_(0, plan.token_S, arrived_SD.float())
        self._pool.give(raw)
        grad_weights_TK.view(-1)[plan.slot_of_pair_Q] = piece.grad_weights_Q

    def _read_pair_gradients(self, piece: Piece, arrived_SD: Tensor) -> Tensor:
        plan = piece.send
        parts = []
        for worker, start in enumerate(starts_of(plan.slots)):
            if worker == self._own:
                assert piece.own_grad_weights_Q is not None
                parts.append(piece.own_grad_weights_Q)
            else:
                room = _bytes_of(arrived_SD, start + plan.rows[worker], start + plan.slots[worker])
                parts.append(room[: 4 * plan.pairs[worker]].view(torch.float32))
        return torch.cat(parts)

    # -- buffers -------------------------------------------------------------------------------------------------

    def _buffer(self, slots: int) -> tuple[Tensor, Tensor]:
        """A pooled buffer, raw and as [slots, D]; contents undefined."""
        raw = self._pool.take(slots * self._row_bytes)
        return raw, raw.view(self._dtype).view(slots, self._dim)

    def _own_part(self, sizes: tuple[int, ...]) -> slice:
        start = sum(sizes[: self._own])
        return slice(start, start + sizes[self._own])


def _bytes_of(buffer_SD: Tensor, start: int, stop: int) -> Tensor:
    """Slots as uint8."""
    return buffer_SD[start:stop].reshape(-1).view(torch.uint8)


def _sum_rows(out_SD: Tensor, index_Q: Tensor, rows_QD: Tensor) -> None:
    """out[s] = sum of the float32 rows with index s; zeros where there is none."""
    if out_SD.dtype == torch.float32:
        out_SD.zero_().index_add_(0, index_Q, rows_QD)
    else:
        total = torch.zeros(out_SD.shape, dtype=torch.float32, device=out_SD.device)
        out_SD.copy_(total.index_add_(0, index_Q, rows_QD))
