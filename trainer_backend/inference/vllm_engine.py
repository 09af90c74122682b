"""A vLLM server as an engine: token ids go there, ids, log-probs and weight versions come back.

    POST /inference/v1/generate     a sample, by token ids; streamed where a stop string may end it,
                                    since closing the stream ends it at the server
    POST /pause /collective_rpc /reset_prefix_cache /update_weight_version /resume      new weights
    GET  /version /v1/models        what is served

The server runs in an environment or image of its own; docs/vllm.md has its command line. SGLang would need a
class like this one: its `/generate` takes ids and returns ids with log-probs, and
`/update_weights_from_disk` loads a folder, but it tells one weight version an answer, not one a token.
"""

import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import aiohttp

from shared_schemas.trajectory import Sampling
from trainer_backend.errors import (
    BadChatRequest,
    ContextLengthExceeded,
    RemoteRefused,
    RemoteUnavailable,
    WeightsRefused,
)
from trainer_backend.inference.protocol import (
    NO_EXTRAS,
    Extras,
    FinishReason,
    Generation,
    SampledToken,
    WeightSource,
)
from trainer_backend.inference.remote_engine import (
    EXCERPT,
    PLAIN_SAMPLING,
    TRY_AGAIN,
    RemoteEngine,
    connection_errors,
)
from trainer_backend.models.layout import weight_files

# Releases whose routes are the ones above. 0.32.0 is the one that was run.
OLDEST, BEYOND = (0, 32), (0, 34)
_GENERATE = "/inference/v1/generate"
_CONTROL_TIMEOUT_S = 600.0
_FRONTEND_TIMEOUT_S = 10.0  # of a question that the engine takes no part in
_ENGINE_TIMEOUT_S = 60.0
_PROBE_TOPS = 5
_RELEASE = re.compile(r"(\d+)\.(\d+)")


