"""Routes of snapshots and branches: a session by value, a new session from it, and children of live ones.

A snapshot travels in the answer; the task app also holds it for a while under `snapshot_id`. Nothing is
written to disk, so the `path` that other task apps tell is null here.
"""

import secrets
from itertools import chain, repeat
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from shared_schemas.rewards import StepRewards
from shared_schemas.rollouts import InferenceKey
from task_app.errors import InvalidRequest, TaskAppError, UnknownId, clipped
from task_app.routes.wire import EnvId, ForeignBody, ReplyJSON, observation_json
from task_app.services import Services, services_of
from task_app.sessions.sessions import EnvironmentSession, PolicySession
from task_app.sessions.snapshots import (
    FROM_SNAPSHOT,
    environment_session,
    open_environment,
    open_policy,
    policy_session,
    seal_environment,
    seal_policy,
    take_environment,
    take_policy,
)
from task_app.sessions.switches import agreed_step_rewards
from task_app.snapshots.envelope import from_text, to_text

router = APIRouter(tags=["snapshots"])

PATH_NOTE = "path is null: no file is written; keep `snapshot`, or use `snapshot_id` here while it is held"


class EnvSnapshot(ForeignBody):
    env_id: EnvId


class PolicySnapshot(ForeignBody):
    policy_id: str = Field(min_length=1, max_length=200)


class Restore(ForeignBody):
    """One of the two: by value from anywhere, or by the id of one that is still held here."""

    snapshot: str | None = Field(default=None, description="as /env/snapshot or /policy/snapshot answered it")
    snapshot_id: str | None = Field(default=None, max_length=200)


class PolicyRestore(Restore):
    inference_key: InferenceKey | None = Field(default=None, description="no snapshot holds the old one")
    bound_env_id: str | None = Field(
        default=None, max_length=200, description="the environment of before when absent"
    )


@router.post("/env/snapshot")
async def snapshot_environment(request: Request, body: EnvSnapshot) -> Response:
    """Everything that the session's future depends on; the session itself goes on as it is."""
    services = services_of(request)
    session = services.environments.get(body.env_id, where="env_id")
    async with session.lock:
        taken = take_environment(session, services.boards, where="env_id")
    data = seal_environment(taken, at_most_bytes=services.settings.max_snapshot_bytes)
    facts = taken.facts
    info = {"env_name": facts.env.env_name, "seed": facts.seed, "turn": facts.turn}
    return _kept(services, data, rl_run_id=facts.rl_run_id, more={"step_idx": facts.step_idx, "info": info})


@router.post("/env/restore")
async def restore_environment(request: Request, body: Restore) -> Response:
    """A new session that goes on from there: same observations, rewards and prompts for the same calls."""
    services = services_of(request)
    services.environments.check_capacity()
    data = _given(services, body)
    taken = open_environment(data, at_most_bytes=services.settings.max_snapshot_bytes)
    session = await services.threads.run("environment.restore", environment_session, taken, services.boards)
    env_id = services.environments.add(session)
    tools = [tool.model_dump(mode="json") for tool in session.environment.tools()]
    return ReplyJSON(
        {
            "env_id": env_id,
            "observation": observation_json(session.observation),
            "info": {"seed": session.seed, "turn": session.turn, "done": session.over, "tools": tools},
            "step_idx": session.step_idx,
            "metadata": session.metadata.model_dump(mode="json", exclude_none=True),
        }
    )


@router.post("/policy/snapshot")
async def snapshot_policy(request: Request, body: PolicySnapshot) -> Response:
    """The policy with its generator, memory and count of decisions; its inference_key stays here."""
    services = services_of(request)
    session = services.policies.get(body.policy_id, where="policy_id")
    async with session.lock:
        facts = take_policy(session, where="policy_id")
    data = seal_policy(facts, at_most_bytes=services.settings.max_snapshot_bytes)
    info = {"policy_name": facts.policy.policy_name, "turn": facts.turn, "bound_env_id": facts.bound_env_id}
    return _kept(services, data, rl_run_id=facts.rl_run_id, more={"info": info})


