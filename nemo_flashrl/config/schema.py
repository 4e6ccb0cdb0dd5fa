"""The typed configuration of a run: its fields, their defaults, and the values that each may take."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

ABOVE_ZERO = 1e-12
LORA_LAYERS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def within(default: Any, lowest: float, highest: float = math.inf) -> Any:
    """A finite number from `lowest` to `highest`; None stays allowed where the type says so."""
    return field(default=default, metadata={"range": (lowest, highest)})


def one_of(default: str, *others: str) -> Any:
    """One of a few words, the default first."""
    return field(default=default, metadata={"choices": (default, *others)})


@dataclass
class ModelConfig:
    """What is trained."""

    path: str = MISSING  # Hugging Face checkpoint folder to start from
    context_length: int = within(4096, 2)  # most tokens of one trajectory, prompt included
    vocab_divisible_by: int = within(128, 1)  # the embedding is padded to a multiple of this times tensor
    head_chunk_tokens: int | None = within(None, 1)  # tokens whose logits are materialised at a time; None: picked
    head_logits_budget_mib: int = within(64, 0)  # a microbatch whose logits fit is scored and trained in one pass
    recompute: str = one_of("none", "selective", "full")  # activation recomputation: of attention | of every layer
    precision: str = one_of("bf16", "fp32")
    hf_config: dict[str, Any] = field(default_factory=dict)  # config.json, for `flashrl plan` without the checkpoint


@dataclass
class LoraConfig:
    """LoRA: low-rank adapters are trained instead of the weights; exports have them merged in."""

    rank: int = within(0, 0)  # 0: no LoRA
    alpha: float = within(32.0, ABOVE_ZERO)  # the adapter is scaled by alpha / rank
    targets: list[str] = field(default_factory=lambda: [*LORA_LAYERS])  # of: q, k and v | o | gate and up | down


@dataclass
class ParallelConfig:
    """Model parallelism; data parallelism is what is left of the world size."""

    tensor: int = within(1, 1)
    pipeline: int = within(1, 1)
    context: int = within(1, 1)  # context parallelism: the tokens of each trajectory are split over so many ranks
    sequence: bool = False  # sequence parallelism over the tensor-parallel group
    expert: int = within(1, 1)  # expert parallelism: ranks over which a layer's experts are split, each expert whole
    overlap_gradients: bool = False  # reduce during the last backward pass; costs one more copy of the output layer


@dataclass
class ClusterConfig:
    """Nodes and GPUs: what launchers ask for and `flashrl plan` assumes."""

    nodes: int = within(1, 1)
    gpus_per_node: int = within(0, 0)  # 0: on CPUs, with the processes that were started
    device: str = one_of("", "A100", "A800", "H100", "H800", "H20", "H200", "B200")  # for `flashrl plan`; "": unset
    environment: dict[str, str] = field(default_factory=dict)  # variables of every process, where not set already


@dataclass
class OptimizerConfig:
    """AdamW with a linear warm-up from a fifth of the learning rate."""

    learning_rate: float = within(1e-6, ABOVE_ZERO, 1)
    warmup_steps: int = within(4, 0)
    schedule: str = one_of("constant", "cosine")  # after the warm-up; cosine decays to near 0 at the last step
    beta1: float = within(0.9, 0, 1 - 1e-6)
    beta2: float = within(0.95, 0, 1 - 1e-6)
    weight_decay: float = within(0.0, 0)
    max_grad_norm: float = within(1.0, ABOVE_ZERO)  # gradients are clipped to this global norm
    moments_dtype: str = one_of("fp32", "bf16")  # Adam's two moments; bf16 needs Transformer Engine's FusedAdam
    gradients_dtype: str = one_of("fp32", "bf16")  # summed over microbatches and reduced over ranks in this dtype
    offload_fraction: float = within(0.0, 0, 1)  # share of the optimizer's state and step that the host takes
    fp8_param_gather: bool = False  # layers compute in FP8, and their weights are kept and gathered in it


@dataclass
class PluginConfig:
    """A plug-in (algorithm, environment) by bare name or dotted path, and the settings that its class declares."""

    name: str = MISSING
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class RolloutConfig:
    """How trajectories are made."""

    batch_size: int = within(64, 1)  # trajectories of one optimizer step (B)
    engine: str = one_of("transformers", "vllm", "sglang")  # in this process | HTTP servers, see `servers`
    servers: list[str] = field(default_factory=list)  # URLs, of vllm or sglang
    server_timeout: float = within(300.0, ABOVE_ZERO)  # seconds for a server to come up, to load weights, to come back
    weight_transfer: str = one_of("file", "broadcast", "adapter")  # vllm: a folder | the network | LoRA adapter alone
    weights_folder: str | None = None  # where servers find new weights; None: a folder in shared memory
    workers: int | None = within(None, 1)  # processes that play episodes, vllm or sglang; None: a quarter of the cores
    worker_max_memory: float | None = within(
        None, ABOVE_ZERO
    )  # GiB of one, beyond which it is replaced; None: no limit
    mode: str = one_of("sync", "async", "in_flight")  # weight sync: nothing runs | between actions | between tokens
    max_in_flight: int = within(0, 0)  # rollout slots: episodes running concurrently; 0 means batch_size
    lag: int = within(0, 0)  # sync: batches collected ahead of the one in training; 0 is on-policy
    max_staleness: int | None = within(None, 0)  # policy versions between sampling and training; older is dropped
    updates_per_batch: int = within(1, 1)  # optimizer steps on each batch; from the second on, off-policy
    dynamic_sampling_max_groups: int = within(0, 0)  # zero-variance groups per batch replaced by other prompts; 0: none
    temperature: float = within(1.0, ABOVE_ZERO, 100)
    temperature_schedule: list[Any] = field(default_factory=list)  # instead: [[share of all steps, from there on], ...]
    max_turns: int = within(8, 1)
    max_tokens_per_turn: int = within(512, 1)
    max_observation_tokens: int = within(2048, 1)
    stop: list[str] = field(default_factory=list)  # tokens or strings that end an action, beside the model's end tokens
    step_timeout: float = within(60.0, ABOVE_ZERO)  # seconds an environment call may take
    episode_timeout: float | None = within(None, ABOVE_ZERO)  # seconds of a whole episode, generation included
    keep_observation: str = one_of("head", "tail", "both")  # what is kept of an observation that is too long
    summarizer: str | None = None  # async function (text, max_tokens) -> text by dotted path, called before it is cut

    @property
    def slots(self) -> int:
        """Rollout slots: episodes running concurrently, of training or of held-out tasks."""
        return self.max_in_flight or self.batch_size


@dataclass
class GroupSizeConfig:
    """Adapts the group size to rewards: of all prompts (4, 8, 16, 32; `every`), or of each prompt (`min` to `max`)."""

    every: int = within(0, 0)  # optimizer steps between two decisions; 0: fixed
    threshold: float = within(0.3, 0)  # mean reward std inside a group: above it one size up, below it one down
    max: int = within(0, 0)  # per prompt: halved after a group of equal rewards, else doubled, up to this; 0: fixed
    min: int = within(2, 2)  # per prompt: down to this; max is min times a power of 2


@dataclass
class CurriculumConfig:
    """Which tasks are sampled: epochs over all of them, or by class: a fixed mixture, or one that follows success."""

    mode: str = one_of("none", "adaptive")  # epochs, or `mixture` from the first step | by success, then `mixture`
    classes: str = ""  # field of a task with its class; empty: each task is its own class
    rule: str = one_of("variance", "threshold")  # p (1 - p): medium success | max(0, threshold - p): low success
    threshold: float = within(0.5, ABOVE_ZERO, 1 - 1e-6)  # success rate below which a class is sampled more
    share: float = within(0.4, 0, 1)  # share of the optimizer steps after which the mixture is fixed
    floor: float = within(0.2, 0, 1)  # least share of its mixture weight that a class keeps
    mixture: dict[str, float] = field(default_factory=dict)  # class: weight; empty: by the number of its tasks


@dataclass
class BatchingConfig:
    """How a batch is split into microbatches."""

    max_tokens_per_microbatch: int = within(16384, 1)  # a longer trajectory gets a microbatch of its own
    layout: str = one_of("packed", "padded")  # sequence packing, attention per trajectory | one row per trajectory
    context_margin: float = within(0.1, 0, 0.99)  # share of the context that episodes leave unused
    on_too_long: str = one_of("error", "truncate", "drop")  # trajectory beyond the context; a prompt is dropped instead


@dataclass
class ReferenceConfig:
    """The reference policy of the KL."""

    mode: str = one_of("none", "frozen", "hard", "ema")  # the initial weights | copied every so many steps | an average
    every: int = within(100, 1)  # hard: optimizer steps between two copies
    beta: float = within(0.99, 0, 1 - 1e-6)  # ema: decay of the average per step; 0.95 to 0.99 is usual
    evaluate: bool = False  # log its log-prob and entropy, evaluate it on held-out tasks, export it


@dataclass
class KlConfig:
    """The KL penalty, for any algorithm."""

    coefficient: float = within(0.0, 0, 1e6)  # 0: none
    estimator: str = one_of("k3", "k1", "k2")
    place: str = one_of("loss", "reward")  # per token in the loss | subtracted from the reward, before advantages
    schedule: str = one_of("fixed", "annealed", "adaptive", "entropy")
    target: float = within(0.05, ABOVE_ZERO)  # adaptive: nats per action token
    entropy_floor: float = within(0.5, 0)  # entropy: nats per action token; below it the coefficient rises
    entropy_fall: float = within(0.3, 0, 1)  # entropy: also after a drop by this share in 10 steps; 1: floor alone


@dataclass
class AdvantageConfig:
    """Post-processing of advantages."""

    clip: float | None = within(None, ABOVE_ZERO)  # clipped to [-clip, clip]; 3 is usual; None: not clipped
    turn_coefficient: float = within(0.0, 0, 1)  # weight of per-turn returns; 0: one advantage per trajectory
    turn_discount: float = within(1.0, 0, 1)  # discount of later turns' rewards in a turn's return
    shaping: dict[str, float] = field(default_factory=dict)  # reward shaping, added last; environment's term: weight


@dataclass
class ValueHeadConfig:
    """A linear value head on the policy's hidden states as baseline; its gradient does not reach the policy."""

    learning_rate: float = within(0.0, 0, 1)  # of its own Adam; 0.01 is usual; 0: no value head
    updates: int = within(4, 1)  # Adam steps on each batch


