"""[training], [lora] and [algorithm] of a job: updates of the policy, and credit."""

from typing import Any, Literal

from pydantic import Field, field_validator

from shared_schemas.rewards import EventRewardsKind, StepRewards, StepRewardsMode
from trainer_backend.core.behaviour import WeightMode
from trainer_backend.core.keys import Table
from trainer_backend.core.kl_reward import KlKind
from trainer_backend.core.losses import RatioLevel

# Nats between sampler and learner: a hundred times the measured value of a correct pair (float32: 1e-4).
MISMATCH_LIMIT_FLOAT32, MISMATCH_LIMIT_LOW = 0.01, 1.0


class TrainingTable(Table):
    """[training]"""

    iterations: int = Field(
        default=20, ge=0, le=1_000_000, description="rounds of collection, credit and update"
    )
    max_staleness: int = Field(
        default=0,
        ge=0,
        le=16,
        description="how many versions the weights that sampled a token may lie behind those that learn from "
        "it; so many iterations are collected ahead while the learner works; 0: the two take turns",
    )
    group_size: int = Field(default=8, ge=1, le=100_000, description="G: episodes with the same start")
    learning_rate: float = Field(default=5e-4, gt=0, description="highest learning rate of AdamW")
    learning_rate_schedule: str = Field(
        default="linear", description="its course after the rise; constant stays at the highest"
    )
    learning_rate_final: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="share of learning_rate that it falls to; reached one step after the last",
    )
    learning_rate_rise: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of the run over which it rises, from 0 at the first step",
    )
    weight_decay: float = Field(default=0.0, ge=0, description="weight decay of AdamW")
    max_grad_norm: float = Field(default=1.0, gt=0, description="limit of the gradient's norm (clipping)")
    update_passes: int = Field(default=2, ge=1, description="passes over an iteration's decisions")
    batch_decisions: int = Field(default=512, ge=1, description="decisions per optimizer step")
    row_tokens: int = Field(default=192, ge=16, description="tokens per packed row")
    micro_batch_tokens: int = Field(
        default=4096,
        ge=64,
        description="tokens per forward and backward pass; gradients are accumulated over a step; small "
        "values fit a CPU's cache",
    )
    logits_chunk_tokens: int | None = Field(
        default=None,
        ge=1,
        description="tokens whose logits exist at a time; absent: a share of the device's memory",
    )
    gradient_checkpointing: bool = Field(
        default=False,
        description="keep one tensor per layer and compute the rest again in the backward pass: less memory, "
        "a third more work",
    )
    optimizer_offload: bool = Field(
        default=False,
        description="keep AdamW's moments in main memory: the same steps, slower, 8 bytes less "
        "of a GPU's memory for every trained weight",
    )
    max_lost_share: float = Field(
        default=0.2,
        ge=0,
        le=1,
        description="the run saves its state and ends if a stage of 8 rollouts or more (warm-up, prompts, "
        "iteration, branches, evaluation) loses a larger share of them to failures",
    )
    mismatch_limit: float | None = Field(
        default=None,
        gt=0,
        description="nats; the run ends if the log-prob of an actor's token differs by more between sampler "
        f"and learner, which have the same weights; absent: {MISMATCH_LIMIT_FLOAT32:g} in float32, "
        f"{MISMATCH_LIMIT_LOW:g} where products are bfloat16",
    )
    target_kl: float | None = Field(
        default=None,
        gt=0,
        description="nats, mean over the tokens of a step, for every loss; once the policy is further than "
        "this from the iteration's first one, its remaining steps are skipped; absent: never",
    )
    skip_flat_groups: bool = Field(
        default=False,
        description="omit groups whose advantages are all 0 from the update; they are still stored",
    )
    skip_certain_above: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="omit what the actor was this sure of from its update: segments of which each token had "
        "a higher probability when it was sampled. A named bias, small with an own critic, which still "
        "learns from them (docs/credit.md); absent: none",
    )
    refill_rounds: int = Field(
        default=0,
        ge=0,
        le=100,
        description="how often an iteration replaces flat groups by other worlds; a known bias: outcomes "
        "then select the training data",
    )
    clip_low: float = Field(
        default=0.2, gt=0, le=1, description="ratios are clipped below 1 - clip_low; at 1 none are"
    )
    clip_high: float = Field(default=0.25, gt=0, description="ratios are clipped above 1 + clip_high")
    clip_dual: float | None = Field(
        default=None, gt=1, description="upper clip of ratios with a negative advantage"
    )
    tau_pos: float = Field(
        default=1.0,
        gt=0,
        description="sapo: how fast a gradient fades as its ratio leaves 1, for positive advantages",
    )
    tau_neg: float = Field(default=1.05, gt=0, description="sapo: the same for negative advantages")
    entropy_coef: float = Field(default=0.003, ge=0, description="weight of the entropy bonus")
    kl_coef: float = Field(
        default=0.0, ge=0, description="weight of the KL to the model that RL started from"
    )
    kl_kind: Literal["k2", "k3"] = Field(default="k3", description="estimator of that KL")
    kl_reward_coef: float = Field(
        default=0.0,
        ge=0,
        description="reward units that a decision pays per nat of its KL to that model: in r_t, while "
        "kl_coef is in the loss",
    )
    kl_reward_kind: KlKind = Field(
        default="k1",
        description="estimator of that KL; only k1 has its gradient (docs/credit.md)",
    )
    behaviour_weight_cap: float = Field(default=2.0, ge=1, description="truncation of proximal / behaviour")
    behaviour_weight_floor: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="mask: smaller weights are set to 0 too; truncate does not read it",
    )
    behaviour_weight_level: RatioLevel = Field(
        default="token",
        description="a token's weight: its own, its decision's or its episode's (products)",
    )
    behaviour_weight_mode: WeightMode = Field(
        default="truncate",
        description="a weight above behaviour_weight_cap is set to the cap, or to 0 (mask)",
    )
    critic: Literal["head", "own"] = Field(
        default="head",
        description="critic: head reads the policy's last hidden state by one linear layer; own is a second "
        "model, which begins as a copy of the policy and has an optimizer, batches and passes of its own",
    )
    critic_learning_rate: float = Field(
        default=1e-3, gt=0, description="own critic: constant learning rate of its layers' AdamW"
    )
    critic_passes: int = Field(
        default=2, ge=1, description="own critic: passes over an iteration's decisions"
    )
    critic_batch_decisions: int = Field(
        default=256, ge=1, description="own critic: decisions per optimizer step"
    )
    critic_warmup: int = Field(
        default=0,
        ge=0,
        description="own critic: its first iterations, in which it learns alone and the policy stays",
    )
    value_coef: float = Field(
        default=0.5, gt=0, description="critic: weight of half the squared error of its values"
    )
    value_clip: float | None = Field(
        default=None,
        gt=0,
        description="critic: a value that moved further than this in an iteration has no gradient; "
        "reward units; absent: no limit",
    )
    value_learning_rate: float = Field(
        default=0.5,
        gt=0,
        description="critic: AdamW's rate for the value head, divided among its inputs: about how far a step "
        "can move a value, in reward units; it falls as learning_rate does",
    )
    value_trunk_gradient: bool = Field(
        default=False,
        description="critic: let the value loss train the policy's own weights too, not only the value head",
    )
    aggregation: str = Field(
        default="token_mean",
        description="what has equal weight: tokens or decisions of an optimizer step, or episodes of the "
        "whole iteration, however it is split; constant: each token, divided by the planned number",
    )
    constant_tokens: int | None = Field(
        default=None,
        ge=1,
        description="constant: sampled tokens that each of rollout.episodes_per_batch counts as in the "
        "denominator; absent: the most that an episode may sample",
    )
    threads: int = Field(default=2, ge=1, le=256, description="torch threads while the policy is updated")
    checkpoint_every: int = Field(default=5, ge=1, description="iterations between checkpoints")
    keep_checkpoints: int = Field(default=2, ge=1, description="newest checkpoints kept beside the best one")
    recovery_every: int = Field(
        default=1,
        ge=0,
        description="iterations between extra checkpoints, each deleted after the next: the most work that "
        "a killed run loses; 0: none",
    )
    step_rewards_enabled: bool = Field(default=False, description="master switch of decision rewards")
    step_rewards_mode: StepRewardsMode = Field(default="off", description="source of r_t")
    event_rewards_kind: EventRewardsKind = Field(
        default="unique", description="count first unlocks, or every achievement whose counter rose"
    )
    step_rewards_beta: float = Field(default=0.0, ge=0, description="bonus beta * (T - t) for a first unlock")
    step_rewards_indicator_lambda: float = Field(
        default=0.0, ge=0, description="bonus for a decision with a first unlock"
    )
    step_rewards_horizon: Literal["realised", "max_decisions"] = Field(
        default="realised", description="T in beta * (T - t): the episode's length, or max_turns (causal)"
    )

    @property
    def needs_reference(self) -> bool:
        """Whether the initial model of RL is kept beside the trained one."""
        return self.kl_coef > 0 or self.kl_reward_coef > 0

    @property
    def step_rewards(self) -> StepRewards:
        """Return the switches in the form that the task app receives."""
        return StepRewards(
            enabled=self.step_rewards_enabled,
            mode=self.step_rewards_mode,
            kind=self.event_rewards_kind,
            indicator_lambda=self.step_rewards_indicator_lambda,
            step_beta=self.step_rewards_beta,
        )


