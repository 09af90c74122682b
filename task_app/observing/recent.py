"""The last decisions of a session, for people who watch it; nothing else reads them."""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from shared_schemas.rewards import decision_rewards
from task_app.protocols import DecisionOutcome, Observation

SHOWN = 12


class RecentDecision(NamedTuple):
    """What was done and earned. Of the observations only the counters are kept: sessions should be small."""

    turn: int
    before: Mapping[str, int]
    after: Mapping[str, int]
    env_rewards: tuple[float, ...]
    executed: tuple[str, ...]
    invalid_reason: str | None

    def achieved(self) -> tuple[tuple[str, bool], ...]:
        """(achievement, whether for the first time in the episode) of each whose counter rose."""
        delta = decision_rewards(self.before, self.after, turn=self.turn)
        return tuple((name, name in delta.unique) for name in delta.all)


Recent = deque[RecentDecision]


def no_decisions() -> Recent:
    return deque(maxlen=SHOWN)


def decision(turn: int, before: Observation, outcome: DecisionOutcome) -> RecentDecision:
    return RecentDecision(
        turn=turn,
        before=before.achievements_counts,
        after=outcome.observation.achievements_counts,
        env_rewards=outcome.env_rewards,
        executed=outcome.executed_actions,
        invalid_reason=outcome.invalid_reason,
    )