@dataclass
class LengthPenaltyConfig:
    """Subtracted from the advantage: coefficient * (length / limit - 1) beyond the limit."""

    coefficient: float = within(0.0, 0)  # 0: none
    unit: str = one_of("tokens", "turns", "new_tokens")  # sampled tokens | actions | sampled tokens without repeats
    novelty: str = "ngrams"  # what repeats: ngrams | sentences, by words | folder or dotted path of an embedder
    similarity: float = within(0.9, ABOVE_ZERO, 1)  # embedder: cosine from which two sentences say the same
    limit: float = within(0.0, 0)  # in that unit; no penalty below
    decay_steps: int = within(0, 0)  # optimizer steps until the coefficient has decayed to 0; 0: constant


@dataclass
class SelectionConfig:
    """Loss masking: what is left out has weight 0; its reward stays in the baseline."""

    tokens: str = one_of("actions", "code")  # all sampled tokens | of these, those inside fenced code
    malformed: str = one_of("keep", "leave_out")  # trajectories with an action that the environment calls malformed
    shaping_at_least: dict[str, float] = field(default_factory=dict)  # environment's term: below it, left out


@dataclass
class EvaluationConfig:
    """Evaluation on held-out tasks."""

    every_steps: int = within(0, 0)  # optimizer steps between two evaluations, and one after the last step; 0: never
    settings: dict[str, Any] = field(default_factory=dict)  # over environment.settings: what selects held-out tasks
    tasks: int = within(64, 1)  # so many, the first ones
    samples: int = within(1, 1)  # episodes per task; above 1, pass@k is reported too
    temperature: float = within(1.0, 0, 100)  # 0: greedy


