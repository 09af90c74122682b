"""`stream: true` as the official `openai` client reads it."""

import json
from collections.abc import AsyncIterator, Iterator

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionChunk
from transformers import PreTrainedTokenizerFast

from shared_schemas.chat import ROLLOUT_HEADER
from tests.trainer_backend.inference.chains import chain_model
from tests.trainer_backend.inference.served import KEY, MESSAGES, MODEL, Served, serving
from trainer_backend.inference.stop_strings import BROKEN
from trainer_backend.models import build_preset

ANSWER = " do sleep€日 noop move_left"


@pytest.fixture(scope="module")
def chain(tokenizer: PreTrainedTokenizerFast) -> Iterator[Served]:
    model = chain_model(
        tokenizer, "<|assistant|>", " do", " sleep", "€", "日", " noop", " move_left", "<|end|>"
    )
    with serving(model, tokenizer) as served:
        yield served


@pytest.fixture(scope="module")
def calling(tokenizer: PreTrainedTokenizerFast) -> Iterator[Served]:
    with serving(
        chain_model(tokenizer, "<|assistant|>", " wood", "<|call|>", " do", " sleep", "<|end|>"), tokenizer
    ) as served:
        yield served


@pytest.fixture
def free(tokenizer: PreTrainedTokenizerFast) -> Iterator[Served]:
    """One slot, held until max_tokens: who has it keeps everyone else waiting."""
    model = build_preset("tiny-0.3m", tokenizer, seed=1)
    with serving(model, tokenizer, stop_ids=(), max_running=1) as served:
        yield served


@pytest.fixture
async def patient(free: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with free.asynchronous() as client:
        yield client


def chunks(served: Served, **changes: object) -> list[ChatCompletionChunk]:
    request = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "stream": True, **changes}
    return list(served.client.chat.completions.create(**request))


def join_text(stream: list[ChatCompletionChunk], index: int = 0) -> str:
    deltas = [c.delta for chunk in stream for c in chunk.choices if c.index == index]
    return "".join(delta.content or "" for delta in deltas)


def test_a_stream_is_role_content_and_an_end(chain: Served):
    first, *middle, last = chunks(chain)
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert [chunk.choices[0].delta.content for chunk in middle] == [
        " do", " sleep", "€", "日", " noop", " move_left",
    ]  # fmt: skip
    assert last.choices[0].finish_reason == "stop" and last.choices[0].delta.content is None
    assert {chunk.id for chunk in (first, *middle, last)} == {first.id}
    assert all(chunk.object == "chat.completion.chunk" and chunk.usage is None for chunk in middle)


def test_the_bytes_on_the_wire_are_server_sent_events(chain: Served):
    reply = httpx.post(
        f"{chain.url}/v1/chat/completions",
        json={"model": MODEL, "messages": MESSAGES, "temperature": 0, "stream": True},
        headers={"Authorization": f"Bearer {KEY}"},
    )
    assert reply.headers["content-type"] == "text/event-stream"
    *events, end, empty = reply.text.split("\n\n")
    assert (end, empty) == ("data: [DONE]", "")
    assert all("choices" in json.loads(event.removeprefix("data: ")) for event in events)


@pytest.mark.parametrize(
    ("stop", "text"),
    [(" sleep", " do"), ("o sl", " d"), ("日 n", " do sleep€"), ("never", ANSWER), ("left!", ANSWER)],
)
def test_nothing_of_a_stop_string_is_ever_sent(chain: Served, stop: str, text: str):
    stream = chunks(chain, stop=stop)
    assert join_text(stream) == text and stream[-1].choices[0].finish_reason == "stop"


def test_a_stream_that_is_cut_by_its_length_sends_all_of_its_text(chain: Served):
    stream = chunks(chain, max_tokens=4, stop="never")  # " do", " sleep" and two of the three bytes of €
    assert join_text(stream) == f" do sleep{BROKEN}" and stream[-1].choices[0].finish_reason == "length"
    assert all(BROKEN not in (c.choices[0].delta.content or "") for c in stream[:-2]), "only at the very end"


def test_usage_comes_last_where_it_is_asked_for(chain: Served):
    *others, last = chunks(chain, stream_options={"include_usage": True}, n=2)
    assert all(chunk.usage is None for chunk in others)
    assert last.choices == [] and last.usage.completion_tokens == 2 * len(others[-1].choices[0].token_ids)
    assert last.usage.prompt_tokens_details.cached_tokens == 0


def test_tool_calls_come_whole_at_the_end_and_their_text_is_no_content(calling, tools):
    request = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "tools": tools}
    with calling.client.chat.completions.stream(**request) as stream:  # it puts the whole reply together
        (streamed,) = stream.get_final_completion().choices
    (whole,) = calling.client.chat.completions.create(**request).choices
    assert (streamed.message.content, whole.message.content) == (" wood", " wood")
    (call,), (expected,) = streamed.message.tool_calls, whole.message.tool_calls
    assert (call.id, call.type, call.function.name) == (expected.id, "function", "interact_many")
    assert call.function.arguments == expected.function.arguments == '{"actions": ["do", "sleep"]}'
    assert (streamed.finish_reason, whole.sampling_finish_reason) == ("tool_calls", "stop")
    *_, before_last, _ = chunks(calling, tools=tools)
    (call,) = before_last.choices[0].delta.tool_calls
    assert call.index == 0 and json.loads(call.function.arguments) == {"actions": ["do", "sleep"]}


