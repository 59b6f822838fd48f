"""Pipeline stages: one sublayer on one worker, between two hops.

The autograd graph of a stage ends at its boundary (DESIGN "Outside autograd"): an A-stage maps a hidden state [B, L, D]
to a hidden state and router weights [T, K]; an F-stage maps received rows [R, D] and pair weights [Q] to rows [R, D].
Gathering rows into messages and summing returned rows, and the two backward mirrors, happen here, outside the graph.

Shape suffixes: B sequences of this worker's slice, L sequence length, D model dim, T = B*L tokens, K top-k,
R rows received, Q (token, expert) pairs received.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.utils.checkpoint import checkpoint

from disagmoe.layout import Stage
from disagmoe.parallelisms.clock import StepClock
from disagmoe.parallelisms.transfer.channel import Arrival, Channel
from disagmoe.parallelisms.transfer.in_process import InProcessChannel
from disagmoe.parallelisms.transfer.wire import Counts

AnyChannel = Channel | InProcessChannel


class RoutingLike(Protocol):
    """What an attention sublayer says about its tokens."""

    weights_TK: Tensor
    """fp32, differentiable."""
    expert_ids_TK: Tensor
    """int64, global."""
    scores_TE: Tensor
    """fp32, detached: router scores, for the entropy metric."""


class RouterState(Protocol):
    """The load-balancing part of a router."""

    expert_bias_E: Tensor | None
    load_balance_coeff: float | None


class WeightGradientsLike(Protocol):
    """Weight gradients that a stage puts off in a split backward."""

    def collect(self) -> AbstractContextManager[None]:
        """Forwards inside leave their weight gradients to `run`."""
        ...

    def run(self) -> None: ...


@dataclass(kw_only=True)
class MicrobatchInput:
    """One A-worker's slice of a micro-batch; B may be 0."""

    tokens_BL: Tensor
    labels_BL: Tensor
    positions_BL: Tensor
    masks: Any = None
    """What the model's attention takes; made once, used by every A-stage."""


@dataclass(kw_only=True)
class StageLinks:
    """The channels at a stage's boundary; None at the ends of the pipeline."""

    forward_in: AnyChannel | None = None
    forward_out: AnyChannel | None = None
    backward_in: AnyChannel | None = None
    backward_out: AnyChannel | None = None

    def all(self) -> list[AnyChannel]:
        return [c for c in (self.forward_in, self.forward_out, self.backward_in, self.backward_out) if c is not None]


@dataclass(kw_only=True)
class RouterStats:
    """Sums over the tokens of a step, read and reset by the trainer."""

    tokens_per_expert_E: Tensor
    entropy_sum: Tensor
    num_tokens: int = 0
    num_rows: int = 0

    def add(self, expert_ids_TK: Tensor, scores_TE: Tensor) -> None:
        """Count a micro-batch's tokens and the entropy (nats) of their normalised router scores."""
        ones = torch.ones_like(expert_ids_TK, dtype=torch.float32).flatten()
        self.tokens_per_expert_E.scatter_add_(0, expert_ids_TK.flatten(), ones)
        share_TE = scores_TE / scores_TE.sum(-1, keepdim=True).clamp(min=1e-20)
        self.entropy_sum += torch.special.entr(share_TE).sum()
        self.num_tokens += expert_ids_TK.shape[0]

    def reset(self) -> None:
        self.tokens_per_expert_E.zero_()
        self.entropy_sum.zero_()
        self.num_tokens = self.num_rows = 0


