"""The session routes with the id in the path: POST /env/{env_id}/step is POST /env/step, and so on.

The handlers are the same. /env/{env_name}/step and /terminate have the same form; the router tells them apart
by the form of an id. OpenAPI cannot express that, so its document lists only the routes with a name.
"""

from typing import Annotated, TypeVar

from fastapi import APIRouter, Path, Request
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.responses import Response

from task_app.errors import InvalidRequest, clipped
from task_app.routes import env, policy, snapshots, steps
from task_app.routes.wire import ForeignBody

router = APIRouter()

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
    """An empty body; the path holds everything."""


@router.post("/env/{env_id:env_id}/step", include_in_schema=False)
async def step(request: Request, env_id: EnvIdInPath, body: steps.EnvDecision) -> Response:
    """POST /env/step."""
    return await steps.step(request, _with_id(steps.EnvStep, body, env_id=env_id))


@router.post("/env/{env_id:env_id}/reset", tags=["env"])
async def reset(request: Request, env_id: EnvIdInPath, body: env.EnvWorld | None = None) -> Response:
    """POST /env/reset."""
    return await env.reset(request, _with_id(env.EnvReset, body, env_id=env_id))


@router.post("/env/{env_id:env_id}/terminate", include_in_schema=False)
async def terminate(request: Request, env_id: EnvIdInPath, body: Nothing | None = None) -> dict[str, bool]:
    """POST /env/terminate."""
    return await env.terminate(request, _with_id(env.EnvTerminate, body, env_id=env_id))


@router.post("/env/{env_id:env_id}/snapshot", tags=["snapshots"])
async def snapshot(request: Request, env_id: EnvIdInPath, body: Nothing | None = None) -> Response:
    """POST /env/snapshot."""
    return await snapshots.snapshot_environment(
        request, _with_id(snapshots.EnvSnapshotRequest, body, env_id=env_id)
    )


@router.post("/policy/{policy_id:policy_id}/step", tags=["policy"])
async def policy_step(
    request: Request, policy_id: PolicyIdInPath, body: policy.PolicyQuestion | None = None
) -> Response:
    """POST /policy/step."""
    return await policy.step(request, _with_id(policy.PolicyStep, body, policy_id=policy_id))


@router.post("/policy/{policy_id:policy_id}/snapshot", tags=["snapshots"])
async def policy_snapshot(
    request: Request, policy_id: PolicyIdInPath, body: Nothing | None = None
) -> Response:
    """POST /policy/snapshot."""
    return await snapshots.snapshot_policy(
        request, _with_id(snapshots.PolicySnapshotRequest, body, policy_id=policy_id)
    )


@router.post("/policy/{policy_id:policy_id}/terminate", tags=["policy"])
async def policy_terminate(
    request: Request, policy_id: PolicyIdInPath, body: Nothing | None = None
) -> dict[str, bool]:
    """POST /policy/terminate."""
    return await policy.terminate(request, _with_id(policy.PolicyTerminate, body, policy_id=policy_id))


def _with_id(model: type[M], body: ForeignBody | None, **in_path: str) -> M:
    """The body with the id of the path.

    Raises:
        InvalidRequest: the body holds another id, and one of them would be ignored.
    """
    body = body or Nothing()
    for key, path_value in in_path.items():
        value = (body.model_extra or {}).get(key, path_value)
        if value != path_value:
            raise InvalidRequest(
                f"{key} is {clipped(repr(value))} in the body and {path_value!r} in the path; name it once",
                where=key,
            )
    return model(**{name: getattr(body, name) for name in type(body).model_fields}, **in_path)
