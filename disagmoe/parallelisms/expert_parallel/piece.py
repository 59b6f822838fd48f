"""Tokens between the passes of a layer's routed experts, and what is asked of them. Suffixes as in `rows`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from disagmoe.parallelisms.expert_parallel.exchange import Ticket
from disagmoe.parallelisms.expert_parallel.rows import ReceivePlan, SendPlan
from disagmoe.parallelisms.stage import WeightGradientsLike


@dataclass(frozen=True, kw_only=True)
class RoutedOptions:
    deduplicate: bool
    num_pieces: int
    """Parts that a stage's tokens are cut into."""
    put_off: Callable[[], WeightGradientsLike] | None
    """Where weight gradients go that are computed behind transfers; None: they are part of the backward."""
    recompute: bool
    owner_kind: str
    """The kind of action that the owner's backward is measured as."""


@dataclass(kw_only=True)
class Piece:
    """Some tokens of one micro-batch, between their forward and the end of their backward."""

    tokens: slice
    send: SendPlan
    n_TD: Tensor
    weights_Q: Tensor
    """float32, of the own tokens' pairs, in the order of experts."""
    dispatch: Ticket = field(init=False)
    receive: ReceivePlan = field(init=False)
    arrived: tuple[Tensor, Tensor] = field(init=False)
    """Receive buffer, raw and as [S, D]."""
    slot_Q: Tensor = field(init=False)
    """Slot in a receive buffer of each received pair, sorted by expert."""
    row_Q: Tensor = field(init=False)
    """The same counting rows only."""
    pair_weights_Q: Tensor | None = None
    x_QD: Tensor = field(init=False)
    y_QD: Tensor = field(init=False)
    owed: WeightGradientsLike | None = None
    combine: Ticket = field(init=False)
    returned: tuple[Tensor, Tensor] = field(init=False)
    """Rows that came back, raw and as [R, D]."""
    token_R: Tensor = field(init=False)
    gradient: Ticket = field(init=False)
    grad_weights_Q: Tensor | None = None
    own_grad_weights_Q: Tensor | None = None
