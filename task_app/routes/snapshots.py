"""Routes that take a snapshot of a session, open a session from a snapshot, and copy live sessions.

The reply of a snapshot route contains the snapshot itself. The task app also keeps it for a while in memory,
under `snapshot_id`. It writes no file, so the field `path`, which other task apps define, is null.
"""

import secrets
from itertools import chain, repeat
from typing import Any

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from shared_schemas.base import Reply
from shared_schemas.messages import ToolSpec
from shared_schemas.rewards import StepRewards
from shared_schemas.rollouts import InferenceKey
from shared_schemas.trajectory import StepMetadata
from task_app.environment_calls import list_tools
from task_app.errors import InvalidRequest, TaskAppError, UnknownId, clipped
from task_app.routes.policy import PolicyCreateReply
from task_app.routes.wire import EnvId, ForeignBody, ObservationReply, ReplyJSON, Router, observation_json
from task_app.services import Services, get_services
from task_app.sessions.sessions import EnvironmentSession, PolicySession
from task_app.sessions.snapshots import FROM_SNAPSHOT, EnvironmentSnapshot, PolicySnapshot
from task_app.sessions.switches import agree_on_step_rewards
from task_app.snapshots.envelope import from_text, to_text

router = Router(tags=["snapshots"])

PATH_NOTE = "path is null: no file is written; keep `snapshot`, or use `snapshot_id` here while it is held"


class EnvSnapshotRequest(ForeignBody):
    env_id: EnvId


class PolicySnapshotRequest(ForeignBody):
    policy_id: str = Field(min_length=1, max_length=200)


class Restore(ForeignBody):
    """A snapshot as text, or the id of a snapshot that this task app still keeps in memory."""

    snapshot: str | None = Field(
        default=None, description="from the reply of /env/snapshot or /policy/snapshot"
    )
    snapshot_id: str | None = Field(default=None, max_length=200)


class PolicyRestore(Restore):
    inference_key: InferenceKey | None = Field(default=None, description="snapshots hold no key")
    bound_env_id: str | None = Field(
        default=None, max_length=200, description="by default the environment that it was bound to"
    )


class SnapshotReply(Reply):
    """A snapshot as text, and the id under which this task app keeps it in memory for a while."""

    snapshot_id: str | None = Field(description="null: it is too large to be held")
    snapshot: str
    size: int = Field(description="bytes, before it became text")
    rl_run_id: str | None
    path: str | None = Field(description="null: no file is written")
    notes: tuple[str, ...]


class EnvSnapshotInfo(Reply):
    env_name: str
    seed: int
    turn: int


class EnvSnapshotReply(SnapshotReply):
    step_idx: int
    info: EnvSnapshotInfo


class PolicySnapshotInfo(Reply):
    policy_name: str
    turn: int
    bound_env_id: str | None


class PolicySnapshotReply(SnapshotReply):
    info: PolicySnapshotInfo


class EnvRestoreInfo(Reply):
    seed: int
    turn: int
    done: bool
    tools: tuple[ToolSpec, ...]


class EnvRestoreReply(Reply):
    """A new environment in the snapshot's state; `metadata` describes the decision before the snapshot."""

    env_id: str
    observation: ObservationReply
    info: EnvRestoreInfo
    step_idx: int
    metadata: StepMetadata


class PolicyRestoreReply(PolicyCreateReply):
    """A new policy in the state of the snapshot; it had made `turn` decisions when the snapshot was taken."""

    turn: int


@router.post("/env/snapshot", response_model=EnvSnapshotReply)
async def snapshot_env(request: Request, body: EnvSnapshotRequest) -> Response:
    """Take a snapshot of an environment session, without changing the session."""
    services = get_services(request)
    session = services.environments.get(body.env_id, where="env_id")
    async with session.lock:
        snapshot = EnvironmentSnapshot.take(session, services.boards, where="env_id")
    data = snapshot.seal(at_most_bytes=services.settings.max_snapshot_bytes)
    facts = snapshot.facts
    info = {"env_name": facts.env.env_name, "seed": facts.seed, "turn": facts.turn}
    return _reply_snapshot(
        services, data, rl_run_id=facts.rl_run_id, more={"step_idx": facts.step_idx, "info": info}
    )


