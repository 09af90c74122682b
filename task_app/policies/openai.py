"""A language model behind any OpenAI-compatible server, as an AgentPolicy.

Source: 2-rollout-worker-and-gigpo.md, Task 2.2; shared_schemas/chat.py defines our gateway's additions to
    OpenAI's API.
"""

import hashlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypedDict

import stamina
from pydantic import SecretStr
from pydantic_core import to_json

from service_kit.http_client import HttpClient, NoReply, Target
from service_kit.replies import ReplyFault
from shared_schemas.chat import CONTEXT_LENGTH_EXCEEDED, IGNORED_HEADER, RESPONSE_FORMAT, ROLLOUT_HEADER
from shared_schemas.messages import Message
from shared_schemas.trajectory import Sampling, SamplingKeys
from task_app.episode.actions import NO_TOOL_CALL
from task_app.errors import ContextLengthExceeded, EpisodeFailed, PolicyUnavailable, PromptRefused
from task_app.policies.openai_config import CHAT_PATH, OpenAIConfig, chat_completions_url
from task_app.policies.replies import (
    OwnReplies,
    Reply,
    WholeReplies,
    protocol_error,
    read_count,
    read_reply,
    refusal,
    retry_after_s,
)
from task_app.protocols import PolicyAnswer, PolicyObservation


class TryAgain(Exception):
    """The server did not answer, or is unavailable for now; the request may be sent again after `after_s`."""

    def __init__(self, sentence: str, *, after_s: float | None = None) -> None:
        super().__init__(sentence)
        self.after_s = after_s


class Answered(NamedTuple):
    status: int
    body: bytes
    after_s: float | None
    """Value of the Retry-After header in seconds; None without one."""
    ignored: str
    """Names of the request's settings that our gateway did not apply, separated by commas."""


class Endpoint:
    """Sends requests to a chat-completions URL with fixed headers, timeout and size limit of the reply.

    If `client` is None, each request opens its own connection.
    """

    def __init__(
        self,
        client: HttpClient | None,
        url: str,
        headers: Mapping[str, str],
        *,
        timeout_s: float,
        max_reply_bytes: int,
    ) -> None:
        self._client, self._url, self._headers = client, url, headers
        self._timeout_s, self._max_reply_bytes = timeout_s, max_reply_bytes
        self._target: Target | None = None

    def without_rollout(self, path: str | None = None) -> "Endpoint":
        """Return a copy without the header that names the rollout; `path`, if given, replaces `CHAT_PATH`."""
        other = copy(self)
        other._headers = {name: value for name, value in self._headers.items() if name != ROLLOUT_HEADER}
        other._url = self._url.replace(CHAT_PATH, path, 1) if path else self._url
        other._target = None
        return other

    async def post(self, data: bytes) -> Answered:
        try:
            if self._client is not None:
                return await self._send(self._client, data)
            async with HttpClient() as client:
                return await self._send(client, data)
        except TimeoutError as exc:
            raise TryAgain(f"no answer within {self._timeout_s:g} s") from exc
        except NoReply as exc:
            raise TryAgain(str(exc)[:200]) from exc
        except ReplyFault as exc:
            raise protocol_error(str(exc)) from exc
        except ValueError as exc:
            raise protocol_error(type(exc).__name__) from exc

    async def _send(self, client: HttpClient, data: bytes) -> Answered:
        self._target = self._target or Target(self._url, self._headers)
        reply = await client.post(
            self._target, data, timeout_s=self._timeout_s, most_bytes=self._max_reply_bytes
        )
        after_s = retry_after_s(reply.headers.get("retry-after"))
        return Answered(reply.status, reply.body, after_s, reply.headers.get(_IGNORED, ""))


_IGNORED = IGNORED_HEADER.lower()
TRY_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
# Statuses of refusals that concern the body of a request, not the caller's key or the model's name.
OF_THE_BODY = frozenset({400, 413, 422})
_OPTIONS = tuple(Sampling.model_fields)
# Options that captured agents may set. While tokens are recorded, `call_options` restricts them.
_OF_AGENTS = frozenset({"tool_choice", RESPONSE_FORMAT, "parallel_tool_calls"})
# Keys of a request that make up its prompt.
_OF_PROMPTS = ("model", "messages", "tools", "chat_template_kwargs")
# A shorter key ("EMPTY", "null") is no secret and may occur in any text.
SECRET_FROM = 12


