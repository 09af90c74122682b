"""/captures: sessions whose base_url answers an agent's model calls, and records them as decisions."""

from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Annotated, Any, Literal

from fastapi import Path, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field, FiniteFloat, model_validator
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from service_kit.gate import JSON_BODY
from service_kit.problems import error_responses, problem_response
from shared_schemas.base import Body, OpenReply
from shared_schemas.chat import IGNORED_HEADER
from shared_schemas.json_text import read_json, read_quotation
from shared_schemas.messages import ToolCall
from shared_schemas.rollouts import LimitKeys, Name, PolicySpec, RolloutFailure, RolloutLimits, Seed, Turn
from shared_schemas.trajectory import StopReason, Trajectory
from task_app.captures.call_errors import CLIENT_MISTAKE, split_path
from task_app.captures.calls import Dialect, Event
from task_app.captures.chat import ChatCompletions
from task_app.captures.messages import AnthropicMessages
from task_app.captures.responses import Responses
from task_app.captures.session import Capture, CaptureSpec
from task_app.errors import InvalidRequest, TaskAppError, clipped, refuse_used
from task_app.rollouts.assembly import branch_policies
from task_app.rollouts.results import build_failure
from task_app.routes.wire import LONGEST_ID, OK, Ok, ReplyJSON, Router, reply_body, while_connected
from task_app.services import Services, get_services
from task_app.sessions import idempotency

router = Router(prefix="/captures", tags=["captures"])

# Number of characters. Some clients refuse an answer with a header of 8 KB.
_LONGEST_HEADER = 2_000

CaptureId = Path(min_length=1, max_length=LONGEST_ID)
# The body of a model call in /openapi.json. OpenAI and Anthropic document the fields.
_BODY: dict[str, Any] = {
    "requestBody": {"content": {"application/json": {"schema": {"type": "object"}}}, "required": True}
}
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}
}

# The answers to model calls, with the fields that clients read. The models allow further fields, because
# OpenAI and Anthropic define the dialects.


class ChatMessage(OpenReply):
    role: str
    content: str | None
    tool_calls: tuple[ToolCall, ...] = ()


class ChatChoice(OpenReply):
    index: int
    message: ChatMessage
    finish_reason: str


class ChatUsage(OpenReply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatCompletion(OpenReply):
    """An answer of OpenAI's Chat Completions API."""

    id: str
    object: str
    created: int
    model: str
    choices: tuple[ChatChoice, ...]
    usage: ChatUsage


class OutputText(OpenReply):
    type: Literal["output_text"]
    text: str


class OutputMessage(OpenReply):
    type: Literal["message"]
    id: str
    role: str
    status: str
    content: tuple[OutputText, ...]


class OutputCall(OpenReply):
    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: str


class ResponseUsage(OpenReply):
    input_tokens: int
    output_tokens: int
    total_tokens: int


class ModelResponse(OpenReply):
    """An answer of OpenAI's Responses API."""

    id: str
    object: str
    created_at: int
    model: str
    status: str
    output: tuple[Annotated[OutputMessage | OutputCall, Field(discriminator="type")], ...]
    usage: ResponseUsage


class InputTokens(OpenReply):
    """The number of tokens of a prompt, in the form that OpenAI's clients read."""

    object: str
    input_tokens: int


class OpenAIFault(OpenReply):
    message: str
    type: str
    param: str | None
    code: str


class OpenAIRefusal(OpenReply):
    """An error in the form that OpenAI's clients read."""

    error: OpenAIFault


class TextBlock(OpenReply):
    type: Literal["text"]
    text: str


class ToolUseBlock(OpenReply):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, object]


class MessageUsage(OpenReply):
    input_tokens: int
    output_tokens: int


class AnthropicMessage(OpenReply):
    """An answer of Anthropic's Messages API."""

    id: str
    type: str
    role: str
    model: str
    content: tuple[Annotated[TextBlock | ToolUseBlock, Field(discriminator="type")], ...]
    stop_reason: str
    stop_sequence: str | None
    usage: MessageUsage


class MessageTokens(OpenReply):
    """The number of tokens of a prompt, in the form that Anthropic's clients read."""

    input_tokens: int


class AnthropicFault(OpenReply):
    type: str
    message: str


class AnthropicRefusal(OpenReply):
    """An error in the form that Anthropic's clients read."""

    type: str
    error: AnthropicFault


