"""Sessions as snapshots, and back: the environment or policy, and what the session knows beside it.

Restored in any process, an environment session gives the same observations, rewards, metadata and prompts for
the same tool calls, and a policy session the same decisions. Nothing of a key is in either.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import Field, ValidationError

from shared_schemas.base import Body
from shared_schemas.rewards import StepRewards
from shared_schemas.rollouts import EnvSpec, PolicySpec, Seed, Start
from shared_schemas.trajectory import StepMetadata
from task_app.complaints import invalid, most_telling
from task_app.errors import NotRestorable, SnapshotRefused, boundary
from task_app.plugins import PlugBoards, PolicyContext
from task_app.protocols import (
    PAST_DECISIONS_SHOWN,
    Environment,
    PastDecision,
    RestorableEnvironment,
    RestorablePolicy,
    policy_name,
)
from task_app.sessions.sessions import EnvironmentSession, PolicySession
from task_app.snapshots.envelope import Contents, open_envelope, seal
from task_app.snapshots.starts import Begun, EpisodeStart, impossible, restored, resumed
from task_app.threads import Threads

# Who named the switches of a restored session: `EnvironmentSession.switches` names everybody who did.
FROM_SNAPSHOT = "the snapshot"


class EnvironmentFacts(Body):
    """What a session knows beside the state of its environment; `step_rewards` when anybody named them."""

    env: EnvSpec
    seed: Seed
    step_idx: int = Field(ge=0)
    turn: int = Field(ge=0)
    over: bool
    step_rewards: StepRewards | None
    metadata: StepMetadata
    past: tuple[PastDecision, ...] = Field(max_length=PAST_DECISIONS_SHOWN)
    rl_run_id: str | None


class PolicyFacts(Body):
    """A policy session; `policy` without its key, `state` as the policy tells it."""

    policy: PolicySpec
    env: EnvSpec | None
    bound_env_id: str | None
    step_rewards: StepRewards | None
    turn: int = Field(ge=0)
    rl_run_id: str | None
    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class EnvironmentSnapshot:
    """A session at one moment, independent of what happens to it later."""

    facts: EnvironmentFacts
    state: bytes


F = TypeVar("F", bound=Body)


def take_environment(session: EnvironmentSession, boards: PlugBoards, *, where: str) -> EnvironmentSnapshot:
    """The session now; the caller holds its lock."""
    environment = session.environment
    if not isinstance(environment, RestorableEnvironment):
        raise NotRestorable("environment", environment.name, where=where)
    with boundary("environment.snapshot"):
        state = environment.snapshot()
    facts = EnvironmentFacts(
        env=boards.resolved(session.spec),
        seed=session.seed,
        step_idx=session.step_idx,
        turn=session.turn,
        over=session.over,
        step_rewards=session.step_rewards if session.switches else None,
        metadata=session.metadata,
        past=tuple(session.past),
        rl_run_id=session.rl_run_id,
    )
    return EnvironmentSnapshot(facts, state)


def environment_session(snapshot: EnvironmentSnapshot, boards: PlugBoards) -> EnvironmentSession:
    """A session that goes on exactly like the one that the snapshot was taken of."""
    facts = snapshot.facts
    environment = boards.environment(facts.env.env_name, facts.env.config, where="snapshot.env.")
    session = EnvironmentSession(
        environment=environment,
        spec=facts.env,
        switches={FROM_SNAPSHOT: facts.step_rewards} if facts.step_rewards else {},
        seed=facts.seed,
        step_idx=facts.step_idx,
        turn=facts.turn,
        over=facts.over,
        metadata=facts.metadata,
        past=deque(facts.past, maxlen=PAST_DECISIONS_SHOWN),
        rl_run_id=facts.rl_run_id,
    )
    session.observation = restored(environment, snapshot.state)
    return session


def episode_start(
    snapshot: EnvironmentSnapshot, asked: Start, threads: Threads | None = None
) -> EpisodeStart:
    """Return the start of an episode that continues from a snapshot, which the request sent by value."""

    async def begin(environment: Environment) -> Begun:
        return Begun(await resumed(environment, snapshot.state, threads), snapshot.facts.past)

    return EpisodeStart(begin, asked.parent_rollout_id, asked.parent_turn)


def seal_environment(snapshot: EnvironmentSnapshot, *, at_most_bytes: int) -> bytes:
    """Seal a snapshot for the wire; errors as in `snapshots.envelope.seal`."""
    with boundary("environment.snapshot"):
        head = snapshot.facts.model_dump(mode="json")
        return seal("environment", Contents(head, snapshot.state), at_most_bytes=at_most_bytes)


def open_environment(data: bytes, *, at_most_bytes: int) -> EnvironmentSnapshot:
    """Return the snapshot that `seal_environment` sealed."""
    contents = open_envelope("environment", data, at_most_bytes=at_most_bytes)
    return EnvironmentSnapshot(_facts(EnvironmentFacts, contents.head), contents.state)


def take_policy(session: PolicySession, *, where: str) -> PolicyFacts:
    """The session now; the caller holds its lock."""
    if not isinstance(session.policy, RestorablePolicy):
        raise NotRestorable("policy", policy_name(session.policy), where=where)
    with boundary(f"policy {policy_name(session.policy)}"):
        state = session.policy.snapshot()
    return PolicyFacts(
        policy=session.spec.model_copy(update={"inference_key": None}),
        env=session.env,
        bound_env_id=session.bound_env_id,
        step_rewards=session.switches,
        turn=session.turn,
        rl_run_id=session.rl_run_id,
        state=state,
    )


def policy_session(facts: PolicyFacts, boards: PlugBoards, context: PolicyContext) -> PolicySession:
    """A session that decides on like the one that the facts are of; it is bound to no environment yet."""
    spec, env = facts.policy, facts.env
    policy = boards.policy(spec.policy_name, spec.config, context, where="snapshot.policy.")
    if not isinstance(policy, RestorablePolicy):
        raise NotRestorable("policy", policy_name(policy), where="snapshot")
    with boundary(f"policy {policy_name(policy)}"):
        try:
            policy.restore(facts.state)
        except ValueError as exc:
            raise impossible(policy_name(policy), exc) from exc
    return PolicySession(
        policy=policy,
        spec=spec.model_copy(update={"inference_key": context.inference_key}),
        environment=boards.environment(env.env_name, env.config, where="snapshot.env.") if env else None,
        env=env,
        turn=facts.turn,
        rl_run_id=facts.rl_run_id,
    )


def seal_policy(facts: PolicyFacts, *, at_most_bytes: int) -> bytes:
    """The policy as it travels; errors as in `snapshots.seal`."""
    with boundary("policy.snapshot"):
        return seal("policy", Contents(facts.model_dump(mode="json"), b""), at_most_bytes=at_most_bytes)


def open_policy(data: bytes, *, at_most_bytes: int) -> PolicyFacts:
    """What `seal_policy` was given; errors as in `open_environment`."""
    return _facts(PolicyFacts, open_envelope("policy", data, at_most_bytes=at_most_bytes).head)


def _facts(model: type[F], head: Mapping[str, Any]) -> F:
    try:
        return model.model_validate(head)
    except ValidationError as exc:
        told = invalid(
            most_telling(exc.errors(include_url=False)), where="snapshot", known=model.model_fields
        )
        raise SnapshotRefused(told.detail, where=told.where) from exc