@router.post("/policy/restore")
async def restore_policy(request: Request, body: PolicyRestore) -> dict[str, str | int | None]:
    """A new policy that decides on from there, bound as before unless `bound_env_id` says otherwise."""
    services = services_of(request)
    services.policies.check_capacity()
    data = _given(services, body)
    facts = open_policy(data, at_most_bytes=services.settings.max_snapshot_bytes)
    context = services.policy_context(inference_key=body.inference_key)
    session = policy_session(facts, services.boards, context)
    bound_env_id = body.bound_env_id or facts.bound_env_id
    policy_id = add_policy(services, session, bound_env_id=bound_env_id, switches=facts.step_rewards)
    return {"policy_id": policy_id, "bound_env_id": bound_env_id, "turn": session.turn}


def add_policy(
    services: Services, session: PolicySession, *, bound_env_id: str | None, switches: StepRewards | None
) -> str:
    """Keep a restored policy, bound to the environment with the switches that it brought to its last one.

    Raises:
        UnknownId: there is no such environment here.
        InvalidRequest: the environment has other switches.
    """
    if bound_env_id is None:
        return services.policies.add(session)
    environment = services.environments.find(bound_env_id)
    if environment is None:
        hint = "name the environment to bind to as bound_env_id"
        raise UnknownId("env", bound_env_id, where="bound_env_id", hint=hint)
    if switches is not None:
        agreed_step_rewards(environment.switches | {FROM_SNAPSHOT: switches})
    session.bound_env_id, session.switches = bound_env_id, switches
    policy_id = services.policies.add(session)
    if switches is not None:
        environment.switches[policy_id] = switches
    return policy_id


def _kept(services: Services, data: bytes, *, rl_run_id: str | None, more: dict[str, Any]) -> Response:
    """Hold the snapshot under a new id, and answer with both."""
    snapshot_id = f"snapshot_{secrets.token_hex(8)}"
    held = services.snapshots.put(snapshot_id, data)
    answer = {
        "snapshot_id": snapshot_id if held else None,
        "snapshot": to_text(data),
        "size": len(data),
        "rl_run_id": rl_run_id,
        "path": None,
        "notes": [PATH_NOTE] if held else [PATH_NOTE, "snapshot_id is null: it is too large to be held"],
    }
    return ReplyJSON(answer | more)


def _given(services: Services, body: Restore) -> bytes:
    """The snapshot that a request names or brings."""
    if (body.snapshot is None) == (body.snapshot_id is None):
        raise InvalidRequest("give either snapshot or snapshot_id", where="snapshot")
    if body.snapshot is not None:
        return from_text(body.snapshot, where="snapshot")
    assert body.snapshot_id is not None, "one of the two is there"
    data = services.snapshots.get(body.snapshot_id)
    if data is None:
        most = services.settings.max_snapshots_held
        hint = f"only {most} are held, and none over a restart; restore it by value, as 'snapshot'"
        raise UnknownId("snapshot", body.snapshot_id, where="snapshot_id", hint=hint)
    return data


Children = dict[str, list[str]]


class Branch(ForeignBody):
    env_ids: tuple[EnvId, ...] = Field(default=(), max_length=10_000)
    policy_ids: tuple[EnvId, ...] = Field(default=(), max_length=10_000)
    num_children: int = Field(default=1, ge=1, description="of each")
    max_branches: int = Field(default=10, ge=1, description="most children of one")


