"""The typed configuration of a run: its fields, their defaults, and the values that each may take.

Plug-ins (algorithm, environment) declare their settings beside their class; here they are a plain mapping.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

ABOVE_ZERO = 1e-12


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
    context_length: int = within(4096, 2)  # tokens of one trajectory at most, prompt included
    vocab_divisible_by: int = within(128, 1)  # the embedding is padded to a multiple of this times tensor
    head_chunk_tokens: int = within(512, 1)  # tokens whose logits are alive at a time
    head_logits_budget_mib: int = within(64, 0)  # a microbatch whose logits fit is scored and trained in one pass
    recompute: str = one_of("none", "selective", "full")  # attention, or every layer, in the backward pass
    precision: str = one_of("bf16", "fp32")
    hf_config: dict[str, Any] = field(default_factory=dict)  # the checkpoint's config.json, to plan without it


@dataclass
class LoraConfig:
    """Two low-rank factors beside layers are trained in place of the weights; exports hold their product merged in."""

    rank: int = within(0, 0)  # 0: no LoRA
    alpha: float = within(32.0, ABOVE_ZERO)  # the product counts alpha / rank
    targets: list[str] = field(  # Megatron's layers: q, k and v | o | gate and up | down
        default_factory=lambda: ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    )


@dataclass
class ParallelConfig:
    """How the model is spread; data parallelism takes what the world size leaves."""

    tensor: int = within(1, 1)
    pipeline: int = within(1, 1)
    context: int = within(1, 1)  # ranks over which the tokens of each trajectory are spread
    sequence: bool = False  # sequence parallelism over the tensor-parallel group
    expert: int = within(1, 1)  # ranks of a stage over which the experts of a layer are spread, each whole on one
    overlap_gradients: bool = False  # reduce them under the last backward pass; one more copy of the output layer lives


@dataclass
class ClusterConfig:
    """Where a run is placed; what launchers ask for and `flashrl plan` reckons with."""

    nodes: int = within(1, 1)
    gpus_per_node: int = within(0, 0)  # 0: processes as they were started, on CPUs
    device: str = one_of("", "A100", "A800", "H100", "H800", "H20", "H200", "B200")  # for `flashrl plan`; "": not said
    environment: dict[str, str] = field(default_factory=dict)  # of every process, where the variable is not set yet


@dataclass
class OptimizerConfig:
    """AdamW with a linear warm-up from a fifth of the learning rate."""

    learning_rate: float = within(1e-6, ABOVE_ZERO, 1)
    warmup_steps: int = within(4, 0)
    schedule: str = one_of("constant", "cosine")  # after the warm-up; cosine ends near 0 with the last step
    beta1: float = within(0.9, 0, 1 - 1e-6)
    beta2: float = within(0.95, 0, 1 - 1e-6)
    weight_decay: float = within(0.0, 0)
    max_grad_norm: float = within(1.0, ABOVE_ZERO)


@dataclass
class PluginConfig:
    """A plug-in by bare name or dotted path, and the settings that its class declares."""

    name: str = MISSING
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class RolloutConfig:
    """How trajectories are made."""

    batch_size: int = within(64, 1)  # trajectories of one optimizer step (B)
    engine: str = one_of("transformers", "vllm", "sglang")  # in this process | over HTTP: see `servers`
    servers: list[str] = field(default_factory=list)  # URLs, of vllm or sglang
    server_timeout: float = within(300.0, ABOVE_ZERO)  # seconds to come up, to load weights, to come back
    weight_transfer: str = one_of("file", "broadcast", "adapter")  # vllm: a folder | the network | LoRA alone, see docs
    weights_folder: str | None = None  # where servers find new weights; None: a folder in shared memory
    mode: str = one_of("sync", "async", "in_flight")  # new weights: nothing runs | between actions | between tokens
    max_in_flight: int = within(0, 0)  # episodes running at a time; 0 means batch_size
    lag: int = within(0, 0)  # sync: batches collected ahead of the one in training; 0 is on-policy
    max_staleness: int | None = within(None, 0)  # policy versions between sampling and training; older is dropped
    updates_per_batch: int = within(
        1, 1
    )  # optimizer steps on each batch; in all but the first it is re-weighted by the ratio
    dynamic_sampling_max_groups: int = within(0, 0)  # groups of equal rewards that a batch may replace by other prompts
    temperature: float = within(1.0, ABOVE_ZERO, 100)
    temperature_schedule: list[Any] = field(default_factory=list)  # in its place: [share of the steps, from there on]
    max_turns: int = within(8, 1)
    max_tokens_per_turn: int = within(512, 1)
    max_observation_tokens: int = within(2048, 1)
    stop: list[str] = field(default_factory=list)  # tokens that end an action, beside the end-of-sequence token
    step_timeout: float = within(60.0, ABOVE_ZERO)  # seconds an environment may take to answer
    episode_timeout: float | None = within(None, ABOVE_ZERO)  # seconds of a whole episode, generation included
    keep_observation: str = one_of("head", "tail", "both")  # what stays of an observation that is too long
    summarizer: str | None = None  # async function (text, max_tokens) -> text by dotted path, asked before it is cut

    @property
    def places(self) -> int:
        """Episodes running at a time, of training or of held-out tasks."""
        return self.max_in_flight or self.batch_size


@dataclass
class GroupSizeConfig:
    """Moves the algorithm's group size between 4, 8, 16 and 32 by how much rewards inside a group differ."""

    every: int = within(0, 0)  # optimizer steps between two decisions; 0: it stays
    threshold: float = within(0.3, 0)  # mean standard deviation in a group: above it one size up, below it one down


