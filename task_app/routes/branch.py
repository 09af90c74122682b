"""/branch: children of live sessions, each going on from here on its own."""

from itertools import chain, repeat

from fastapi import APIRouter, Request
from pydantic import Field

from task_app.errors import InvalidRequest, TaskAppError, UnknownId, clipped
from task_app.routes.bodies import EnvId, ForeignBody
from task_app.routes.snapshots import add_policy
from task_app.services import Services, services_of
from task_app.sessions import EnvironmentSession, PolicySession
from task_app.snapshots.sessions import (
    environment_session,
    policy_session,
    take_environment,
    take_policy,
)

router = APIRouter(tags=["snapshots"])

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
