"""The typed configuration: one dataclass a TOML section, a docstring a field.

Values come from recipe defaults, then TOML, then the command line (`disagmoe.config.load`). Units are in the names.
A field's range is part of its type and holds for loaded configurations; checks that need several fields or the model
are in `disagmoe.config.checks`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from disagmoe.layout import ExpertParallelLayout, Layout

Count = Annotated[int, Ge(1)]
CountOrZero = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
PositiveOrZero = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
Decay = Annotated[float, Ge(0), Lt(1)]


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    name: str
    """A file in `recipes/`, without `.py`."""
    flavor: str = "debug"
    """One of the recipe's model sizes, or the path of a model's config.json (or of its folder) as published."""


@dataclass(frozen=True, kw_only=True)
class ParallelismConfig:
    mode: Literal["disagmoe", "ep", "none"] = "disagmoe"
    """`none` trains the unsplit model in one process: the reference for everything else. `ep`: expert parallelism
    without disaggregation, what AF-Pipe is compared with."""


@dataclass(frozen=True, kw_only=True)
class DisagMoEConfig:
    attn_depth: Count = 1
    """p_A: number of A-groups a replica's layers are spread over."""
    ffn_depth: Count = 1
    """p_F: number of F-groups."""
    attn_workers: Count = 2
    """M: workers of an A-group; each has the group's dense parameters and a slice of every micro-batch."""
    ffn_workers: Count = 2
    """N: workers of an F-group; the experts of a layer are spread over them. At most the number of experts."""
    replicas: Count = 1
    """R: independent copies of the whole pipeline, data parallel over them."""
    schedule: Literal["plain", "deep", "fitted"] = "deep"
    """`plain`: interleaved 1F1B over the p_A + p_F groups; `deep`: rounds of 2 (p_A + p_F) micro-batches, which leave
    one transfer time of slack at every hop, at the price of more activations; `fitted`: the best order found for
    `costs` within `in_flight`."""
    split_backward: bool = False
    """Weight gradients are actions of their own, which fill waits; input gradients go ahead."""
    costs: str = ""
    """JSON profile of a run, whose measured times `fitted` and `split_backward` plan with; empty: assumed times."""
    microbatches: Count = 8
    """Micro-batches a replica's share of the global batch is cut into."""
    in_flight: CountOrZero = 0
    """Most micro-batches between their first forward and their last backward; 0: what the schedule wants, and one
    with `colocate`, where more would only take memory."""
    hoist: CountOrZero = 8
    """A receive is posted up to this many compute actions before the action that needs it."""
    send_after: Annotated[int, Ge(0), Le(1)] = 0
    """1: a transfer is sent after the compute action that follows its maker, so that on CUDA no launch waits for it."""
    rank_order: str | list[str] = "paired"
    """Which worker is which rank: `paired` (A0 F0 A1 F1 ...), `mixed` (the same, but both roles in every node),
    `attn_first`, `apart` (A-workers of all replicas, then F-workers), or a list of worker names such as `r0.A0.1`."""
    attn_placement: list[int] = field(default_factory=list)
    """A-group of each MoE layer's attention in the model's order, and of the head; empty: 0, 1, ... in turn. For models
    whose first layers or head are heavy: dense layers and the embedding are in the A-stage of the MoE layer after
    them."""
    colocate: bool = False
    """One process holds a whole replica (attn_workers = ffn_workers = 1): for one GPU, or a debugger."""
    recompute: Literal["none", "ffn", "full"] = "none"
    """`ffn`: F-stages keep the received rows and recompute the rest in backward; `full`: A-stages too."""

    def layout(self) -> Layout:
        """The workers that these values describe.

        Raises:
            ValueError: they contradict each other.
        """
        return Layout(
            attn_depth=self.attn_depth,
            ffn_depth=self.ffn_depth,
            attn_workers=self.attn_workers,
            ffn_workers=self.ffn_workers,
            replicas=self.replicas,
            colocate=self.colocate,
            rank_order=self.rank_order if isinstance(self.rank_order, str) else tuple(self.rank_order),
            attn_placement=tuple(self.attn_placement),
        )

    @property
    def most_in_flight(self) -> int:
        """`in_flight` as schedules take it: in one process there is no transfer that another micro-batch could hide."""
        return self.in_flight or int(self.colocate)

    def schedule_options(self) -> dict[str, Any]:
        """Keyword arguments of `disagmoe.schedules.make_schedule`, without `costs`, which is a path here."""
        return {
            "name": self.schedule,
            "num_microbatches": self.microbatches,
            "in_flight": self.most_in_flight,
            "hoist": self.hoist,
            "send_after": self.send_after,
            "split_backward": self.split_backward,
        }


