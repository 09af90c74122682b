"""Sample from an external OpenAI-compatible server, which receives token ids and returns ids and log-probs.

Requests go to POST /v1/completions with the ids of the prompt. If OpenAI's API lacks a key, the key of vLLM's
API is used. The server's chat template, tool parser and reasoning parser are not used: the gateway renders
prompts and parses answers, as it does for the actor.

    request: prompt (ids), logprobs, return_token_ids
    reply:   prompt_token_ids, token_ids, logprobs.token_logprobs      in choices[0]
"""

import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from urllib.parse import urlsplit, urlunsplit

import aiohttp
from pydantic import Field, SecretStr

from service_kit.replies import (
    Model,
    ReplyFault,
    ReplyInvalid,
    plain_session,
    read_bounded,
    read_reply,
    show_found,
)
from shared_schemas.base import StrictReply
from shared_schemas.json_text import read_json
from shared_schemas.trajectory import DrawnLogprob, Sampling, TokenId
from trainer_backend.errors import BadChatRequest, ContextLengthExceeded, RemoteRefused, RemoteUnavailable
from trainer_backend.inference.actor import NO_EXTRAS, Extras, FinishReason, Generation

# The version of an external model, which is never trained.
_VERSION = 0
TRY_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
_KEEP_ALIVE_S = 2.0
_AUTH_ERRORS = frozenset({401, 403})
MOST_REPLY_BYTES = 16 << 20
EXCERPT = 300
_WHO_TELLS = "vLLM from 0.10.2 on and gateways of Turnwise return ids and log-probs of their samples."
_THEIR_LIMIT = re.compile(r"maximum context length is (\d{1,9})")


