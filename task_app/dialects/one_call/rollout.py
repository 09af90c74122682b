"""Plays the rollouts of POST /rollout, an API of older Crafter task apps.

Each episode is an RLRolloutWorker in the rollout service's queue, and is therefore limited, listed, cancelled
and aborted like the episodes of POST /rollouts. As in the older task apps, a decision that is invalid or
contains no tool call ends the episode.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from typing import Any

from shared_schemas.messages import Message, ToolSpec
from shared_schemas.rollouts import EnvSpec, PolicySpec, RolloutLimits, RolloutRequest, Start
from shared_schemas.task_definition import TaskDefinitionModel
from shared_schemas.trajectory import StopReason
from task_app.dialects.one_call.plan import LegacyPlan, plan_rollout
from task_app.dialects.one_call.reply import Cast, Episode, Result, reply
from task_app.dialects.one_call.request import LegacyRollout, agree_on_stepwise
from task_app.environment_calls import list_tools
from task_app.episode.release import close
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
from task_app.routes.policy import session_policy
from task_app.services import Services
from task_app.sessions.sessions import EnvironmentSession, PolicySession
from task_app.sessions.switches import agree_on_step_rewards


async def legacy_rollout(services: Services, body: LegacyRollout) -> dict[str, Any]:
    """Play the requested rollout, and return the reply."""
    plan = plan_rollout(body, services.boards, services.settings)
    async with _cast(services, plan) as cast:
        result = await _play(services, cast)
    if cast.env_session is not None and cast.env_session.over and body.on_done == "reset":
        await cast.env_session.reset(cast.env_session.seed)
    return reply(result, cast, created_at=datetime.now(UTC))


@asynccontextmanager
async def _cast(services: Services, plan: LegacyPlan) -> AsyncIterator[Cast]:
    """Build the environment and the policy, or find their living sessions; keep these sessions locked."""
    body = plan.body
    env_session: EnvironmentSession | None = None
    async with AsyncExitStack() as locks:
        if body.env.env_id is None:
            environment = services.boards.environment(plan.env_name, plan.env_config, where="env.")
        else:
            env_session = services.environments.get(body.env.env_id, where="env.env_id")
            await _lock_session(env_session, locks, where="env.env_id")
            if env_session.over:
                raise EpisodeOver(where="env.env_id")
            environment = SessionEnvironment(env_session)
        policy: AgentPolicy
        url: Any = plan.policy_config.get("inference_url")
        if body.policy.policy_id is None:
            context = services.policy_context(inference_key=plan.inference_key)
            policy = services.boards.policy(plan.policy_name, plan.policy_config, context, where="policy.")
        else:
            session = services.policies.get(body.policy.policy_id, where="policy.policy_id")
            await _lock_session(session, locks, where="policy.policy_id")
            policy = session_policy(
                services, session, inference_key=plan.inference_key, where="policy.inference_key"
            )
            url = session.spec.config.get("inference_url")
        # Use the request's reward switches, or else the living environment's. If both exist, they must agree.
        switches = dict(env_session.switches) if env_session is not None else {}
        stepwise = plan.stepwise or agree_on_stepwise(switches)
        agree_on_step_rewards(switches | {"step_rewards of this rollout": stepwise})
        yield Cast(
            plan=plan,
            environment=environment,
            policy=policy,
            stepwise=stepwise,
            env_session=env_session,
            seed=plan.seed if env_session is None else env_session.seed,
            inference_url=url if isinstance(url, str) else None,
        )


async def _lock_session(
    session: EnvironmentSession | PolicySession, locks: AsyncExitStack, *, where: str
) -> None:
    if session.lock.locked():
        # Refuse instead of waiting, because a rollout may hold the lock for hours.
        raise SessionBusy("another request is using it now", where=where)
    await locks.enter_async_context(session.lock)


async def _play(services: Services, cast: Cast) -> Result:
    """Play one episode, or several.

    With `on_done = "reset"` and a new environment, episodes are played until the request's ops are used up.
    """
    body = cast.plan.body
    until_s = time.monotonic() + body.safety.max_time_s
    rest, result = cast.plan.decisions, Result()
    while rest:
        try:
            episode = await _play_episode(services, cast, rest, until_s - time.monotonic())
        except RunAborted as exc:
            # The run was aborted before this episode began.
            result.warnings.append(exc.detail)
            result.aborted = True
            break
        result.episodes.append(episode)
        result.aborted = episode.is_cancelled
        rest -= len(episode.steps)
        if episode.is_cancelled and services.runner.is_cut_short(body.run_id):
            # An error lets the client retry. Raise none if a retry would repeat decisions in living sessions.
            count = sum(len(episode.steps) for episode in result.episodes)
            if not count or (body.env.env_id is None and body.policy.policy_id is None):
                raise ShuttingDown("this task app stopped before the rollout was over; nothing of it is kept")
            decisions = "1 decision" if count == 1 else f"{count} decisions"
            result.warnings.append(
                f"the task app stopped after {decisions}; living sessions go on from there"
            )
        if episode.stop_reason is not StopReason.ENVIRONMENT_DONE or body.on_done == "terminate":
            break
        if cast.env_session is not None:
            # Do not play a second episode, because the client controls the resets of a living environment.
            remainder = f"; {rest} decisions of ops are left" if rest else ""
            result.warnings.append(f"on_done is reset: the environment was restarted{remainder}")
            break
    return result


async def _play_episode(services: Services, cast: Cast, decisions: int, timeout_s: float) -> Episode:
    recorder, body = ObservationRecorder(cast.environment), cast.plan.body
    limits = RolloutLimits(max_decisions=decisions, max_invalid_decisions=1, timeout_s=body.safety.max_time_s)
    # The rollout service lists this request while the episode runs.
    request = RolloutRequest(
        rollout_id=f"legacy/{secrets.token_hex(8)}",
        run_id=body.run_id,
        start=Start(seed=cast.seed),
        env=EnvSpec(env_name=cast.environment.name),
        policy=PolicySpec(policy_name=policy_name(cast.policy)),
        step_rewards=cast.stepwise.step_rewards,
        limits=limits,
    )
    worker = RLRolloutWorker(
        task_definition=TaskDefinitionModel.of_request(request),
        environment=recorder,
        agent_policy=cast.policy,
        seed=cast.seed,
        step_rewards=cast.stepwise.step_rewards,
    )
    is_timed_out = False
    try:
        # This time limit includes the time in the queue; the worker's own limit does not.
        async with asyncio.timeout(max(0.0, timeout_s)):
            await services.runner.play(request, worker)
    except TimeoutError:
        is_timed_out = True
    return Episode(
        steps=worker.steps,
        observations=tuple(recorder.observations),
        outcome_reward=worker.trajectory().outcome_reward if worker.stop_reason else None,
        stop_reason=worker.stop_reason,
        failure=worker.failure,
        is_timed_out=is_timed_out or worker.stop_reason is StopReason.DEADLINE,
    )


class _Wrapper:
    """Base of environments that delegate all methods but `reset` and `step` to another environment."""

    def __init__(self, environment: Environment) -> None:
        self._inner = environment
        self.name = environment.name
        self.outcome_definition = environment.outcome_definition

    def tools(self) -> tuple[ToolSpec, ...]:
        return list_tools(self._inner)

    def messages(self, observation: Observation, past: Sequence[PastDecision]) -> tuple[Message, ...]:
        return self._inner.messages(observation, past)

    def outcome_reward(self) -> float:
        return self._inner.outcome_reward()


class SessionEnvironment(_Wrapper):
    """Presents a living session as an `Environment`, so that an episode continues from the session's state.

    The caller must hold the session's lock.
    """

    def __init__(self, env_session: EnvironmentSession) -> None:
        super().__init__(env_session.environment)
        self._session = env_session

    def reset(self, seed: int) -> Observation:
        """Return the session's present observation, so that the episode continues from it."""
        if self._session.over:
            raise EpisodeOver()
        return self._session.observation

    def step(self, calls: Sequence[ToolRequest], *, invalid_reason: str | None = None) -> DecisionOutcome:
        _, outcome = self._session.take(calls, invalid_reason=invalid_reason)
        return outcome

    def messages(self, observation: Observation, past: Sequence[PastDecision]) -> tuple[Message, ...]:
        # The session's history may begin before this rollout, so `past` may lack its first decisions.
        return self._inner.messages(observation, tuple(self._session.past))


class ObservationRecorder(_Wrapper):
    """Records the observations of an episode of T decisions in `observations` [T + 1].

    They are the observations before each decision, and the observation after the last decision.
    """

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.observations: list[Observation] = []

    def reset(self, seed: int) -> Observation:
        observation = self._inner.reset(seed)
        self.observations = [observation]
        return observation

    def step(self, calls: Sequence[ToolRequest], *, invalid_reason: str | None = None) -> DecisionOutcome:
        outcome = self._inner.step(calls, invalid_reason=invalid_reason)
        self.observations.append(outcome.observation)
        return outcome

    def close(self) -> None:
        close(self._inner)
