"""Serve the OpenAI-compatible gateway.

Its routes are POST /v1/chat/completions, /v1/completions and /tokenize, and GET /v1/models and /health. For a
chat request, the gateway renders the messages to token ids, checks the length, samples a continuation, and
replies with exact ids, log-probs and policy versions. Every decision of every rollout passes through the
gateway, so for speed its POST routes work on bytes, without a web framework's request and response objects.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from service_kit.gate import Gate, KeyDoor, while_connected, whole_body
from service_kit.keys import Keys
from service_kit.problems import install_problem_handlers
from shared_schemas.chat import IGNORED_HEADER, ROLLOUT_HEADER
from trainer_backend.errors import BadChatRequest, EngineStopped, InferenceUnauthorized
from trainer_backend.inference.actor import refuse_too_long
from trainer_backend.inference.asgi import (
    EventStream,
    Headers,
    boundary,
    error_response,
    json_response,
)
from trainer_backend.inference.chat_request import ChatRequest, TokenizeRequest, read_chat_request
from trainer_backend.inference.completion import Completion, all_generations
from trainer_backend.inference.conversations import Conversations
from trainer_backend.inference.reply import Choice
from trainer_backend.inference.request_body import read_request
from trainer_backend.inference.served_policy import ServedPolicy, find_policy
from trainer_backend.inference.streaming import stream_reply
from trainer_backend.inference.text_completion import TextRequest, text_completion

# A larger body is rendered and tokenised on a thread, so that other requests do not wait.
_LARGE_BYTES = 100_000
_ROLLOUT_HEADER = ROLLOUT_HEADER.lower().encode()


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """Limits of a gateway, and the keys of requests that it ignores.

    `default_max_tokens` limits the answer if the request sets no limit; after a long prompt, the answer may
    be limited further. `leaves_out` contains keys of chat requests that are ignored instead of refused.
    """

    max_body_bytes: int = 8 * 1024 * 1024
    max_body_s: float = 60.0
    default_max_tokens: int = 256
    max_conversations: int = 20_000
    leaves_out: frozenset[str] = frozenset()


def create_gateway(
    policies: Mapping[str, ServedPolicy],
    *,
    key: str | SecretStr | None,
    limits: GatewayLimits | None = None,
    clock: Callable[[], float] = time.time,
) -> Starlette:
    """Build the ASGI app of a gateway.

    `policies` maps model names (`{job}/{policy}`) to policies. `key` is the Bearer key that requests must
    carry; it is never logged. If `key` is None, requests need no key, and only those from this machine are
    accepted.
    """
    secret = SecretStr(key) if isinstance(key, str) else key
    if secret is not None and not secret.get_secret_value():
        raise ValueError("the gateway needs a key")
    limits = limits or GatewayLimits()

    async def health(request: Request) -> Response:
        for name, policy in policies.items():
            if policy.engine.breakdown.done():  # without the reason, since this route needs no key
                raise EngineStopped(f"the engine of {name!r} has ended by itself; the log says why")
        return JSONResponse({"status": "ok"})

    async def models(request: Request) -> Response:
        data = [_model(name, policy, clock()) for name, policy in policies.items()]
        return JSONResponse({"object": "list", "data": data})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        return JSONResponse(_model(name, find_policy(name, policies), clock()))

    endpoints = {
        "/v1/chat/completions": ChatEndpoint(policies, limits, clock),
        "/v1/completions": TextEndpoint(policies, limits, clock),
        "/tokenize": TokenizeEndpoint(policies, limits, clock),
    }
    routes = [
        *[Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()],
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{name:path}", model, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
    ]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        for policy in policies.values():
            await policy.engine.close()

    app = Starlette(
        routes=routes,
        middleware=[gate_for(secret, limits), Middleware(_Posts, endpoints=endpoints)],
        lifespan=lifespan,
    )
    install_problem_handlers(app, error_response)
    return app


class _Posts:
    """Middleware that calls the POST endpoints by path, without Starlette's router and error handlers.

    The endpoints convert their own errors to replies. All other requests go to the router.
    """

    def __init__(self, app: ASGIApp, *, endpoints: Mapping[str, ASGIApp]) -> None:
        self._app, self._endpoints = app, endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = self._endpoints.get(scope["path"]) if is_post else None
        await (endpoint or self._app)(scope, receive, send)


# How hints name the key. A run generates the key of its own gateway, so users only need the key of
# `turnwise serve`.
_KEY = "gateway's key (of `turnwise serve`: TURNWISE_API_KEY, or the variable that --api-key-env names)"


def gate_for(key: SecretStr | None, limits: GatewayLimits) -> Middleware:
    """Build the middleware that checks the key of all requests except those to /health.

    If `key` is None, it accepts only requests from this machine.
    """
    door = KeyDoor(
        Keys([] if key is None else [key], variable=_KEY, needed=False),
        open_paths=["/health"],
        unauthorised=InferenceUnauthorized,
    )
    return Middleware(
        Gate,
        door=door,
        max_body_bytes=limits.max_body_bytes,
        max_body_s=limits.max_body_s,
        unreadable=None,  # the routes parse the body, so that it is parsed only once
        respond=error_response,
    )


def _model(name: str, policy: ServedPolicy, now: float) -> dict[str, Any]:
    """Return OpenAI's model object, with additional fields that our own clients read."""
    return {
        "id": name,
        "object": "model",
        "created": int(now),
        "owned_by": "turnwise",
        "max_model_len": policy.engine.max_model_len,
        "policy_version": policy.engine.version,
        "chat_template": policy.renderer.template_digest,
        "conversations": policy.figures.totals(),
        "ignored": dict(policy.left_out),
    }