@dataclass(frozen=True, kw_only=True)
class ExpertParallelConfig:
    """`mode = "ep"`: baselines that hold attention and experts of a layer on the same workers."""

    pipeline_depth: Count = 1
    """PP: pipeline ranks that a replica's layers are spread over."""
    expert_workers: Count = 2
    """EP: workers of a pipeline rank. Each owns a slice of every micro-batch (attention is data-parallel over them) and
    a contiguous share of the experts of the rank's layers. At most the number of experts."""
    replicas: Count = 1
    """Independent copies of the whole pipeline, data parallel over them."""
    chunks_per_rank: Count = 1
    """Runs of consecutive layers on each pipeline rank: more than one interleaves; `dual_pipe_v` needs 2."""
    microbatches: Count = 8
    """Micro-batches a replica's share of the global batch is cut into."""
    overlap: Literal["none", "chunked", "dual_pipe_v"] = "none"
    """`none`: interleaved 1F1B, transfers within a layer are waited for; `chunked`: a stage's tokens in `num_chunks`
    parts, the transfers of one behind the experts' work on another; `dual_pipe_v`: DualPipeV, a forward's transfers
    behind another micro-batch's backward and the other way round."""
    num_chunks: Count = 4
    """Parts of `chunked`: 2 to 4 as Tutel, 8 to 16 as Comet."""
    deduplicate: bool = False
    """A token with several experts on one worker travels there once and returns once, weighted and summed. `false`: one
    row for each of its experts, as torchtitan's all-to-all dispatcher does it."""
    recompute: Literal["none", "ffn", "full"] = "none"
    """`ffn`: experts keep their rows and recompute the rest in backward; `full`: attention too."""

    def layout(self) -> ExpertParallelLayout:
        """The workers that these values describe."""
        return ExpertParallelLayout(
            attn_depth=self.pipeline_depth, attn_workers=self.expert_workers, replicas=self.replicas
        )