@dataclass
class TrainerConfig:
    """Length, seed and logging of the run."""

    steps: int = within(100, 1)
    seed: int = within(0, 0, 2**31)
    strict: bool = False  # refuse settings whose effects are confounded, instead of warning
    log_trajectories: int = within(4, 0)  # full trajectories written to samples.jsonl each step
    wandb_project: str = ""  # Weights & Biases project to log to; needs the wandb package


@dataclass
class MonitorsConfig:
    """Early stopping: limits at which a run saves a checkpoint and stops; null: off."""

    patience: int = within(5, 1)  # consecutive steps beyond a limit before it stops
    advantage_jump: float | None = within(None, 1)  # most, as a multiple of the spread of advantages before
    unique_samples: float | None = within(None, 0, 1)  # least unique_sample_share
    distinct_answers: float | None = within(None, 1)  # least group_distinct_answers
    effective_fraction: float | None = within(None, 0, 1)  # least effective_fraction
    entropy: float | None = within(None, 0)  # least sampled_entropy, nats
    length_trend: float | None = within(None, ABOVE_ZERO)  # most, as a multiple of the first steps' response_tokens
    repeated_tokens: float | None = within(None, 0, 1)  # most repeated_token_share
    loss_spike: float | None = within(None, 1)  # most, as a multiple of the median |loss| before
    success_drop: float | None = within(None, 0, 1)  # most that success (mean of 10 steps) is below its best so far
    reward_drop: float | None = within(None, 0)  # the same of reward_mean


@dataclass
class CheckpointConfig:
    """When a run saves checkpoints, and whether it resumes from them."""

    every_steps: int = within(50, 0)  # optimizer steps between checkpoints, and one at the end; 0: on SIGTERM alone
    keep: int = within(2, 1)  # newest complete checkpoints that are kept
    resume: bool | None = None  # resume the run in `output`: false never, true also with a changed configuration


@dataclass
class RunConfig:
    """One run."""

    output: str = MISSING  # folder of all files of the run; a run that is there already is resumed
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    algorithm: PluginConfig = field(default_factory=lambda: PluginConfig("flash_reinforce"))
    environment: PluginConfig = field(default_factory=PluginConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    group_size: GroupSizeConfig = field(default_factory=GroupSizeConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    kl: KlConfig = field(default_factory=KlConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    value_head: ValueHeadConfig = field(default_factory=ValueHeadConfig)
    length_penalty: LengthPenaltyConfig = field(default_factory=LengthPenaltyConfig)
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    monitors: MonitorsConfig = field(default_factory=MonitorsConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
