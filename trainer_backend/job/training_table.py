"""[training], [lora] and [algorithm] of a job TOML: how the policy is updated and how credit is given."""

from typing import Any, Literal

from pydantic import Field, field_validator

from shared_schemas.rewards import EventRewardsKind, StepRewards, StepRewardsMode
from trainer_backend.core.behaviour import WeightMode
from trainer_backend.core.kl_reward import KlKind
from trainer_backend.core.losses import RatioLevel
from trainer_backend.job.tables import Table

# Nats between sampler and learner: a hundred times what is measured of a right one (float32: 1e-4).
MISMATCH_LIMIT_FLOAT32, MISMATCH_LIMIT_LOW = 0.01, 1.0


class TrainingTable(Table):
    """[training]"""

    iterations: int = Field(
        default=20, ge=0, le=1_000_000, description="of collecting, crediting and updating"
    )
    group_size: int = Field(default=8, ge=1, le=100_000, description="G: episodes that share a start")
    learning_rate: float = Field(default=5e-4, gt=0, description="AdamW's, at its highest")
    learning_rate_schedule: str = Field(
        default="linear", description="how it falls after its rise; constant stays at the highest"
    )
    learning_rate_final: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="share of learning_rate that it falls towards; it would be there one step after the last",
    )
    learning_rate_rise: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of the run over which it rises from 0, the rate of the first step",
    )
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's")
    max_grad_norm: float = Field(default=1.0, gt=0, description="the gradient's norm is clipped to it")
    update_passes: int = Field(
        default=2, ge=1, description="times that an iteration's decisions are gone through"
    )
    batch_decisions: int = Field(default=512, ge=1, description="decisions of one optimizer step")
    row_tokens: int = Field(default=192, ge=16, description="tokens of a packed row")
    micro_batch_tokens: int = Field(
        default=4096,
        ge=64,
        description="tokens of one forward and backward, whose gradients add up to a step's (accumulation); "
        "small ones stay in a CPU's cache",
    )
    logits_chunk_tokens: int | None = Field(
        default=None,
        ge=1,
        description="tokens whose logits exist at a time; absent: what fits a share of the device's memory",
    )
    gradient_checkpointing: bool = Field(
        default=False,
        description="keep one tensor a layer and compute the rest again in the backward pass: less memory, "
        "a third more work",
    )
    optimizer_offload: bool = Field(
        default=False,
        description="keep AdamW's moments in main memory: the same steps, slower, 8 bytes less "
        "of a GPU's memory for every trained weight",
    )
    mismatch_limit: float | None = Field(
        default=None,
        gt=0,
        description="nats; a token of the actor whose log-prob differs by more between sampler and learner "
        f"ends the run, for both have the same weights; absent: {MISMATCH_LIMIT_FLOAT32:g} in float32, "
        f"{MISMATCH_LIMIT_LOW:g} where products are bfloat16",
    )
    target_kl: float | None = Field(
        default=None,
        gt=0,
        description="nats, mean over the tokens of a step, whatever the loss; further than this from the "
        "policy that the iteration began with, its remaining steps are skipped; absent: never",
    )
    skip_flat_groups: bool = Field(
        default=False, description="leave groups whose advantages are all 0 out of the update; still stored"
    )
    refill_rounds: int = Field(
        default=0,
        ge=0,
        le=100,
        description="times that an iteration asks for other worlds in place of flat groups; a named bias: "
        "what is learned from is chosen by its outcome",
    )
    clip_low: float = Field(
        default=0.2, gt=0, le=1, description="ratios below 1 - clip_low are held; at 1 none are"
    )
    clip_high: float = Field(default=0.25, gt=0, description="ratios above 1 + clip_high are held")
    clip_dual: float | None = Field(
        default=None, gt=1, description="a ratio above it is held where the advantage is negative too"
    )
    entropy_coef: float = Field(default=0.003, ge=0, description="weight of the entropy bonus")
    kl_coef: float = Field(
        default=0.0, ge=0, description="weight of the KL to the model that RL started from"
    )
    kl_kind: Literal["k2", "k3"] = Field(default="k3", description="estimator of that KL")
    kl_reward_coef: float = Field(
        default=0.0,
        ge=0,
        description="reward units that a decision pays for each nat of its KL to that model: in r_t, where "
        "kl_coef is in the loss",
    )
    kl_reward_kind: KlKind = Field(
        default="k1",
        description="estimator of that KL; only k1 has the gradient of it (docs/credit.md)",
    )
    behaviour_weight_cap: float = Field(default=2.0, ge=1, description="truncation of proximal / behaviour")
    behaviour_weight_floor: float = Field(
        default=0.0, ge=0, le=1, description="mask: weights below it are 0 too; truncate does not read it"
    )
    behaviour_weight_level: RatioLevel = Field(
        default="token",
        description="whose weight a token has: its own, its decision's or its episode's (products)",
    )
    behaviour_weight_mode: WeightMode = Field(
        default="truncate",
        description="a weight above behaviour_weight_cap is held at it, or counts 0 (mask)",
    )
    value_coef: float = Field(
        default=0.5, gt=0, description="critic: weight of half the squared error of its values"
    )
    value_clip: float | None = Field(
        default=None,
        gt=0,
        description="critic: a value that has moved further than this in an iteration is not pushed on; "
        "reward units; absent: never",
    )
    value_learning_rate: float = Field(
        default=0.5,
        gt=0,
        description="critic: AdamW's for the value head, shared out over its inputs: about how far one step "
        "may move a value, in reward units; it falls as learning_rate does",
    )
    value_trunk_gradient: bool = Field(
        default=False,
        description="critic: let the value loss change the policy's own weights too, not its head alone",
    )
    aggregation: str = Field(
        default="token_mean",
        description="what counts the same: tokens or decisions of an optimizer step, or episodes of the "
        "whole iteration, however it is cut into steps; constant: each token, divided by what was planned",
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
        description="iterations between further checkpoints, each removed when the next one is there: what a "
        "killed run loses at most; 0: none",
    )
    step_rewards_enabled: bool = Field(default=False, description="master switch of decision rewards")
    step_rewards_mode: StepRewardsMode = Field(default="off", description="where r_t comes from")
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
        """Whether the model that RL started from is held beside the one in training."""
        return self.kl_coef > 0 or self.kl_reward_coef > 0

    @property
    def step_rewards(self) -> StepRewards:
        """The switches in the form that reaches the task app."""
        return StepRewards(
            enabled=self.step_rewards_enabled,
            mode=self.step_rewards_mode,
            kind=self.event_rewards_kind,
            indicator_lambda=self.step_rewards_indicator_lambda,
            step_beta=self.step_rewards_beta,
        )


