"""Environments around environments: one that remembers what it showed, one that is a living session."""

from collections.abc import Sequence

from shared_schemas.messages import Message, ToolSpec
from task_app.errors import EpisodeOver
from task_app.protocols import DecisionOutcome, Environment, Observation, PastDecision, ToolRequest
from task_app.sessions import EnvironmentSession


class SessionEnvironment:
    """A living session as an `Environment`: an episode goes on where it stands. The caller holds its lock."""

    def __init__(self, session: EnvironmentSession) -> None:
        self._session = session
        self.name = session.environment.name
        self.outcome_definition = session.environment.outcome_definition

    def reset(self, seed: int) -> Observation:
        """Nothing is started anew; the session's own observation."""
        if self._session.over:
            raise EpisodeOver()
        return self._session.observation

    def step(self, calls: Sequence[ToolRequest], *, invalid_reason: str | None = None) -> DecisionOutcome:
        _, outcome = self._session.take(calls, invalid_reason=invalid_reason)
        return outcome

    def tools(self) -> tuple[ToolSpec, ...]:
        return self._session.environment.tools()

    def messages(self, observation: Observation, past: Sequence[PastDecision]) -> tuple[Message, ...]:
        """With the session's own history: it may have decided before this rollout."""
        return self._session.environment.messages(observation, tuple(self._session.past))

    def outcome_reward(self) -> float:
        return self._session.environment.outcome_reward()


class Witness:
    """Passes all on, and keeps what was shown: `seen` is [T + 1], before each decision and after the last."""

    def __init__(self, environment: Environment) -> None:
        self._inner = environment
        self.name = environment.name
        self.outcome_definition = environment.outcome_definition
        self.seen: list[Observation] = []

    def reset(self, seed: int) -> Observation:
        observation = self._inner.reset(seed)
        self.seen = [observation]
        return observation

    def step(self, calls: Sequence[ToolRequest], *, invalid_reason: str | None = None) -> DecisionOutcome:
        outcome = self._inner.step(calls, invalid_reason=invalid_reason)
        self.seen.append(outcome.observation)
        return outcome

    def tools(self) -> tuple[ToolSpec, ...]:
        return self._inner.tools()

    def messages(self, observation: Observation, past: Sequence[PastDecision]) -> tuple[Message, ...]:
        return self._inner.messages(observation, past)

    def outcome_reward(self) -> float:
        return self._inner.outcome_reward()