@dataclass(frozen=True, kw_only=True)
class CommConfig:
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Backend of tensor transfers; `auto`: nccl on CUDA, gloo otherwise. Row counts always travel over gloo."""
    timeout_s: Positive = 300.0
    """Longest wait on a peer before the run ends with an error that names the edge and the peer."""
    heartbeat_timeout_s: Annotated[float, Ge(2)] = 15.0
    """A worker that shows no sign of life for this long counts as gone."""
    strict_order: bool = False
    """gloo: constant tags, so that a wrong order of transfers fails as it would on NCCL."""
    imbalance_factor: Annotated[float, Ge(1)] = 4.0
    """`disagmoe check` also plans an F-worker's memory for this many times its average number of rows: what is received
    is never dropped and has no fixed bound."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    steps: Count = 100
    """Optimizer steps."""
    stop_after: CountOrZero = 0
    """End after this step, with a checkpoint where those are on; schedules still span `steps`. 0: train to the end."""
    seq_len: Count = 128
    """Tokens a sample."""
    global_batch_size: Count = 16
    """Samples an optimizer step, over all replicas."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of parameters and activations. Routers and the residual sums of returned rows are computed in float32."""
    gc_freq: Count = 50
    """Steps between runs of Python's garbage collector, which otherwise runs in the middle of any action and makes
    all peers wait."""
    max_grad_norm: PositiveOrZero = 1.0
    """Global norm that gradients are clipped to; 0 turns clipping off."""
    load_balance_coeff: PositiveOrZero = 1e-3
    """Step of the aux-loss-free router bias; 0 turns the bias off."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    name: Literal["AdamW", "SGD"] = "AdamW"
    lr: PositiveOrZero = 1e-3
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    eps: Positive = 1e-8
    weight_decay: PositiveOrZero = 0.1
    momentum: Decay = 0.0
    """SGD only."""


@dataclass(frozen=True, kw_only=True)
class LRSchedulerConfig:
    warmup_steps: CountOrZero = 10
    decay_ratio: Share = 0.0
    """Share of the steps, at the end, over which the learning rate decays; 0: none."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "cosine"
    min_lr_factor: Share = 0.1


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    source: str = "python-stdlib"
    """`python-stdlib` (source text of the standard library found on this machine), `synthetic`, a path to a local
    .txt / .jsonl / .parquet file or folder, or the name of a Hugging Face dataset."""
    tokenizer: str = "bytes"
    """`bytes`, or a folder that holds a `tokenizer.json`."""
    text_field: str = "text"
    """Field of a jsonl / parquet / Hugging Face record that holds the text."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    shuffle: bool = True
    """Shuffle documents (seeded by `[debug] seed`); off for streamed datasets."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    initial_load_in_hf: bool = False
    """Start from published Hugging Face weights in `initial_load_path`, whatever the layout."""
    initial_load_path: str = ""
    """Folder with config.json and safetensors files, seen by all nodes: each worker reads only what it holds."""
    enable: bool = False
    """Save checkpoints, and continue from them as `resume` says."""
    folder: str = "checkpoints"
    """Where they are, relative to the dump folder: of this run alone, on a file system that all nodes see."""
    interval: Count = 500
    """Optimizer steps between checkpoints. The last step, and a stop on request, make one too."""
    keep_latest_k: CountOrZero = 10
    """Complete checkpoints to keep; older ones are removed once a new one is complete. 0: keep all."""
    async_mode: Literal["disabled", "async"] = "async"
    """`async`: training waits only while its state is copied to host memory, and goes on while that is written."""
    resume: str | Count = "auto"
    """`auto`: from the newest complete checkpoint, from the start where there is none; a step number: from that one or
    not at all; `none`: from the start, in a folder without an earlier run."""
    on_save_failure: Literal["stop", "continue"] = "stop"
    """What training does when a checkpoint can't be written (disk full, no permission): end with an error, or say so
    and go on. What was saved before stays either way."""
    grace_s: Positive = 25.0
    """After SIGTERM or SIGUSR1 the run ends at the end of the step, with a checkpoint; if that takes longer than this,
    at once and without one."""


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    log_freq: Count = 1
    """Steps between lines on the console and in the event files."""
    tensorboard: bool = True
    timeline_step: CountOrZero = 3
    """The step whose actions are written to `timeline.json`; 0: none."""
    profile_costs: str = ""
    """File that the measured times of stages and transfers are written to at the end, for `disagmoe simulate --profile`
    and `[disagmoe] costs`; empty: none. The first two steps do not count. On CPU only so far."""


@dataclass(frozen=True, kw_only=True)
class DebugConfig:
    seed: CountOrZero = 0
    deterministic: bool = False
    """torch.use_deterministic_algorithms."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run. Field names are the TOML's section names."""

    recipe: RecipeConfig
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    disagmoe: DisagMoEConfig = field(default_factory=DisagMoEConfig)
    expert_parallel: ExpertParallelConfig = field(default_factory=ExpertParallelConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    dump_folder: str = ""
    """Where a run writes; empty: `outputs/<name of the TOML file>`."""

    @property
    def microbatches(self) -> int:
        """Of a replica and step, in the mode that is chosen."""
        ep = self.parallelism.mode == "ep"
        return self.expert_parallel.microbatches if ep else self.disagmoe.microbatches