class LoraTable(Table):
    """[lora]: train low-rank adapters and leave the model's own weights as they are."""

    rank: int = Field(default=16, ge=1, le=1024, description="of each adapter")
    alpha: int = Field(default=32, ge=1, description="an adapter's product is scaled by alpha / rank")
    dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="of an adapter's input, in the gradient of update steps alone: ratios and KL are scored "
        "without it, from the second step of an iteration on by a forward pass more",
    )
    target_modules: tuple[str, ...] = Field(
        default=("all-linear",),
        min_length=1,
        description="names of the layers that get one; all-linear: every linear layer but the head",
    )

    @field_validator("target_modules", mode="before")
    @classmethod
    def _one_name_is_a_list_of_one(cls, found: Any) -> Any:
        return [found] if isinstance(found, str) else found


class AlgorithmTable(Table):
    """[algorithm]; which keys an estimator and a loss read stands on the plug board."""

    advantage: str = Field(default="stepwise", description="the estimator of advantages")
    loss: str = Field(
        default="clipped", description="of the policy; the values of its paper stand where the job has none"
    )
    ratio_level: RatioLevel = Field(
        default="token",
        description="whose ratio to the proximal policy a token has: its own, its decision's or its "
        "episode's (geometric means)",
    )
    gamma: float = Field(default=0.97, ge=0, le=1, description="discount per decision")
    gae_lambda: float = Field(
        default=0.95, ge=0, le=1, description="gae: weight of longer looks ahead, over decisions"
    )
    gae_token_lambda: float = Field(
        default=1.0, ge=0, le=1, description="gae_token: the same over the tokens of one decision"
    )
    episode_score: Literal["rewards", "outcome"] = Field(
        default="rewards",
        description="what siblings are compared by as wholes: the sum of r_t, or the outcome, which is the "
        "score of a reward function where there is one; returns of decisions come from r_t either way",
    )
    bootstrap_truncated: bool = Field(
        default=False,
        description="gae: an episode that a limit cut short goes on with the critic's value of the state "
        "after its last decision, and does not end there; costs each such episode one token more",
    )
    omega: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="gigpo: share of the episode's advantage; the step's has the rest",
    )
    step_advantage_w: float = Field(
        default=1.0, ge=0, description="gigpo_additive: weight of the step's advantage"
    )
    state_hashing_function: str = Field(
        default="default",
        description="gigpo: what makes two states the same; a state key (docs/configuration.md)",
    )
    default_step_reward: float = Field(
        default=0.0, description="gigpo: reward of a decision where rewards are off, in its step's returns"
    )
    fnorm: Literal["std", "one"] = Field(
        default="std", description="gigpo: what divides the deviations of a group"
    )
    episode_baseline: Literal["trajectory", "step"] = Field(
        default="trajectory", description="gigpo: what counts once in the mean of a group's scores"
    )
    context_depth: int = Field(
        default=0, ge=0, le=16, description="gigpo: K earlier states that are compared too, as in HGPO"
    )
    context_alpha: float = Field(
        default=1.0, ge=0, description="gigpo: equal contexts of k earlier states weigh (k + 1)^alpha"
    )
    branches_per_episode: int = Field(
        default=2,
        ge=1,
        le=64,
        description="branch: decisions of an episode from before which others play on",
    )
    branch_rollouts: int = Field(
        default=2, ge=1, le=64, description="branch: rollouts that play on from before each of them"
    )
