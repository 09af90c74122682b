"""The tables [training], [lora] and [algorithm] of a job: updates of the policy, and credit assignment."""

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

# Limits of the difference in nats between a token's log-probs at the sampler and at the learner. They are a
# hundred times the difference that a correct pair has, which is 1e-4 in float32.
MISMATCH_LIMIT_FLOAT32, MISMATCH_LIMIT_LOW = 0.01, 1.0


# So many tokens fit a CPU's cache. The number is used if neither the job nor the learner's memory plan has
# one.
MICRO_BATCH_TOKENS = 4096


class LoopKeys(Table):
    """Keys of the training loop, batches and optimizer, except those that modules of `core` declare."""

    iterations: int = Field(default=20, ge=0, le=1_000_000)
    """number of iterations; each collects rollouts, computes advantages, and updates the policy"""
    max_staleness: int = Field(default=0, ge=0, le=16)
    """maximum number of versions by which the weights that sampled a token may be older than the weights that
    learn from it. It is also the number of iterations that are collected ahead while the learner works. 0:
    collecting and learning take turns"""
    group_size: int = Field(default=8, ge=1, le=100_000)
    """number of episodes in a group; they have the same start, and estimators compare them"""
    learning_rate: float = Field(default=5e-4, gt=0)
    """peak learning rate of AdamW; with learning_rate_schedule = 'desired_kl', the initial one"""
    learning_rate_schedule: str = "linear"
    """how the learning rate changes after its rise. linear, cosine: it falls to learning_rate_final;
    constant: it stays at its peak; desired_kl: it is adapted after each iteration, so that the next iteration
    moves the policy by about training.desired_kl nats"""
    learning_rate_rise: float = Field(default=0.0, ge=0, lt=1)
    """share of the run over which the learning rate rises linearly to its peak, from 0 at the first step; 0:
    it starts at the peak"""
    weight_decay: float = Field(default=0.0, ge=0)
    """weight decay of AdamW"""
    adam_epsilon: float = Field(default=1e-8, gt=0)
    """epsilon of AdamW, for policy and critic. A weight whose gradient is far below epsilon hardly moves;
    tokens of which the policy is almost certain give such small gradients. PPO implementations use 1e-5"""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """a gradient with a larger norm is scaled down to this norm (clipping)"""
    update_passes: int = Field(default=2, ge=1)
    """number of passes over the decisions of an iteration"""
    batch_decisions: int = Field(default=512, ge=1)
    """number of decisions in an optimizer step"""
    row_tokens: int = Field(default=192, ge=16)
    """number of tokens in a row of the batch, into which segments are packed"""
    micro_batch_tokens: int | None = Field(
        default=None,
        ge=64,
        description="number of tokens in a forward and backward pass; a step adds up its passes' gradients. "
        f"Absent: on a CPU {MICRO_BATCH_TOKENS}, which fit its cache; on a GPU as many as fit its memory",
    )
    share_prefixes: bool = True
    """compute only once what several segments have in common at their beginning, such as the rules and tools
    of a prompt, the prompt of siblings, or the earlier part of a conversation. It is not done with
    lora.dropout, because the segments would then share the dropout too"""
    logits_chunk_tokens: int | None = Field(default=None, ge=1)
    """number of tokens whose logits are in memory at the same time; absent: as many as fit a share of the
    device's memory"""
    gradient_checkpointing: bool | Annotated[int, Field(ge=0)] = False
    """keep one tensor per layer in the forward pass, and compute the others again in the backward pass. This
    takes less memory and a third more computation. true: in all layers; a number: only in this many layers,
    counted from the first"""
    optimizer_offload: bool = False
    """keep the moments of AdamW in main memory. The steps stay the same, take longer, and need 8 bytes less
    of the GPU's memory for each trained weight"""
    max_lost_share: float = Field(default=0.2, ge=0, le=1)
    """largest share of its rollouts that a stage (warm-up, prompts, iteration, branches or evaluation) may
    lose to failures. If a stage of at least 8 rollouts loses more, the run saves its state and ends"""
    mismatch_limit: float | None = Field(
        default=None,
        gt=0,
        description="limit in nats for the difference between the log-probs that sampler and learner compute "
        "for a token of the actor with the same weights. If it is exceeded, the run ends. "
        f"Absent: {MISMATCH_LIMIT_FLOAT32:g} in float32, {MISMATCH_LIMIT_LOW:g} where products are bfloat16",
    )
    target_kl: float | None = Field(default=None, gt=0)
    """limit in nats for the KL between the policy and the policy at the start of the iteration, as a mean
    over the tokens of an optimizer step. Once it is exceeded, the remaining steps of the iteration are
    skipped, whichever loss is used; absent: no limit"""
    skip_flat_groups: bool = False
    """leave groups whose advantages are all 0 (flat groups) out of the update; they are still stored"""
    skip_certain_above: float | None = Field(default=None, gt=0, lt=1)
    """leave a segment out of the actor's update if each of its tokens had a higher probability than this when
    it was sampled. This biases the gradient. The bias is small with training.critic = 'own', because that
    critic still learns from these segments (docs/credit.md); absent: no segment is left out"""
    refill_rounds: int = Field(default=0, ge=0, le=100)
    """maximum number of times that an iteration replaces its flat groups by groups in other worlds. This
    biases the training, because outcomes then decide which worlds are trained on"""
    aggregation: str = "token_mean"
    """what has equal weight in the loss. token_mean: the tokens of an optimizer step; decision_mean: the
    decisions of an optimizer step; episode_equal: the episodes of the iteration, over all of its steps;
    constant: the tokens, whose sum is divided by a planned number of tokens"""
    entropy_coef: float = Field(default=0.003, ge=0)
    """weight of the entropy bonus in the loss"""

    @property
    def micro_batch(self) -> int:
        """The number of tokens in a forward and backward pass: micro_batch_tokens or its default on a CPU."""
        return self.micro_batch_tokens or MICRO_BATCH_TOKENS