@router.post("/env/restore", response_model=EnvRestoreReply)
async def restore_env(request: Request, body: Restore) -> Response:
    """Open an environment session that continues from the snapshot.

    The same tool calls give the same observations and rewards as in the original session.
    """
    services = get_services(request)
    services.environments.check_capacity()
    data = _read_snapshot(services, body)
    snapshot = EnvironmentSnapshot.open(data, at_most_bytes=services.settings.max_snapshot_bytes)
    session = await services.threads.run("environment.restore", snapshot.session, services.boards)
    env_id = services.environments.add(session)
    tools = [tool.model_dump(mode="json") for tool in list_tools(session.environment)]
    return ReplyJSON(
        {
            "env_id": env_id,
            "observation": observation_json(session.observation),
            "info": {"seed": session.seed, "turn": session.turn, "done": session.over, "tools": tools},
            "step_idx": session.step_idx,
            "metadata": session.metadata.model_dump(mode="json", exclude_none=True),
        }
    )


@router.post("/policy/snapshot", response_model=PolicySnapshotReply)
async def snapshot_policy(request: Request, body: PolicySnapshotRequest) -> Response:
    """Take a snapshot of a policy: its random generator, memory and number of decisions, but no API key."""
    services = get_services(request)
    session = services.policies.get(body.policy_id, where="policy_id")
    async with session.lock:
        snapshot = PolicySnapshot.take(session, where="policy_id")
    data = snapshot.seal(at_most_bytes=services.settings.max_snapshot_bytes)
    name, turn = snapshot.policy.policy_name, snapshot.turn
    info = {"policy_name": name, "turn": turn, "bound_env_id": snapshot.bound_env_id}
    return _reply_snapshot(services, data, rl_run_id=snapshot.rl_run_id, more={"info": info})


@router.post("/policy/restore")
async def restore_policy(request: Request, body: PolicyRestore) -> PolicyRestoreReply:
    """Create a policy that continues from the snapshot.

    The policy is bound to `bound_env_id`, by default to the environment of the original policy, if any.
    """
    services = get_services(request)
    services.policies.check_capacity()
    data = _read_snapshot(services, body)
    snapshot = PolicySnapshot.open(data, at_most_bytes=services.settings.max_snapshot_bytes)
    context = services.policy_context(inference_key=body.inference_key)
    session = snapshot.session(services.boards, context)
    bound_env_id = body.bound_env_id or snapshot.bound_env_id
    policy_id = add_policy(services, session, bound_env_id=bound_env_id, switches=snapshot.step_rewards)
    return PolicyRestoreReply(policy_id=policy_id, bound_env_id=bound_env_id, turn=session.turn)


def add_policy(
    services: Services, session: PolicySession, *, bound_env_id: str | None, switches: StepRewards | None
) -> str:
    """Add a restored policy under a new id, and return the id.

    If `bound_env_id` is given, bind the policy to that environment. The policy's reward switches then apply
    to the environment too.

    Raises:
        UnknownId: this task app has no such environment.
        InvalidRequest: the environment's reward switches differ from the policy's.
    """
    if bound_env_id is None:
        return services.policies.add(session)
    environment = services.environments.find(bound_env_id)
    if environment is None:
        hint = "name the environment to bind to as bound_env_id"
        raise UnknownId("env", bound_env_id, where="bound_env_id", hint=hint)
    if switches is not None:
        agree_on_step_rewards(environment.switches | {FROM_SNAPSHOT: switches})
    session.bound_env_id, session.switches = bound_env_id, switches
    policy_id = services.policies.add(session)
    if switches is not None:
        environment.switches[policy_id] = switches
    return policy_id


def _reply_snapshot(
    services: Services, data: bytes, *, rl_run_id: str | None, more: dict[str, Any]
) -> Response:
    """Keep the snapshot in memory under a new id, and return a response with the snapshot and its id."""
    snapshot_id = f"snapshot_{secrets.token_hex(8)}"
    is_held = services.snapshots.put(snapshot_id, data)
    answer = {
        "snapshot_id": snapshot_id if is_held else None,
        "snapshot": to_text(data),
        "size": len(data),
        "rl_run_id": rl_run_id,
        "path": None,
        "notes": [PATH_NOTE] if is_held else [PATH_NOTE, "snapshot_id is null: it is too large to be held"],
    }
    return ReplyJSON(answer | more)


