"""A language model behind any OpenAI-compatible server, as an AgentPolicy.

Source: 2-rollout-worker-and-gigpo.md, Task 2.2; what our gateway adds to the wire: shared_schemas/chat.py.
"""

import hashlib
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import aiohttp
import stamina
from pydantic import SecretStr

from shared_schemas.chat import ROLLOUT_HEADER
from shared_schemas.messages import Message
from shared_schemas.trajectory import PolicyLogprobs, Sampling
from task_app.errors import ContextLengthExceeded, PolicyUnavailable
from task_app.policies.openai_config import EVERY_TOKEN, SAMPLED_PLAINLY, OpenAIConfig, chat_completions_url
from task_app.policies.replies import (
    Reply,
    WholeReplies,
    is_context_length,
    own_tokens,
    protocol_error,
    read_reply,
    refusal,
    wait_told,
    without_missing_call,
)
from task_app.protocols import PolicyAnswer, PolicyObservation

# One POST to an inference server: its bounded answer, or the reason why another may be worth it.


class TryAgain(Exception):
    """Nothing answered, or the server said 'later', and perhaps when; the same request may be sent again."""

    def __init__(self, sentence: str, *, after_s: float | None = None) -> None:
        super().__init__(sentence)
        self.after_s = after_s


class Endpoint:
    """Where a policy asks, with what headers, how long it waits and how much it reads.

    Without a session each request has one of its own.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession | None,
        url: str,
        headers: Mapping[str, str],
        *,
        timeout_s: float,
        max_reply_bytes: int,
    ) -> None:
        self._session, self._url, self._headers = session, url, headers
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._timeout_s, self._max_reply_bytes = timeout_s, max_reply_bytes

    async def post(self, data: bytes) -> tuple[int, bytes, float | None]:
        """Status, body, and after how many seconds the server wants to be asked again, if it says so."""
        try:
            if self._session is not None:
                return await self._posted(self._session, data)
            async with aiohttp.ClientSession() as session:
                return await self._posted(session, data)
        except TimeoutError as exc:
            raise TryAgain(f"no answer within {self._timeout_s:g} s") from exc
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as exc:
            raise TryAgain(f"{type(exc).__name__}: {exc}"[:200]) from exc
        except (aiohttp.ClientError, ValueError) as exc:
            raise protocol_error(type(exc).__name__) from exc

    async def _posted(self, session: aiohttp.ClientSession, data: bytes) -> tuple[int, bytes, float | None]:
        # No redirects: they would lead past the list of allowed hosts.
        async with session.post(
            self._url, data=data, headers=self._headers, timeout=self._timeout, allow_redirects=False
        ) as response:
            after_s = wait_told(response.headers.get("Retry-After"))
            return response.status, await self._bounded(response), after_s

    async def _bounded(self, response: aiohttp.ClientResponse) -> bytes:
        if (response.content_length or 0) <= self._max_reply_bytes:
            parts = bytearray()
            async for part in response.content.iter_any():
                parts += part
                if len(parts) > self._max_reply_bytes:
                    break
            else:
                return bytes(parts)
        raise protocol_error(f"a reply of more than {self._max_reply_bytes} bytes")


TRY_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
# A shorter key ("EMPTY", "null") is no secret, and may be a part of any text.
SECRET_FROM = 12


def decision_seed(seed: int, turn: int) -> int:
    """The sampling seed of decision `turn` (from 1): pure, in [0, 2**31 - 1)."""
    digest = hashlib.blake2b(f"{seed}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % (2**31 - 1)


class OpenAIAgentPolicy:
    """One conversation with a model; a policy per rollout.

        policy = OpenAIAgentPolicy(OpenAIConfig(inference_url=..., model=..., ask_token_ids=False))
        action, text, log_probs, value = await policy.get_action(messages, tools)

    Args:
        config: what to ask, and where.
        session: shared by all policies of a service; without one each request has a connection of its own.
        allowed_hosts: the operator's list of inference hosts; None allows any.
        rollout_id: sent as a header, to a gateway of ours alone, which keeps the conversation's ids under it.
        inference_key: Bearer key that came in the same request as config.inference_url, for it alone.
        max_reply_bytes: bound of one reply.
        on_retry: told of every attempt after the first.
        clock: seconds that only grow.

    Raises:
        InvalidRequest: inference_url is no URL, or its host is not allowed.
    """

    name = "openai"

    def __init__(
        self,
        config: OpenAIConfig,
        *,
        session: aiohttp.ClientSession | None = None,
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
            session, url, headers, timeout_s=config.request_timeout_s, max_reply_bytes=max_reply_bytes
        )
        self._on_retry = on_retry
        self._clock = clock
        self._turn = 0
        self._ids_seen = 0
        self._read_tokens = WholeReplies() if config.exact_tokens == "vllm" else own_tokens
        self._last: tuple[tuple[Message, ...], Reply] | None = None
        self._answered = False
        self.pending_failure: str | None = None

    async def get_action(
        self,
        observation: Sequence[Message | Mapping[str, Any]],
        available_tools_specs: list[dict[str, Any]] | None = None,
    ) -> PolicyAnswer:
        self._turn += 1
        messages = tuple(map(Message.model_validate, observation))
        most = observation.max_tokens if isinstance(observation, PolicyObservation) else None
        sampling = self.sampling(self._turn, most=most)
        self._refuse_overrun(messages, sampling.max_tokens)
        body = self.request_body(messages, available_tools_specs or [], sampling)
        reply = await self._complete(body)
        self._check_reuse(reply.tokens)
        self._last = messages, reply
        action = reply.action if available_tools_specs else without_missing_call(reply.action)
        return action, reply.text, self._log_probs(reply, sampling), None

    @property
    def max_model_length(self) -> int | None:
        """What a prompt and its max_tokens may have together, as far as this policy was told."""
        return self.config.max_model_length

    def sampling(self, turn: int, *, most: int | None = None) -> Sampling:
        """How decision `turn` (from 1) is drawn: at most `most` tokens, whatever the config allows."""
        config = self.config
        return Sampling(
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            seed=None
            if config.seed is None or "seed" in config.leave_out
            else decision_seed(config.seed, turn),
            max_tokens=config.max_tokens if most is None else min(config.max_tokens, most),
        )

    def snapshot(self) -> dict[str, Any]:
        """Which decision comes next. The conversation's ids stay with the gateway."""
        return {"turn": self._turn}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Sample on with the next decision's seed, in a conversation of its own."""
        turn = state.get("turn")
        if type(turn) is not int or turn < 0:
            raise ValueError(f"'turn' is {turn!r}; it counts decisions from 0")
        self._turn = turn

    def request_body(
        self, messages: Collection[Message], tools: list[dict[str, Any]], sampling: Sampling
    ) -> dict[str, Any]:
        """Make the chat-completions request without unused options, which some servers do not know."""
        body: dict[str, Any] = {
            "model": self.config.model,
            "messages": [message.model_dump(exclude_none=True) for message in messages],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            self.config.max_tokens_name: sampling.max_tokens,
        }
        if tools:
            body |= {"tools": tools, "tool_choice": self.config.tool_choice}
        if sampling.top_k > 0:
            body["top_k"] = sampling.top_k
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if self.config.max_model_length is not None and self.config.asks_gateway_of_ours:
            body["max_model_length"] = self.config.max_model_length
        if self.config.processed_logprobs:
            body["processed_logprobs"] = True
        if self.config.logprobs:
            body["logprobs"] = True
        if self.config.chat_template_kwargs:
            body["chat_template_kwargs"] = self.config.chat_template_kwargs
        if self.config.exact_tokens == "vllm":
            body |= SAMPLED_PLAINLY | {"return_token_ids": True, "top_k": sampling.top_k or EVERY_TOKEN}
        kept = {name: value for name, value in body.items() if name not in self.config.leave_out}
        return kept | self.config.extra_body

    async def _complete(self, body: dict[str, Any]) -> Reply:
        """Ask, and ask again within the budget; the caller's deadline may cut in at any time."""
        self.pending_failure = None
        try:
            reply = await self._ask_once(body, first=not self._answered)
        except TryAgain as exc:
            self.pending_failure = str(exc)
            reply = await self._ask_again(body, exc)
        self.pending_failure = None
        self._answered = True
        return reply

    async def _ask_again(self, body: dict[str, Any], failed: TryAgain) -> Reply:
        """The attempts after the first. Apart from it: stamina's machinery costs as much as an env step."""
        until_s = self._clock() + self.config.retry_budget_s
        try:
            async for attempt in stamina.retry_context(
                on=partial(self._wait, until_s),
                attempts=self.config.max_attempts,
                timeout=self.config.retry_budget_s,
                wait_initial=0.1,
                wait_max=5.0,
                wait_jitter=0.3,
            ):
                with attempt:
                    if attempt.num == 1:
                        raise failed
                    self._on_retry()
                    return await self._ask_once(body, first=True)
        except TryAgain as exc:
            raise PolicyUnavailable(f"the inference server is unavailable: {exc}") from exc
        raise AssertionError("retry_context returns or raises")

    def _wait(self, until_s: float, failed: Exception) -> bool | float:
        """Seconds before the next attempt; True for a growing wait, False for no further one."""
        if not isinstance(failed, TryAgain):
            return False
        if failed.after_s is None:
            return True
        return self._clock() + failed.after_s <= until_s and failed.after_s

    async def _ask_once(self, body: Mapping[str, Any], *, first: bool) -> Reply:
        # A repeated request whose first answer was lost must not build on that lost answer's ids, nor a
        # first decision on those of an earlier attempt at the same rollout: ask for the whole prompt.
        sent = {**body, "return_token_ids": True} if first and self.config.asks_gateway_of_ours else body
        status, text, after_s = await self._endpoint.post(json.dumps(sent).encode())
        if len(self._key) >= SECRET_FROM:
            # A server that repeats its request (proxies do) would have the key recorded with the episode.
            text = text.replace(self._key.encode(), b"[key]")
        if status == 200:
            return read_reply(text, self._read_tokens, logprobs=self.config.logprobs)
        code, sentence = refusal(status, text, key=self._key)
        if status in TRY_AGAIN:
            raise TryAgain(sentence, after_s=after_s)
        if is_context_length(code, sentence):
            raise ContextLengthExceeded(sentence)
        raise PolicyUnavailable(f"the inference server refused: {sentence}", code="inference_refused")

    def _refuse_overrun(self, messages: tuple[Message, ...], max_tokens: int) -> None:
        """Towards a server that does not know `max_model_length`: refuse a prompt that is surely too long.

        Its last reply told how many tokens the prompt and the answer had, and a conversation that only grew
        has at least those. What was appended since cannot be counted here, nor the prompt of a first decision
        or one after an edit, nor anything where the server tells no usage: there its own limit alone holds.
        """
        limit, last = self.config.max_model_length, self._last
        if limit is None or self.config.asks_gateway_of_ours or last is None:
            return
        earlier, reply = last
        if reply.kept_tokens is None or messages[: len(earlier)] != earlier or len(messages) == len(earlier):
            return
        wanted = reply.kept_tokens + max_tokens
        if wanted > limit:
            raise ContextLengthExceeded(
                f"a prompt of at least {reply.kept_tokens} tokens + max_tokens {max_tokens} = {wanted}, "
                f"but max_model_length is {limit}"
            )

    def _check_reuse(self, tokens: PolicyLogprobs | None) -> None:
        """The gateway may reuse at most the ids that this conversation has seen."""
        if tokens is None:
            return
        if tokens.prompt_ids_reused > self._ids_seen:
            raise protocol_error(f"{tokens.prompt_ids_reused} ids reused of {self._ids_seen}")
        self._ids_seen = tokens.prompt_ids_reused + len(tokens.prompt_token_ids) + len(tokens.token_ids)

    def _log_probs(self, reply: Reply, sampling: Sampling) -> dict[str, Any]:
        """The fields of PolicyLogprobs, or without token ids `tokens` and `logprobs`, each where known; and
        how they were drawn, where that is known."""
        exact, plain = reply.tokens, reply.logprobs
        known: dict[str, Any] = {}
        if exact is not None:
            known = {name: getattr(exact, name) for name in PolicyLogprobs.model_fields}
        elif plain is not None:
            known = {"tokens": [token for token, _ in plain], "logprobs": [number for _, number in plain]}
        told = {"temperature", "top_p"}.isdisjoint(self.config.leave_out)
        return {
            "finish_reason": reply.finish_reason,
            **known,
            "sampling": sampling if told else None,
            "model": reply.model or self.config.model,
            "prompt_tokens": reply.prompt_tokens,
            "completion_tokens": reply.completion_tokens,
        }
