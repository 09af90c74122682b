"""Sample from a vLLM server by token ids. A sample contains ids, log-probs and weight versions.

The engine uses these routes of the server:

    POST /inference/v1/generate             a sample, by token ids; streamed for stop strings and `on_token`
    POST /inference/v1/abort_requests       ends a stream at a stop string; the last chunk has weight versions
    POST /pause /collective_rpc /reset_prefix_cache /update_weight_version /resume      new weights
    POST /start_weight_update /update_weights /finish_weight_update      new weights that the learner sends
    POST /sleep /wake_up                    frees the GPU's memory while the learner works
    GET  /version /v1/models                the release of vLLM, and the served models
    GET  /metrics                           the number of computed tokens, to detect a hanging server

Each load gives the server's weights a unique name. vLLM reports the names of the weights that computed a
sample, so a sample with other weights, such as those of another run, is detected.

The server runs in its own environment or image; docs/vllm.md has its command line. SGLang would need a
similar class: its `/generate` takes ids and returns ids with log-probs, and `/update_weights_from_disk` loads
a folder, but it reports one weight version per answer, not per token.
"""

import asyncio
import json
import re
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import aiohttp
from pydantic import Field, JsonValue, model_validator
from typing_extensions import TypedDict  # pydantic reads `typing.TypedDict` only from Python 3.12 on

from service_kit.replies import Lines, Model, plain_session, read_bounded, show_found
from shared_schemas.base import Count, StrictReply
from shared_schemas.trajectory import MOST_TOKENS, DrawnLogprob, Logprob, Sampling, TokenId, cover
from trainer_backend.errors import (
    BadChatRequest,
    EngineBusy,
    InferenceError,
    RemoteRefused,
    RemoteUnavailable,
    WeightsRefused,
)
from trainer_backend.inference.actor import (
    NO_EXTRAS,
    Extras,
    FinishReason,
    Generation,
    SampledToken,
    refuse_too_long,
)
from trainer_backend.inference.remote_engine import (
    EXCERPT,
    MOST_REPLY_BYTES,
    TRY_AGAIN,
    RemoteEngine,
    connection_errors,
    read,
)
from trainer_backend.inference.versions import WeightAddress

# The releases with the routes above. 0.32.0 was tested.
OLDEST, BEYOND = (0, 32), (0, 34)
_GENERATE, _ABORT = "/inference/v1/generate", "/inference/v1/abort_requests"
_STOP: FinishReason = "stop"
_UNSEEN = (
    "The server's machine does not see the folder: put job.runs_dir on a disk that it has mounted under "
    "the same path."
)
_DEV_MODE = "VLLM_SERVER_DEV_MODE=1 in its environment"
# The option that a server lacks if it does not know a route.
_FLAGS = {
    _GENERATE: "--enable-scale-out",
    **dict.fromkeys(
        ("/resume", "/pause", "/weight_info", "/collective_rpc", "/sleep", "/wake_up"), _DEV_MODE
    ),
}
_CONNECT_TIMEOUT_S = 30.0
_FRONTEND_TIMEOUT_S = 10.0  # for requests that the server answers without its engine
_ENGINE_TIMEOUT_S = 60.0
_PROBE_TOPS = 5
# Methods of vllm_worker/turnwise_vllm.py.
_READY, _RECEIVES, _SLEEPS = "turnwise_ready", "turnwise_receives", "turnwise_sleeps"
# The statuses of a server that runs, but cannot take this request now.
_BUSY = frozenset({408, 425, 429})
_RELEASE = re.compile(r"(\d+)\.(\d+)")
_TOKENS = re.compile(
    rb"^vllm:(?:prompt|generation)_tokens_total(?:\{.*\})? (\d{1,20}(?:\.\d{1,20})?(?:e\+?\d\d?)?)$",
    re.MULTILINE,
)


class _Top(TypedDict):  # not a model: there are up to 20 per token, and parsing objects takes twice the time
    token_id: TokenId
    logprob: Logprob


class _Token(StrictReply):
    logprob: DrawnLogprob
    top_logprobs: tuple[_Top, ...] | None = None
    """The sampled token comes first, whatever its rank."""


