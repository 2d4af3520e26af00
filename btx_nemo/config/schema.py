"""What a training run can be told. `conf/train/*.yaml` fill these classes; `build.py` refuses everything else."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field
from typing import Any

from btx_nemo.config.precision import Fp8Config, LossScaleConfig
from btx_nemo.families.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class LayoutConfig:
    """How ranks share the model; what is left over is data parallel (DP = ranks / (tp * pp * cp))."""

    tp: int = 1
    """Tensor-parallel ranks; with more than one, sequence parallelism is on as well."""
    pp: int = 1
    """Pipeline stages; divides the number of layers."""
    vpp: int = 1
    """Virtual stages of each pipeline rank (Megatron's interleaved schedule): the rank has every pp-th piece of the
    model; pp * vpp divides the number of layers, and pp the micro-batches of a step."""
    cp: int = 1
    """Context-parallel ranks: each has a part of every sequence, which 2 * cp * tp divides."""
    ep: int = 1
    """Expert-parallel ranks, taken from the tp * cp * dp ranks of a pipeline stage; divides the number of experts."""
    etp: int = 1
    """Ranks that each expert is cut over (tp cuts only what is no expert), taken from the same ranks."""

    def dp(self, ranks: int) -> int:
        """Data-parallel ranks, each with its own sequences, of `ranks` in all."""
        return ranks // (self.tp * self.pp * self.cp)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which tokens a run sees."""

    path: str
    """Folder made by `btx-nemo prepare-data`: one subfolder per domain."""
    blend: dict[str, float] = field(default_factory=dict)
    """Weight of each domain in training; normalised, any positive scale. Empty: all domains, equally."""
    valid: list[str] = field(default_factory=list)
    """Domains whose validation loss is measured; empty: all in `path` of the kind (text, chats) that trains."""
    kind: str | None = None
    """text or chat: what the stage is for; a run without any of it is refused."""
    seq_length: int = 2048
    """Tokens per sequence."""
    document_mask: bool = False
    """Text: neither attention nor loss across the borders of documents, positions start again. Chats always have it."""
    sample: float = 1.0
    """Share of each domain's training documents that is used, rounded up; always the same ones (BAR, App. C: 0.05)."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and its schedule (Branch-Train-MiX, section 4.1, where a run of the paper is meant)."""

    lr: float
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    warmup_steps: int = 0
    """Length of the linear warm-up, from 0."""
    decay: str = "cosine"
    """Shape of the decay after the warm-up: cosine, linear, constant, or wsd, which stays at `lr` until it anneals."""
    decay_steps: int | None = None
    """Where the decay ends, warm-up included; the rate is `min_lr` from there on. null: with the run."""
    anneal_steps: int | None = None
    """How long before that decay=wsd anneals from `lr` to `min_lr`."""
    anneal: str = "linear"
    """Shape of it: linear, cosine, exponential or minus_sqrt."""
    schedule_unit: str = "steps"
    """What warmup_steps, decay_steps and anneal_steps count: steps, samples or tokens."""
    router_lr: float | None = None
    """Peak learning rate of the routers, on the same schedule; null: `lr`."""
    router_min_lr: float | None = None
    """Their rate at the end of the decay; null: as far below router_lr as min_lr is below lr."""
    weight_decay: float = 0.1
    """Decoupled weight decay; norms and biases have none, and routers only with decay_routers."""
    decay_routers: bool = False
    """Whether the routers' matrices have the weight decay, too."""
    beta1: float = 0.9
    """AdamW's first moment."""
    beta2: float = 0.95
    """AdamW's second moment."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 for no clipping."""
    offload: float = 0.0
    """Fraction of the main weights and moments that is kept, and updated, in the host's memory; docs/running.md."""


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How a router is trained; the routing rule itself is the model's (`ModelConfig.moe`)."""

    losses: dict[str, float] = field(default_factory=lambda: {"btx": 0.01})
    """Weight of each loss on the routing, e.g. {btx: 0.01, z: 0.001}; 0 turns one off. See `routers/losses.py`."""
    detach_u: bool = False
    """Treat the gate-weighted load u of the btx loss as a constant, as count-based losses do."""
    input_jitter: float = 0.0
    """In training, multiply what the router sees by uniform noise in [1 - jitter, 1 + jitter] (Switch, section 2.4)."""
    init_scale: float = 0.0
    """s of a fresh router's truncated normal, sqrt(s / H) (Switch: 0.1); 0 for N(0, init_std^2)."""
    frozen_rows: list[int] = field(default_factory=list)
    """Experts whose rows of the router stay as they are, to the bit (FlexOlmo and BAR: [0], the public one)."""
    reset: bool = False
    """Start with fresh router weights where `init_from` has trained ones."""


@dataclass(frozen=True, kw_only=True)
class MoEOverride:
    """Changes the routing rule of the model that is loaded; what is None stays."""

    router: str | None = None
    """Name of the router."""
    top_k: int | None = None
    """Experts per token; a router that knows only one number needs none."""
    options: dict[str, Any] | None = None
    """The router's own settings."""
    shared_expert_intermediate_size: int | None = None
    """Width of the shared expert; a fresh one adds nothing at first. 0 for none."""
    dispatcher: str = "alltoall"
    """How tokens get to their experts: alltoall, allgather (for few ranks), or flex (DeepEP, on GPUs)."""
    experts: str = "auto"
    """Layers of the experts: sequential, grouped (one product for all; Transformer Engine's), or auto, which takes
    grouped where it can be."""


@dataclass(frozen=True, kw_only=True)
class DropoutConfig:
    """What is dropped in training; nothing in evaluation. The same at every layout."""

    hidden: float = 0.0
    """Share of the embedding's output and of what attention and feed-forward blocks add (Switch's fine-tuning: 0.1)."""
    expert: float = 0.0
    """Share of the activations inside routed experts, before the down-projection (Switch's fine-tuning: 0.4)."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save, and what is kept."""

    every: int = 0
    """Steps between checkpoints; 0 for one at the end only (and one when stopped early)."""
    keep: int = 2
    """Complete checkpoints kept, 1 or more; older ones are removed."""
    asynchronous: bool = False
    """Write in the background, while training goes on; the one on request and the last are waited for."""
    optimizer: bool = True
    """Whether the last checkpoint of the run has the optimizer's state as well; false: its weights alone. All before it
    have both, as a run resumes from them."""
    gather_on_first: bool = False
    """Put the optimizer's state together on the first data-parallel rank alone, over gloo, and not on all of them: the
    others need no memory for it while a checkpoint is saved, which is the same to the byte, but can take longer. A run
    that resumes has all of it on every rank."""
    verify: bool = False
    """Compare every file with its checksum before a run resumes from it; sizes are compared always."""


@dataclass(frozen=True, kw_only=True)
class EmaConfig:
    """An average of the weights that train, beside them; `export in=RUN ema=true` takes it out."""

    decay: float = 0.0
    """Weight of a step's weights relative to the next step's, e.g. 0.999; 0 for no average."""


@dataclass(frozen=True, kw_only=True)
class RobustConfig:
    """What a run does when something goes wrong; docs/running.md."""

    max_skipped: int = 3
    """Steps in a row that are skipped because their loss or gradient is not finite; one more ends the run. With a loss
    scale (fp16) only those whose loss is not finite count: Megatron skips others while it looks for the scale."""
    hang_seconds: float = 1800.0
    """A run in which no step, validation or checkpoint ends for so long is ended, with the stacks of all threads in a
    file; collectives wait as long. 0 for never (collectives: 30 minutes)."""
    spike_zscore: float = 8.0
    """Warn of a loss so many robust standard deviations above the median of the steps before; 0 for never."""
    spike_window: int = 64
    """Steps before, for that; the first warning is possible after a quarter of them."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Where the metrics go, besides metrics.jsonl and the progress line."""

    tensorboard: bool = False
    """Write them for TensorBoard as well, in `out`/tensorboard (needs the extra `track`)."""
    wandb: dict[str, Any] = field(default_factory=dict)
    """Arguments of `wandb.init` ({project: btx, mode: offline}); empty for no Weights & Biases."""
    peak_flops: float | None = None
    """Peak FLOP/s of one device, for the utilisation; None: by the device's name and the precision, where known."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run."""

    stage: str
    """expert (dense, one domain), mix (a mixture, all domains), router (a mixture's routers), bar_expert (a two-expert
    model's domain) or sft (any model, on chats)."""
    out: str
    """Run directory."""
    init_from: str | None = None
    """Where the weights come from: a Hugging Face folder, a checkpoint, or a run directory; None starts afresh."""
    model: ModelConfig | None = None
    """Architecture of a fresh model; only without `init_from`."""
    tokenizer: str | None = None
    """Tokenizer folder that goes along with the checkpoints; default: the one of `init_from` or of the data."""
    domain: str | None = None
    """What the run is an expert of. Without `data.blend` it trains on the data of this name alone."""
    data: DataConfig
    """Tokens."""
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    """Parallel layout."""
    precision: str = "fp32"
    """fp32; bf16 or fp16 with fp32 main weights in the optimizer, fp16 with a loss scale. A router is always fp32."""
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    """Loss scale of fp16."""
    fp8: Fp8Config = field(default_factory=Fp8Config)
    """FP8 beside precision=bf16."""
    recompute: str = "none"
    """What is computed again in the backward pass, which saves memory and changes nothing: none, selective (the
    `recompute_modules`) or full (all but each layer's input)."""
    recompute_modules: list[str] = field(default_factory=lambda: ["core_attn"])
    """With recompute=selective: core_attn (scores and probabilities), mlp (dense blocks), moe (mixtures)."""
    steps: int
    """Optimizer steps of the whole run. Give `steps`, `tokens` or `epochs`; steps follow from the others."""
    tokens: float | None = None
    """Tokens of the whole run, padding included; rounded up to whole steps."""
    epochs: float | None = None
    """Passes over all training data, in an order of its own each; rounded up to whole steps. Without `data.blend`."""
    micro_batch_size: int
    """Sequences per forward pass and data-parallel rank."""
    global_batch_size: int
    """Sequences per optimizer step, over all ranks."""
    optim: OptimConfig
    """Optimizer and schedule."""
    ema: EmaConfig = field(default_factory=EmaConfig)
    """Average of the weights."""
    moe: MoEOverride = field(default_factory=MoEOverride)
    """Another routing rule for the mixture that is loaded."""
    router: RouterConfig = field(default_factory=RouterConfig)
    """Losses on the routing, for a mixture."""
    dropout: DropoutConfig = field(default_factory=DropoutConfig)
    """Dropout."""
    per_token_loss: bool = False
    """Average over all tokens of the global batch instead of over each micro-batch and then over these; the losses on
    the routing weigh a micro-batch likewise. They differ where loss masks leave unequal numbers of tokens."""
    freeze: list[str] = field(default_factory=list)
    """Patterns over Megatron parameter names that stay as they are, e.g. "*.mlp.experts.*"; each must match."""
    train: list[str] = field(default_factory=list)
    """Patterns of the only parameters that train, e.g. "*.mlp.router.*"; each must match. Empty: all but `freeze`."""
    eval_every: int = 0
    """Steps between validations; there is always one before the first step and one after the last."""
    eval_batches: int = 8
    """Global batches per domain and validation."""
    log_every: int = 10
    """Steps between lines in metrics.jsonl."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    robust: RobustConfig = field(default_factory=RobustConfig)
    """Faults."""
    log: LogConfig = field(default_factory=LogConfig)
    """Trackers."""
    export: bool = False
    """Leave the last checkpoint as a Hugging Face folder in `out`/hf as well, and its averages in `out`/hf-ema."""
    seed: int = 1234
    """Seed of fresh weights, data order and dropout."""

    def trains(self, name: str) -> bool:
        """Whether `freeze` and `train` let a parameter train; its name is the one that it has at every layout."""
        frozen = any(fnmatch.fnmatchcase(name, pattern) for pattern in self.freeze)
        return not frozen and (not self.train or any(fnmatch.fnmatchcase(name, pattern) for pattern in self.train))


NO_EFFECT = (
    "layout",
    "log_every",
    "eval_every",
    "eval_batches",
    "checkpoint",
    "robust",
    "log",
    "export",
    "recompute",
    "recompute_modules",
)
"""Keys of TrainConfig that change nothing in what is computed."""
SAME_RESULT = ("moe.dispatcher", "moe.experts", "optim.offload", "data.kind")
"""Settings inside other keys that change nothing in what is computed."""
DENSE_STAGES = ("expert", "sft")
"""Stages that train dense models."""
RECOMPUTE_MODULES = ("core_attn", "mlp", "moe")
"""What `recompute_modules` may name."""
