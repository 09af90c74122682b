"""A body that is wrong in one place is a 4xx that names the place, and no error of the gateway's own."""

import json
from collections.abc import AsyncIterator
from itertools import repeat
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from shared_schemas.chat import ROLLOUT_HEADER
from shared_schemas.trajectory import PLAIN_SAMPLING
from tests.malformed import absences, malformed, names_item
from tests.trainer_backend.inference.served import KEY, StandInEngine
from trainer_backend.errors import BadChatRequest
from trainer_backend.inference.chat_request import ChatRequest, read_chat_request
from trainer_backend.inference.gateway_app import create_gateway
from trainer_backend.inference.request_body import BYSTANDERS, SamplingRequest, read_request
from trainer_backend.inference.served_policy import ServedPolicy
from trainer_backend.inference.text_completion import TextRequest

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SCHEMA = {"type": "object", "properties": {}}
CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "a"}], "name": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "r"},
        {"role": "tool", "tool_call_id": "c", "content": "b"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}],
    "tool_choice": "auto", "response_format": {"type": "text"}, "stop": ["x"], "logit_bias": {},
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 1, "max_tokens": 4, "n": 1, "stream": False,
    "logprobs": True, "top_logprobs": 0, "chat_template_kwargs": {}, "return_token_ids": False,
    "processed_logprobs": False, "common_draws": False, "presence_penalty": 0, "max_model_length": 900,
}  # fmt: skip
TEXT: dict[str, Any] = {
    "model": "m", "prompt": [1, 2], "logprobs": 0, "max_tokens": 2, "temperature": 1.0, "stop": None,
    "echo": False, "seed": 3, "return_token_ids": True, "add_special_tokens": False,
}  # fmt: skip


def read(body: dict[str, Any], kind: type[SamplingRequest] = ChatRequest) -> SamplingRequest | str | None:
    """A request, or the place that is refused."""
    try:
        data = json.dumps(body).encode()
        return read_chat_request(data) if kind is ChatRequest else read_request(kind, data)
    except BadChatRequest as error:
        return error.where


@pytest.mark.parametrize(("kind", "body"), [(ChatRequest, CHAT), (TextRequest, TEXT)])
def test_a_key_that_is_null_counts_as_absent(kind: type[SamplingRequest], body: dict[str, Any]):
    names = [*kind.model_fields, *kind.neutral, *sorted(BYSTANDERS)]
    for place, without, with_null in absences(body, names):  # also where it is needed: refused there
        assert read(with_null, kind) == read(without, kind), place


def test_a_call_needs_neither_id_nor_type_and_a_tool_no_type():
    calls = [{"id": None, "type": None, "function": {"name": "f", "arguments": None}}]
    tool = {"type": None, "function": {"name": "f", "description": None, "parameters": {"properties": None}}}
    messages = [{"role": "assistant", "content": None, "tool_calls": calls, "of_a_client": None}]
    request = read({"model": "m", "messages": messages, "tools": [tool]})
    assert isinstance(request, ChatRequest)
    assert request.messages == [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]
    assert request.tools == [{"function": {"name": "f", "parameters": {}}}]


@pytest.mark.parametrize("value", [True, False])
def test_a_boolean_is_no_number_and_a_number_no_boolean(value: bool):
    numbers = ["temperature", "top_p", "top_k", "seed", "max_tokens", "max_completion_tokens", "n",
               "top_logprobs", "max_model_length", "min_tokens", *PLAIN_SAMPLING]  # fmt: skip
    assert [read({**CHAT, name: value}) for name in numbers] == numbers
    numbers = ["n", "best_of", "logprobs", *PLAIN_SAMPLING]
    assert [read({**TEXT, name: value}, TextRequest) for name in numbers] == numbers
    switches = ["parallel_tool_calls", "store", "ignore_eos", "continue_final_message", "stream", "logprobs"]
    assert [read({**CHAT, name: int(value)}) for name in switches] == switches
    switches = ["echo", "add_special_tokens"]
    assert [read({**TEXT, name: int(value)}, TextRequest) for name in switches] == switches


