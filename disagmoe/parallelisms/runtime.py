"""Runs a schedule: torch.distributed.pipelining's runtime with our own loop over the actions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from disagmoe.parallelisms.clock import StepClock
from disagmoe.parallelisms.failures import Monitor
from disagmoe.parallelisms.stage import DisagStage, MicrobatchInput
from disagmoe.schedules.actions import Action, Kind, Schedule

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""(logits [B, L, V], labels [B, L]) -> sum of the losses of the valid tokens."""

_TORCH_KIND = {kind: getattr(_ComputationType, kind.name) for kind in Kind}


class _Line(NamedTuple):
    """An action, ready to run."""

    action: Action
    stage: DisagStage
    status: str
    category: str
    """On the clock, with the two below."""
    name: str
    sample: tuple[str, int]


class AFPipeRuntime(_PipelineScheduleRuntime):
    """The pipeline of one process: its stages, its part of the schedule, and the loop that executes it.

    Args:
        stages: This process's stages.
        schedule: The whole replica's schedule (validated).
        loss_fn: Sums the loss over valid tokens; used by the process that holds the last stage.
        clock: Books where the step's time goes.
        monitor: Told what the process is about to do, for failure reports; says when another process has failed.
    """

    def __init__(
        self,
        *,
        stages: Sequence[DisagStage],
        schedule: Schedule,
        loss_fn: LossFunction,
        clock: StepClock,
        monitor: Monitor,
    ) -> None:
        super().__init__(list(stages), schedule.num_microbatches, loss_fn=loss_fn, scale_grads=False)
        self._stage_of = {stage.stage_index: stage for stage in stages}
        self._clock, self._monitor = clock, monitor
        # Made once: a step of small actions would spend per cents of its time on these texts.
        self._lines = [self._line(action) for action in schedule.programs[self.rank]]
        self.pipeline_order_with_comms = {
            group: [_Action(a.stage, _TORCH_KIND[a.kind], a.microbatch) for a in program]
            for group, program in enumerate(schedule.programs)
        }
        self._run = {
            Kind.FORWARD: self._forward,
            Kind.FULL_BACKWARD: self._full_backward,
            Kind.BACKWARD_INPUT: self._backward_input,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.SEND_F: lambda s, m: s.send_forward(m),
            Kind.SEND_B: lambda s, m: s.send_backward(m),
            Kind.RECV_F: lambda s, m: s.post_forward_receive(m),
            Kind.RECV_B: lambda s, m: s.post_backward_receive(m),
        }
        self._losses: dict[int, Tensor] = {}
        self._channels = {id(c): c for stage in stages for c in stage.links.all()}.values()
        self._on_cuda = any(stage.device.type == "cuda" for stage in stages)
        self.before_action: Callable[[Action], None] | None = None
        """Called before each action; for tests that inject faults."""

    def run_step(self, inputs: Sequence[MicrobatchInput], *, loss_scale: float, step: int = 0) -> Tensor | None:
        """Forward and backward of all micro-batches; gradients accumulate in the parameters' `.grad`.

        Args:
            inputs: This worker's slice of each micro-batch; F-workers may pass none.
            loss_scale: Multiplies every micro-batch's summed loss *before* backward, normally one over the number of
                valid tokens of the whole step.
        Returns:
            The scaled loss of this worker's tokens, on processes that hold the last stage; else None.
        """
        if len(inputs) not in (0, self._n_microbatches):
            raise ValueError(f"run_step got {len(inputs)} micro-batches; the schedule has {self._n_microbatches}")
        for stage in self._stage_of.values():
            stage.start_step(inputs, self._n_microbatches)
        self._step_microbatches(list(inputs), step=step, loss_scale=loss_scale)
        for stage in self._stage_of.values():
            stage.clear_runtime_states()
        if not self._losses:
            return None
        return torch.stack([self._losses[m] for m in sorted(self._losses)]).sum()

    def _step_microbatches(  # type: ignore[override]
        self, inputs: list[MicrobatchInput], *, step: int, loss_scale: float
    ) -> None:
        self._inputs, self._loss_scale = inputs, loss_scale
        self._losses = {}
        for action, stage, status, category, name, sample in self._lines:
            self._monitor.status.write(f"step {step}, {status}")
            self._monitor.check()
            if self.before_action is not None:
                self.before_action(action)
            with self._clock.span(category, name, sample):
                self._run[action.kind](stage, action.microbatch)
            if self._on_cuda:
                for channel in self._channels:
                    channel.progress()

    def _line(self, action: Action) -> _Line:
        stage = self._stage_of[action.stage]
        status = f"{action.kind.name} of {stage.spec} (stage {action.stage}), micro-batch {action.microbatch}"
        if action.kind.is_compute:
            category = "compute"
        elif action.kind in (Kind.SEND_F, Kind.SEND_B):
            category = "send"
        else:
            category = "post receive"
        return _Line(action, stage, status, category, str(action), (action.kind.name, action.stage))

    def _forward(self, stage: DisagStage, microbatch: int) -> None:
        logits_BLV = stage.forward(microbatch)
        if not stage.is_last:
            return
        if logits_BLV is None:
            self._losses[microbatch] = torch.zeros((), device=stage.device)
            return
        assert self._loss_fn is not None
        loss = self._loss_fn(logits_BLV, self._inputs[microbatch].labels_BL) * self._loss_scale
        self._losses[microbatch] = loss

    def _backward(self, stage: DisagStage, microbatch: int, *, full: bool) -> None:
        loss = self._losses[microbatch] if stage.is_last else None
        stage.backward(microbatch, loss=loss, full=full)
        if loss is not None:
            self._losses[microbatch] = loss.detach()

    def _full_backward(self, stage: DisagStage, microbatch: int) -> None:
        self._backward(stage, microbatch, full=True)

    def _backward_input(self, stage: DisagStage, microbatch: int) -> None:
        self._backward(stage, microbatch, full=False)

    def _backward_weight(self, stage: DisagStage, microbatch: int) -> None:
        stage.backward_weight(microbatch)

    @property
    def sent_bytes(self) -> int:
        """Bytes this process has handed to the network so far, counts included."""
        return sum(channel.sent_bytes for channel in self._channels)

    def close(self) -> None:
        """End the channels' threads."""
        for channel in self._channels:
            channel.close()
