"""OpenEnv over HTTP: /openenv/{env_name}/reset, /step, /state, /schema, /metadata, /health.

In OpenEnv's own server, each HTTP request to /reset and /step gets a new environment, so that a step cannot
continue an episode. Here, /reset returns `metadata.session_id`, which /step and /state accept. OpenEnv's
clients use a WebSocket instead (`openenv_socket.py`); each socket has its own session.
"""

from typing import Annotated, Any

from fastapi import Body, Query, Request
from pydantic import Field
from starlette.responses import Response

from shared_schemas.base import OpenReply, Reply
from shared_schemas.rollouts import Name
from task_app.dialects.openenv_session import STEP_KEYS, OpenEnvSession, ignored_keys
from task_app.dialects.openenv_wire import (
    NO_EPISODE,
    OpenEnvReply,
    OpenEnvReset,
    OpenEnvState,
    document,
    schemas,
)
from task_app.routes.wire import NULL_IS_EMPTY, EnvId, ForeignBody, ReplyJSON, Router
from task_app.services import get_services

router = Router(prefix="/openenv/{env_name}", tags=["openenv"])


class HttpReset(OpenEnvReset):
    session_id: EnvId | None = Field(default=None, description="reset this session; by default a new one")


class HttpStep(ForeignBody):
    action: dict[str, Any]
    session_id: EnvId = Field(description="metadata.session_id of the reply to /reset")
    request_id: str | None = Field(default=None, max_length=255)


class OpenEnvSchemas(Reply):
    """JSON Schemas of an environment's actions, observations and state."""

    action: dict[str, Any]
    observation: dict[str, Any]
    reset_observation: dict[str, Any]
    state: dict[str, Any]


class OpenEnvMetadata(Reply):
    """OpenEnv's description of an environment."""

    name: str
    description: str
    version: str
    readme_content: str | None = None
    author: str | None = None
    documentation_url: str | None = None


class OpenApiDocument(OpenReply):
    """An OpenAPI document."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any]


class OpenEnvHealth(Reply):
    status: str


@router.post("/reset", response_model=OpenEnvReply)
async def reset_openenv(
    request: Request,
    env_name: Name,
    body: Annotated[HttpReset, NULL_IS_EMPTY, Body(default_factory=HttpReset)],
) -> Response:
    """Start an episode in the session `session_id`. Without an id, or with a `config`, open a new session."""
    services = get_services(request)
    if body.session_id is None or body.config is not None:
        session = await OpenEnvSession.start(services, env_name, body)
    else:
        session = OpenEnvSession.of(services, env_name, body.session_id)
        await session.reset(body)
    return ReplyJSON(session.reset_reply(ignored=ignored_keys(body)))


@router.post("/step", response_model=OpenEnvReply)
async def step_openenv(request: Request, env_name: Name, body: HttpStep) -> Response:
    """Execute one decision.

    `metadata.ignored` lists the unknown keys of the body. `timeout_s` is among them, because a step cannot be
    interrupted.
    """
    session = OpenEnvSession.of(get_services(request), env_name, body.session_id)
    ignored = sorted((body.model_extra or {}).keys() - STEP_KEYS)
    return ReplyJSON(await session.step(body.action, where="action", ignored=ignored))


@router.get("/state", response_model=OpenEnvState)
async def show_openenv_state(
    request: Request, env_name: Name, session_id: Annotated[EnvId | None, Query()] = None
) -> Response:
    """Return the episode's id and its number of decisions; null and 0 if no `session_id` is given."""
    if session_id is None:
        return ReplyJSON(NO_EPISODE)
    return ReplyJSON(OpenEnvSession.of(get_services(request), env_name, session_id).state())


@router.get("/schema", response_model=OpenEnvSchemas)
async def show_openenv_schema(request: Request, env_name: Name) -> Response:
    """Return JSON Schemas of the environment's actions, observations and state."""
    environment = get_services(request).boards.environment(env_name, {}, where="")
    return ReplyJSON(schemas(await get_services(request).fetch_tools(environment)))


@router.get("/metadata")
async def show_openenv_metadata(request: Request, env_name: Name) -> OpenEnvMetadata:
    """Return OpenEnv's description of an environment."""
    environment = get_services(request).boards.environment(env_name, {}, where="")
    return OpenEnvMetadata(
        name=environment.name,
        description=f"{environment.name} of a Turnwise task app, scored by the "
        f"{environment.outcome_definition}",
        version=request.app.version,
    )


@router.get("/openapi.json", response_model=OpenApiDocument)
async def show_openenv_document(request: Request, env_name: Name) -> Response:
    """Return an OpenAPI document of only this environment's routes, for `openenv validate`."""
    get_services(request).boards.environment(env_name, {}, where="")
    url = str(request.url).removesuffix("/openapi.json")
    return ReplyJSON(document(request.app.openapi(), prefix=router.prefix, url=url))


@router.get("/health")
async def show_openenv_health(request: Request, env_name: Name) -> OpenEnvHealth:
    """Reply `healthy` if the environment exists."""
    get_services(request).boards.environment(env_name, {}, where="")
    return OpenEnvHealth(status="healthy")
