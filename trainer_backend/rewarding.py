"""Stop 9 of the route, as a job sets it: r_t of a finished rollout, in which nothing is lost. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shared_schemas.rollouts import Rollout
from trainer_backend.core.errors import RewardError, place
from trainer_backend.core.guards import refuse_lost_reward
from trainer_backend.core.kl_reward import ScoredTokens, kl_estimates, kl_rewards
from trainer_backend.core.rewards import RewardConfig, reward_vector
from trainer_backend.jobfile.training_table import TrainingTable


@dataclass(frozen=True, slots=True)
class Earned:
    """What the decisions of an episode earned.

    Attributes:
        paid_T: [T] what the reward mode gives.
        kl_T: [T] what they pay for their KL to the reference; empty where the job does not ask for it.
        kl_nats: for each decision, the estimate of that KL at each of its tokens; likewise.
    """

    paid_T: Sequence[float]
    kl_T: Sequence[float] = ()
    kl_nats: Sequence[Sequence[float]] = ()

    @property
    def rewards_T(self) -> Sequence[float]:
        """[T] r_t, what estimators see."""
        if not self.kl_T:
            return self.paid_T
        return [paid + kl for paid, kl in zip(self.paid_T, self.kl_T, strict=True)]


@dataclass(frozen=True, slots=True)
class Rewards:
    """How a job rewards decisions.

    Attributes:
        table: [training], with the step-reward switches and what is paid for KL.
        max_decisions: that an episode may take.
    """

    table: TrainingTable
    max_decisions: int

    @property
    def pays_kl(self) -> bool:
        return self.table.kl_reward_coef > 0

    def without_kl(self) -> "Rewards":
        """The same rewards, with nothing paid for KL."""
        return replace(self, table=self.table.model_copy(update={"kl_reward_coef": 0.0}))

    @property
    def config(self) -> RewardConfig:
        """The step-reward switches of [training], for `core.rewards`."""
        table = self.table
        return RewardConfig(
            enabled=table.step_rewards_enabled,
            mode=table.step_rewards_mode,
            kind=table.event_rewards_kind,
            beta=table.step_rewards_beta,
            indicator_lambda=table.step_rewards_indicator_lambda,
            horizon=table.step_rewards_horizon,
            max_decisions=self.max_decisions,
        )

    def earned_by(
        self, rollout: Rollout, scored: Mapping[str, ScoredTokens], *, decisions_done: int = 0
    ) -> Earned:
        """r_t of a finished rollout.

        Args:
            scored: by rollout id, what policy and reference say of its tokens; read where the job has
                `training.kl_reward_coef`.
            decisions_done: how many its episode had before it was played on from there; they are off the
                horizon.

        Raises:
            RewardError: see `reward_vector`, `refuse_lost_reward`; log-probs that it needs are not there.
        """
        episode, config = rollout.trajectory, self.config
        assert episode is not None, "only finished rollouts earned anything"
        if decisions_done and config.max_decisions is not None:
            config = replace(config, max_decisions=config.max_decisions - decisions_done)
        name = rollout.rollout_id
        paid_T = reward_vector(
            episode.steps, outcome_reward=episode.outcome_reward, config=config, rollout_id=name
        )
        earned = self._with_kl(paid_T, scored.get(name), rollout_id=name)
        refuse_lost_reward(episode, earned.rewards_T, config, rollout_id=name, kl_T=earned.kl_T)
        return earned

    def _with_kl(self, paid_T: Sequence[float], scored: ScoredTokens | None, *, rollout_id: str) -> Earned:
        training = self.table
        if training.kl_reward_coef == 0:
            return Earned(paid_T)
        if scored is None:
            raise RewardError(
                "no log-probs of policy and reference, "
                f"which training.kl_reward_coef = {training.kl_reward_coef} needs",
                where=place(rollout_id),
                hint="They are stored where rollouts were collected with that key; 0 leaves the KL out.",
            )
        if len(scored.policy_T) != len(paid_T):
            told = f"log-probs of {len(scored.policy_T)} decisions, but it has {len(paid_T)}"
            raise RewardError(told, where=place(rollout_id))
        nats = kl_estimates(scored, training.kl_reward_kind, rollout_id=rollout_id)
        return Earned(paid_T, kl_rewards(nats, training.kl_reward_coef), nats)


def kl_metrics(episodes: Sequence[Earned]) -> dict[str, float]:
    """Of a batch: KL in nats, mean a token; what it cost, mean an episode. Nothing where it costs nothing."""
    nats = [value for item in episodes for row in item.kl_nats for value in row]
    if not nats:
        return {}
    paid = math.fsum(math.fsum(item.kl_T) for item in episodes)
    return {"kl/reference": math.fsum(nats) / len(nats), "reward/kl": paid / len(episodes)}
