"""POST /rollout behind its route: plan, play through the one episode loop, reply (the ancestor's contract).

Each episode is an RLRolloutWorker in the rollout service's own queue: bounded, listed, cancelled and aborted
like every other. Legacy endings: the first decision that is invalid, or holds no call, is the last.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from shared_schemas.messages import Message, ToolSpec
from shared_schemas.rollouts import EnvSpec, PolicySpec, RolloutLimits, RolloutRequest, Start
from shared_schemas.task_definition import TaskDefinitionModel
from shared_schemas.trajectory import StopReason
from task_app.dialects.one_call.plan import LegacyPlan, correlation_id, plan_rollout
from task_app.dialects.one_call.reply import Episode, Names, Stepwise, Wanted, reply
from task_app.dialects.one_call.request import LegacyRollout
from task_app.episode.worker import RLRolloutWorker
from task_app.errors import EpisodeOver, SessionBusy, ShuttingDown
from task_app.protocols import (
    AgentPolicy,
    DecisionOutcome,
    Environment,
    Observation,
    PastDecision,
    ToolRequest,
    policy_name,
)
from task_app.rollouts.runs import RunAborted
from task_app.routes.policy import living_policy
from task_app.services import Services
from task_app.sessions.sessions import EnvironmentSession, PolicySession
from task_app.sessions.switches import agreed_step_rewards


@dataclass(frozen=True, slots=True)
class Cast:
    """Who plays: the environment and the policy, new or living, and by which switches."""

    environment: Environment
    policy: AgentPolicy
    stepwise: Stepwise
    session: EnvironmentSession | None
    seed: int
    inference_url: str | None


@dataclass(slots=True)
class Played:
    episodes: list[Episode] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    aborted: bool = False


async def legacy_rollout(services: Services, body: LegacyRollout) -> dict[str, Any]:
    """Play what the request asks for; its reply."""
    plan = plan_rollout(body, services.boards, services.settings)
    async with _cast(services, body, plan) as cast:
        played = await _play(services, body, plan, cast)
    if cast.session is not None and cast.session.over and body.on_done == "reset":
        await cast.session.reset(cast.session.seed)
    wanted = Wanted(
        trajectories=body.record.trajectories,
        logprobs=body.record.logprobs,
        value=body.record.value,
        trace_format=body.record.trace_format if body.record.return_trace else None,
        stepwise=cast.stepwise,
        warnings=(*plan.warnings, *played.warnings),
        metadata={"training_session_id": body.training_session_id, "synth_base_url": body.synth_base_url},
        created_at=datetime.now(UTC),
    )
    return reply(played.episodes, _names(body, plan, cast), wanted, aborted=played.aborted)


@asynccontextmanager
async def _cast(services: Services, body: LegacyRollout, plan: LegacyPlan) -> AsyncIterator[Cast]:
    """Build or find who plays. Living sessions are held: nobody else steps or asks them meanwhile."""
    session: EnvironmentSession | None = None
    async with AsyncExitStack() as held:
        if body.env.env_id is None:
            environment = services.boards.environment(plan.env_name, plan.env_config, where="env.")
        else:
            session = services.environments.get(body.env.env_id, where="env.env_id")
            await _hold(session, held, where="env.env_id")
            if session.over:
                raise EpisodeOver(where="env.env_id")
            environment = SessionEnvironment(session)
        policy: AgentPolicy
        url: Any = plan.policy_config.get("inference_url")
        if body.policy.policy_id is None:
            context = services.policy_context(inference_key=plan.inference_key)
            policy = services.boards.policy(plan.policy_name, plan.policy_config, context, where="policy.")
        else:
            living = services.policies.get(body.policy.policy_id, where="policy.policy_id")
            await _hold(living, held, where="policy.policy_id")
            policy = living_policy(
                services, living, inference_key=plan.inference_key, where="policy.inference_key"
            )
            url = living.spec.config.get("inference_url")
        yield Cast(
            environment=environment,
            policy=policy,
            stepwise=_switches(plan, session),
            session=session,
            seed=plan.seed if session is None else session.seed,
            inference_url=url if isinstance(url, str) else None,
        )


async def _hold(session: EnvironmentSession | PolicySession, held: AsyncExitStack, *, where: str) -> None:
    if session.lock.locked():
        # Not waited for, as elsewhere: a rollout may hold it for hours.
        raise SessionBusy("another request is using it now", where=where)
    await held.enter_async_context(session.lock)


def _switches(plan: LegacyPlan, session: EnvironmentSession | None) -> Stepwise:
    """Return the request's switches, or else the living environment's; both must agree."""
    found = dict(session.switches) if session is not None else {}
    if plan.stepwise is None:
        return Stepwise(agreed_step_rewards(found))
    agreed_step_rewards(found | {"step_rewards of this rollout": plan.stepwise.switches})
    return plan.stepwise


async def _play(services: Services, body: LegacyRollout, plan: LegacyPlan, cast: Cast) -> Played:
    """One episode; with `on_done = "reset"` and an environment of its own, as many as ops hold."""
    until_s = time.monotonic() + plan.max_time_s
    left, played = plan.decisions, Played()
    while left:
        try:
            episode = await _episode(services, body, plan, cast, left, until_s - time.monotonic())
        except RunAborted as exc:
            # Before the first episode, or between two of them.
            played.warnings.append(exc.detail)
            played.aborted = True
            break
        played.episodes.append(episode)
        played.aborted = episode.cancelled
        left -= len(episode.steps)
        if episode.cancelled and services.runner.is_cut_short(body.run_id):
            _tell_of_the_stop(body, played)
        if episode.stop_reason is not StopReason.ENVIRONMENT_DONE or body.on_done == "terminate":
            break
        if cast.session is not None:
            # Another episode would be played unseen: the caller follows this environment itself.
            after = f"; {left} decisions of ops are left" if left else ""
            played.warnings.append(f"on_done is reset: the environment was started anew{after}")
            break
    return played


def _tell_of_the_stop(body: LegacyRollout, played: Played) -> None:
    """A rollout that was cut short is to be asked for again, unless that would do something twice."""
    done = sum(len(episode.steps) for episode in played.episodes)
    if not done or (body.env.env_id is None and body.policy.policy_id is None):
        raise ShuttingDown("this task app stopped before the rollout was over; nothing of it is kept")
    decisions = "1 decision" if done == 1 else f"{done} decisions"
    played.warnings.append(f"the task app stopped after {decisions}; what lives goes on from there")


async def _episode(
    services: Services, body: LegacyRollout, plan: LegacyPlan, cast: Cast, decisions: int, timeout_s: float
) -> Episode:
    witness = Witness(cast.environment)
    limits = RolloutLimits(max_decisions=decisions, max_invalid_decisions=1, timeout_s=plan.max_time_s)
    request = _request(body, cast, limits)
    worker = RLRolloutWorker(
        task_definition=TaskDefinitionModel.of_request(request),
        environment=witness,
        agent_policy=cast.policy,
        seed=cast.seed,
        step_rewards=cast.stepwise.switches,
    )
    timed_out = False
    try:
        # Around the queue too: the worker's own limit begins when the worker does.
        async with asyncio.timeout(max(0.0, timeout_s)):
            await services.runner.play(request, worker)
    except TimeoutError:
        timed_out = True
    return Episode(
        steps=worker.steps,
        seen=tuple(witness.seen),
        outcome_reward=worker.trajectory().outcome_reward if worker.stop_reason else None,
        stop_reason=worker.stop_reason,
        failure=worker.failure,
        timed_out=timed_out or worker.stop_reason is StopReason.DEADLINE,
    )


def _request(body: LegacyRollout, cast: Cast, limits: RolloutLimits) -> RolloutRequest:
    """What the rollout service lists while the episode runs."""
    return RolloutRequest(
        rollout_id=f"legacy/{secrets.token_hex(8)}",
        run_id=body.run_id,
        start=Start(seed=cast.seed),
        env=EnvSpec(env_name=cast.environment.name),
        policy=PolicySpec(policy_name=policy_name(cast.policy)),
        step_rewards=cast.stepwise.switches,
        limits=limits,
    )


def _names(body: LegacyRollout, plan: LegacyPlan, cast: Cast) -> Names:
    """A session of this rollout alone has no id that any route would know; it is named by the run."""
    return Names(
        run_id=body.run_id,
        env_id=body.env.env_id or body.run_id,
        policy_id=body.policy.policy_id or body.run_id,
        env_name=cast.environment.name,
        policy_name=policy_name(cast.policy),
        seed=cast.seed,
        inference_url=cast.inference_url,
        correlation_id=correlation_id(body),
        policy_config=plan.policy_config,
    )


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
    """Passes calls on and keeps observations: `seen` is [T + 1], before each decision and after the last."""

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