WRONG: tuple[dict[str, Any], ...] = (
    {"max_model_length": 0}, {"messages": []}, {"parallel_tool_calls": False}, {"store": True}, {"n": 65},
    {"stop": ["a", "b", "c", "d", "e"]}, {"top_logprobs": 21, "logprobs": True},
    {"top_logprobs": 5, "logprobs": None}, {"top_logprobs": 2, "processed_logprobs": True},
    {"stream_options": {"include_usage": True}}, {"stop_token_ids": [3]}, {"min_tokens": 3},
    {"logit_bias": {"3": 100}}, {"frequency_penalty": 1}, {"response_format": {"type": "json_object"}},
    {"max_tokens": 0}, {"max_tokens": -5}, {"max_tokens": 2**63}, {"max_completion_tokens": 2**63},
    {"max_model_length": 2**63}, {"temperature": -1}, {"temperature": 1e30}, {"top_p": 0}, {"top_k": -2},
    {"top_k": 2**63}, {"seed": 2**64},
)  # fmt: skip


def test_a_value_that_is_not_offered_or_out_of_bounds_is_refused_by_its_key():
    assert [read({**CHAT, **changes}) for changes in WRONG] == [next(iter(changes)) for changes in WRONG]
    within = {"stop.1": {"stop": ["a", ""]}, "stream_options.obfuscate": {"stream_options": {"obfuscate": 1}}}
    for place, changes in within.items():
        assert read({**CHAT, "stream": True, **changes}) == place
    messages: list[tuple[str, dict[str, Any]]] = [
        ("messages.0.role", {"role": "usr", "content": "a"}),
        ("messages.0.role", {"content": "a"}),
        ("messages.0.contnt", {"role": "user", "contnt": "a"}),
        ("messages.0.audio", {"role": "assistant", "audio": {"id": "a"}}),
    ]
    for place, message in messages:
        assert read({**CHAT, "messages": [message]}) == place


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        ("sometimes", "tool_choice is 'sometimes' (str); allowed: 'auto', 'none', 'required', or a function"),
        ({"type": "function", "function": {"name": "x"}}, "tool_choice names 'x'; tools: f"),
        ({"type": "allowed_tools", "allowed_tools": {"tools": [{}]}}, "tool_choice names no function"),
    ],
)
def test_a_wrong_tool_choice_is_refused_with_what_is_allowed(choice: object, sentence: str):
    with pytest.raises(BadChatRequest) as caught:
        read_chat_request(json.dumps({**CHAT, "tool_choice": choice}).encode())
    assert caught.value.where == "tool_choice" and caught.value.detail.startswith(sentence)


@pytest.fixture
async def client(tokenizer: PreTrainedTokenizerFast) -> AsyncIterator[httpx.AsyncClient]:
    app = create_gateway({"m": ServedPolicy(StandInEngine(repeat((5, 6))), tokenizer)}, key=KEY)
    headers = {"Authorization": f"Bearer {KEY}", ROLLOUT_HEADER: "r"}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://g/v1", headers=headers) as client:
        yield client


@pytest.mark.parametrize(("path", "body"), [("chat/completions", CHAT), ("completions", TEXT)])
async def test_one_wrong_place_is_named(client: httpx.AsyncClient, path: str, body: dict[str, Any]):
    assert (await client.post(path, json=body)).status_code == 200
    refused = {}
    for place, value, wrong in malformed(body):
        reply = await client.post(path, json=wrong)
        if reply.status_code != 200:
            assert reply.status_code in (400, 404), (place, value, reply.text)
            assert names_item(reply.json()["where"], place), (place, value, reply.text)
            refused[place, str(value)] = reply.json()["where"]
    if path == "chat/completions":
        assert refused["messages.0.content.0.text", "None"] == "messages.0.content.0.text"
        assert refused["tools.0.function", "None"] == refused["tools.0", "{}"] == "tools.0.function"
        assert refused["messages.3.tool_call_id", "[]"] == "messages.3.tool_call_id"
    assert refused["max_tokens", "True"] == "max_tokens", "true is no number"


async def test_a_body_may_begin_with_a_byte_order_mark_and_utf_16_is_named(client: httpx.AsyncClient):
    text = json.dumps(TEXT)
    assert (await client.post("completions", content=text.encode("utf-8-sig"))).status_code == 200
    reply = await client.post("completions", content=text.encode("utf-16"))
    assert (reply.status_code, reply.json()["where"]) == (400, "body")
    assert "UTF-16" in reply.json()["detail"]
