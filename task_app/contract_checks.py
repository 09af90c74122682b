"""What the contract of an environment looks at (task_app.testing): each check fails with a sentence."""

import json
import math
from collections.abc import Mapping, Sequence

from task_app.errors import EpisodeOver
from task_app.protocols import DecisionOutcome, Environment, Observation, ToolRequest


def check(holds: bool, sentence: str) -> None:
    """Fail with the sentence; a bare assert would say nothing: pytest rewrites those of test files alone."""
    if not holds:
        raise AssertionError(sentence)


def check_observation(observation: Observation) -> None:
    check(bool(observation.text), "Observation.text is empty")
    observation.text.encode("utf-8")
    data = dict(observation.data)
    check(
        json.loads(json.dumps(data)) == data,
        "Observation.data is not what JSON makes of it: use plain values",
    )
    check_counts(observation.achievements_counts)
    check(math.isfinite(observation.reward_last_step), "reward_last_step is not finite")


def check_counts(counts: Mapping[str, int]) -> None:
    wrong = [name for name, count in counts.items() if type(count) is not int or count < 0]
    check(not wrong, f"achievements_counts holds no counter from 0 on: {wrong}")


def check_outcome(outcome: DecisionOutcome) -> None:
    check_observation(outcome.observation)
    rewards = outcome.env_rewards
    check(len(rewards) > 0, "env_rewards is empty: every decision runs at least one env step")
    check(all(math.isfinite(reward) for reward in rewards), f"env_rewards are not finite: {rewards}")
    told = outcome.executed_actions
    check(len(told) == len(rewards), f"{len(told)} executed_actions, but {len(rewards)} env_rewards")
    last = outcome.observation.reward_last_step
    check(last == rewards[-1], f"reward_last_step is {last}, but the last env step earned {rewards[-1]}")
    check(
        not (outcome.terminated and outcome.truncated), "terminated and truncated at once: a limit is no end"
    )


def raises_episode_over(environment: Environment, calls: Sequence[ToolRequest]) -> None:
    try:
        environment.step(calls)
    except EpisodeOver:
        return
    raise AssertionError("step() ran although no episode is under way; raise task_app.errors.EpisodeOver")
