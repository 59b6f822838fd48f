"""torchtitan's all-to-all token dispatcher on exchanges that are handed in.

Its reordering, its permutation to expert order and its weighted sum are torchtitan's own code; only the three calls
that communicate are replaced, so that waits are measured and polled like everybody else's. Models never import
torch.distributed.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher


class PairExchange(Protocol):
    """The all-to-all of one layer's rows among the workers that share its experts."""

    def counts(self, counts_NE: Tensor) -> Tensor:
        """int64 [N, e]: rows for each local expert of each worker -> rows from each worker for each local expert."""
        ...

    def rows(self, rows_RD: Tensor, *, send: list[int], receive: list[int], back: bool) -> Tensor:
        """Differentiable; rows are cut by worker. `back`: from experts to owners."""
        ...


class _Mesh:
    """What the dispatcher asks of a mesh."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def get_group(self) -> None:
        return None


class TitanDispatcher(AllToAllTokenDispatcher):
    """`AllToAllTokenDispatcher` for any split of the experts, uneven ones included.

    Args:
        experts_by_worker: contiguous ranges. torchtitan wants equal ones: the shorter are filled up with experts that
            no token is routed to.
    """

    def __init__(self, *, experts_by_worker: list[range], top_k: int, exchange: PairExchange) -> None:
        self._most = max(map(len, experts_by_worker))
        self._num_workers = len(experts_by_worker)
        slots = self._num_workers * self._most
        super().__init__(AllToAllTokenDispatcher.Config(num_experts=slots, top_k=top_k))
        self._exchange = exchange
        self._slot_E = torch.tensor(
            [worker * self._most + i for worker, held in enumerate(experts_by_worker) for i in range(len(held))]
        )
        if self._num_workers > 1:
            mesh: Any = _Mesh(self._num_workers)
            self.wire_meshes(ep_mesh=mesh)

    def slots_of(self, expert_ids_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and counts by expert, as torchtitan would number them in equal shares."""
        self._slot_E = self._slot_E.to(expert_ids_TK.device)
        slots_TK = self._slot_E[expert_ids_TK]
        return slots_TK, torch.bincount(slots_TK.flatten(), minlength=self._num_workers * self._most)

    def _token_count_exchange(self, num_local_tokens_per_expert_E: Tensor, pg: Any, ep_size: int) -> Tensor:
        return self._exchange.counts(num_local_tokens_per_expert_E.view(ep_size, -1))

    def _dispatch_token_exchange(
        self, routed_input_ND: Tensor, pg: Any, output_splits: list[int], input_splits: list[int]
    ) -> Tensor:
        return self._exchange.rows(routed_input_ND, send=input_splits, receive=output_splits, back=False)

    def _combine_token_exchange(
        self, routed_output_RD: Tensor, pg: Any, input_splits: list[int], output_splits: list[int]
    ) -> Tensor:
        return self._exchange.rows(routed_output_RD, send=output_splits, receive=input_splits, back=True)