@dataclass
class CurriculumConfig:
    """Which tasks come: epochs over all of them, or drawn by the success of their class."""

    mode: str = one_of("none", "adaptive")
    classes: str = ""  # field of a task that names its class; empty: each task is a class of its own
    share: float = within(0.4, 0, 1)  # of the optimizer steps, before the mixture is fixed
    floor: float = within(0.2, 0, 1)  # share of its part of the mixture that a class keeps whatever its success
    mixture: dict[str, float] = field(default_factory=dict)  # class: weight; empty: by the number of its tasks


@dataclass
class BatchingConfig:
    """How a batch is split into microbatches."""

    max_tokens_per_microbatch: int = within(16384, 1)  # a longer trajectory goes alone
    layout: str = one_of("packed", "padded")  # one row, attention inside each trajectory | a row each
    context_margin: float = within(0.1, 0, 0.99)  # share of the context that episodes leave free
    on_too_long: str = one_of("error", "truncate", "drop")  # what exceeds the context; a prompt is not cut but dropped


@dataclass
class ReferenceConfig:
    """The policy that a KL is measured to."""

    mode: str = one_of("none", "frozen", "hard", "ema")  # the first weights | copied now and then | an average
    every: int = within(100, 1)  # hard: optimizer steps between two copies
    beta: float = within(0.99, 0, 1 - 1e-6)  # ema: share of the average that stays in a step; 0.95 to 0.99 is usual
    evaluate: bool = False  # report the reference's own log-prob and entropy, play held-out tasks with it, export it


@dataclass
class KlConfig:
    """The KL penalty, for any algorithm."""

    coefficient: float = within(0.0, 0, 1e6)  # 0: none
    estimator: str = one_of("k3", "k1", "k2")
    place: str = one_of("loss", "reward")  # of every token | of a trajectory, before advantages
    schedule: str = one_of("fixed", "annealed", "adaptive", "entropy")
    target: float = within(0.05, ABOVE_ZERO)  # adaptive: nats per action token
    entropy_floor: float = within(0.5, 0)  # entropy: nats per action token; under it the coefficient rises
    entropy_fall: float = within(0.3, 0, 1)  # entropy: and after a loss of this share in 10 steps; 1: floor alone