# Statuses of errors below a capture's /v1, where 400 replaces 409 and 422.
_STATUSES = (CLIENT_MISTAKE, 401, 404, 405, 408, 413, 424, 428, 429, 500, 502, 503, 504, 507)
REFUSALS = (OpenAIRefusal, AnthropicRefusal)


def _describe_call(reply: type[BaseModel], refusal: type[BaseModel]) -> dict[str, Any]:
    """Return the arguments of the decorator of a route that reads a model call."""
    return {"response_model": reply, "responses": error_responses(_STATUSES, refusal), "openapi_extra": _BODY}


def _describe_stream(reply: type[BaseModel], refusal: type[BaseModel]) -> dict[str, Any]:
    """Return the arguments of the decorator of a route that reads a model call and may stream the answer."""
    described = _describe_call(reply, refusal)
    return {**described, "responses": _STREAM | described["responses"]}


# The headers of a request decide whether an error has OpenAI's form or Anthropic's form.
_OF_ANY_DIALECT = error_responses(_STATUSES, *REFUSALS)


class CaptureOpen(Body):
    """Body of POST /captures."""

    policy: PolicySpec = Field(description="answers the agent's calls; its sampling applies, not the agent's")
    limits: RolloutLimits = RolloutLimits()
    seed: Seed = Field(default=0, description="for the record")
    models: tuple[Name, ...] = Field(
        default=(), max_length=64, description="that the agent may name; none listed: any name is the policy"
    )


class CaptureOpened(Body):
    """The URLs at which an agent calls its model, and the API key, which is valid for this capture only."""

    capture_id: str
    capture_url: str = Field(description="of this capture; also the base URL for Anthropic's clients")
    base_url: str = Field(description="for OpenAI's clients")
    key: str


class CaptureReward(Body):
    """Body of POST /captures/{capture_id}/rewards: it rewards a call, or the episode if it names no call."""

    reward: FiniteFloat
    turn: Turn | None = Field(default=None, description="of the call, from 1, in the order of the answers")
    response_id: str | None = Field(default=None, max_length=300, description="the id of the call's answer")

    @model_validator(mode="after")
    def _one_call(self) -> "CaptureReward":
        if self.turn is not None and self.response_id is not None:
            raise ValueError("give turn or response_id, not both")
        return self


class CaptureRewarded(Body):
    turn: int | None
    reward: float


class CaptureModel(Body):
    """A model, with the fields that OpenAI's clients read and those that Anthropic's clients read."""

    id: str
    object: str = "model"
    created: int = 0
    owned_by: str = "turnwise"
    type: str = "model"
    display_name: str
    created_at: str = "1970-01-01T00:00:00Z"


class CaptureModels(Body):
    """The models of a capture, with the fields that OpenAI's and Anthropic's clients read."""

    object: str = "list"
    data: list[CaptureModel]
    has_more: bool = False
    first_id: str
    last_id: str


class CaptureState(Body):
    """The state of a capture; once it has ended with at least one decision, also its trajectory."""

    capture_id: str
    status: str = Field(description="open, ended or failed")
    calls: int
    trajectory: Trajectory | None = None
    failure: RolloutFailure | None = None


@router.post("")
async def open_capture(request: Request, body: CaptureOpen) -> CaptureOpened:
    """Open a capture. An agent on any machine can send its model calls to the capture's `base_url`."""
    services = get_services(request)
    context = services.policy_context(inference_key=body.policy.inference_key, seed=body.policy.seed)
    make_policy = branch_policies(services.boards, body.policy.policy_name, body.policy.config, context)
    make_policy(0)  # so that a wrong config is refused now, not at the first call
    given = LimitKeys.model_fields.keys() & body.limits.model_fields_set - {"timeout_s"}
    uses = {f"limits.{name}": True for name in given}
    refuse_used(uses, "on a capture, whose agent decides itself when it ends", where="")
    spec = CaptureSpec(
        "capture", make_policy, limits=body.limits, seed=body.seed, models=body.models, spans=services.spans,
        max_bytes=services.settings.max_reply_bytes,
    )  # fmt: skip
    capture = services.captures.open(spec, size=len(body.model_dump_json()))
    url = f"{str(request.base_url).rstrip('/')}/captures/{capture.capture_id}"
    return CaptureOpened(
        capture_id=capture.capture_id, capture_url=url, base_url=f"{url}/v1", key=capture.key
    )