@router.post("/branch")
async def branch(request: Request, body: Branch) -> dict[str, Children]:
    """Copy sessions `num_children` times: all of them, or none.

    A policy bound to an environment that is branched too is bound, child by child, to that one's children;
    one whose environment stays is bound to it as before.
    """
    services = services_of(request)
    _check(services, body)
    environments = [await _environments(services, env_id, body.num_children) for env_id in body.env_ids]
    policies = [await _policies(services, policy_id, body.num_children) for policy_id in body.policy_ids]
    # Others were served meanwhile. From here on nothing waits: what holds now holds until all are added.
    _check(services, body)
    made: dict[str, Children] = {"env_branches": {}, "policy_branches": {}}
    try:
        _add(services, made, dict(zip(body.env_ids, environments, strict=True)))
        _add_policies(services, made, dict(zip(body.policy_ids, policies, strict=True)))
    except TaskAppError:
        _forget(services, made)
        raise
    return made


def _check(services: Services, body: Branch) -> None:
    """Everything is known, named once, and fits."""
    if body.num_children > body.max_branches:
        raise InvalidRequest(
            f"num_children is {body.num_children}, max_branches {body.max_branches}",
            where="num_children",
            hint="a request with more children needs a larger max_branches",
        )
    for where, ids in (("env_ids", body.env_ids), ("policy_ids", body.policy_ids)):
        if len(set(ids)) < len(ids):
            raise InvalidRequest("an id stands there twice; num_children makes several", where=where)
    unknown = [env_id for env_id in body.env_ids if services.environments.find(env_id) is None]
    policies = {policy_id: services.policies.find(policy_id) for policy_id in body.policy_ids}
    unknown += [policy_id for policy_id, session in policies.items() if session is None]
    unknown += [
        session.bound_env_id
        for session in policies.values()
        if session and session.bound_env_id and services.environments.find(session.bound_env_id) is None
    ]
    if unknown:
        where = "env_ids" if unknown[0] in body.env_ids else "policy_ids"
        hint = f"unknown, terminated, or idle for too long: {clipped(', '.join(unknown), 1_000)}"
        raise UnknownId("session", unknown[0], where=where, hint=hint)
    services.environments.check_capacity(len(body.env_ids) * body.num_children)
    services.policies.check_capacity(len(body.policy_ids) * body.num_children)


async def _environments(services: Services, env_id: str, count: int) -> list[EnvironmentSession]:
    session = services.environments.get(env_id, where="env_ids")
    async with session.lock:
        taken = take_environment(session, services.boards, where="env_ids")
    # All in one thread: a third of a millisecond each, or whatever the environment takes for it.
    return await services.threads.run(
        "environment.restore", lambda: [environment_session(taken, services.boards) for _ in range(count)]
    )


async def _policies(services: Services, policy_id: str, count: int) -> list[PolicySession]:
    session = services.policies.get(policy_id, where="policy_ids")
    async with session.lock:
        facts = take_policy(session, where="policy_ids")
    key = session.spec.inference_key
    return [
        policy_session(facts, services.boards, services.policy_context(inference_key=key))
        for _ in range(count)
    ]


def _add(
    services: Services, made: dict[str, Children], children: dict[str, list[EnvironmentSession]]
) -> None:
    for env_id, sessions in children.items():
        ids = made["env_branches"][env_id] = []
        for child in sessions:
            ids.append(services.environments.add(child))


def _add_policies(
    services: Services, made: dict[str, Children], children: dict[str, list[PolicySession]]
) -> None:
    for policy_id, sessions in children.items():
        parent = services.policies.get(policy_id, where="policy_ids")
        bound = parent.bound_env_id
        targets = made["env_branches"].get(bound, repeat(bound)) if bound else repeat(None)
        ids = made["policy_branches"][policy_id] = []
        for child, target in zip(sessions, targets, strict=False):
            ids.append(add_policy(services, child, bound_env_id=target, switches=parent.switches))


def _forget(services: Services, made: dict[str, Children]) -> None:
    """A journal that cannot be written refuses a child: then the others are not wanted either."""
    for policy_id in chain(*made["policy_branches"].values()):
        services.unbind(policy_id, services.policies.remove(policy_id, where="policy_ids"))
    for env_id in chain(*made["env_branches"].values()):
        services.environments.remove(env_id, where="env_ids")
