"""Snapshots of sessions: the state of the environment or policy, and the session's own fields.

A snapshot can be restored in any process. A restored environment session gives the same observations,
rewards, metadata and prompts for the same tool calls. A restored policy session makes the same decisions. A
snapshot contains no API key.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

from pydantic import Field

from shared_schemas.base import Body
from shared_schemas.rewards import StepRewards
from shared_schemas.rollouts import EnvSpec, PolicySpec, Seed, Start
from shared_schemas.trajectory import StepMetadata
from task_app.complaints import validated
from task_app.episode.decisions import NO_METADATA
from task_app.errors import InvalidRequest, NotRestorable, SnapshotRefused, boundary
from task_app.plugins import PlugBoards, PolicyContext
from task_app.protocols import (
    PAST_DECISIONS_SHOWN,
    DecisionOutcome,
    Environment,
    PastDecision,
    RestorablePolicy,
    ToolRequest,
    policy_name,
)
from task_app.sessions.sessions import EnvironmentSession, PolicySession
from task_app.snapshots.envelope import open_envelope, seal, to_text
from task_app.snapshots.starts import (
    EpisodeStart,
    StartView,
    require_restorable,
    reseed,
    restore,
    restore_in_thread,
    wrap_refusal,
)
from task_app.threads import Threads

# The source of a restored session's switches, as a key of `EnvironmentSession.switches`.
FROM_SNAPSHOT = "the snapshot"
# Fields that an `EnvironmentSession` and its `EnvironmentFacts` share.
_SAME = ("seed", "step_idx", "turn", "over", "metadata", "rl_run_id")


class EnvironmentFacts(Body):
    """The fields of an environment session, or of an episode after `turn` decisions.

    The state of the environment itself is not included. `step_rewards` is None if no request named any.
    `past` contains the last decisions, because the next prompt may show them. `metadata` is the metadata of
    the last decision.
    """

    env: EnvSpec
    seed: Seed
    step_idx: int = Field(ge=0)
    turn: int = Field(ge=0)
    over: bool
    step_rewards: StepRewards | None
    metadata: StepMetadata
    past: tuple[PastDecision, ...] = Field(max_length=PAST_DECISIONS_SHOWN)
    rl_run_id: str | None

    @classmethod
    def begin(cls, env: EnvSpec, seed: int) -> Self:
        """Return the facts at the start of an episode; `env` must contain every setting, even defaults."""
        return cls(
            env=env, seed=seed, step_idx=0, turn=0, over=False, step_rewards=None, metadata=NO_METADATA,
            past=(), rl_run_id=None,
        )  # fmt: skip

    def after(self, calls: tuple[ToolRequest, ...], outcome: DecisionOutcome) -> Self:
        changes = {
            "turn": self.turn + 1,
            "step_idx": self.step_idx + len(outcome.env_rewards),
            "over": outcome.terminated or outcome.truncated,
            "past": (*self.past, PastDecision(calls, outcome))[-PAST_DECISIONS_SHOWN:],
        }
        return self.model_copy(update=changes)


F = TypeVar("F", bound=Body)


def _read_facts(model: type[F], head: Mapping[str, Any]) -> F:
    try:
        return validated(model, head, where="snapshot")
    except InvalidRequest as refusal:
        raise SnapshotRefused(refusal.detail, where=refusal.where) from refusal


@dataclass(frozen=True, slots=True)
class EnvironmentSnapshot:
    """A snapshot of an environment session: its fields, and the environment's state as bytes."""

    facts: EnvironmentFacts
    state: bytes

    @classmethod
    def take(cls, session: EnvironmentSession, boards: PlugBoards, *, where: str) -> Self:
        """Return a snapshot of the session; the caller must hold the session's lock."""
        environment = require_restorable(session.environment, where=where)
        with boundary("environment.snapshot"):
            state = environment.snapshot()
        facts = EnvironmentFacts(
            env=boards.resolve(session.spec),
            step_rewards=session.step_rewards if session.switches else None,
            past=tuple(session.past),
            **{name: getattr(session, name) for name in _SAME},
        )
        return cls(facts, state)

    @classmethod
    def open(cls, data: bytes, *, at_most_bytes: int) -> Self:
        """Return the snapshot that `seal` wrote as `data`. Raises SnapshotRefused for any other bytes."""
        head, state = open_envelope("environment", data, at_most_bytes=at_most_bytes)
        return cls(_read_facts(EnvironmentFacts, head), state)

    def seal(self, *, at_most_bytes: int) -> bytes:
        with boundary("environment.snapshot"):
            head = self.facts.model_dump(mode="json")
            return seal("environment", head, self.state, at_most_bytes=at_most_bytes)

    def text(self, *, at_most_bytes: int) -> str:
        """Return the sealed snapshot as base64 text, the form of `start.snapshot` in a rollout request."""
        return to_text(self.seal(at_most_bytes=at_most_bytes))

    def session(self, boards: PlugBoards) -> EnvironmentSession:
        """Return a new session that continues from the snapshot."""
        facts = self.facts
        environment = boards.environment(facts.env.env_name, facts.env.config, where="snapshot.env.")
        session = EnvironmentSession(
            environment=environment,
            spec=facts.env,
            switches={FROM_SNAPSHOT: facts.step_rewards} if facts.step_rewards else {},
            past=deque(facts.past, maxlen=PAST_DECISIONS_SHOWN),
            **{name: getattr(facts, name) for name in _SAME},
        )
        session.observation = restore(environment, self.state)
        return session

    def start(self, start: Start, threads: Threads | None = None) -> EpisodeStart:
        """Return the start of an episode that continues from the snapshot.

        If `start.draws_seed` is given, it reseeds the environment's random generator.
        """

        async def begin(environment: Environment) -> StartView:
            observation = await restore_in_thread(environment, self.state, threads)
            if start.draws_seed is not None:
                reseed(environment, start.draws_seed)
            return observation, self.facts.past

        return EpisodeStart(begin, start.parent_rollout_id, start.parent_turn, is_snapshot=True)