class _Tokens(StrictReply):
    content: tuple[_Token, ...] | None = None


class _Span(StrictReply):
    start: TokenId
    version: str


class _Choice(StrictReply):
    token_ids: tuple[TokenId, ...] | None = None
    logprobs: _Tokens | None = None
    finish_reason: str | None = None
    weight_versions: tuple[_Span, ...] | None = None

    @property
    def tokens(self) -> tuple[_Token, ...]:
        return (self.logprobs.content if self.logprobs else None) or ()

    @model_validator(mode="after")
    def _of_equal_length(self) -> "_Choice":
        if len(self.token_ids or ()) != len(self.tokens):
            raise ValueError(
                f"token_ids has {len(self.token_ids or ())} ids and logprobs.content {len(self.tokens)} "
                "log-probs; each token needs one"
            )
        return self


class _Details(StrictReply):
    cached_tokens: TokenId | None = None


class _Usage(StrictReply):
    prompt_tokens_details: _Details | None = None


class _Sample(StrictReply):
    """A reply of /inference/v1/generate or one chunk of a streamed reply, with only the fields used."""

    request_id: str | None = None
    """The id that the server gave to the request."""
    choices: tuple[_Choice, ...] | None = Field(default=None, max_length=1)
    usage: _Usage | None = None
    error: JsonValue = None
    """The error with which a stream reports that the engine has failed."""


class _Scored(StrictReply):
    logprob: Logprob


class _Scores(StrictReply):
    prompt_logprobs: tuple[dict[str, _Scored] | None, ...]
    """For each token of the prompt, a mapping from token ids to log-probs; None for the first token."""


class _Nothing(StrictReply):
    """A reply of which only the status is read: any JSON object, or an empty body."""


class _Release(StrictReply):
    version: str


class _Model(StrictReply):
    id: str
    max_model_len: Count


class _Models(StrictReply):
    data: tuple[_Model, ...]


@dataclass(slots=True)
class _Answer:
    """The part of one sample that has been received so far."""

    request_id: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    likeliest: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    spans: tuple[_Span, ...] = ()
    finish_reason: str | None = None
    cached_tokens: int = 0
    stop_string: str | None = None

    def add(self, reply: _Sample, extras: Extras) -> None:
        """Add a reply or a chunk. Tokens after the token that completes a stop string are ignored."""
        if reply.error is not None:
            raise RemoteUnavailable(f"vLLM ended an answer with an error: {reply.error!r:.{EXCERPT}}")
        self.request_id = reply.request_id or self.request_id
        if reply.usage is not None and (details := reply.usage.prompt_tokens_details):
            self.cached_tokens = details.cached_tokens or 0
        for choice in reply.choices or ():
            self.finish_reason = choice.finish_reason or self.finish_reason
            self.spans = choice.weight_versions or self.spans
            for token_id, token in zip(choice.token_ids or (), choice.tokens, strict=True):
                if self.stop_string is not None:
                    return
                self._add_token(token_id, token, extras)

    def _add_token(self, token_id: int, token: _Token, extras: Extras) -> None:
        tops: tuple[tuple[int, float], ...] = ()
        if extras.likeliest:
            told = [(top["token_id"], top["logprob"]) for top in token.top_logprobs or ()]
            tops = tuple(sorted(told, key=lambda top: -top[1])[: extras.likeliest])
        self.token_ids.append(token_id)
        self.logprobs.append(token.logprob)
        self.likeliest.append(tops)
        if extras.stop is not None:
            self.stop_string = extras.stop.take(token_id)