@dataclass(slots=True)
class _Answer:
    """What a server has told of one sample so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    likeliest: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    spans: list[Mapping[str, Any]] | None = None
    finish_reason: str | None = None
    cached_tokens: int = 0
    stop_string: str | None = None

    def add(self, reply: Mapping[str, Any], extras: Extras) -> None:
        """Take a reply, or one chunk of it; a stop string ends it with the token that completes it."""
        if "error" in reply:  # how a stream says that its engine has failed
            raise RemoteUnavailable(f"vLLM ended an answer with an error: {reply['error']!r:.{EXCERPT}}")
        usage = reply.get("usage")
        if isinstance(usage, dict):
            details = usage.get("prompt_tokens_details")
            self.cached_tokens = (details or {}).get("cached_tokens") or 0
        for choice in reply.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self.spans = choice.get("weight_versions") or self.spans
            entries = (choice.get("logprobs") or {}).get("content") or []
            ids = choice.get("token_ids") or []
            if len(entries) != len(ids):
                raise RemoteRefused(f"vLLM returned {len(ids)} token ids and {len(entries)} log-probs")
            for token_id, entry in zip(ids, entries, strict=True):
                if self.stop_string is not None:
                    return
                self._add_token(token_id, entry, extras)

    def _add_token(self, token_id: int, entry: Mapping[str, Any], extras: Extras) -> None:
        # The sampled token comes first, whatever its rank.
        tops = sorted(
            ((top["token_id"], top["logprob"]) for top in entry.get("top_logprobs") or ()),
            key=lambda top: -top[1],
        )
        self.token_ids.append(token_id)
        self.logprobs.append(entry["logprob"])
        self.likeliest.append(tuple(tops[: extras.likeliest]))
        if extras.stop is not None:
            self.stop_string = extras.stop.take(token_id)


class VllmEngine(RemoteEngine):
    """One vLLM server: a `FrozenEngine` with `load_weights`, which takes folders.

    Unlike the local engine it has no seeds: equal seeds do not give equal tokens (and a seed crashed the CPU
    build of 0.32.0 at a preemption), so none is sent.

    Args:
        url: the server's base URL; it serves one model.
        weight_update: "wait" lets running requests end before new weights are loaded; "keep" freezes them,
            and they go on with the new weights.
    """

    def __init__(
        self,
        url: str,
        *,
        stop_ids: Sequence[int],
        vocabulary: int,
        max_model_len: int,
        weight_update: Literal["wait", "keep"] = "wait",
    ) -> None:
        super().__init__(url, "", stop_ids=stop_ids, vocabulary=vocabulary, max_model_len=max_model_len)
        self.url = url.rstrip("/")
        self.label, self._url = f"vLLM at {self.url}", self.url + _GENERATE
        self._weight_update, self._serving_version = weight_update, 0

    @property
    def version(self) -> int:
        return self._serving_version

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, request_id: str, extras: Extras = NO_EXTRAS
    ) -> Generation:
        if len(ids) + sampling.max_tokens > self._max_model_len:
            raise ContextLengthExceeded(
                prompt_tokens=len(ids), max_tokens=sampling.max_tokens, max_model_len=self._max_model_len
            )
        if sampling.is_truncated:
            raise BadChatRequest(
                f"top_p {sampling.top_p:g}, top_k {sampling.top_k}: vLLM returns log-probs of the truncated "
                "distribution, and the learner computes those of the whole one",
                where="top_p",
                hint="Use top_p = 1 and top_k = 0 with inference.engine = 'vllm'.",
            )
        version = self.version
        answer = await self._sample(ids, sampling, extras, salt=str(version))
        if answer.finish_reason == "abort":
            raise RemoteUnavailable(f"{self.label} aborted the request")
        token_ids, logprobs = self._tokens(
            {"token_ids": answer.token_ids, "logprobs": {"token_logprobs": answer.logprobs}}, sampling
        )
        length = len(token_ids)
        versions: tuple[tuple[int, int], ...] = ((0, version),)
        finish_reason: FinishReason = "stop"
        if answer.stop_string is None:
            choice = {"finish_reason": answer.finish_reason}
            length, finish_reason, _ = self._end(token_ids, choice, NO_EXTRAS)
            versions = _versions(answer.spans)
        elif self.version != version:  # only the last chunk, which was not waited for, tells of a change
            raise RemoteUnavailable("the weights changed while a stop string ended the answer")
        return Generation(
            tuple(token_ids[:length]), tuple(logprobs[:length]), finish_reason, versions,
            answer.stop_string, answer.cached_tokens, tuple(answer.likeliest[:length]),
        )  # fmt: skip

    async def _control(
        self,
        method: str,
        route: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        timeout_s: float = _CONTROL_TIMEOUT_S,
    ) -> Mapping[str, Any]:
        """One request beside the samples, on a connection of its own: its caller may run in another loop."""
        where = self.url + route
        with connection_errors(where, timeout_s):
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session,
                session.request(method, where, params=params, json=body, allow_redirects=False) as response,
            ):
                return _reply(response.status, await response.read(), where)

    def _body(
        self, ids: Sequence[int], sampling: Sampling, likeliest: int, *, salt: str, streams: bool = False
    ) -> dict[str, Any]:
        return {
            "model": self._model,
            "token_ids": list(ids),
            "sampling_params": {
                "max_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "top_p": 1.0,
                "top_k": -1,
                **PLAIN_SAMPLING,
                "logprobs": likeliest + 1 if likeliest else 0,  # the sampled one comes beside them
                "stop_token_ids": sorted(self._stop_ids),
                "detokenize": False,
            },
            # Keys and values of other weights must not be reused: one salt a version.
            "cache_salt": salt,
            "stream": streams,
            "stream_options": {"include_usage": True} if streams else None,
        }

    async def _sample(self, ids: Sequence[int], sampling: Sampling, extras: Extras, *, salt: str) -> _Answer:
        streams = extras.stop is not None or extras.on_token is not None
        body = self._body(ids, sampling, extras.likeliest, salt=salt, streams=streams)
        data, answer = json.dumps(body).encode(), _Answer()
        if not streams:
            status, text = await self._post(data)
            answer.add(_reply(status, text, self.url), extras)
            return answer
        async with self._response(data) as response:  # leaving it aborts the request
            if response.status != 200:
                _reply(response.status, await response.content.read(EXCERPT * 10), self.url)
            count = 0
            async for chunk in _chunks(response.content, self.url):
                answer.add(chunk, extras)
                if answer.stop_string is not None:
                    break
                if extras.on_token is not None:
                    count = _tell(answer, count, extras)
        return answer

    async def load_weights(self, version: int, source: WeightSource) -> None:
        """Replace the weights by those of a folder that the server's workers can read.

        Raises:
            WeightsRefused: the server cannot load them, or does not answer; what it samples with then is
                unknown until a later load succeeds.
        """
        if not isinstance(source, str | Path):
            raise WeightsRefused("vLLM loads weights from a folder, not from tensors of this process")
        folder = Path(source).resolve()
        files = [file.name for file in weight_files(folder)]
        try:
            try:
                await self._control("POST", "/pause", params={"mode": self._weight_update})
                load = {"method": "turnwise_load", "args": [str(folder), files]}
                await self._control("POST", "/collective_rpc", body=load)
                await self._control("POST", "/reset_prefix_cache")
                await self._control("POST", "/update_weight_version", body={"new_version": str(version)})
                self._serving_version = version
            finally:
                await self._control("POST", "/resume")
        except (RemoteRefused, RemoteUnavailable) as error:
            raise WeightsRefused(error.detail, where=self.url, hint=error.hint) from error

    async def score(self, ids: Sequence[int]) -> list[float]:
        """Log-probs of ids[1:], each given those before it, under the weights that serve now."""
        body = {
            "model": self._model,
            "token_ids": list(ids),
            "sampling_params": {
                "max_tokens": 1,
                "temperature": 1.0,
                "prompt_logprobs": 0,
                "detokenize": False,
            },
            # Nothing may be taken from a cache: what is tested is the weights.
            "cache_salt": f"score {self.version} {uuid4().hex}",
        }
        reply = await self._control("POST", _GENERATE, body=body)
        places: Any = reply.get("prompt_logprobs")
        try:
            return [
                float(place[str(token_id)]["logprob"])
                for token_id, place in zip(ids[1:], places[1:], strict=True)
            ]
        except (TypeError, KeyError, ValueError) as error:
            raise RemoteRefused(
                f"vLLM at {self.url} returned no prompt_logprobs for a scored prompt"
            ) from error

    async def refuse_unfit(self) -> str:
        """Check that the server can be trained with; return a line that describes it.

        Raises:
            RemoteRefused: it is no vLLM, or of another release; it serves several models, or has a shorter
                context; a route is missing; or its log-probs ignore the temperature.
            RemoteUnavailable: it does not answer.
        """
        release = (await self._control("GET", "/version", timeout_s=_FRONTEND_TIMEOUT_S)).get("version")
        numbers = _RELEASE.match(str(release))
        if numbers is None:
            raise RemoteRefused(f"{self.url} is no vLLM server: its /version has no version")
        if not OLDEST <= (int(numbers[1]), int(numbers[2])) < BEYOND:
            raise RemoteRefused(
                f"{self.url} runs vLLM {release}; releases from {_dotted(OLDEST)} to before "
                f"{_dotted(BEYOND)} are supported"
            )
        # A trainer that was killed amid a publish leaves the server paused, and every request waiting.
        await self._control("POST", "/resume", timeout_s=_FRONTEND_TIMEOUT_S)
        models = (await self._control("GET", "/v1/models", timeout_s=_FRONTEND_TIMEOUT_S)).get("data") or []
        lengths = {str(model.get("id")): model.get("max_model_len") or 0 for model in models}
        if len(lengths) != 1:
            raise RemoteRefused(f"{self.url} serves the models {sorted(lengths)}, where one is needed")
        ((self._model, length),) = lengths.items()
        if length < self._max_model_len:
            raise RemoteRefused(
                f"{self.url} has a context of {length} tokens, and inference.max_model_len is "
                f"{self._max_model_len}",
                hint=f"Start it with --max-model-len {self._max_model_len}.",
            )
        await self._control("GET", "/weight_info", timeout_s=_FRONTEND_TIMEOUT_S)
        try:
            await self._control(
                "POST", "/collective_rpc", body={"method": "turnwise_ready"}, timeout_s=_ENGINE_TIMEOUT_S
            )
        except RemoteUnavailable as error:  # an unknown method is an error of its worker
            raise RemoteRefused(
                f"{self.url} cannot load weights: {error.detail}",
                hint="Start it with --worker-extension-cls turnwise_vllm.TurnwiseWorker (docs/vllm.md).",
            ) from error
        await self._refuse_raw_logprobs()
        return f"replica {self.url}: vLLM {release}, context {length}"

    async def _refuse_raw_logprobs(self) -> None:
        """Refuse log-probs that ignore the temperature: processed ones at 1/2 and raw ones differ."""
        tops = []
        for temperature in (2.0, 0.5):
            sampling = Sampling(temperature=temperature, max_tokens=1)
            answer = _Answer()
            body = self._body(range(1, 17), sampling, _PROBE_TOPS, salt="probe")
            reply = await self._control("POST", _GENERATE, body=body, timeout_s=_ENGINE_TIMEOUT_S)
            answer.add(reply, Extras(likeliest=_PROBE_TOPS))
            tops.append(answer.likeliest)
        if not tops[0] or tops[0] == tops[1]:
            raise RemoteRefused(
                f"{self.url} returns log-probs before the temperature, which cannot be weighed",
                hint="Start it with --logprobs-mode processed_logprobs.",
            )


def _reply(status: int, text: bytes, where: str) -> Mapping[str, Any]:
    """The JSON object of a reply; {} of an empty one."""
    try:
        reply = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        reply = None
    if status == 200 and isinstance(reply, dict):
        return reply
    excerpt = text[:EXCERPT].decode("utf-8", "replace")
    if status == 200 or (400 <= status < 500 and status not in TRY_AGAIN):
        raise RemoteRefused(f"{where} answered {status}: {excerpt}")
    raise RemoteUnavailable(f"{where} answered {status}: {excerpt}")


async def _chunks(content: aiohttp.StreamReader, where: str) -> AsyncIterator[Mapping[str, Any]]:
    """The JSON objects of server-sent events, up to [DONE].

    Raises:
        RemoteUnavailable: the stream ends without it.
    """
    async for line in content:
        data = line.strip().removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        if data:
            yield _reply(200, data, where)
    raise RemoteUnavailable(f"{where} ended a stream in the middle of an answer")


def _tell(answer: _Answer, count: int, extras: Extras) -> int:
    """Call `on_token` with each token after the first `count` but the newest, which may be the last.

    Returns:
        With how many tokens it was called so far.
    """
    assert extras.on_token is not None
    newest = len(answer.token_ids) - 1
    tokens = map(SampledToken, answer.token_ids, answer.logprobs, answer.likeliest)
    for token in list(tokens)[count:newest]:
        extras.on_token(token)
    return max(count, newest)


def _versions(spans: Sequence[Mapping[str, Any]] | None) -> tuple[tuple[int, int], ...]:
    """((first_token, policy_version), ...) of the server's spans."""
    try:
        versions = tuple((int(span["start"]), int(span["version"])) for span in spans or ())
    except (KeyError, TypeError, ValueError) as error:
        # A server that was started anew has the weights and the version name of its start.
        raise RemoteUnavailable(f"vLLM samples with weights that are none of ours: {spans!r:.200}") from error
    if not versions or versions[0][0] != 0:
        raise RemoteRefused(
            f"vLLM returned the weight versions {spans!r:.200}, which do not begin at the first token"
        )
    return versions


def _dotted(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