def test_a_call_that_cannot_be_read_is_sent_as_text_with_the_reason(calling: Served):
    stream = chunks(calling)  # no tool is offered, so the short form means nothing
    assert join_text(stream) == " wood<|call|> do sleep" and stream[-1].choices[0].finish_reason == "stop"
    reasons = [chunk.choices[0].delta.model_extra.get("tool_call_error") for chunk in stream]
    assert [reason for reason in reasons if reason] == [
        "tool call 1 cannot be read: expected a tool's name and a JSON object"
    ]


def test_the_last_chunk_has_the_exact_tokens_that_a_whole_reply_has(chain: Served):
    request = {"seed": 4, "temperature": 1, "extra_body": {"return_token_ids": True}}
    last = chunks(chain, **request)[-1]
    whole = chain.client.chat.completions.create(model=MODEL, messages=MESSAGES, **request)
    for name in ("token_ids", "versions", "sampling_finish_reason"):
        assert getattr(last.choices[0], name) == getattr(whole.choices[0], name)
    assert last.choices[0].token_logprobs == pytest.approx(whole.choices[0].token_logprobs, abs=1e-5)
    assert last.prompt_token_ids == whole.prompt_token_ids and last.prompt_ids_reused == 0


def test_a_rollout_goes_on_from_a_streamed_answer(chain: Served):
    header = {ROLLOUT_HEADER: "streamed"}
    first = chunks(chain, extra_headers=header)[-1]
    answered = [*MESSAGES, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": "tree 3"}]
    second = chain.client.chat.completions.create(model=MODEL, messages=answered, extra_headers=header)
    assert second.prompt_ids_reused == len(first.prompt_token_ids) + len(first.choices[0].token_ids)


def test_every_token_has_its_logprobs_once(chain: Served):
    stream = chunks(chain, logprobs=True, top_logprobs=2)
    told = [e for c in stream if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [entry.logprob for entry in told] == stream[-1].choices[0].token_logprobs
    assert all(len(entry.top_logprobs) == 2 for entry in told) and told[-1].token == "<|end|>"


def test_choices_of_a_stream_are_told_apart_by_their_index(free: Served):
    request = {"n": 3, "seed": 2, "temperature": 1, "max_tokens": 6}
    stream = chunks(free, **request)
    whole = free.client.chat.completions.create(model=MODEL, messages=MESSAGES, **request)
    ends = {c.index: c for chunk in stream for c in chunk.choices if c.finish_reason}
    for choice in whole.choices:
        assert join_text(stream, choice.index) == (choice.message.content or "")
        assert ends[choice.index].token_ids == choice.token_ids


def test_a_request_that_is_refused_is_no_stream(chain: Served):
    with pytest.raises(openai.BadRequestError) as caught:
        chunks(chain, max_tokens=10**6)
    assert caught.value.code == "context_length_exceeded"


LONG = {"temperature": 1, "seed": 1, "max_tokens": 1500, "stream": True}


def test_a_client_that_leaves_a_stream_frees_its_place(free: Served):
    stream = free.client.chat.completions.create(model=MODEL, messages=MESSAGES, **LONG)
    next(iter(stream))
    stream.close()
    free.client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=2)
    assert free.engine.counters.sampled_tokens < 1500, "there is one slot, and the stream has left it"


async def test_an_aborted_stream_ends_with_what_it_has_and_leaves_the_other_choices(free, patient):
    request = {**LONG, "n": 3}
    stream = await patient.chat.completions.create(model=MODEL, messages=MESSAGES, **request)
    arrived = [await anext(stream)]  # the first choice runs, and the others wait for its slot
    assert await free.engine.abort(arrived[0].id) and await free.engine.abort(f"{arrived[0].id}.2")
    arrived += [chunk async for chunk in stream]
    ends = {c.index: c for chunk in arrived for c in chunk.choices if c.finish_reason}
    assert [ends[i].finish_reason for i in range(3)] == ["abort", "length", "abort"]
    assert 0 < len(ends[0].token_ids) < len(ends[1].token_ids) == 1500 and ends[2].token_ids == []


async def test_a_failure_in_the_middle_of_a_stream_reaches_the_client(free, patient):
    stream = await patient.chat.completions.create(model=MODEL, messages=MESSAGES, **LONG)
    await anext(stream)
    free.engine.stop()
    with pytest.raises(openai.APIError, match="it was stopped") as caught:
        async for _ in stream:
            pass
    assert caught.value.code == "engine_stopped"
