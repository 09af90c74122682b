"""Session routes with the id in the path: POST /env/{env_id}/step does the same as POST /env/step, and so on.

Two routes of another module, /env/{env_name}/step and /env/{env_name}/terminate, have a name in the place of
the id. The router recognises an id by its pattern. OpenAPI cannot describe an id and a name in one place, so
/openapi.json describes these two paths only with {env_name}.
"""

from typing import Annotated, TypeVar

from fastapi import Body, Path, Request
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.responses import Response

from task_app.errors import InvalidRequest, clipped
from task_app.routes import env, policy, snapshots, steps
from task_app.routes.wire import NULL_IS_EMPTY, ForeignBody, Ok, Router

router = Router()

ENV_ID = "env_[0-9a-f]{16}"
POLICY_ID = "policy_[0-9a-f]{16}"


class _EnvId(StringConvertor):
    regex = ENV_ID


class _PolicyId(StringConvertor):
    regex = POLICY_ID


register_url_convertor("env_id", _EnvId())
register_url_convertor("policy_id", _PolicyId())

EnvIdInPath = Annotated[str, Path(pattern=f"^{ENV_ID}$")]
PolicyIdInPath = Annotated[str, Path(pattern=f"^{POLICY_ID}$")]

M = TypeVar("M", bound=ForeignBody)


class Nothing(ForeignBody):
    """An empty body, because the path already names the session."""


NoBody = Annotated[Nothing, NULL_IS_EMPTY, Body(default_factory=Nothing)]


@router.post("/env/{env_id:env_id}/step", include_in_schema=False)
async def step_env_by_id(request: Request, env_id: EnvIdInPath, body: steps.EnvDecision) -> Response:
    """Do the same as POST /env/step."""
    return await steps.step_env(request, _with_id(steps.EnvStep, body, env_id=env_id))


@router.post("/env/{env_id:env_id}/reset", tags=["env"], response_model=env.EnvResetReply)
async def reset_env_by_id(
    request: Request,
    env_id: EnvIdInPath,
    body: Annotated[env.EnvWorld, NULL_IS_EMPTY, Body(default_factory=env.EnvWorld)],
) -> Response:
    """Do the same as POST /env/reset."""
    return await env.reset_env(request, _with_id(env.EnvReset, body, env_id=env_id))


@router.post("/env/{env_id:env_id}/terminate", include_in_schema=False)
async def terminate_env_by_id(request: Request, env_id: EnvIdInPath, body: NoBody) -> Ok:
    """Do the same as POST /env/terminate."""
    return await env.terminate_env(request, _with_id(env.EnvTerminate, body, env_id=env_id))


@router.post("/env/{env_id:env_id}/snapshot", tags=["snapshots"], response_model=snapshots.EnvSnapshotReply)
async def snapshot_env_by_id(request: Request, env_id: EnvIdInPath, body: NoBody) -> Response:
    """Do the same as POST /env/snapshot."""
    return await snapshots.snapshot_env(request, _with_id(snapshots.EnvSnapshotRequest, body, env_id=env_id))


@router.post("/policy/{policy_id:policy_id}/step", tags=["policy"], response_model=policy.PolicyStepReply)
async def step_policy_by_id(
    request: Request,
    policy_id: PolicyIdInPath,
    body: Annotated[policy.PolicyQuestion, NULL_IS_EMPTY, Body(default_factory=policy.PolicyQuestion)],
) -> Response:
    """Do the same as POST /policy/step."""
    return await policy.step_policy(request, _with_id(policy.PolicyStep, body, policy_id=policy_id))


@router.post(
    "/policy/{policy_id:policy_id}/snapshot", tags=["snapshots"], response_model=snapshots.PolicySnapshotReply
)
async def snapshot_policy_by_id(request: Request, policy_id: PolicyIdInPath, body: NoBody) -> Response:
    """Do the same as POST /policy/snapshot."""
    return await snapshots.snapshot_policy(
        request, _with_id(snapshots.PolicySnapshotRequest, body, policy_id=policy_id)
    )


@router.post("/policy/{policy_id:policy_id}/terminate", tags=["policy"])
async def terminate_policy_by_id(request: Request, policy_id: PolicyIdInPath, body: NoBody) -> Ok:
    """Do the same as POST /policy/terminate."""
    return await policy.terminate_policy(request, _with_id(policy.PolicyTerminate, body, policy_id=policy_id))


def _with_id(model: type[M], body: ForeignBody, **in_path: str) -> M:
    """Return a `model` with the fields of `body` and the id from the path.

    Raises:
        InvalidRequest: the body contains an id that differs from the id in the path.
    """
    for key, path_value in in_path.items():
        value = (body.model_extra or {}).get(key, path_value)
        if value != path_value:
            raise InvalidRequest(
                f"{key} is {clipped(repr(value))} in the body and {path_value!r} in the path; name it once",
                where=key,
            )
    return model(**{name: getattr(body, name) for name in type(body).model_fields}, **in_path)
