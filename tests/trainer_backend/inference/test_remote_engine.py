"""An engine at somebody else's server: what it makes of a reply, and a gateway of ours as that server."""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from transformers import PreTrainedTokenizerFast

from service_kit.server import Listener, ServerThread
from shared_schemas.trajectory import Sampling
from tests.trainer_backend.inference.chains import chain_model
from tests.trainer_backend.inference.served import KEY, MODEL, serving
from trainer_backend.errors import (
    BadChatRequest,
    ContextLengthExceeded,
    InferenceError,
    RemoteRefused,
    RemoteUnavailable,
)
from trainer_backend.inference.actor import Extras, Generation, SampledToken
from trainer_backend.inference.remote_engine import RemoteEngine, completions_url
from trainer_backend.inference.stop_strings import StopStrings

PROMPT = [1, 2, 3]
END = 9


@asynccontextmanager
async def engine_at(url: str, **settings: Any) -> AsyncIterator[RemoteEngine]:
    limits = {"stop_ids": [END], "vocabulary": 100, "max_model_len": 64, **settings}
    engine = RemoteEngine(url, MODEL, SecretStr(KEY), **limits)
    try:
        yield engine
    finally:
        await engine.close()


@contextmanager
def server_with(reply: Response) -> Iterator[str]:
    """Answers everything with `reply`."""

    async def complete(request: Request) -> Response:
        return reply

    app = Starlette(routes=[Route("/v1/completions", complete, methods=["POST"])])
    with ServerThread(app, Listener("127.0.0.1", 0)) as url:
        yield url


def make_reply(sampled: list[int], **changes: Any) -> Response:
    choice = {
        "prompt_token_ids": PROMPT,
        "token_ids": sampled,
        "logprobs": {"token_logprobs": [-0.5] * len(sampled)},
        "finish_reason": "stop",
        **changes,
    }
    return JSONResponse({"choices": [choice]})


async def generated(
    reply: Response, *, sampling: Sampling | None = None, extras: Extras | None = None, **settings: Any
) -> Generation:
    with server_with(reply) as url:
        async with engine_at(url, **settings) as engine:
            return await engine.generate(
                PROMPT, sampling or Sampling(max_tokens=4), request_id="r", extras=extras or Extras()
            )


async def test_an_answer_ends_where_the_actors_would_have():
    found = await generated(make_reply([7, END, 5, 6], finish_reason="length"))
    assert (found.token_ids, found.logprobs, found.finish_reason) == ((7, END), (-0.5, -0.5), "stop")
    assert (await generated(make_reply([7, 8], finish_reason="length"))).finish_reason == "length"
    stop = StopStrings(lambda ids: "".join(map(str, ids)), ["78"])
    cut = await generated(make_reply([7, 8, 5], finish_reason="length"), extras=Extras(stop=stop))
    assert (cut.token_ids, cut.finish_reason, cut.stop_string) == ((7, 8), "stop", "78")


async def test_a_stream_has_all_tokens_but_the_last_before_the_end():
    seen: list[SampledToken] = []
    await generated(make_reply([7, 8, END]), extras=Extras(on_token=seen.append))
    assert [sampled.token_id for sampled in seen] == [7, 8]


