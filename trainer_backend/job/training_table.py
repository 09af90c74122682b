"""[training], [lora] and [algorithm] of a job: updates of the policy, and credit."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from shared_schemas.rewards import StepRewardKeys
from trainer_backend.core.advantages.branch import BranchKeys
from trainer_backend.core.advantages.gae import GaeTokenKeys
from trainer_backend.core.advantages.gagpo import GagpoKeys
from trainer_backend.core.advantages.gigpo import GigpoAdditiveKeys, GigpoKeys
from trainer_backend.core.advantages.gigpo_soft import SoftKeys
from trainer_backend.core.advantages.graphgpo import GraphgpoKeys
from trainer_backend.core.aggregation import ConstantKeys
from trainer_backend.core.behaviour import WeightKeys
from trainer_backend.core.critic import CriticKeys
from trainer_backend.core.forks import ForkKeys
from trainer_backend.core.keys import Table
from trainer_backend.core.kl import KlKeys
from trainer_backend.core.kl_reward import KlRewardKeys
from trainer_backend.core.losses import ClipKeys, RatioLevel, SapoKeys
from trainer_backend.core.router_loss import RouterKeys
from trainer_backend.core.schedules import DesiredKlKeys, FallKeys
from trainer_backend.job.plug_table import PlugTable

# Nats between log-probs of sampler and learner: a hundred times those of a correct pair (float32: 1e-4).
MISMATCH_LIMIT_FLOAT32, MISMATCH_LIMIT_LOW = 0.01, 1.0


# Fits a CPU's cache; used if neither the job nor a plan of memory sets it.
MICRO_BATCH_TOKENS = 4096


class LoopKeys(Table):
    """Keys of the training loop, its batches and its optimizer that no part of the core declares."""

    iterations: int = Field(default=20, ge=0, le=1_000_000)
    """rounds of collection, credit and update"""
    max_staleness: int = Field(default=0, ge=0, le=16)
    """how many versions older the weights that sampled a token may be than the weights that learn from it,
    and how many iterations are collected ahead while the learner works; 0: the two take turns"""
    group_size: int = Field(default=8, ge=1, le=100_000)
    """G: episodes with the same start"""
    learning_rate: float = Field(default=5e-4, gt=0)
    """highest learning rate of AdamW; with the schedule desired_kl the first one"""
    learning_rate_schedule: str = "linear"
    """course of the learning rate after its rise. constant: it stays at the highest; desired_kl: it changes
    after each iteration, so that the next one moves the policy by training.desired_kl nats"""
    learning_rate_rise: float = Field(default=0.0, ge=0, lt=1)
    """share of the run over which the learning rate rises, from 0 at the first step"""
    weight_decay: float = Field(default=0.0, ge=0)
    """weight decay of AdamW"""
    adam_epsilon: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon, for policy and critic: weights whose gradient is far below it hardly move, such as
    those of tokens that the policy is sure of; PPO implementations have 1e-5"""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """limit of the gradient's norm (clipping)"""
    update_passes: int = Field(default=2, ge=1)
    """passes over an iteration's decisions"""
    batch_decisions: int = Field(default=512, ge=1)
    """decisions per optimizer step"""
    row_tokens: int = Field(default=192, ge=16)
    """tokens per packed row"""
    micro_batch_tokens: int | None = Field(
        default=None,
        ge=64,
        description="tokens per forward and backward pass; gradients are accumulated over a step; absent: on "
        f"a CPU {MICRO_BATCH_TOKENS}, which fit its cache, on a GPU as many as fit its memory by the plan",
    )
    share_prefixes: bool = True
    """compute a beginning that several segments share only once: the rules and tools of a prompt, a sibling's
    prompt, a conversation so far; not with lora.dropout, which would be shared too"""
    logits_chunk_tokens: int | None = Field(default=None, ge=1)
    """tokens whose logits exist at a time; absent: a share of the device's memory"""
    gradient_checkpointing: bool | Annotated[int, Field(ge=0)] = False
    """keep one tensor per layer and compute the rest again in the backward pass: less memory, a third more
    work; a number: only in this many layers, from the first; true: in all layers"""
    optimizer_offload: bool = False
    """keep AdamW's moments in main memory: the same steps, slower, 8 bytes less of a GPU's memory for every
    trained weight"""
    max_lost_share: float = Field(default=0.2, ge=0, le=1)
    """the run saves its state and ends if a stage of 8 rollouts or more (warm-up, prompts, iteration,
    branches, evaluation) loses a larger share of them to failures"""
    mismatch_limit: float | None = Field(
        default=None,
        gt=0,
        description="nats; the run ends if the log-prob of an actor's token differs by more between sampler "
        f"and learner, which have the same weights; absent: {MISMATCH_LIMIT_FLOAT32:g} in float32, "
        f"{MISMATCH_LIMIT_LOW:g} where products are bfloat16",
    )
    target_kl: float | None = Field(default=None, gt=0)
    """in nats: once the policy's KL to the policy at the iteration's start, as a mean over the tokens of a
    step, is above this, the iteration's remaining steps are skipped, with every loss; absent: never"""
    skip_flat_groups: bool = False
    """omit groups whose advantages are all 0 from the update; they are still stored"""
    skip_certain_above: float | None = Field(default=None, gt=0, lt=1)
    """omit segments from the actor's update if each of their tokens had a higher probability than this when
    it was sampled. A named bias; it is small with an own critic, which still learns from these segments
    (docs/credit.md); absent: none"""
    refill_rounds: int = Field(default=0, ge=0, le=100)
    """how often an iteration replaces flat groups by other worlds; a known bias: outcomes then select the
    training data"""
    aggregation: str = "token_mean"
    """what weighs equally in the loss. token_mean: tokens of an optimizer step; decision_mean: its decisions;
    episode_equal: episodes of the iteration, in all its steps; constant: tokens, over a planned number"""
    entropy_coef: float = Field(default=0.003, ge=0)
    """weight of the entropy bonus"""

    @property
    def micro_batch(self) -> int:
        """Tokens per forward and backward pass. In a learner's table they are from its plan of memory."""
        return self.micro_batch_tokens or MICRO_BATCH_TOKENS