@dataclass(slots=True)
class _Endpoint:
    """A route as an ASGI app that works without Starlette's request and response objects."""

    policies: Mapping[str, ServedPolicy]
    limits: GatewayLimits
    clock: Callable[[], float]
    numbers: Iterator[int] = field(default_factory=lambda: count(1))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await boundary(self._answer, scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


@dataclass(slots=True)
class ChatEndpoint(_Endpoint):
    conversations: Conversations = field(init=False)

    def __post_init__(self) -> None:
        self.conversations = Conversations(most=self.limits.max_conversations)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await whole_body(receive)
        request, rollout_id = read_chat_request(body, self.limits.leaves_out), _rollout_id(scope)
        if len(body) > _LARGE_BYTES:  # other requests must not wait for this body
            completion = await asyncio.to_thread(self._completion, request, rollout_id)
        else:
            completion = self._completion(request, rollout_id)
        headers: Headers = ()
        if names := sorted(completion.left_out):  # settings without effect: count and name them
            completion.policy.left_out.update(names)
            headers = [(IGNORED_HEADER.lower().encode(), ", ".join(names).encode())]
        if completion.request.stream:
            stream = stream_reply(completion, EventStream(send, headers), partial(self._remember, completion))
            await while_connected(stream, receive)
            return
        generations = await while_connected(all_generations(completion), receive)
        choices = [completion.choice(index, generation) for index, generation in enumerate(generations)]
        for choice in choices:
            self._remember(completion, choice)
        await json_response(send, completion.body(choices), headers)

    def _completion(self, request: ChatRequest, rollout_id: str) -> Completion:
        """Find the policy, render the prompt, and check that the context has room for an answer."""
        if rollout_id and request.n > 1:
            raise BadChatRequest(
                f"n is {request.n}, and a rollout goes on from one answer",
                where="n",
                hint=f"Leave n out, or leave the header {ROLLOUT_HEADER} out.",
            )
        policy = find_policy(request.model, self.policies)
        policy.renderer.refuse_other_settings(request.chat_template_kwargs)
        most, whose, asked = policy.engine.max_model_len, "the model's own", request.max_model_length
        if asked is not None and asked < most:
            most, whose = asked, "max_model_length"
        opening = policy.call_opening if request.forces_call else None
        call_opening = "" if opening is None else opening.text(policy.name_to_write(request.active_tools))
        prompt = self.conversations.prompt(
            rollout_id,
            request.messages,
            request.active_tools,
            policy.renderer,
            refuse_too_long=partial(
                policy.renderer.refuse_too_long, most=most, max_tokens=request.token_limit or 1, whose=whose
            ),
            opening="" if opening is None else opening.lead + call_opening,
        )
        room = most - len(prompt.ids)
        max_tokens = request.token_limit or max(1, min(self.limits.default_max_tokens, room))
        refuse_too_long(len(prompt.ids), max_tokens, most, whose)
        return Completion(
            completion_id=f"chatcmpl-{next(self.numbers)}",
            created=int(self.clock()),
            request=request,
            policy=policy,
            prompt=prompt,
            max_tokens=max_tokens,
            rollout_id=rollout_id,
            call_opening=call_opening,
        )

    def _remember(self, completion: Completion, choice: Choice) -> None:
        if completion.rollout_id:
            prompt = completion.prompt
            completion.policy.figures.add(
                extends=prompt.extends, break_cause=prompt.break_cause, drift=prompt.drift
            )
            self.conversations.remember(completion.rollout_id, completion.turn(choice))


class TokenizeEndpoint(_Endpoint):
    """Handles POST /tokenize: returns the token ids of a prompt, even if it is too long for the model."""

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = read_chat_request(await whole_body(receive), self.limits.leaves_out, TokenizeRequest)
        policy = find_policy(request.model, self.policies)
        policy.renderer.refuse_other_settings(request.chat_template_kwargs)
        ids = await asyncio.to_thread(policy.renderer.prompt_ids, request.messages, request.active_tools)
        limit = policy.engine.max_model_len
        await json_response(send, {"count": len(ids), "max_model_len": limit, "tokens": ids})


class TextEndpoint(_Endpoint):
    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = read_request(TextRequest, await whole_body(receive))
        created = int(self.clock())
        reply = text_completion(request, self.policies, number=next(self.numbers), created=created)
        await json_response(send, await while_connected(reply, receive))


def _rollout_id(scope: Scope) -> str:
    """Return the id of the conversation that the request continues, or "" if the request names none.

    The id comes from the header ROLLOUT_HEADER, and names a rollout or a conversation of a captured agent.

    Raises:
        BadChatRequest: the request contains the header several times.
    """
    values = [value.decode("latin-1") for name, value in scope["headers"] if name == _ROLLOUT_HEADER]
    if len(values) > 1:
        raise BadChatRequest(
            f"{ROLLOUT_HEADER} is there {len(values)} times: {', '.join(values)[:80]!r}; it names one",
            where=f"header {ROLLOUT_HEADER}",
        )
    return values[0] if values else ""