class VllmEngine(RemoteEngine):
    """A `FrozenEngine` that samples from one vLLM server, and can load new weights into it.

    The seeds of requests are not sent: with vLLM, equal seeds do not give equal tokens, and a seed crashed
    the CPU build of 0.32.0 when the server preempted a request.

    Args:
        url: the server's base URL; it serves one model.
        weight_update: "wait" lets running requests end before new weights are loaded; "keep" freezes them,
            and they continue with the new weights.
        wait_s: how long a load may take.
        ask: called before a load from the learner's address, so that the learner sends the weights.
    """

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
    wake_s = 0.0
    """The total time in seconds that the server has needed to wake up."""
    silence_s = 30.0
    """The time without a sign of life (an answer, a chunk, a load) after which the server is probed.

    The probe is a request for one token. The server is considered hanging if the probe also takes longer than
    this time, and the token count in the server's metrics does not rise during the probe. (The count rises
    while the probe only waits behind long samples.) A caller that limits the time of `generate` must allow
    more than twice this time, or a hang is not detected."""

    def __init__(
        self,
        url: str,
        *,
        stop_ids: Sequence[int],
        vocabulary: int,
        max_model_len: int,
        wait_s: float,
        weight_update: Literal["wait", "keep"] = "wait",
        ask: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(url, "", stop_ids=stop_ids, vocabulary=vocabulary, max_model_len=max_model_len)
        self.move(url)
        self._weight_update, self._wait_s, self._ask = weight_update, wait_s, ask
        self._name = ""  # the name of the last loaded weights; `version` is their number
        self._versions = {"": 0}  # the version of each name that was accepted
        self._loads, self._signs = False, 0  # signs of life: answers, chunks, loads
        self._is_asleep = False

    def move(self, url: str) -> None:
        """Send requests to this address from now on."""
        self.url = url.rstrip("/")
        self.label = f"vLLM at {self.url}"
        self.part = self._url = self.url + _GENERATE

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, request_id: str, extras: Extras = NO_EXTRAS
    ) -> Generation:
        refuse_too_long(len(ids), sampling.max_tokens, self.max_model_len)
        if sampling.is_truncated:
            raise BadChatRequest(
                f"{sampling.truncation}: vLLM returns log-probs of the truncated distribution, and the "
                "learner computes those of the whole one",
                where=sampling.truncation.partition(" ")[0],
                hint="Leave it out with inference.engine = 'vllm'.",
            )
        answer = await self._wait_for(self._sample(ids, sampling, extras))
        if answer.finish_reason == "abort" and answer.stop_string is None:
            raise RemoteUnavailable(f"{self.label} aborted the request")
        self._refuse_unsound(answer.token_ids, answer.logprobs, sampling)
        most = max((top for tops in answer.likeliest for top, _ in tops), default=0)
        if most >= self._vocabulary:
            raise self._wrong("choices.0.logprobs.content, in top_logprobs, token_id", most, self._known)
        length, finish_reason = len(answer.token_ids), _STOP
        if answer.stop_string is None:
            length, finish_reason, _ = self._end(answer.token_ids, answer.finish_reason, NO_EXTRAS)
        return Generation(
            tuple(answer.token_ids[:length]), tuple(answer.logprobs[:length]), finish_reason,
            self._list_versions(answer, length), answer.stop_string, answer.cached_tokens,
            tuple(answer.likeliest[:length]),
        )  # fmt: skip

    def _list_versions(self, answer: _Answer, length: int) -> tuple[tuple[int, int], ...]:
        """Return pairs (first_token, policy_version) for the first `length` tokens of an answer.

        Spans that begin later are dropped: a server may sample further tokens after a stop string.
        """
        starts = [span.start for span in answer.spans]
        count = len(answer.token_ids) if answer.stop_string is None else MOST_TOKENS
        if not cover(starts, count):
            allowed = f"they begin at 0, rise, and end below {count}"
            raise self._wrong("choices.0.weight_versions, by their starts,", starts, allowed)
        for name in [span.version for span in answer.spans]:
            if name == self._name and name not in self._versions:
                raise RemoteUnavailable(f"{self.part} sampled with weights that have not passed the canary")
            if name not in self._versions:
                raise RemoteUnavailable(
                    f"{self.part} samples with weights that are none of this run's (weight_versions name "
                    f"{name!r:.80}): it was started again, or another run loads weights into it"
                )
        spans = [(span.start, self._versions[span.version]) for span in answer.spans]
        return tuple(span for span in spans if span[0] < length)

    async def _wait_for(self, sample: Coroutine[Any, Any, _Answer]) -> _Answer:
        """Return the answer; raise if the server hangs (see `silence_s`)."""
        task = asyncio.ensure_future(sample)
        tasks: list[asyncio.Future[Any]] = [task]
        try:
            while not task.done():
                signs = self._signs
                await asyncio.wait(tasks[:1], timeout=self.silence_s)
                if not task.done() and not self._loads and signs == self._signs:
                    probe = asyncio.ensure_future(self._probe(signs))
                    tasks = [task, probe]
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    if probe.done():
                        probe.result()
            return task.result()
        finally:
            for item in tasks:
                item.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _probe(self, signs: int) -> None:
        """Request one token; raise if the server gives neither this token nor another sign of life."""
        body, count = self._body([1], Sampling(max_tokens=1), 0), await self._token_count()
        try:
            await self._order(_GENERATE, json=body, timeout_s=self.silence_s)
        except EngineBusy:
            pass
        except RemoteUnavailable:
            # The probe may wait in a queue, or for a load.
            if signs != self._signs or self._loads:
                return
            if count is None or await self._token_count() in (count, None):
                raise

    async def _token_count(self) -> float | None:
        """Return the number of prompt and sampled tokens in the server's metrics, or None if unavailable."""
        with suppress(RemoteUnavailable):
            status, text = await self._exchange("GET", "/metrics", timeout_s=_FRONTEND_TIMEOUT_S)
            counts = [float(number) for number in _TOKENS.findall(text)] if status == 200 else []
            return sum(counts) if counts else None
        return None

    async def _control(
        self, kind: type[Model], method: str, route: str, *, timeout_s: float | None = None, **sent: Any
    ) -> Model:
        """Send a request, and parse its reply as a `kind`; see `_exchange` for the other arguments."""
        status, text = await self._exchange(method, route, timeout_s=timeout_s, **sent)
        return _reply(kind, status, text, self.url + route)

    async def _order(self, route: str, **sent: Any) -> None:
        """Send a POST request, and check only the status of the reply; see `_exchange` for the arguments."""
        await self._control(_Nothing, "POST", route, **sent)

    async def _exchange(
        self, method: str, route: str, *, timeout_s: float | None, **sent: Any
    ) -> tuple[int, bytes]:
        """Send a request over a new connection, and return status and body.

        Connections are not shared, because callers run in several event loops. If `timeout_s` is None, the
        caller must set a deadline. `sent` contains the request's `params` or `json`.
        """
        where, timeout = self.url + route, aiohttp.ClientTimeout(total=timeout_s)
        with connection_errors(where, timeout):
            async with (
                plain_session(timeout=timeout) as session,
                session.request(method, where, allow_redirects=False, **sent) as response,
            ):
                return response.status, await read_bounded(response.content.iter_any(), MOST_REPLY_BYTES)

    def _body(
        self, ids: Sequence[int], sampling: Sampling, likeliest: int, *, streams: bool = False
    ) -> dict[str, Any]:
        options = sampling.whole_request_keys()
        options.pop("seed", None)  # a seed crashes vLLM's CPU build at a preemption
        return {
            "model": self._model,
            "token_ids": list(ids),
            "sampling_params": {
                **options,
                "logprobs": likeliest + 1 if likeliest else 0,  # plus the sampled one
                "stop_token_ids": sorted(self._stop_ids),
                "detokenize": False,
            },
            # Keys and values of other weights must not be reused, so each load has its own salt.
            "cache_salt": self._name or "start",
            "stream": streams,
            "stream_options": {"include_usage": True} if streams else None,
        }

    async def _sample(self, ids: Sequence[int], sampling: Sampling, extras: Extras) -> _Answer:
        streams = extras.stop is not None or extras.on_token is not None
        body = self._body(ids, sampling, extras.likeliest, streams=streams)
        data, answer = json.dumps(body).encode(), _Answer()
        if not streams:
            status, text = await self._post(data)
            answer.add(_reply(_Sample, status, text, self._url), extras)
            self._signs += 1
            return answer
        async with self._response(data) as response:  # leaving this context early aborts the request
            if response.status != 200:
                raise _refusal(response.status, await response.content.read(EXCERPT * 10), self._url)
            most_per_token = 1024 * (2 + extras.likeliest)  # more than a server writes per token
            count, most_bytes = 0, MOST_REPLY_BYTES + sampling.max_tokens * most_per_token
            async for chunk in _chunks(response.content, self._url, most_bytes):
                self._signs += 1
                goes_on = answer.stop_string is None
                answer.add(chunk, extras)
                if len(answer.token_ids) > sampling.max_tokens:
                    raise RemoteRefused(f"{self._url} sampled more than max_tokens {sampling.max_tokens}")
                if goes_on and answer.stop_string is not None and answer.finish_reason is None:
                    ended = {"request_ids": [answer.request_id]}
                    await self._order(_ABORT, json=ended, timeout_s=_FRONTEND_TIMEOUT_S)
                if extras.on_token is not None:
                    count = _report_tokens(answer, count, extras)
        return answer

    async def load_weights(
        self, version: int, source: Path | WeightAddress, base: Path | None = None
    ) -> None:
        """Load weights from a folder that the server's workers can read, or from the learner at an address.

        Samples with these weights are refused until `accept` is called.

        Args:
            base: the base model's folder, into which the workers merge the adapters in `source`; None:
                `source` is a whole model.

        Raises:
            WeightsRefused: the server cannot load the weights within `wait_s`; its weights are then unknown
                until a later load succeeds.
        """
        name = f"{version}-{secrets.token_hex(6)}"
        update = self._plan_update(source, base, name)
        self._loads = True
        try:
            try:
                async with asyncio.timeout(self._wait_s):
                    if self._is_asleep:
                        await self._wake("weights")
                    await self._order("/pause", params={"mode": self._weight_update})
                    # A load that fails half-way must not leave the name of the earlier weights.
                    await self._order("/update_weight_version", json={"new_version": "unknown"})
                    if isinstance(source, WeightAddress):
                        self._ask()
                    for route, body in update:
                        await self._order(route, json=body)
                    await self._order("/reset_prefix_cache")
                    await self._order("/update_weight_version", json={"new_version": name})
                    if self._is_asleep:
                        await self._wake("kv_cache")
                        self._is_asleep = False
                self._name, self.version = name, version
            finally:
                self._loads, self._signs = False, self._signs + 1
                if not self._is_asleep:  # else the server would compute over a cache without memory
                    await self._order("/resume", timeout_s=_ENGINE_TIMEOUT_S)
        except TimeoutError as error:
            raise WeightsRefused(
                f"it has not loaded version {version} within {self._wait_s:g} s (inference.replica_wait_s)",
                where=self.url,
            ) from error
        except (RemoteRefused, RemoteUnavailable) as error:
            hint = _UNSEEN if "No such file" in error.detail else error.hint
            raise WeightsRefused(error.detail, where=self.url, hint=hint) from error

    async def sleep(self) -> None:
        """Free the GPU memory of weights and cache until the next load; running requests end.

        The server drops the weights (level 2), since the load brings all of them.

        Raises:
            RemoteRefused, RemoteUnavailable: the server may have kept its memory.
        """
        self._is_asleep = True  # set first, because the request may fail half-way
        await self._order("/sleep", params={"level": "2", "mode": "abort"}, timeout_s=self._wait_s)

    async def _wake(self, tag: Literal["weights", "kv_cache"]) -> None:
        """Let the server allocate one kind of memory again. The server resumes once it has both kinds."""
        began_s = asyncio.get_running_loop().time()
        await self._order("/wake_up", params={"tags": tag})
        self.wake_s += asyncio.get_running_loop().time() - began_s

    def _plan_update(
        self, source: Path | WeightAddress, base: Path | None, name: str
    ) -> list[tuple[str, Mapping[str, Any]]]:
        """Return (route, body) of each request that replaces the weights, in order."""
        if isinstance(source, WeightAddress):
            learner = {**source.model_dump(), "server": name, "wait_s": self._wait_s}
            return [
                ("/start_weight_update", {}),
                ("/update_weights", {"update_info": learner}),
                ("/finish_weight_update", {}),
            ]
        from trainer_backend.models.layout import weight_files  # imports torch; a check of servers avoids it

        folder = (base or source).resolve()
        adapters = [] if base is None else [str(source.resolve())]
        files = [file.name for file in weight_files(folder)]
        return [("/collective_rpc", {"method": "turnwise_load", "args": [str(folder), files, *adapters]})]

    def accept(self) -> None:
        """Accept samples with the weights of the last load. Call this once the weights have passed a test."""
        self._versions[self._name] = self.version

    async def score(self, ids: Sequence[int]) -> list[float]:
        """Return the log-probs of `ids[1:]` under the current weights, each given all ids before it."""
        body = {
            "model": self._model,
            "token_ids": list(ids),
            "sampling_params": {
                "max_tokens": 1,
                "temperature": 1.0,
                "prompt_logprobs": 0,
                "detokenize": False,
            },
            # The result must not come from a cache, since it tests the weights.
            "cache_salt": f"score {uuid4().hex}",
        }
        reply = await self._control(_Scores, "POST", _GENERATE, json=body, timeout_s=self._wait_s)
        places = reply.prompt_logprobs
        if len(places) != len(ids):
            raise RemoteRefused(
                f"{self.part}: prompt_logprobs has {len(places)} places; {len(ids)} ids need one each"
            )
        scores = [(place or {}).get(str(token_id)) for token_id, place in zip(ids, places, strict=True)]
        if None in scores[1:]:
            index = scores.index(None, 1)
            allowed = f"the log-prob of {ids[index]} is needed"
            raise self._wrong(f"prompt_logprobs.{index}", sorted(places[index] or ()), allowed)
        return [score.logprob for score in scores[1:] if score is not None]

    async def refuse_unfit(self) -> str:
        """Check that the server fits the run; return a line of text that describes the server.

        Raises:
            RemoteRefused: the server is not vLLM, or an unsupported release; it serves several models, or has
                a shorter context; a route is missing; or its log-probs ignore the temperature.
            RemoteUnavailable: the server does not answer.
        """
        release = (await self._control(_Release, "GET", "/version", timeout_s=_FRONTEND_TIMEOUT_S)).version
        refuse_release(release, self.url)
        # A trainer that was killed during a publish leaves the server paused, with all requests waiting; a
        # trainer that was killed during an update leaves it asleep.
        await self._order("/wake_up", timeout_s=self._wait_s)
        self._is_asleep = False
        await self._order("/resume", timeout_s=_FRONTEND_TIMEOUT_S)
        models = (await self._control(_Models, "GET", "/v1/models", timeout_s=_FRONTEND_TIMEOUT_S)).data
        lengths = {model.id: model.max_model_len for model in models}
        if len(lengths) != 1:
            raise RemoteRefused(
                f"{self.url}/v1/models: data names {show_found(sorted(lengths))}; one model is needed"
            )
        ((self._model, length),) = lengths.items()
        if length < self.max_model_len:
            raise RemoteRefused(
                f"{self.url} has a context of {length} tokens, and inference.max_model_len is "
                f"{self.max_model_len}",
                hint=f"Start it with --max-model-len {self.max_model_len}.",
            )
        await self._control(_Nothing, "GET", "/weight_info", timeout_s=_FRONTEND_TIMEOUT_S)
        hint = "Start it with --worker-extension-cls turnwise_vllm.TurnwiseWorker (docs/vllm.md)."
        await self._require(_READY, "cannot load weights", hint)
        await self._refuse_raw_logprobs()
        return f"replica {self.url}: vLLM {release}, context {length}"

    async def check_receiver(self) -> None:
        hint = (
            'Start it with --weight-transfer-config \'{"backend": "turnwise"}\' (docs/vllm.md), or use '
            'weight_transfer.backend = "folder".'
        )
        await self._require(_RECEIVES, "cannot receive weights from the learner", hint)

    async def check_sleeper(self) -> None:
        hint = "Start it with --enable-sleep-mode, which needs a GPU (docs/vllm.md), or leave sleep out."
        await self._require(_SLEEPS, "gives no memory back (inference.sleep)", hint)

    async def _require(self, method: str, what: str, hint: str) -> None:
        """Refuse a server whose error names `method`: its workers lack the method, or raise in it."""
        try:
            await self._order("/collective_rpc", json={"method": method}, timeout_s=_ENGINE_TIMEOUT_S)
        except RemoteUnavailable as error:
            if method not in error.detail:
                raise
            raise RemoteRefused(f"{self.url} {what}: {error.detail}", hint=hint) from error

    async def _refuse_raw_logprobs(self) -> None:
        """Refuse a server whose log-probs ignore the temperature (are equal at temperatures 2 and 1/2)."""
        tops = []
        for temperature in (2.0, 0.5):
            sampling, answer = Sampling(temperature=temperature, max_tokens=1), _Answer()
            body = self._body(range(1, 17), sampling, _PROBE_TOPS)
            reply = await self._control(_Sample, "POST", _GENERATE, json=body, timeout_s=_ENGINE_TIMEOUT_S)
            answer.add(reply, Extras(likeliest=_PROBE_TOPS))
            tops.append(answer.likeliest)
        if not tops[0] or tops[0] == tops[1]:
            raise RemoteRefused(
                f"{self.url} returns log-probs before the temperature, which cannot be weighed",
                hint="Start it with --logprobs-mode processed_logprobs.",
            )