class RunKeys(Table):
    """Keys of checkpoints and of the learner's threads."""

    threads: int = Field(default=2, ge=1, le=256)
    """number of torch threads while the policy is updated"""
    checkpoint_every: int = Field(default=5, ge=1)
    """number of iterations between checkpoints; there is also one at each evaluation"""
    keep_checkpoints: int = Field(default=2, ge=1)
    """number of the newest checkpoints to keep; those of recovery_every do not count. The best checkpoint and
    iteration_0 are kept in any case"""
    recovery_every: int = Field(default=1, ge=0)
    """number of iterations between additional checkpoints, each of which is deleted after the next checkpoint
    is written. A killed run loses at most the work of this many iterations. 0: no additional checkpoints"""


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
    """[training]: the updates of the policy and the critic, the rewards of decisions, and checkpoints."""

    boards = ("algorithm.loss", "training.aggregation")

    step_rewards_horizon: Literal["realised", "max_decisions"] = "realised"
    """T in the bonus step_rewards_beta * (T - t) for a first unlock in decision t. realised: the length of
    the episode; max_decisions: the maximum number of decisions, so that no reward depends on later
    decisions"""

    @property
    def needs_reference(self) -> bool:
        """Whether the job needs the reference policy, which has the weights that RL started from."""
        return self.kl_coef > 0 or self.kl_reward_coef > 0


# The value of target_modules that means every linear layer except the head, as in peft.
ALL_LINEAR = "all-linear"


class LoraTable(Table):
    """[lora]: train low-rank adapters, and leave the model's own weights unchanged."""

    rank: int = Field(default=16, ge=1, le=1024)
    """rank of each adapter"""
    alpha: int = Field(default=32, ge=1)
    """the output of an adapter is scaled by alpha / rank"""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """dropout probability for the input of each adapter. It is applied only when gradients are computed.
    Ratios and KL are computed without dropout, so each step except the first of an iteration needs another
    forward pass"""
    target_modules: tuple[str, ...] = Field(default=(ALL_LINEAR,), min_length=1)
    """names of the layers that get an adapter; all-linear: every linear layer except the head"""

    merged_checkpoints: bool = False
    """write the model with its adapters merged into every checkpoint, so that other programs can load it.
    false: only the first checkpoint contains a model, and the others contain adapters for that model"""

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
    """The choice of an estimator, of a loss, and of the level of the loss's ratios."""

    advantage: str = "stepwise"
    """name of the estimator that computes the advantages"""
    loss: str = "clipped"
    """name of the policy's loss. Keys that the job omits have the values of the loss's paper, if it has
    one"""
    ratio_level: RatioLevel = "token"
    """which ratio to the policy before the update the loss uses for a token. token: the token's own ratio;
    decision, episode: the geometric mean of the ratios of all tokens of its decision or its episode"""


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
    """[algorithm]: credit assignment. `trainer_backend.plugins` lists the keys that each estimator reads."""

    boards = ("algorithm.advantage",)
