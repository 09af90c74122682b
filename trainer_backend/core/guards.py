"""Checks the rewards of every episode before an update; the error for a wrong sum names the rollout."""

import math
from collections.abc import Sequence
from itertools import chain

from shared_schemas.rewards import StepRewardKeys, event_terms
from shared_schemas.trajectory import Trajectory
from trainer_backend.errors import RewardError, place

# Relative rounding error of sums of a few hundred rewards.
_ROUNDING = 1e-9


def refuse_lost_reward(
    trajectory: Trajectory,
    rewards_T: Sequence[float],
    keys: StepRewardKeys,
    *,
    horizon: int | None = None,
    rollout_id: str,
    kl_T: Sequence[float] = (),
) -> None:
    """Raise RewardError if the rewards r_t of an episode do not sum to what its trajectory records.

    For each `reward_mode` these equations must hold, with KL = sum of `kl_T`:

        decision_stepwise   credited achievements = those unlocked after the first observation, each once
                            sum of r_t = deltas + bonuses of first unlocks + reward_parts + KL
        off                 sum of r_t = outcome_reward + penalties + KL
        env_sparse          sum of r_t = env_rewards of all env steps + reward_parts + KL

    `rewards_T` is the result of `shared_schemas.rewards.reward_vector` with the same keys and horizon, plus
    `kl_T`, the costs of the KL to the reference policy (core.kl_reward). The error contains both sums.

    Source: DESIGN.md 4.1, 4.3.
    """
    mode = keys.reward_mode
    parts = [part for step in trajectory.steps for part in step.reward_parts]
    if mode == "decision_stepwise":
        _refuse_other_unlocks(trajectory, rollout_id)
        what = "deltas, bonuses and reward_parts"
        end = len(trajectory.steps) if horizon is None else horizon
        records = [step.metadata.decision_rewards for step in trajectory.steps]
        earned = [event_terms(item, keys, decisions_left=end - t) for t, item in enumerate(records) if item]
        paid = [*chain.from_iterable(earned), *(part.value for part in parts)]
    elif mode == "off":
        what = "outcome_reward and penalties"
        paid = [trajectory.outcome_reward, *(part.value for part in parts if part.source == "penalty")]
    else:
        what = "env_rewards and reward_parts"
        paid = [reward for step in trajectory.steps for reward in step.env_rewards or ()]
        paid += [part.value for part in parts]
    if kl_T:
        what, paid = f"{what}, with the KL,", [*paid, *kl_T]
    found, score = math.fsum(rewards_T), math.fsum(paid)
    if abs(found - score) > _ROUNDING * max(1.0, math.fsum(map(abs, paid))):
        raise RewardError(f"r_t sums to {found}, but {what} to {score}", where=place(rollout_id))


def _refuse_other_unlocks(trajectory: Trajectory, rollout_id: str) -> None:
    before = trajectory.steps[0].observation_data.achievements_counts
    unlocked = {
        name
        for name, count in trajectory.achievements_counts.items()
        if count > 0 and before.get(name, 0) == 0
    }
    records = [step.metadata.decision_rewards for step in trajectory.steps]
    credited = [name for record in records if record is not None for name in record.unique]
    if sorted(credited) != sorted(unlocked):
        twice = sorted({name for name in credited if credited.count(name) > 1})
        lost, made_up = sorted(unlocked - set(credited)), sorted(set(credited) - unlocked)
        kinds = (("never credited", lost), ("credited but not unlocked", made_up), ("credited twice", twice))
        found = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in kinds if names)
        raise RewardError(
            f"its decisions unlocked {len(credited)} achievements, the episode {len(unlocked)}: {found}",
            where=place(rollout_id),
        )