@router.get("/{capture_id}")
async def show_capture(request: Request, capture_id: str = CaptureId) -> CaptureState:
    """Return the number of calls so far and, after the end of the capture, its trajectory."""
    return _show_state(_find_capture(request, capture_id))


@router.post("/{capture_id}/rewards")
async def reward_capture(
    request: Request, body: CaptureReward, capture_id: str = CaptureId
) -> CaptureRewarded:
    """Reward a call or the episode; each can be rewarded only once."""
    capture = _find_capture(request, capture_id)
    turn = capture.reward(body.reward, turn=body.turn, response_id=body.response_id)
    return CaptureRewarded(turn=turn, reward=body.reward)


@router.post("/{capture_id}/end")
async def end_capture(request: Request, capture_id: str = CaptureId) -> CaptureState:
    """End the episode and return the capture's state; a repeated request changes nothing."""
    capture = _find_capture(request, capture_id)
    capture.end(capture.refused or StopReason.ENVIRONMENT_DONE)
    return _show_state(capture)


@router.delete("/{capture_id}")
async def forget_capture(request: Request, capture_id: str = CaptureId) -> Ok:
    """End the capture and delete it, together with its trajectory."""
    get_services(request).captures.sessions.remove(capture_id, where="capture_id")
    return OK


@router.get("/{capture_id}/v1/models", responses=_OF_ANY_DIALECT)
async def list_capture_models(request: Request, capture_id: str = CaptureId) -> CaptureModels:
    """List the models that the agent may name."""
    names = _find_capture(request, capture_id).models
    data = [CaptureModel(id=name, display_name=name) for name in names]
    return CaptureModels(data=data, first_id=names[0], last_id=names[-1])


@router.get("/{capture_id}/v1/models/{name:path}", responses=_OF_ANY_DIALECT)
async def show_capture_model(
    request: Request, capture_id: str = CaptureId, name: str = Path(min_length=1)
) -> CaptureModel:
    """Return the model with this name; refuse a name that the agent may not use."""
    _find_capture(request, capture_id).refuse_model(name)
    return CaptureModel(id=name, display_name=name)


@router.post("/{capture_id}/v1/chat/completions", **_describe_stream(ChatCompletion, OpenAIRefusal))
async def create_chat_completion(request: Request, capture_id: str = CaptureId) -> Response:
    """Answer a model call in the form of OpenAI's Chat Completions."""
    return await _answer_request(request, capture_id, "chat/completions")


@router.post("/{capture_id}/v1/responses", **_describe_stream(ModelResponse, OpenAIRefusal))
async def create_response(request: Request, capture_id: str = CaptureId) -> Response:
    """Answer a model call in the form of OpenAI's Responses."""
    return await _answer_request(request, capture_id, "responses")


@router.post("/{capture_id}/v1/messages", **_describe_stream(AnthropicMessage, AnthropicRefusal))
async def create_message(request: Request, capture_id: str = CaptureId) -> Response:
    """Answer a model call in the form of Anthropic's Messages."""
    return await _answer_request(request, capture_id, "messages")


@router.post("/{capture_id}/v1/responses/input_tokens", **_describe_call(InputTokens, OpenAIRefusal))
async def count_response_tokens(request: Request, capture_id: str = CaptureId) -> Response:
    """Count the tokens of a prompt as OpenAI's API does; the request is not recorded as a decision."""
    return await _count_tokens(request, capture_id, "responses")


@router.post("/{capture_id}/v1/messages/count_tokens", **_describe_call(MessageTokens, AnthropicRefusal))
async def count_message_tokens(request: Request, capture_id: str = CaptureId) -> Response:
    """Count the tokens of a prompt as Anthropic's API does; the request is not recorded as a decision."""
    return await _count_tokens(request, capture_id, "messages")


DIALECTS: Mapping[str, Dialect] = {
    "chat/completions": ChatCompletions(),
    "responses": Responses(),
    "messages": AnthropicMessages(),
}
_COUNTING = frozenset({"responses/input_tokens", "messages/count_tokens"})


def find_dialect(path: str, headers: Mapping[bytes, bytes]) -> Dialect:
    """Return the dialect to which `path`, the part after /v1/, belongs.

    For an unknown path, return Anthropic's dialect if the headers contain `anthropic-version`, else OpenAI's.
    """
    is_anthropic = b"anthropic-version" in headers
    default = "messages" if is_anthropic else "chat/completions"
    return DIALECTS[next((name for name in DIALECTS if path.startswith(name)), default)]


