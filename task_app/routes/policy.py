"""/policy: policies that the caller asks for decisions.

A bound policy reads its observations from an environment session; an unbound one gets them from the caller.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Request
from pydantic import Field, SecretStr
from starlette.responses import Response

from shared_schemas.base import OpenReply, Reply
from shared_schemas.messages import Message, ToolCall, ToolSpec
from shared_schemas.rollouts import EnvSpec, InferenceKey, Name, PolicySpec, Seed
from shared_schemas.trajectory import DecisionRewards, Sampling, StepMetadata
from task_app.complaints import validated
from task_app.episode.decisions import NO_METADATA
from task_app.episode.worker import decide
from task_app.errors import CriticalError, DeadlineExceeded, InferenceKeyNeeded, InvalidRequest, boundary
from task_app.protocols import Environment, Observation, PolicyObservation, RestorablePolicy, policy_name
from task_app.routes.wire import OK, CreateBody, ForeignBody, Ok, ReplyJSON, Router
from task_app.services import Services, get_services
from task_app.sessions.sessions import PolicySession
from task_app.sessions.snapshots import PolicySnapshot
from task_app.sessions.switches import agree_on_step_rewards, take_step_rewards

router = Router(prefix="/policy", tags=["policy"])

_UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


class PolicyCreate(CreateBody):
    policy_name: Name
    seed: Seed | None = Field(
        default=None, description="goes into a config that has such a field and does not set it"
    )
    inference_key: InferenceKey | None = Field(default=None, description="for config.inference_url alone")
    bound_env_id: str | None = Field(default=None, max_length=200)
    env: EnvSpec | None = Field(default=None, description="writes the prompts of an unbound policy")
    rl_run_id: str | None = Field(default=None, max_length=200)


class PolicyQuestion(ForeignBody):
    observation: dict[str, Any] | None = Field(
        default=None,
        description="for an unbound policy: {messages} or {text, data}; a bound one reads its environment",
    )
    dry_run: bool = Field(default=False, description="build the prompt without asking the policy")
    inference_key: InferenceKey | None = Field(
        default=None, description="replaces the key; needed again after a restart, since no key is on disk"
    )


class PolicyStep(PolicyQuestion):
    policy_id: str = Field(min_length=1, max_length=200)


class PolicyTerminate(ForeignBody):
    policy_id: str = Field(min_length=1, max_length=200)


class PolicyCreateReply(Reply):
    """The id of a new policy, and the id of the environment that it is bound to."""

    policy_id: str
    bound_env_id: str | None


class PolicyMeta(OpenReply):
    """Facts about a decision of the policy. A policy may add further keys, such as the exact tokens.

    In a dry run the policy decides nothing: `messages` and `tools` are set, and no key of a decision is set.
    """

    policy_name: str
    decision_rewards: DecisionRewards | None = None
    dry_run: bool = False
    messages: tuple[Message, ...] = ()
    tools: tuple[ToolSpec, ...] = ()
    action_type: str | None = None
    raw_policy_output: str | None = None
    invalid_reason: str | None = None
    value_estimate: float | None = None
    sampling: Sampling | None = None
    turn: int | None = None
    policy_s: float | None = None


class PolicyStepReply(Reply):
    """The tool calls of a decision, as POST /env/step accepts them."""

    tool_calls: tuple[ToolCall, ...]
    meta: PolicyMeta


@router.post("/create")
async def create_policy(request: Request, body: PolicyCreate) -> PolicyCreateReply:
    """Create a policy.

    The reward switches may be in `config`, `env.config`, `training` or `rollout`. If the policy is bound to
    an environment, the switches apply to the environment too.
    """
    services = get_services(request)
    services.policies.check_capacity()
    config, switches = take_step_rewards(
        body.config, where="config", training=body.training, rollout=body.rollout
    )
    env_config, of_env = take_step_rewards(body.env.config if body.env else {}, where="env.config")
    switches |= of_env
    context = services.policy_context(inference_key=body.inference_key, seed=body.seed)
    policy = services.boards.policy(body.policy_name, config, context)
    name = services.boards.policy_name(body.policy_name)
    spec = PolicySpec(policy_name=name, config=config, seed=body.seed, inference_key=body.inference_key)
    session = PolicySession(
        policy=policy, spec=spec, bound_env_id=body.bound_env_id, rl_run_id=body.rl_run_id
    )
    if body.bound_env_id is not None:
        environment = services.environments.get(body.bound_env_id, where="bound_env_id")
        switches_in_force = agree_on_step_rewards(environment.switches | switches)
        session.switches = switches_in_force if switches else None
        policy_id = services.policies.add(session)
        if switches:
            environment.switches[policy_id] = switches_in_force
        return PolicyCreateReply(policy_id=policy_id, bound_env_id=body.bound_env_id)
    agree_on_step_rewards(switches)
    if body.env is not None:
        session.environment = services.boards.environment(body.env.env_name, env_config, where="env.")
        name = services.boards.environment_name(body.env.env_name, where="env.")
        session.env = EnvSpec(env_name=name, config=env_config)
    return PolicyCreateReply(policy_id=services.policies.add(session), bound_env_id=None)


@router.post("/step", response_model=PolicyStepReply)
async def step_policy(request: Request, body: PolicyStep) -> Response:
    """Let the policy choose the tool calls of the next decision.

    If the policy is bound, `meta.decision_rewards` are the rewards of the environment's last decision.
    """
    services = get_services(request)
    session = services.policies.get(body.policy_id, where="policy_id")
    async with session.lock, _blame_caller(session):
        observation, environment, metadata = await _observe(services, session, body)
        specs = await services.fetch_tools(environment) if environment else ()
        tools = [tool.model_dump(mode="json") for tool in specs]
        meta: dict[str, Any] = {"policy_name": policy_name(session.policy)}
        meta |= metadata.model_dump(mode="json", exclude_none=True)
        if body.dry_run:
            messages = [message.model_dump(mode="json", exclude_none=True) for message in observation]
            meta |= {"dry_run": True, "messages": messages, "tools": tools}
            return ReplyJSON({"tool_calls": [], "meta": meta})
        policy = session_policy(services, session, inference_key=body.inference_key, where="inference_key")
        start_s = time.perf_counter()
        at_most_s = services.settings.policy_deadline_s
        try:
            choice, action = await decide(policy, observation, tools, timeout_s=at_most_s)
        except TimeoutError as exc:
            raise DeadlineExceeded(f"policy {policy.name!r} did not decide within {at_most_s:g} s") from exc
        facts = {name: value for name, value in choice.log_probs.items() if value is not None}
        sampling = facts.pop("sampling", None)
        meta |= facts | {
            "action_type": choice.action["type"],
            "raw_policy_output": choice.raw_output,
            "invalid_reason": action.invalid_reason,
            "value_estimate": choice.value,
            "sampling": sampling.model_dump(mode="json") if sampling is not None else None,
            "turn": session.turn,
            "policy_s": time.perf_counter() - start_s,
        }
        calls = [call.model_dump(mode="json", exclude_none=True) for call in action.tool_calls]
        return ReplyJSON({"tool_calls": calls, "meta": meta})


@router.post("/terminate")
async def terminate_policy(request: Request, body: PolicyTerminate) -> Ok:
    """Delete the policy and its reward switches; an environment that it is bound to remains."""
    services = get_services(request)
    services.unbind(body.policy_id, services.policies.remove(body.policy_id, where="policy_id"))
    return OK


@asynccontextmanager
async def _blame_caller(session: PolicySession) -> AsyncIterator[None]:
    """Raise InvalidRequest instead of CriticalError if the caller's observation could not be read.

    Errors of a bound policy pass unchanged, because its observation comes from the environment.
    """
    try:
        yield
    except CriticalError as exc:
        if session.bound_env_id is not None or not isinstance(exc.__cause__, _UNREADABLE):
            raise
        raise InvalidRequest(
            "the policy, or the environment that writes its prompts, cannot read this observation",
            where="observation",
            hint="give text and data as the environment's observations have them; the log has the reason",
        ) from exc


async def _observe(
    services: Services, session: PolicySession, body: PolicyStep
) -> tuple[PolicyObservation, Environment | None, StepMetadata]:
    """Return what a decision of the policy needs, and the metadata of the bound environment's last decision.

    The first two results are the observation, and the environment whose tools the policy may call.
    """
    if session.bound_env_id is not None:
        bound = services.environments.get(session.bound_env_id, where="bound_env_id")
        # Without the lock, a step in a thread could change the environment while it is read here.
        async with bound.lock:
            observation = PolicyObservation(bound.prompt(), bound.observation.data)
            return observation, bound.environment, bound.metadata
    if body.observation is None:
        raise InvalidRequest(
            "an unbound policy needs an observation: {messages} or {text, data}", where="observation"
        )
    return _read_observation(body.observation, session.environment), session.environment, NO_METADATA


def _read_observation(observation: dict[str, Any], environment: Environment | None) -> PolicyObservation:
    data = observation.get("data")
    data = data if isinstance(data, dict) else {}
    if "messages" in observation:
        where, listed = "observation.messages", observation["messages"]
        if not isinstance(listed, list) or not listed:
            raise InvalidRequest(f"{where} is no list of messages", where=where)
        return PolicyObservation((validated(Message, message, where=where) for message in listed), data)
    text = observation.get("text")
    if not isinstance(text, str):
        raise InvalidRequest("observation holds neither messages nor a text", where="observation")
    if environment is None:
        return PolicyObservation((Message(role="user", content=text),), data)
    with boundary("environment.messages"):
        return PolicyObservation(environment.messages(Observation(text=text, data=data), ()), data)


def session_policy(
    services: Services, session: PolicySession, *, inference_key: SecretStr | None, where: str
) -> PolicySession:
    """Give the policy the request's `inference_key`, if there is one, and return the session.

    Raises:
        InferenceKeyNeeded: a restart lost the policy's key, and the request contains none.
        InvalidRequest: the policy cannot change its key.
    """
    if inference_key is not None and inference_key != session.spec.inference_key:
        _give_key(services, session, inference_key, where=where)
    elif session.has_lost_key:
        raise InferenceKeyNeeded(
            "this policy's inference_key was lost when the process was restarted",
            where=where,
            hint=f"send {where} with this request",
        )
    return session


def _give_key(services: Services, session: PolicySession, inference_key: SecretStr, *, where: str) -> None:
    """Replace the session's policy by one with another key, which continues from the same state."""
    if not isinstance(session.policy, RestorablePolicy):
        raise InvalidRequest(
            f"policy {policy_name(session.policy)!r} cannot take another inference_key: "
            "it has no snapshot() and restore()",
            where=where,
            hint="make another policy with the key",
        )
    context = services.policy_context(inference_key=inference_key)
    successor = PolicySnapshot.take(session, where=where).session(services.boards, context)
    session.policy, session.spec, session.has_lost_key = successor.policy, successor.spec, False