class RemoteEngine:
    """An engine that sends its requests to a server, and does not load weights.

    Only one event loop may use it at a time, and the same loop must call `close`. `stop_ids`, `vocabulary`
    and `max_model_len` are the actor's, because the server must have the actor's tokenizer. If `processed` is
    true, the server reports log-probs under its sampling distribution instead of softmax(logits).
    """

    # The names in error messages: `label` for the server, `part` for the sender of an invalid reply.
    label = part = "the server of the fixed policy"
    timeout = aiohttp.ClientTimeout(total=600.0)

    def __init__(
        self,
        url: str,
        model: str,
        key: SecretStr | None = None,
        *,
        stop_ids: Sequence[int],
        vocabulary: int,
        max_model_len: int,
        processed: bool = False,
    ) -> None:
        self._url, self._model = completions_url(url), model
        self._key = key.get_secret_value() if key is not None else ""
        self._stop_ids, self._vocabulary = frozenset(stop_ids), vocabulary
        self.version, self.max_model_len, self._processed = _VERSION, max_model_len, processed
        # This future never completes, since a server that is down may come back.
        self.breakdown: Future[str] = Future()
        self._session: aiohttp.ClientSession | None = None

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, request_id: str, extras: Extras = NO_EXTRAS
    ) -> Generation:
        self._refuse_unrecordable(sampling, extras)
        choice = await self._choice(list(ids), sampling, prompt_tokens=len(ids))
        if choice.prompt_token_ids != tuple(ids):
            raise self._wrong("choices.0.prompt_token_ids", choice.prompt_token_ids, "the prompt was another")
        token_ids, logprobs = choice.token_ids, choice.logprobs.token_logprobs
        self._refuse_unsound(token_ids, logprobs, sampling)
        length, finish_reason, stop_string = self._end(token_ids, choice.finish_reason, extras)
        generation = Generation(
            token_ids[:length], logprobs[:length], finish_reason, ((0, _VERSION),), stop_string
        )
        if extras.on_token is not None:
            for token in generation.sampled()[:-1]:
                extras.on_token(token)
        return generation

    async def text_ids(self, text: str) -> list[int]:
        """Return the ids of a text by the server's tokenizer. Special tokens in the text are recognised."""
        choice = await self._choice(text, Sampling(max_tokens=1), prompt_tokens=0)
        return list(choice.prompt_token_ids)

    def start(self) -> None:
        """Do nothing: the server runs elsewhere."""

    def stop(self) -> None:
        """Do nothing: the server runs elsewhere."""

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _refuse_unrecordable(self, sampling: Sampling, extras: Extras) -> None:
        """Refuse a request if the server cannot report the log-probs that have to be recorded."""
        if extras.likeliest:
            raise BadChatRequest("a fixed policy at a server returns no top_logprobs", where="top_logprobs")
        if not self._processed and sampling.changes:
            raise BadChatRequest(
                f"its server returns log-probs of softmax(logits), and {sampling.changes} draws from "
                "something else",
                where=sampling.changes.partition(" ")[0],
            )

    async def _choice(self, prompt: list[int] | str, sampling: Sampling, *, prompt_tokens: int) -> "_Choice":
        body = {
            "model": self._model,
            "prompt": prompt,
            **sampling.whole_request_keys(),
            "logprobs": 0,
            "return_token_ids": True,
            "add_special_tokens": False,
        }
        if self._processed:
            # Turnwise gateways support this key; other servers are configured at their start.
            body["processed_logprobs"] = True
        status, text = await self._post(json.dumps(body).encode())
        if status == 200:
            return read(_Completion, text, self.part, hint=_WHO_TELLS).choices[0]
        sentence = _refusal(status, text, key=self._key)
        if status in TRY_AGAIN:
            raise RemoteUnavailable(f"{self.label} answers {sentence}")
        if limit := _THEIR_LIMIT.search(sentence):
            raise ContextLengthExceeded(
                prompt_tokens=prompt_tokens, max_tokens=sampling.max_tokens, max_model_len=int(limit[1])
            )
        raise RemoteRefused(f"{self.label} refused: {sentence}")

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            # Callers limit their concurrency; a second limit would only hide a queue. vLLM closes a
            # connection that was idle for 5 s, and a request that arrives at that moment fails.
            self._session = plain_session(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
                timeout=self.timeout,
            )
        return self._session

    @property
    def _headers(self) -> dict[str, str]:
        key = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        return {"Content-Type": "application/json", **key}

    @asynccontextmanager
    async def _response(self, data: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request for a sample and yield the response, which is closed at the end of the context."""
        with connection_errors(self.label, self.timeout):
            # No redirects: the key is for this host only.
            async with self._open_session().post(
                self._url, data=data, headers=self._headers, allow_redirects=False
            ) as response:
                yield response

    async def _post(self, data: bytes) -> tuple[int, bytes]:
        async with self._response(data) as response:
            return response.status, await read_bounded(response.content.iter_any(), MOST_REPLY_BYTES)

    def _refuse_unsound(
        self, token_ids: Sequence[int], logprobs: Sequence[float], sampling: Sampling
    ) -> None:
        """Refuse a sample with ids that the actor lacks, with no ids, or with more ids than requested."""
        if len(token_ids) != len(logprobs) or not 1 <= len(token_ids) <= sampling.max_tokens:
            raise RemoteRefused(
                f"{self.part}: choices.0 has {len(token_ids)} token_ids and {len(logprobs)} logprobs; 1 to "
                f"{sampling.max_tokens} of each were requested"
            )
        if max(token_ids) >= self._vocabulary:
            index = next(i for i, token in enumerate(token_ids) if token >= self._vocabulary)
            raise self._wrong(f"choices.0.token_ids.{index}", token_ids[index], self._known)

    @property
    def _known(self) -> str:
        return f"the actor knows the ids 0 to {self._vocabulary - 1}"

    def _wrong(self, field: str, value: object, allowed: str) -> RemoteRefused:
        return RemoteRefused(str(ReplyInvalid(self.part, field, show_found(value), allowed)))

    def _end(
        self, token_ids: Sequence[int], reason: str | None, extras: Extras
    ) -> tuple[int, FinishReason, str | None]:
        """Find the end of an answer by the actor's end tokens and the request's stop strings.

        Return the number of ids of the answer, the finish reason, and the stop string that ended it, or None.
        """
        for length, token_id in enumerate(token_ids, start=1):
            if token_id in self._stop_ids:
                return length, "stop", None
            stop_string = extras.stop.take(token_id) if extras.stop is not None else None
            if stop_string is not None:
                return length, "stop", stop_string
        if reason == "length":
            return len(token_ids), "length", None
        raise RemoteRefused(
            f"{self.label} ended an answer with the id {token_ids[-1]} (finish_reason {reason!r:.40}); "
            f"answers of the actor end with {sorted(self._stop_ids)}",
            hint="generation_config.json of both models must name the same eos_token_id.",
        )


@contextmanager
def connection_errors(label: str, timeout: aiohttp.ClientTimeout) -> Iterator[None]:
    """Translate connection errors, raised inside the context, into errors of an engine.

    Raises:
        RemoteUnavailable: no complete answer arrived.
        RemoteRefused: the answer cannot be read.
    """
    try:
        yield
    except TimeoutError as error:
        limit_s = timeout.total or timeout.sock_connect
        raise RemoteUnavailable(f"{label} gave no answer within {limit_s:g} s") from error
    except ReplyFault as error:
        raise RemoteRefused(f"{label}: {error}") from error
    except (aiohttp.ClientError, OSError) as error:
        reason = f"{type(error).__name__}: {error}"[:EXCERPT]
        raise RemoteUnavailable(f"{label} does not answer: {reason}") from error


def completions_url(url: str) -> str:
    """Return the completions URL for a base URL, which may end in /v1 or in a path below /v1."""
    parts = urlsplit(url)
    base = parts.path.rstrip("/")
    for ending in ("/chat/completions", "/completions", "/v1"):
        base = base.removesuffix(ending)
    return urlunsplit((parts.scheme, parts.netloc, f"{base}/v1/completions", parts.query, ""))


class _TokenLogprobs(StrictReply):
    token_logprobs: tuple[DrawnLogprob, ...]


class _Choice(StrictReply):
    prompt_token_ids: tuple[TokenId, ...]
    token_ids: tuple[TokenId, ...]
    logprobs: _TokenLogprobs
    finish_reason: str | None = None


class _Completion(StrictReply):
    """The reply of /v1/completions, with only the fields that are used."""

    choices: tuple[_Choice, ...] = Field(min_length=1)


def read(kind: type[Model], content: bytes, part: str, *, hint: str | None = None) -> Model:
    """Parse a reply with `read_reply`, but raise RemoteRefused if the reply is invalid."""
    try:
        return read_reply(kind, content, part)
    except ReplyInvalid as error:
        raise RemoteRefused(str(error), hint=hint) from error


def _refusal(status: int, body: bytes, *, key: str) -> str:
    """Return the HTTP status and the server's error message as one text.

    For 401 and 403 the message is left out, because servers repeat the API key in it.
    """
    if status in _AUTH_ERRORS:
        return f"status {status}"
    try:
        reply = read_json(body)
    except ValueError:
        return f"status {status}"
    inner = reply.get("error") if isinstance(reply, dict) else None
    source = inner if isinstance(inner, dict) else reply
    message = source.get("message") if isinstance(source, dict) else None
    sentence = message if isinstance(message, str) else ""
    if key:
        sentence = sentence.replace(key, "[key]")
    return f"status {status} {sentence.encode('utf-8', 'replace').decode()[:EXCERPT]}".strip()