def decision_seed(seed: int, turn: int) -> int:
    """Return the sampling seed of decision `turn` (from 1), in [0, 2**31 - 1)."""
    digest = hashlib.blake2b(f"{seed}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % (2**31 - 1)


class ModelAccess(TypedDict, total=False):
    """The arguments that a service passes to `OpenAIAgentPolicy` in addition to the config."""

    client: HttpClient | None
    allowed_hosts: Collection[str] | None
    rollout_id: str | None
    inference_key: SecretStr | str | None
    max_reply_bytes: int
    on_retry: Callable[[], None]


class OpenAIAgentPolicy:
    """Asks a model for the actions of one conversation; each rollout has a policy of its own.

        policy = OpenAIAgentPolicy(OpenAIConfig(inference_url=..., model=..., ask_token_ids=False))
        action, text, log_probs, value = await policy.get_action(messages, tools)

    Args:
        client: shared by all policies of a service; if it is None, each request opens its own connection.
        allowed_hosts: the operator's list of inference hosts; None allows any.
        rollout_id: sent as a header to our gateway, which stores the conversation's token ids under it; not
            sent to other servers.
        inference_key: Bearer key for config.inference_url.
        max_reply_bytes: size limit of one reply.
        on_retry: called before every attempt after the first.

    Raises:
        InvalidRequest: inference_url is not a valid URL, or its host is not allowed.
    """

    name = "openai"

    def __init__(
        self,
        config: OpenAIConfig,
        *,
        client: HttpClient | None = None,
        allowed_hosts: Collection[str] | None = None,
        rollout_id: str | None = None,
        inference_key: SecretStr | str | None = None,
        max_reply_bytes: int = 16 << 20,
        on_retry: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        url = chat_completions_url(config.inference_url, allowed_hosts=allowed_hosts)
        headers = {"Content-Type": "application/json"}
        if rollout_id is not None and config.asks_gateway_of_ours:
            headers[ROLLOUT_HEADER] = rollout_id
        key = SecretStr(inference_key) if isinstance(inference_key, str) else inference_key
        self._key = key.get_secret_value() if key is not None else ""
        if key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        self._endpoint = Endpoint(
            client, url, headers, timeout_s=config.request_timeout_s, max_reply_bytes=max_reply_bytes
        )
        self._on_retry, self._clock = on_retry, clock
        self._turn = self._known_ids = 0
        is_whole = config.exact_tokens == "vllm"
        self._read_tokens = WholeReplies() if is_whole else OwnReplies(asked=config.asks_gateway_of_ours)
        self._last: tuple[tuple[Message, ...], Reply] | None = None
        self._has_answer = False
        self.pending_failure: str | None = None

    async def get_action(
        self,
        observation: Sequence[Message | Mapping[str, Any]],
        available_tools_specs: list[dict[str, Any]] | None = None,
    ) -> PolicyAnswer:
        self._turn += 1
        messages = tuple(
            one if isinstance(one, Message) else Message.model_validate(one) for one in observation
        )
        most = observation.max_tokens if isinstance(observation, PolicyObservation) else None
        sampling = self.sampling(self._turn, most=most)
        self._check_length(messages, sampling.max_tokens)
        body = self.request_body(messages, available_tools_specs or [], sampling)
        if isinstance(observation, PolicyObservation):  # a captured agent may set these
            names = self.call_options & observation.options.keys()
            body |= {name: observation.options[name] for name in names}
            body |= {"stop": list(observation.stop)} if observation.stop else {}
        reply = await self._complete(body)
        if (tokens := reply.tokens) is not None:
            # The gateway may reuse only ids that this policy has received.
            if tokens.prompt_ids_reused > self._known_ids:
                raise protocol_error(f"{tokens.prompt_ids_reused} ids reused of {self._known_ids}")
            count = len(tokens.prompt_token_ids) + len(tokens.token_ids)
            self._known_ids = tokens.prompt_ids_reused + count
        self._last = messages, reply
        action = dict(reply.action)
        if not available_tools_specs and action.get("invalid_reason") == NO_TOOL_CALL:
            del action["invalid_reason"]  # no tool was offered
        return action, reply.text, self._describe_tokens(reply, sampling), None

    @property
    def max_model_length(self) -> int | None:
        """Return the limit of prompt tokens plus max_tokens; None if no limit is configured."""
        return self.config.max_model_length

    @property
    def call_options(self) -> frozenset[str]:
        """Return the names of an agent's options that the policy passes to the server.

        While exact tokens are recorded, an option must not restrict which tokens the server samples. A server
        like vLLM then gets no option. Our gateway gets only `tool_choice`, because our gateway forces a call
        by the prompt alone. Options in `leave_out` or `extra_body` of the config are never passed.
        """
        if self.config.exact_tokens == "vllm":
            return frozenset()
        names = frozenset({"tool_choice"}) if self.config.asks_gateway_of_ours else _OF_AGENTS
        return names - {*self.config.leave_out, *self.config.extra_body}

    async def count_tokens(self, messages: Sequence[Message], tools: list[dict[str, Any]]) -> int:
        """Return the number of tokens of the prompt.

        A server without `/tokenize` is asked to sample one token, and its `usage.prompt_tokens` is returned.
        """
        can_count = self.config.asks_gateway_of_ours or self.config.exact_tokens == "vllm"
        asked = self.request_body(messages, tools, self.sampling(1, most=1))
        if can_count:
            asked = {name: asked[name] for name in _OF_PROMPTS if name in asked}
        try:
            endpoint = self._endpoint.without_rollout("/tokenize" if can_count else None)
            answer = await self._post(endpoint, asked)
        except TryAgain as exc:
            raise PolicyUnavailable(f"the inference server is unavailable: {exc}") from exc
        if answer.status != 200:
            raise self._make_refusal(answer.status, answer.body)
        return read_count(answer.body, is_billed=not can_count)

    def sampling(self, turn: int, *, most: int | None = None) -> Sampling:
        """Return the sampling settings of decision `turn` (from 1), with at most `most` sampled tokens."""
        config = self.config
        seed = None if "seed" in config.leave_out else config.seed
        return Sampling(
            **{name: getattr(config, name) for name in _OPTIONS}
            | {
                "seed": None if seed is None else decision_seed(seed, turn),
                "max_tokens": config.max_tokens if most is None else min(config.max_tokens, most),
            }
        )

    def snapshot(self) -> dict[str, Any]:
        """Return the number of decisions. The token ids stay in the gateway, outside of the snapshot."""
        return {"turn": self._turn}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the number of past decisions, so that the next decision is sampled with the right seed."""
        turn = state.get("turn")
        if type(turn) is not int or turn < 0:
            raise ValueError(f"'turn' is {turn!r}; it counts decisions from 0")
        self._turn = turn

    def request_body(
        self, messages: Collection[Message], tools: list[dict[str, Any]], sampling: Sampling
    ) -> dict[str, Any]:
        """Return the chat-completions request, without unused options, which some servers refuse."""
        is_whole = self.config.exact_tokens == "vllm"
        options = sampling.whole_request_keys() if is_whole else sampling.request_keys()
        body: dict[str, Any] = {
            "model": self.config.model,
            "messages": [message.model_dump(exclude_none=True) for message in messages],
            self.config.max_tokens_name: options.pop("max_tokens"),
            **options,
        }
        if tools:
            body |= {"tools": tools, "tool_choice": self.config.tool_choice}
        if self.config.max_model_length is not None and self.config.asks_gateway_of_ours:
            body["max_model_length"] = self.config.max_model_length
        if self.config.processed_logprobs:
            body["processed_logprobs"] = True
        if self.config.logprobs or is_whole:
            body["logprobs"] = True
        if self.config.chat_template_kwargs:
            body["chat_template_kwargs"] = self.config.chat_template_kwargs
        if is_whole:
            body["return_token_ids"] = True
        rest = {name: value for name, value in body.items() if name not in self.config.leave_out}
        return rest | self.config.extra_body

    async def _complete(self, body: dict[str, Any]) -> Reply:
        """Return the reply to the request; repeat an attempt that raised TryAgain, within `retry_budget_s`.

        If the caller's deadline cancels the retries, `pending_failure` keeps the error of the first attempt.
        """
        self.pending_failure = None
        try:
            reply = await self._ask_once(body, first=not self._has_answer)
        except TryAgain as exc:
            self.pending_failure = str(exc)
            reply = await self._ask_again(body, exc)
        self.pending_failure = None
        self._has_answer = True
        return reply

    async def _ask_again(self, body: dict[str, Any], error: TryAgain) -> Reply:
        """Repeat a request whose first attempt failed with `error`, within `retry_budget_s`."""
        # The first attempt is made without stamina, whose overhead is as long as a step. For stamina, it
        # consists of raising `error`.
        until_s = self._clock() + self.config.retry_budget_s
        try:
            async for attempt in stamina.retry_context(
                on=partial(self._find_wait, until_s),
                attempts=self.config.max_attempts,
                timeout=self.config.retry_budget_s,
                wait_initial=0.1,
                wait_max=5.0,
                wait_jitter=0.3,
            ):
                with attempt:
                    if attempt.num == 1:
                        raise error
                    self._on_retry()
                    return await self._ask_once(body, first=True)
        except TryAgain as exc:
            raise PolicyUnavailable(f"the inference server is unavailable: {exc}") from exc
        raise AssertionError("retry_context returns or raises")

    def _find_wait(self, until_s: float, error: Exception) -> bool | float:
        """Return the seconds until the next attempt, True for stamina's growing wait, or False to give up."""
        if not isinstance(error, TryAgain):
            return False
        if error.after_s is None:
            return True
        return self._clock() + error.after_s <= until_s and error.after_s

    async def _ask_once(self, body: Mapping[str, Any], *, first: bool) -> Reply:
        # The gateway may hold an answer that got lost, or that an earlier attempt at this rollout received.
        # It must not continue from such an answer, so the request asks for the ids of the whole prompt.
        request = {**body, "return_token_ids": True} if first and self.config.asks_gateway_of_ours else body
        status, text, after_s, ignored = await self._post(self._endpoint, request)
        if status == 200:
            reply = read_reply(text, self._read_tokens, logprobs=self.config.logprobs)
            left_out = tuple([name for name in ignored.split(", ") if name in _OF_AGENTS])
            return replace(reply, ignored=left_out) if left_out else reply
        if status in TRY_AGAIN:
            raise TryAgain(refusal(status, text, key=self._key)[1], after_s=after_s)
        raise self._make_refusal(status, text)

    async def _post(self, endpoint: Endpoint, body: Mapping[str, Any]) -> Answered:
        """Send a request, and remove the key from the answer, because answers are recorded."""
        answer = await endpoint.post(to_json(body))
        if len(self._key) >= SECRET_FROM:
            return answer._replace(body=answer.body.replace(self._key.encode(), b"[key]"))
        return answer

    def _make_refusal(self, status: int, text: bytes) -> EpisodeFailed:
        code, sentence = refusal(status, text, key=self._key)
        # Our gateway and OpenAI send an error code; other servers send only a sentence.
        if code == CONTEXT_LENGTH_EXCEEDED or "maximum context length" in sentence.lower():
            return ContextLengthExceeded(sentence)
        kind = PromptRefused if status in OF_THE_BODY else PolicyUnavailable
        return kind(f"the inference server refused: {sentence}", code="inference_refused")

    def _check_length(self, messages: tuple[Message, ...], max_tokens: int) -> None:
        """Raise ContextLengthExceeded if the prompt plus `max_tokens` surely exceeds `max_model_length`.

        If messages were only appended since the last reply, the prompt has at least the tokens counted in
        that reply. Otherwise nothing is checked, and only the server's own limit applies. Our gateway checks
        `max_model_length` itself.
        """
        limit, last = self.config.max_model_length, self._last
        if limit is None or self.config.asks_gateway_of_ours or last is None:
            return
        earlier, count = last[0], last[1].reusable_tokens
        has_grown = messages[: len(earlier)] == earlier and len(messages) > len(earlier)
        if count is not None and has_grown and count + max_tokens > limit:
            total = f"{count} tokens + max_tokens {max_tokens} = {count + max_tokens}"
            raise ContextLengthExceeded(f"a prompt of at least {total}, but max_model_length is {limit}")

    def _describe_tokens(self, reply: Reply, sampling: Sampling) -> dict[str, Any]:
        """Return the decision's sampling settings and tokens, as far as the server sent them.

        If the server sent no token ids but OpenAI's log-probs, `tokens` contains the tokens as text.
        """
        exact, plain = reply.tokens, reply.logprobs
        tokens: dict[str, Any] = {}
        if exact is not None:
            tokens = {name: getattr(exact, name) for name in exact.model_fields_set}
        elif plain is not None:
            tokens = {"tokens": [token for token, _ in plain], "logprobs": [number for _, number in plain]}
        is_known = SamplingKeys.model_fields.keys().isdisjoint(self.config.leave_out)
        return {
            "finish_reason": reply.finish_reason,
            **tokens,
            "sampling": sampling if is_known else None,
            "model": reply.model or self.config.model,
            "prompt_tokens": reply.prompt_tokens,
            "completion_tokens": reply.completion_tokens,
            **({"ignored": reply.ignored} if reply.ignored else {}),
        }