def _read_snapshot(services: Services, body: Restore) -> bytes:
    if (body.snapshot is None) == (body.snapshot_id is None):
        raise InvalidRequest("give either snapshot or snapshot_id", where="snapshot")
    if body.snapshot is not None:
        return from_text(body.snapshot, where="snapshot")
    assert body.snapshot_id is not None, "the request gives one of the two"
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
    num_children: int = Field(default=1, ge=1, description="copies of each session")
    max_branches: int = Field(default=10, ge=1, description="largest num_children")


class BranchReply(Reply):
    """Maps the id of each copied session to the ids of its copies."""

    env_branches: Children
    policy_branches: Children


@router.post("/branch")
async def branch_sessions(request: Request, body: Branch) -> BranchReply:
    """Make `num_children` copies of each session. If one copy fails, no session is copied.

    If the request also copies the environment that a policy is bound to, the policy's n-th copy is bound to
    the environment's n-th copy. If not, all copies of the policy are bound to the original environment.
    """
    services = get_services(request)
    _check_branch(services, body)
    environments = [await _copy_environment(services, env_id, body.num_children) for env_id in body.env_ids]
    policies = [await _copy_policy(services, policy_id, body.num_children) for policy_id in body.policy_ids]
    # Other requests may have run during the copying. No code awaits from here on, so this check stays valid.
    _check_branch(services, body)
    children: dict[str, Children] = {"env_branches": {}, "policy_branches": {}}
    try:
        for env_id, sessions in zip(body.env_ids, environments, strict=True):
            ids = children["env_branches"][env_id] = []
            for child in sessions:
                ids.append(services.environments.add(child))
        for policy_id, copies in zip(body.policy_ids, policies, strict=True):
            parent = services.policies.get(policy_id, where="policy_ids")
            bound = parent.bound_env_id
            targets = children["env_branches"].get(bound, repeat(bound)) if bound else repeat(None)
            ids = children["policy_branches"][policy_id] = []
            for copy, target in zip(copies, targets, strict=False):
                ids.append(add_policy(services, copy, bound_env_id=target, switches=parent.switches))
    except TaskAppError:
        # The journal could not store a copy, so the copies that are already added are removed.
        for policy_id in chain(*children["policy_branches"].values()):
            services.unbind(policy_id, services.policies.remove(policy_id, where="policy_ids"))
        for env_id in chain(*children["env_branches"].values()):
            services.environments.remove(env_id, where="env_ids")
        raise
    return BranchReply.model_validate(children)


def _check_branch(services: Services, body: Branch) -> None:
    """Check that every session exists and is named once, and that the limits allow the requested copies."""
    if body.num_children > body.max_branches:
        raise InvalidRequest(
            f"num_children is {body.num_children}, max_branches {body.max_branches}",
            where="num_children",
            hint="a request with more children needs a larger max_branches",
        )
    for where, ids in (("env_ids", body.env_ids), ("policy_ids", body.policy_ids)):
        if len(set(ids)) < len(ids):
            raise InvalidRequest("an id is named twice; use num_children for several copies", where=where)
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


async def _copy_environment(services: Services, env_id: str, count: int) -> list[EnvironmentSession]:
    session = services.environments.get(env_id, where="env_ids")
    async with session.lock:
        snapshot = EnvironmentSnapshot.take(session, services.boards, where="env_ids")
    # One thread makes all copies, because copying a Crafter environment takes only a third of a millisecond.
    return await services.threads.run(
        "environment.restore", lambda: [snapshot.session(services.boards) for _ in range(count)]
    )


async def _copy_policy(services: Services, policy_id: str, count: int) -> list[PolicySession]:
    session = services.policies.get(policy_id, where="policy_ids")
    async with session.lock:
        snapshot = PolicySnapshot.take(session, where="policy_ids")
    key = session.spec.inference_key
    return [
        snapshot.session(services.boards, services.policy_context(inference_key=key)) for _ in range(count)
    ]