def refuse_release(release: str, where: str) -> None:
    """Raise RemoteRefused for a release of vLLM whose routes may differ from the supported ones."""
    numbers = _RELEASE.match(release)
    if numbers is None:
        raise RemoteRefused(f"{where} is no vLLM: its version is {release!r:.40}")
    if not OLDEST <= (int(numbers[1]), int(numbers[2])) < BEYOND:
        oldest, beyond = (".".join(map(str, limit)) for limit in (OLDEST, BEYOND))
        raise RemoteRefused(
            f"{where} runs vLLM {release}; releases from {oldest} to before {beyond} are supported"
        )


def _reply(kind: type[Model], status: int, text: bytes, where: str) -> Model:
    """Parse a reply as a `kind`; an empty body counts as {}. Raise an InferenceError unless status is 200."""
    if status != 200:
        raise _refusal(status, text, where)
    return read(kind, text if text.strip() else b"{}", where)


def _refusal(status: int, text: bytes, where: str) -> InferenceError:
    told = f"{where} answered {status}: {text[:EXCERPT].decode('utf-8', 'replace')}"
    if status in _BUSY:
        return EngineBusy(told)
    if status >= 500 or status in TRY_AGAIN or status < 400:
        return RemoteUnavailable(told)
    flag = next((flag for route, flag in _FLAGS.items() if status == 404 and where.endswith(route)), None)
    return RemoteRefused(told, hint=None if flag is None else f"Start it with {flag} (docs/vllm.md).")


async def _chunks(content: aiohttp.StreamReader, where: str, most_bytes: int) -> AsyncIterator[_Sample]:
    """Parse and yield server-sent events up to [DONE]; raise RemoteUnavailable if [DONE] is missing.

    `most_bytes` limits the length of the whole stream.
    """
    lines = Lines(MOST_REPLY_BYTES, most_bytes)
    async for part in content.iter_any():
        for line in lines.take(part):
            data = line.strip().removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            if data and not data.startswith(b":"):  # skip comments, which keep the connection open
                yield read(_Sample, data, where)
    raise RemoteUnavailable(f"{where} ended a stream in the middle of an answer")


def _report_tokens(answer: _Answer, count: int, extras: Extras) -> int:
    """Call `on_token` for each token after the first `count`, except the newest; return the new `count`.

    The newest token may be the answer's last one, which `on_token` must not receive.
    """
    assert extras.on_token is not None
    newest = len(answer.token_ids) - 1
    tokens = map(SampledToken, answer.token_ids, answer.logprobs, answer.likeliest)
    for token in list(tokens)[count:newest]:
        extras.on_token(token)
    return max(count, newest)