class DisagStage(_PipelineStageBase):
    """Common part of both kinds of stage.

    Derives from torch's stage base for its forward and backward of one micro-batch (autograd across the boundary,
    split backward); receives, sends and their sizes are ours.
    """

    def __init__(
        self,
        *,
        spec: Stage,
        submodule: nn.Module,
        num_stages: int,
        pipeline_group: int,
        num_groups: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
        links: StageLinks,
        clock: StepClock,
        dim: int,
        row_dtype: torch.dtype,
        recompute: bool,
        weight_gradients: Callable[[], WeightGradientsLike] | None,
        most: Counts | None,
    ) -> None:
        # The base refuses a world with more ranks than stages, but our pipeline rank is the component group.
        super().__init__(submodule, spec.index, max(num_stages, dist.get_world_size(group)), device, group)
        self.num_stages = num_stages
        self.group_rank, self.group_size = pipeline_group, num_groups
        self.spec, self.links, self.clock = spec, links, clock
        self._name = str(spec)
        self._dim, self._row_dtype, self._recompute = dim, row_dtype, recompute
        self._most = most
        self.has_backward = True
        self._inputs: Sequence[MicrobatchInput] = ()
        self._empty: set[int] = set()
        """Micro-batches of which this worker has nothing: no compute, no gradient, empty messages."""
        self._num_outputs = 1
        self._new_weight_gradients = weight_gradients
        self._owed: dict[int, WeightGradientsLike] = {}
        if weight_gradients is not None:
            self.dw_builder = self._weight_gradient_runner

    # -- torch's stage interface ---------------------------------------------------------------------------------

    def _prepare_forward_infra(self, num_microbatches: int, *_args: Any, **_kwargs: Any) -> None:
        self.chunks = num_microbatches

    def _prepare_backward_infra(self, num_microbatches: int, *_args: Any, **_kwargs: Any) -> None:
        self.chunks = num_microbatches

    def _create_grad_recv_info(self, act_send_info: dict[int, Any]) -> tuple[Any, ...]:
        del act_send_info
        return ()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def forward_maybe_with_nosync(self, *args: Any, **_kwargs: Any) -> tuple[Tensor, ...]:
        # Bound now: a recomputation happens while another micro-batch is current.
        compute = partial(self._compute, self._microbatch)
        if self._new_weight_gradients is not None:
            owed = self._owed[self._microbatch] = self._new_weight_gradients()
            compute = partial(_collecting, owed, compute)
        if self._recompute:
            return checkpoint(compute, *args, use_reentrant=False, preserve_rng_state=False)
        return compute(*args)

    def _weight_gradient_runner(self) -> Callable[..., None]:
        """torch's `dw_builder`: called after an input-gradient pass, for the function that pays what it owes."""
        return self._owed.pop(self._microbatch).run

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        self.bwd_cache.clear()
        self.dw_runner.clear()
        self._owed.clear()
        self._empty.clear()

    # -- one step ------------------------------------------------------------------------------------------------

    def start_step(self, inputs: Sequence[MicrobatchInput], num_microbatches: int) -> None:
        """Take the slices of a step's micro-batches (F-stages read none of them).

        Raises:
            ValueError: A slice has more tokens than the receivers' buffers were sized for.
        """
        largest = max((i.tokens_BL.numel() for i in inputs), default=0)
        if self._most is not None and largest > self._most.num_rows:
            raise ValueError(
                f"a micro-batch with {largest} tokens of this worker: slice_tokens promised at most "
                f"{self._most.num_rows}; give pipeline_disagmoe the largest slice of any A-worker, or None"
            )
        self.clear_runtime_states()
        self.chunks = num_microbatches
        self._inputs = inputs

    def forward(self, microbatch: int) -> Tensor | None:
        """Wait for the input, compute; returns the logits [B, L, V] in the last stage."""
        args = self._take_input(microbatch)
        if args is None:
            self._empty.add(microbatch)
            return None
        self._microbatch = microbatch
        # The base only asks how many inputs there are: `backward_one_chunk` returns that many gradients.
        self._stage_meta.inputs = cast(Any, (None,) * len(args))
        self._args = args
        outputs = self.forward_one_chunk(microbatch, args, save_forward_output=False)
        self._keep_output(microbatch, outputs)
        if self.links.forward_out is not None:
            self.links.forward_out.made((self.spec.index, microbatch))
        return outputs[0] if self.is_last else None

    def backward(self, microbatch: int, *, loss: Tensor | None, full: bool) -> None:
        """Wait for the output gradient (unless this is the last stage), then back-propagate."""
        if microbatch in self._empty:
            if not self.is_last:
                self._take_gradient(microbatch)
            return
        self._microbatch = microbatch
        self.backward_one_chunk(microbatch, loss=loss, full_backward=full)
        if self.links.backward_out is not None:
            self.links.backward_out.made((self.spec.index - 1, microbatch))

    def backward_weight(self, microbatch: int) -> None:
        if microbatch not in self._empty:
            self.backward_weight_one_chunk(microbatch)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        del fwd_chunk_id
        return self._args

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        grads = self._take_gradient(bwd_chunk_id)
        return (*grads, *([None] * (self._num_outputs - len(grads))))

    def _receive(self, channel: AnyChannel, key: tuple[int, int]) -> Arrival:
        """`channel.take`, with the wait booked on the clock."""
        arrival = channel.take(key)
        self.clock.waited(
            f"{channel.name} {self._name} mb {key[1]}",
            arrival.wait_from_s,
            arrival.wait_to_s,
            arrival.sent_at_s,
            arrival.stream_wait,
        )
        self.clock.transfer_s += arrival.transfer_s
        if self.clock.samples is not None and arrival.num_bytes:
            hop = (key[0], channel.backward)
            self.clock.samples.transfers[hop].append((arrival.num_bytes, arrival.transfer_s))
        return arrival

    def post_forward_receive(self, microbatch: int) -> None:
        assert self.links.forward_in is not None
        what = f"the input of {self._name}, micro-batch {microbatch}"
        self.links.forward_in.post((self.spec.index - 1, microbatch), what, most=self._most)

    def post_backward_receive(self, microbatch: int) -> None:
        assert self.links.backward_in is not None
        self.links.backward_in.post(
            (self.spec.index, microbatch),
            f"the output gradient of {self._name}, micro-batch {microbatch}",
            counts=self._gradient_counts(microbatch),
        )

    @abstractmethod
    def _compute(self, microbatch: int, *args: Tensor) -> tuple[Tensor, ...]: ...

    @abstractmethod
    def _take_input(self, microbatch: int) -> tuple[Tensor, ...] | None:
        """Autograd leaves of the stage; None if there is nothing to compute."""

    @abstractmethod
    def _keep_output(self, microbatch: int, outputs: tuple[Tensor, ...]) -> None: ...

    @abstractmethod
    def _take_gradient(self, microbatch: int) -> tuple[Tensor, ...]: ...

    @abstractmethod
    def _gradient_counts(self, microbatch: int) -> list[Counts]: ...

    @abstractmethod
    def send_forward(self, microbatch: int) -> None: ...

    @abstractmethod
    def send_backward(self, microbatch: int) -> None: ...


def _collecting(
    owed: WeightGradientsLike, compute: Callable[..., tuple[Tensor, ...]], *args: Tensor
) -> tuple[Tensor, ...]:
    with owed.collect():
        return compute(*args)