class PolicySnapshot(Body):
    """A snapshot of a policy session: the spec `policy` without the API key, and the policy's own `state`."""

    policy: PolicySpec
    env: EnvSpec | None
    bound_env_id: str | None
    step_rewards: StepRewards | None
    turn: int = Field(ge=0)
    rl_run_id: str | None
    state: dict[str, Any]

    @classmethod
    def take(cls, session: PolicySession, *, where: str) -> Self:
        """Return a snapshot of the session; the caller must hold the session's lock."""
        if not isinstance(session.policy, RestorablePolicy):
            raise NotRestorable("policy", policy_name(session.policy), where=where)
        with boundary(f"policy {policy_name(session.policy)}"):
            state = session.policy.snapshot()
        return cls(
            policy=session.spec.model_copy(update={"inference_key": None}),
            env=session.env,
            bound_env_id=session.bound_env_id,
            step_rewards=session.switches,
            turn=session.turn,
            rl_run_id=session.rl_run_id,
            state=state,
        )

    @classmethod
    def open(cls, data: bytes, *, at_most_bytes: int) -> Self:
        """Return the snapshot that `seal` wrote as `data`. Raises SnapshotRefused for any other bytes."""
        return _read_facts(cls, open_envelope("policy", data, at_most_bytes=at_most_bytes)[0])

    def seal(self, *, at_most_bytes: int) -> bytes:
        with boundary("policy.snapshot"):
            return seal("policy", self.model_dump(mode="json"), b"", at_most_bytes=at_most_bytes)

    def session(self, boards: PlugBoards, context: PolicyContext) -> PolicySession:
        """Return a new session that continues from the snapshot and is not bound to an environment yet."""
        spec, env = self.policy, self.env
        seeded = replace(context, seed=spec.seed)
        policy = boards.policy(spec.policy_name, spec.config, seeded, where="snapshot.policy.")
        if not isinstance(policy, RestorablePolicy):
            raise NotRestorable("policy", policy_name(policy), where="snapshot")
        with boundary(f"policy {policy_name(policy)}"):
            try:
                policy.restore(self.state)
            except ValueError as exc:
                raise wrap_refusal(policy_name(policy), exc) from exc
        return PolicySession(
            policy=policy,
            spec=spec.model_copy(update={"inference_key": context.inference_key}),
            environment=boards.environment(env.env_name, env.config, where="snapshot.env.") if env else None,
            env=env,
            turn=self.turn,
            rl_run_id=self.rl_run_id,
        )