_ROUTES = {
    path: next(route for route in router.routes if isinstance(route, APIRoute) and route.path.endswith(path))
    for path in DIALECTS
}


class CallWay:
    """ASGI middleware that answers model calls without FastAPI.

    FastAPI would take as long as all other work of a call. The middleware runs after service_kit.gate, which
    has read the body. The general deadline of requests does not apply to calls, because a capture has limits
    of its own. A call with an Idempotency-Key goes through FastAPI.
    """

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app, self._services = app, services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        capture_id, path = _split_call_path(scope)
        if JSON_BODY not in scope or path not in DIALECTS or idempotency.HEADER in dict(scope["headers"]):
            # The route parses the body again, so the parsed copy would only take memory.
            scope.pop(JSON_BODY, None)
            await self._app(scope, receive, send)
            return
        scope["route"] = _ROUTES[path]
        body = scope.pop(JSON_BODY)
        response = await _answer(self._services, capture_id, DIALECTS[path], body, receive)
        await response(scope, receive, send)


def _split_call_path(scope: Scope) -> tuple[str, str]:
    """Return capture id and path after /v1/ of a POST to a capture; two empty strings for other requests."""
    return split_path(scope) if scope["type"] == "http" and scope["method"] == "POST" else ("", "")


def read_body(scope: Scope, body: bytes) -> Any:
    """Parse a JSON body for the gate, and return its value.

    The body of a model call is parsed by `read_quotation`, which tolerates faulty text that a model wrote. If
    that fails, the InvalidRequest is returned instead of raised, so that the reply can be in the dialect of
    the call.
    """
    path = _split_call_path(scope)[1]
    return _read_call(body) if path in DIALECTS or path in _COUNTING else read_json(body)


def _read_call(body: bytes) -> Any:
    try:
        return read_quotation(body)
    except ValueError as fault:
        return InvalidRequest(str(fault), where="body")


async def _answer_request(request: Request, capture_id: str, path: str) -> Response:
    body = _read_call(await request.body())
    return await _answer(get_services(request), capture_id, DIALECTS[path], body, request.receive)


async def _answer(
    services: Services, capture_id: str, dialect: Dialect, body: Any, receive: Receive
) -> Response:
    """Carry out a model call and answer in its dialect; `CallErrors` later translates errors into it."""
    try:
        call = dialect.read(_check_object(body))
        capture = services.captures.sessions.get(capture_id, where="capture_id")
        answer = await while_connected(capture.call(call), receive)
    except TaskAppError as error:
        return problem_response(error)
    if answer is None:
        return Response(status_code=499)
    services.metrics.count_dropped_options(answer.dropped)
    # The names are keys of the caller's body, so line breaks are escaped and the length is limited.
    ignored = clipped(", ".join(answer.ignored).encode("unicode_escape").decode(), _LONGEST_HEADER)
    headers = {IGNORED_HEADER: ignored} if ignored else {}
    if call.stream:
        stream = _write_events(dialect.events(answer, call))
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)
    return Response(reply_body(dialect.body(answer, call)), media_type="application/json", headers=headers)


async def _count_tokens(request: Request, capture_id: str, path: str) -> Response:
    dialect = DIALECTS[path]
    call = dialect.read(_check_object(_read_call(await request.body())))
    return ReplyJSON(dialect.count(await _find_capture(request, capture_id).count_tokens(call)))


def _check_object(body: Any) -> dict[str, Any]:
    if isinstance(body, InvalidRequest):
        raise body
    if not isinstance(body, dict):
        raise InvalidRequest("the body is no JSON object", where="body")
    return body


async def _write_events(events: Iterable[Event]) -> AsyncIterator[bytes]:
    for name, data in events:
        text = data.encode() if isinstance(data, str) else reply_body(data)
        yield (b"event: %s\n" % name.encode() if name else b"") + b"data: %s\n\n" % text


def _find_capture(request: Request, capture_id: str) -> Capture:
    return get_services(request).captures.sessions.get(capture_id, where="capture_id")


def _show_state(capture: Capture) -> CaptureState:
    failure, has_ended = capture.failure, capture.stop_reason is not None
    count = len(capture.steps)
    return CaptureState(
        capture_id=capture.capture_id,
        status="failed" if failure else "ended" if has_ended else "open",
        calls=count,
        trajectory=capture.trajectory() if has_ended and count else None,
        failure=build_failure(failure, decisions_done=count) if failure else None,
    )