class RunKeys(Table):
    """Keys of checkpoints, and of the learner's threads."""

    threads: int = Field(default=2, ge=1, le=256)
    """torch threads while the policy is updated"""
    checkpoint_every: int = Field(default=5, ge=1)
    """iterations between checkpoints"""
    keep_checkpoints: int = Field(default=2, ge=1)
    """newest checkpoints kept in addition to the best one"""
    recovery_every: int = Field(default=1, ge=0)
    """iterations between extra checkpoints, each deleted after the next: the most work that a killed run
    loses; 0: none"""


class TrainingTable(
    StepRewardKeys,
    RunKeys,
    ConstantKeys,
    CriticKeys,
    WeightKeys,
    KlRewardKeys,
    KlKeys,
    RouterKeys,
    SapoKeys,
    ClipKeys,
    FallKeys,
    DesiredKlKeys,
    LoopKeys,
    PlugTable,
):
    """[training]"""

    boards = ("algorithm.loss", "training.aggregation")

    step_rewards_horizon: Literal["realised", "max_decisions"] = "realised"
    """T in beta * (T - t). realised: the episode's length; max_decisions: the most decisions (causal)"""

    @property
    def needs_reference(self) -> bool:
        """Whether the job needs the reference policy, the weights that RL started from."""
        return self.kl_coef > 0 or self.kl_reward_coef > 0


# The target of adapters that means every linear layer except the head, as in peft.
ALL_LINEAR = "all-linear"


class LoraTable(Table):
    """[lora]: train low-rank adapters and keep the model's own weights."""

    rank: int = Field(default=16, ge=1, le=1024)
    """rank of each adapter"""
    alpha: int = Field(default=32, ge=1)
    """an adapter's product is scaled by alpha / rank"""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """dropout of an adapter's input, in the gradient of update steps only: ratios and KL are computed without
    it, by one more forward pass from the second step of an iteration on"""
    target_modules: tuple[str, ...] = Field(default=(ALL_LINEAR,), min_length=1)
    """layers with an adapter, by name; all-linear: every linear layer except the head"""

    merged_checkpoints: bool = False
    """write the model with merged adapters into every checkpoint, for other programs; false: only into the
    first one, which is the base model of the adapters in the others"""

    @field_validator("target_modules", mode="before")
    @classmethod
    def _one_name_is_a_list_of_one(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("target_modules")
    @classmethod
    def _all_stands_alone(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        if ALL_LINEAR in targets and len(targets) > 1:
            raise ValueError(f"{ALL_LINEAR!r} takes in every linear layer, and no other name goes with it")
        return targets

    @property
    def adapts_all(self) -> bool:
        """Whether every linear layer except the head gets an adapter."""
        return self.target_modules == (ALL_LINEAR,)


class AdvantageKeys(Table):
    """The choice of an estimator and of a loss."""

    advantage: str = "stepwise"
    """the estimator of advantages"""
    loss: str = "clipped"
    """loss of the policy; keys that the job omits have its paper's values"""
    ratio_level: RatioLevel = "token"
    """a token's ratio to the proximal policy: its own, its decision's or its episode's (geometric means)"""


class AlgorithmTable(
    ForkKeys,
    BranchKeys,
    GraphgpoKeys,
    SoftKeys,
    GigpoKeys,
    GigpoAdditiveKeys,
    GagpoKeys,
    GaeTokenKeys,
    AdvantageKeys,
    PlugTable,
):
    """[algorithm]; `trainer_backend/plugins.py` knows the keys that each estimator and loss reads."""

    boards = ("algorithm.advantage",)