@dataclass
class AdvantageConfig:
    """What becomes of an algorithm's advantages."""

    clip: float | None = within(None, ABOVE_ZERO)  # they stay in [-clip, clip]; 3 is usual; None: as they are
    turn_coefficient: float = within(0.0, 0, 1)  # share of a turn's own return; 0: a trajectory has one advantage
    turn_discount: float = within(1.0, 0, 1)  # of later turns' rewards in a turn's return
    shaping: dict[str, float] = field(default_factory=dict)  # the environment's term: coefficient; added last


@dataclass
class ValueHeadConfig:
    """A linear value head on the policy's hidden states as baseline; nothing of its loss reaches the policy."""

    learning_rate: float = within(0.0, 0, 1)  # of its own Adam; 0.01 is usual; 0: no value head
    updates: int = within(4, 1)  # Adam steps on each batch


@dataclass
class LengthPenaltyConfig:
    """Taken off the advantage: coefficient * (length / limit - 1) beyond the limit."""

    coefficient: float = within(0.0, 0)  # 0: none
    unit: str = one_of("tokens", "turns", "new_tokens")  # sampled tokens | actions | tokens, repeated passages once
    limit: float = within(0.0, 0)  # in that unit; nothing is taken below
    decay_steps: int = within(0, 0)  # optimizer steps until nothing is left of the coefficient; 0: it stays


@dataclass
class SelectionConfig:
    """What of a batch is trained on; what is left out has weight 0, and its reward stays in the baseline."""

    tokens: str = one_of("actions", "code")  # all that the policy sampled | of these, what is inside fenced code
    malformed: str = one_of("keep", "leave_out")  # trajectories with an action that the environment calls none
    shaping_at_least: dict[str, float] = field(default_factory=dict)  # the environment's term: below it is left out


@dataclass
class EvaluationConfig:
    """Tasks that training never asks for, played now and then."""

    every_steps: int = within(0, 0)  # optimizer steps between two, and after the last one; 0: never
    settings: dict[str, Any] = field(default_factory=dict)  # over environment.settings: what makes the tasks others
    tasks: int = within(64, 1)  # the first so many
    samples: int = within(1, 1)  # episodes of a task; above 1, pass@samples is reported too
    temperature: float = within(1.0, 0, 100)  # 0: greedy


@dataclass
class TrainerConfig:
    """How long, and from which randomness."""

    steps: int = within(100, 1)
    seed: int = within(0, 0, 2**31)
    strict: bool = False  # refuse settings that move the same quantity, which otherwise are told at the start
    log_trajectories: int = within(4, 0)  # full trajectories written as text each step
    wandb_project: str = ""  # Weights & Biases project that gets the metrics too; needs the wandb package


@dataclass
class MonitorsConfig:
    """Limits beyond which a run ends itself, with a checkpoint; each is off while it is null."""

    patience: int = within(5, 1)  # steps in a row beyond a limit
    advantage_jump: float | None = within(None, 1)  # most, as a multiple of the spread of advantages before
    unique_samples: float | None = within(None, 0, 1)  # least unique_sample_share
    distinct_answers: float | None = within(None, 1)  # least group_distinct_answers
    effective_fraction: float | None = within(None, 0, 1)  # least effective_fraction
    entropy: float | None = within(None, 0)  # least sampled_entropy, nats
    length_trend: float | None = within(None, ABOVE_ZERO)  # most, as a multiple of the first steps' response_tokens
    repeated_tokens: float | None = within(None, 0, 1)  # most repeated_token_share
    loss_spike: float | None = within(None, 1)  # most, as a multiple of the median |loss| before


@dataclass
class CheckpointConfig:
    """When a run saves itself, and whether it goes on from there."""

    every_steps: int = within(50, 0)  # optimizer steps between two, and one at the end; 0 saves on SIGTERM alone
    keep: int = within(2, 1)  # complete ones that stay
    resume: bool | None = None  # go on with the run in `output`: false never, true also with a changed configuration


@dataclass
class RunConfig:
    """One run."""

    output: str = MISSING  # folder of everything the run leaves; one that holds this run is gone on with
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