REFUSED: Mapping[str, tuple[Response, type[InferenceError], str]] = {
    "an end of its own": (make_reply([7, 8]), RemoteRefused, r"ended an answer with the id 8 .*with \[9\]"),
    "another prompt": (make_reply([END], prompt_token_ids=[0, *PROMPT]), RemoteRefused, "prompt was another"),
    "text for ids": (make_reply([END], token_ids=["7"]), RemoteRefused, r"token_ids.0 is '7' \(str\); "),
    "lengths": (
        make_reply([7, END], logprobs={"token_logprobs": [-1.0]}), RemoteRefused, "2 token_ids and 1 logprobs"
    ),
    "too many": (make_reply([7] * 5), RemoteRefused, "5 token_ids and 5 logprobs; 1 to 4"),
    "nothing": (make_reply([]), RemoteRefused, "has 0 token_ids"),
    "unknown id": (make_reply([100]), RemoteRefused, r"token_ids.0 is 100 \(int\); .*the ids 0 to 99"),
    "null": (make_reply([END], logprobs={"token_logprobs": [None]}), RemoteRefused, "s.0 is None .* number"),
    "NaN": (
        Response(b'{"choices": [{"prompt_token_ids": [1, 2, 3], "token_ids": [9], "logprobs": '
                 b'{"token_logprobs": [NaN]}}]}'), RemoteRefused, "s.0 is nan .*a finite number"
    ),
    "a number too large": (
        make_reply([END], logprobs={"token_logprobs": [-(10**400)]}), RemoteRefused, "s.0 is -1000.* finite"
    ),
    "above 0": (make_reply([END], logprobs={"token_logprobs": [0.5]}), RemoteRefused, "is 0.5 .* to 0.001"),
    "impossible": (
        make_reply([END], logprobs={"token_logprobs": [-9999.0]}), RemoteRefused, "is -9999.0 .* to -1000"
    ),
    "no JSON": (Response("<html>"), RemoteRefused, "JSON is needed"),
    "no choices": (JSONResponse({"choices": []}), RemoteRefused, "choices is .*at least 1 item"),
    "unauthorised": (
        JSONResponse({"error": {"message": f"no such key: {KEY}"}}, 401), RemoteRefused, "status 401$"
    ),
    "refused": (
        JSONResponse({"error": {"message": f"you sent {KEY}"}}, 400), RemoteRefused, r"400 you sent \[key\]$"
    ),
    "busy": (JSONResponse({"message": "later"}, 429), RemoteUnavailable, "answers status 429 later"),
    "elsewhere": (Response(status_code=307, headers={"location": "/x"}), RemoteRefused, "status 307"),
    "full": (
        JSONResponse({"error": {"message": "This model's maximum context length is 5 tokens."}}, 400),
        ContextLengthExceeded,
        "prompt of 3 tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
async def test_what_cannot_be_weighed_is_a_failure_and_never_data(case: str):
    reply, kind, told = REFUSED[case]
    with pytest.raises(kind, match=told) as caught:
        await generated(reply)
    assert KEY not in str(caught.value)
    if isinstance(caught.value, ContextLengthExceeded):
        assert (caught.value.prompt_tokens, caught.value.max_tokens, caught.value.max_model_len) == (3, 4, 5)


@pytest.mark.parametrize("draw", [{"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}])
async def test_raw_log_probs_stand_for_plain_sampling_alone(draw: dict[str, Any]):
    sampling = Sampling(max_tokens=4, **draw)
    with pytest.raises(BadChatRequest, match="draws from something else"):
        await generated(make_reply([END]), sampling=sampling)
    assert (await generated(make_reply([END]), sampling=sampling, processed=True)).token_ids == (END,)


async def test_an_engine_that_is_not_there_is_told():
    with Listener("127.0.0.1", 0) as listener:
        nowhere = listener.url
    async with engine_at(nowhere) as engine:
        with pytest.raises(RemoteUnavailable, match="does not answer: "):
            await engine.generate(PROMPT, Sampling(), request_id="r")


async def test_a_gateway_of_ours_is_such_a_server(tokenizer: PreTrainedTokenizerFast):
    chain = chain_model(tokenizer, " tree", "<|call|>", " do", "<|end|>")
    ends = {"stop_ids": [tokenizer.eos_token_id], "vocabulary": len(tokenizer)}
    sampling = Sampling(max_tokens=8, seed=3)
    with serving(chain, tokenizer) as there:
        async with engine_at(there.url, **ends) as engine:
            ids = await engine.text_ids("wood 2 tree")
            found = await engine.generate(ids, sampling, request_id="r")
        own = await there.engine.generate(ids, sampling, request_id="own")
        text = there.client.completions.create(model=MODEL, prompt=ids, max_tokens=8, logprobs=0, seed=3)
    assert ids == tokenizer.encode("wood 2 tree", add_special_tokens=False)
    assert found.token_ids == own.token_ids and found.finish_reason == "stop"
    assert found.logprobs == pytest.approx(own.logprobs, abs=1e-6)
    assert text.choices[0].text == "<|call|> do<|end|>"
    assert text.choices[0].logprobs.token_logprobs == pytest.approx(list(own.logprobs), abs=1e-6)


def test_a_server_is_named_as_people_name_it():
    for path in ("", "/", "/v1", "/v1/", "/v1/chat/completions", "/v1/completions"):
        assert completions_url(f"http://h:1{path}") == "http://h:1/v1/completions"
    assert completions_url("https://h/a/v1?k=1") == "https://h/a/v1/completions?k=1"