# The target of adapters that stands for every linear layer except the head, as in peft.
ALL_LINEAR = "all-linear"


class LoraTable(Table):
    """[lora]: train low-rank adapters and keep the model's own weights."""

    rank: int = Field(default=16, ge=1, le=1024, description="rank of each adapter")
    alpha: int = Field(default=32, ge=1, description="an adapter's product is scaled by alpha / rank")
    dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="dropout of an adapter's input, in the gradient of update steps only: ratios and KL are "
        "computed without it, by one more forward pass from the second step of an iteration on",
    )
    target_modules: tuple[str, ...] = Field(
        default=(ALL_LINEAR,),
        min_length=1,
        description="layers with an adapter, by name; all-linear: every linear layer except the head",
    )

    merged_checkpoints: bool = Field(
        default=False,
        description="write the model with merged adapters into every checkpoint, for other programs; false: "
        "into the first one alone, which the adapters of the others are over",
    )

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
        """Whether every linear layer gets an adapter, whatever the model calls them."""
        return self.target_modules == (ALL_LINEAR,)


class AlgorithmTable(Table):
    """[algorithm]; the plug board lists the keys that each estimator and loss reads."""

    advantage: str = Field(default="stepwise", description="the estimator of advantages")
    loss: str = Field(
        default="clipped", description="loss of the policy; keys that the job omits have its paper's values"
    )
    ratio_level: RatioLevel = Field(
        default="token",
        description="a token's ratio to the proximal policy: its own, its decision's or its episode's "
        "(geometric means)",
    )
    gamma: float = Field(default=0.97, ge=0, le=1, description="discount per decision")
    gae_lambda: float = Field(
        default=0.95, ge=0, le=1, description="gae, gagpo: weight of longer returns, over decisions"
    )
    gae_token_lambda: float = Field(
        default=1.0, ge=0, le=1, description="gae_token: the same over the tokens of one decision"
    )
    episode_score: Literal["rewards", "outcome"] = Field(
        default="rewards",
        description="score of a whole episode among siblings: the sum of r_t, or the outcome, which is the "
        "score of a reward function if there is one; returns of decisions come from r_t either way",
    )
    bootstrap_truncated: bool = Field(
        default=False,
        description="gae: continue an episode that a limit cut short with the critic's value of its last "
        "state, instead of ending it there; costs each such episode one token more",
    )
    omega: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="gigpo: weight of the episode's advantage; the step's has the rest",
    )
    step_advantage_w: float = Field(
        default=1.0,
        ge=0,
        description="gigpo_additive, gigpo_soft, g2po, graphgpo: weight of the step's advantage",
    )
    state_hashing_function: str = Field(
        default="default",
        description="gigpo, g2po, graphgpo, gagpo: the state key that identifies equal states "
        "(docs/configuration.md)",
    )
    default_step_reward: float = Field(
        default=0.0, description="gigpo: reward of a decision in its step's returns while rewards are off"
    )
    fnorm: Literal["std", "one"] = Field(
        default="std", description="gigpo, g2po, graphgpo, gagpo: divisor of the deviations of a group"
    )
    episode_baseline: Literal["trajectory", "step"] = Field(
        default="trajectory",
        description="gigpo, gigpo_soft, g2po, graphgpo: the unit of the mean of a group's scores",
    )
    context_depth: int = Field(
        default=0, ge=0, le=16, description="gigpo: K earlier states that are compared too, as in HGPO"
    )
    context_alpha: float = Field(
        default=1.0, ge=0, description="gigpo: weight (k + 1)^alpha of a context of k equal earlier states"
    )
    similarity_temperature: float = Field(
        default=0.1,
        ge=0,
        description="gigpo_soft: how unlike the observations may be whose decisions are compared; 0: equal "
        "ones alone",
    )
    distance_discount: float = Field(
        default=0.1, gt=0, lt=1, description="graphgpo: discount per decision between a state and the goal"
    )
    goal_score: float | None = Field(
        default=None,
        description="graphgpo: least score of an episode that reached the goal; absent: the group's best",
    )
    branches_per_episode: int = Field(
        default=2,
        ge=1,
        le=64,
        description="branch: decisions per episode from which others play on",
    )
    branch_rollouts: int = Field(
        default=2, ge=1, le=64, description="branch: rollouts that start before each of them"
    )
