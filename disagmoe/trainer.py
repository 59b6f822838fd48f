"""The step loop: data by global sample index, forward and backward, gradients, update, report."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from disagmoe.checkpoint.checkpointer import Checkpointer, Position
from disagmoe.checkpoint.resume import find_checkpoint_to_continue
from disagmoe.checkpoint.state import LocalState
from disagmoe.config.load import ResolvedConfig
from disagmoe.config.recipe import Recipe, load_recipe
from disagmoe.config.schema import Config
from disagmoe.cost_profile import gather_profile
from disagmoe.data import Batch, build_dataset
from disagmoe.engine import DisagEngine, Engine, PlainEngine
from disagmoe.expert_parallel_engine import EPEngine
from disagmoe.layout import Role, owned_samples
from disagmoe.observability import Event, MetricsLogger, metrics, write_chrome_trace
from disagmoe.observability.memory import reset_peak_memory
from disagmoe.optimizer import build_lr_schedulers, build_optimizers, set_schedule_step
from disagmoe.parallelisms.clock import CostSamples
from disagmoe.parallelisms.gradients import update_router_bias
from disagmoe.parallelisms.stage import MicrobatchInput
from disagmoe.step_report import RouterTable, gather_workers
from disagmoe.world import World, run_guarded, start_world

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Trainer:
    """Trains one model on this process, in whichever mode.

    Args:
        config: Checked (`disagmoe.config.checks`).
        world: This process among the others.
        folder: Where rank 0 writes metrics and the timeline; None: nowhere.
        after_init: Called once with the engine before the first step (tests change weights there).
    """

    def __init__(
        self,
        config: Config,
        world: World,
        *,
        folder: Path | None,
        after_init: Callable[[Engine], None] | None = None,
    ) -> None:
        from disagmoe.models.titan import prepare_torchtitan

        world.monitor.status.write("building the model")
        prepare_torchtitan()
        from torchtitan.components.loss import cross_entropy_loss

        from disagmoe.models.attention import attention_masks
        from disagmoe.models.init import make_portable

        self.config, self.world = config, world
        training = config.training
        recipe = load_recipe(config.recipe.name)
        self._shape = recipe.shape(config.recipe.flavor)
        model_config = make_portable(
            recipe.model_config(config.recipe.flavor),
            seq_len=training.seq_len,
            attention=world.device.type == "cpu",
            load_balance_coeff=training.load_balance_coeff,
        )
        torch.use_deterministic_algorithms(config.debug.deterministic)
        torch.manual_seed(config.debug.seed)
        engine_class: Any = {"none": PlainEngine, "disagmoe": DisagEngine, "ep": EPEngine}[config.parallelism.mode]
        self.engine: Engine = engine_class(
            config=config,
            model_config=model_config,
            device=world.device,
            dtype=_DTYPES[training.dtype],
            loss_fn=cross_entropy_loss,
            monitor=world.monitor,
        )
        if config.checkpoint.initial_load_in_hf and not find_checkpoint_to_continue(config):
            self._load_hugging_face(recipe)
        if after_init is not None:
            after_init(self.engine)
        self.optimizers = build_optimizers(config.optimizer, self.engine.modules)
        self.lr_schedulers = build_lr_schedulers(config.lr_scheduler, self.optimizers, training.steps)
        moe_layers = [i for i, layer in enumerate(model_config.layers) if layer.moe is not None]
        num_experts = max(model_config.layers[i].moe.num_experts for i in moe_layers)
        self.routers = RouterTable(moe_layers, num_experts)
        world.monitor.status.write("opening the data")
        self._masks = lambda positions_BL: attention_masks(model_config, positions_BL)
        self._data = (
            build_dataset(config.data, seq_len=training.seq_len, seed=config.debug.seed)
            if self.engine.owns_samples
            else None
        )
        fingerprint = self._check_same_data()
        self._folder = folder
        self.logger = MetricsLogger(
            folder or Path("."),
            enabled=world.rank == 0 and folder is not None,
            tensorboard=config.metrics.tensorboard,
            num_steps=training.steps,
            log_freq=config.metrics.log_freq,
        )
        self.history: list[dict[str, Any]] = []
        """What each step reported."""
        self.position = Position()
        self._stop = False
        self.checkpointer: Checkpointer | None = None
        if config.checkpoint.enable:
            self.checkpointer = Checkpointer(
                config=config,
                world=world,
                local=LocalState(self.engine, self.optimizers),
                fingerprint=fingerprint,
                say=self.logger.say,
            )
            self.position = self.checkpointer.restore()
            set_schedule_step(self.lr_schedulers, self.position.step)
        self._first_step = self.position.step + 1

    def run(self, num_steps: int | None = None) -> None:
        """Train from where the run stands; `num_steps` or `[training] stop_after` ends early (schedules still span
        `[training] steps`), and so does a request to stop (see `Monitor.accept_stop`)."""
        from torchtitan.tools.utils import GarbageCollection

        training = self.config.training
        last_step = num_steps or training.stop_after or training.steps
        if self.checkpointer is not None:
            self.world.monitor.accept_stop(self.config.checkpoint.grace_s)
        if self._first_step > last_step:
            self.logger.say(f"nothing to do: step {self.position.step} has been made, and the last is {last_step}")
        collector = GarbageCollection(gc_freq=training.gc_freq)
        for step in range(self._first_step, last_step + 1):
            collector.run(step)
            self.history.append(self.train_step(step))
            next_sample = self.position.next_sample + training.global_batch_size
            self.position = Position(step=step, next_sample=next_sample)
            if self.checkpointer is not None:
                self.checkpointer.after_step(self.position, last=self._stop or step == last_step)
            if self._stop:
                self.logger.say(f"stopping after step {step}, as asked")
                break
        gc.enable()
        self.logger.close()

    def write_profile(self, resolved: ResolvedConfig) -> None:
        """Write what `[metrics] profile_costs` asks for. Collective."""
        samples = self.engine.clock.samples
        if samples is not None:
            with self.world.monitor.collective("gathering measured costs"):
                profile = gather_profile(resolved, samples)
            if profile is not None:
                profile.save(resolved.config.metrics.profile_costs)

    def close(self) -> None:
        """Free what the engine holds. Collective."""
        if self.checkpointer is not None:
            self.checkpointer.close()
        self.engine.close()

    def train_step(self, step: int) -> dict[str, Any]:
        """One optimizer step (numbered from 1); returns its metrics. Collective."""
        config, engine, clock = self.config, self.engine, self.engine.clock
        start_s, sent_before = time.monotonic(), engine.sent_bytes
        clock.reset()
        clock.recording = step == config.metrics.timeline_step and self._folder is not None
        if config.metrics.profile_costs and step == min(self._first_step + 2, config.training.steps):
            clock.samples = CostSamples()
        reset_peak_memory(self.world.device)
        monitor = self.world.monitor
        monitor.status.write(f"step {step}, reading data")
        inputs, num_valid = self._inputs()
        with monitor.collective(f"step {step}, counting tokens"):
            valid_tokens = self._sum(num_valid)

        pipeline_start_s = time.monotonic()
        loss = engine.run(inputs, loss_scale=1.0 / max(valid_tokens, 1), step=step)
        pipeline_time_s = time.monotonic() - pipeline_start_s
        with monitor.collective(f"step {step}, summing gradients"):
            engine.gradients.reduce()
            grad_norm = engine.gradients.clip(config.training.max_grad_norm)
        lr = self.lr_schedulers.schedulers[0].get_last_lr()[0]
        monitor.status.write(f"step {step}, optimizer")
        self.optimizers.step()
        self.optimizers.zero_grad()
        self.lr_schedulers.step()
        with monitor.collective(f"step {step}, summing routers' counts"):
            self.routers.gather(engine)
        for router in engine.routers:
            if router.bias_E is not None:
                counts_E = self.routers.counts(router.layer).to(router.bias_E.device)
                update_router_bias(router.bias_E, counts_E[: router.bias_E.numel()], router.coeff)

        with monitor.collective(f"step {step}, reporting"):
            values = self._report(start_s, pipeline_time_s, sent_before, loss, valid_tokens, grad_norm, lr)
        self.logger.log(step, values)
        if clock.recording:
            with monitor.collective(f"step {step}, writing the timeline"):
                self._write_timeline()
        return {metrics.STEP: step, **values}

    def _load_hugging_face(self, recipe: Recipe) -> None:
        """Start from published weights: every process reads what it holds."""
        from disagmoe.hugging_face.load import load_hugging_face

        config, status = self.config, self.world.monitor.status
        path = config.checkpoint.initial_load_path
        load_hugging_face(self.engine.modules, recipe, config.recipe.flavor, path, progress=status.write)

    def _check_same_data(self) -> str:
        """Compare what the processes read under one sample index. Collective.

        Returns: the data's fingerprint.

        Raises:
            ValueError: it is not the same.
        """
        if self._data is not None and self.world.layout.world_size == 1:
            return self._data.fingerprint
        everyone: list[str | None] = [None] * dist.get_world_size()
        with self.world.monitor.collective("comparing the data"):
            dist.all_gather_object(everyone, None if self._data is None else self._data.fingerprint)
        readers = {rank: text for rank, text in enumerate(everyone) if text is not None}
        first = min(readers)
        for rank, text in readers.items():
            if text != readers[first]:
                raise ValueError(
                    f'[data] source = "{self.config.data.source}": ranks {first} and {rank} read different data '
                    f"({readers[first]}; {text}); copy the same files to every node (python-stdlib: the same Python)"
                )
        return readers[first]

    def _inputs(self) -> tuple[list[MicrobatchInput], int]:
        """This process's slices of the step's micro-batches, and its share of the step's valid tokens."""
        inputs: list[MicrobatchInput] = []
        num_valid = 0
        if self._data is not None:
            first = self.position.next_sample
            for owned in self._owned():
                batch = self._data.batch([first + i for i in owned])
                inputs.append(self._microbatch(batch))
                num_valid += batch.num_valid_tokens
            # Every A-group reads the same slices: count them once.
            if not any(w.role is Role.ATTN and w.group == 0 for w in self.engine.workers):
                num_valid = 0
        return inputs, num_valid

    @staticmethod
    def _sum(count: int) -> int:
        """Sum over all processes. Collective."""
        total = torch.tensor([count], dtype=torch.int64)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(total)
        return int(total)

    def _owned(self) -> list[range]:
        worker = next(w for w in self.engine.workers if w.role is Role.ATTN)
        return owned_samples(
            self.world.layout,
            global_batch_size=self.config.training.global_batch_size,
            microbatches=self.config.microbatches,
            replica=worker.replica,
            worker_index=worker.index,
        )

    def _microbatch(self, batch: Batch) -> MicrobatchInput:
        device = self.world.device
        positions_BL = batch.positions_BL.to(device, non_blocking=True)
        return MicrobatchInput(
            tokens_BL=batch.tokens_BL.to(device, non_blocking=True),
            labels_BL=batch.labels_BL.to(device, non_blocking=True),
            positions_BL=positions_BL,
            masks=self._masks(positions_BL) if positions_BL.numel() else None,
        )

    def _report(
        self,
        start_s: float,
        pipeline_time_s: float,
        sent_before: int,
        loss: torch.Tensor | None,
        valid_tokens: int,
        grad_norm: float,
        lr: float,
    ) -> dict[str, Any]:
        disaggregated = self.config.parallelism.mode != "none"
        values: dict[str, Any]
        values, self._stop = gather_workers(
            self.engine,
            layout=self.world.layout if disaggregated else None,
            loss=loss,
            step_time_s=time.monotonic() - start_s,
            pipeline_time_s=pipeline_time_s,
            sent_bytes=self.engine.sent_bytes - sent_before,
            device=self.world.device,
            stop=self.world.monitor.stop_requested,
        )
        training = self.config.training
        tokens = training.global_batch_size * training.seq_len
        step_time_s = values[metrics.STEP_TIME_S]
        values |= {
            metrics.GRAD_NORM: grad_norm,
            metrics.LR: lr,
            metrics.TOKENS: tokens,
            metrics.VALID_TOKENS: valid_tokens,
            metrics.TOKENS_PER_S: tokens / step_time_s,
        }
        utilisation = self._mfu(step_time_s)
        if utilisation is not None:
            values[metrics.MFU] = utilisation
        return values | self.routers.values()

    def _mfu(self, step_time_s: float) -> float | None:
        """Model FLOPs utilisation; None on CPU, whose peak is not known."""
        if self.world.device.type != "cuda":
            return None
        from torchtitan.tools.utils import get_peak_flops

        training = self.config.training
        samples = training.global_batch_size
        return metrics.mfu(
            step_flops=3.0 * samples * self._shape.flops_per_sequence(training.seq_len),
            step_time_s=step_time_s,
            num_devices=self.world.layout.world_size,
            device_flops_per_s=float(get_peak_flops(torch.cuda.get_device_name(self.world.device))),
        )

    def _write_timeline(self) -> None:
        """Gather the recorded spans on rank 0 and write `timeline.json`. Collective."""
        clock = self.engine.clock
        events = [Event(s.name, s.category, s.start_s, s.end_s, {}) for s in clock.spans]
        clock.spans.clear()
        world_size = self.world.layout.world_size
        everyone: list[Any] = [None] * world_size
        payload = (events, self.engine.clock_offset_s)
        if world_size > 1:
            dist.gather_object(payload, everyone if self.world.rank == 0 else None)
        else:
            everyone = [payload]
        if self.world.rank == 0 and self._folder is not None:
            write_chrome_trace(
                self._folder / "timeline.json",
                {rank: entry[0] for rank, entry in enumerate(everyone)},
                {rank: self.world.monitor.workers_on(rank) for rank in range(world_size)},
                everyone[0][1],
            )


def train(resolved: ResolvedConfig) -> None:
    """Train as configured, on this process. A failure of any worker raises here, on all of them."""
    config = resolved.config
    folder = Path(config.dump_folder)
    world = start_world(config, folder)

    def body() -> None:
        trainer = Trainer(config, world, folder=folder)
        trainer.run()
        trainer.write_profile(resolved)
        trainer.close()

    run_guarded(world, body)
