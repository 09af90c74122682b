"""The three APIs of a captured endpoint: what the policy is asked, and what clients make of its answers."""

import json
from contextlib import asynccontextmanager

import httpx
import openai
import pytest

from task_app.errors import ContextLengthExceeded
from tests.task_app.counting import PlannedPolicy, add, boards, running_app

ADD = {"name": "add", "description": "Counts.", "parameters": {"type": "object"}}
CALL = add("a", "b") | {"content": "I count."}
TEXT = {"type": "text", "content": "Two."}


@asynccontextmanager
async def captured(*moves, **opening):
    """A client of a capture's base URL, and the policy that answers it."""
    policy = PlannedPolicy(*moves)
    async with running_app(boards(mine=lambda: policy)) as client:
        body = {"policy": {"policy_name": "mine"}} | opening
        capture = (await client.post("/captures", json=body)).json()
        client.headers = {"Authorization": f"Bearer {capture['key']}"}
        client.base_url = capture["capture_url"]
        yield client, policy, capture


def sdk(client: httpx.AsyncClient, capture) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=capture["base_url"], api_key=capture["key"], http_client=client, max_retries=0
    )


def asked(policy, number=-1):
    """The messages of a prompt, without empty fields."""
    return [message.model_dump(mode="json", exclude_none=True) for message in policy.seen[number]]


CONVERSATION = [
    {"role": "system", "content": "Count."},
    {"role": "user", "content": "Begin."},
    {
        "role": "assistant",
        "content": "I count.",
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"names": ["a", "b"]}'}}
        ],
    },
    {"role": "tool", "content": "did 2", "tool_call_id": "c"},
]


async def test_chat_completions_as_openai_s_client_speaks_them():
    async with captured(CALL, TEXT) as (client, policy, capture):
        chat = sdk(client, capture).chat.completions
        tools = [{"type": "function", "function": ADD}]
        messages = [{"role": "developer", "content": "Count."}, {"role": "user", "content": "Begin."}]
        first = await chat.create(model="any", messages=messages, tools=tools, max_tokens=7)
        (call,) = first.choices[0].message.tool_calls
        assert (first.choices[0].finish_reason, call.function.name) == ("tool_calls", "add")
        messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "did 2"}]
        stream = await chat.create(model="any", messages=messages, tools=tools, stream=True, stop=["."])
        parts = [part async for part in stream]
        assert "".join(part.choices[0].delta.content or "" for part in parts) == "Two."
        assert parts[-1].choices[0].finish_reason == "stop"
        assert asked(policy) == CONVERSATION
        assert (policy.seen[0].max_tokens, policy.seen[1].stop) == (7, (".",))


async def test_responses_as_openai_s_client_speaks_them():
    async with captured(CALL, TEXT) as (client, policy, capture):
        responses = sdk(client, capture).responses
        tools = [{"type": "function", **ADD, "strict": False}]
        first = await responses.create(model="any", instructions="Count.", input="Begin.", tools=tools)
        assert [item.type for item in first.output] == ["message", "function_call"]
        inputs = [
            {"role": "user", "content": [{"type": "input_text", "text": "Begin."}]},
            *(item.model_dump(exclude_none=True) for item in first.output),
            {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "did 2"},
        ]
        async with responses.stream(model="any", instructions="Count.", input=inputs, tools=tools) as stream:
            deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert (deltas, final.output_text, final.status) == (["Two."], "Two.", "completed")
        assert asked(policy) == CONVERSATION


async def test_anthropic_s_messages():
    async with captured(CALL, TEXT) as (client, policy, _):
        tools = [{"name": "add", "description": "Counts.", "input_schema": {"type": "object"}}]
        body = {"model": "any", "system": "Count.", "max_tokens": 9, "tools": tools}
        messages = [{"role": "user", "content": "Begin."}]
        first = (await client.post("v1/messages", json=body | {"messages": messages})).json()
        assert first["stop_reason"] == "tool_use"
        text, use = first["content"]
        assert (text["text"], use["name"], use["input"]) == ("I count.", "add", {"names": ["a", "b"]})
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "did 2"}
        messages += [
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": [result]},
        ]
        answer = await client.post("v1/messages", json=body | {"messages": messages, "stream": True})
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        names = [line[7:] for line in answer.text.splitlines() if line.startswith("event: ")]
        assert names == [event["type"] for event in events]
        assert names == [
            "message_start", "content_block_start", "content_block_delta", "content_block_stop",
            "message_delta", "message_stop",
        ]  # fmt: skip
        assert events[2]["delta"]["text"] == "Two." and events[4]["delta"]["stop_reason"] == "end_turn"
        # The object of the call is the text again that the policy wrote, blanks included.
        assert asked(policy) == CONVERSATION
        assert policy.seen[0].max_tokens == 9


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
REFUSED = [
    ("chat/completions", {"messages": [{"role": "user", "content": [IMAGE]}]}, "image_url"),
    ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 2}, "n = 2"),
    ("chat/completions", {"messages": []}, "messages is empty"),
    ("chat/completions", {"messages": [{"role": "owner", "content": "x"}]}, "'owner'"),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
    ("responses", {"input": "x", "previous_response_id": "resp_1"}, "the whole input"),
    ("responses", {"input": "x", "tools": [{"type": "web_search"}]}, "only functions"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 1}, "image"),
    ("messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, "at least 1"),
    ("messages", {"messages": [{"role": "user", "content": []}], "max_tokens": 1}, "content is empty"),
    ("responses", {"input": [{"type": "reasoning", "summary": []}]}, "holds no message"),
]


@pytest.mark.parametrize(("path", "body", "sentence"), REFUSED)
async def test_what_is_not_offered_is_a_400_in_the_client_s_own_form(path, body, sentence):
    async with captured(TEXT) as (client, policy, _):
        answer = await client.post(f"v1/{path}", json={"model": "any"} | body)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
        assert sentence in error["message"]
        assert not policy.seen


def nested(levels):
    return "[" * levels + "]" * levels


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_a_body_that_is_no_json_or_too_deep_is_a_400_in_the_client_s_own_form(path):
    bodies = {
        "{": "no JSON", f'{{"metadata": {nested(201)}}}': "more than 201 levels",
        f'{{"messages": {nested(5_000)}}}': "more than 201 levels", "[]": "no JSON object",
    }  # fmt: skip
    async with captured(TEXT) as (client, _, _):
        for body, sentence in bodies.items():
            answer = await client.post(
                f"v1/{path}", content=body, headers={"Content-Type": "application/json"}
            )
            assert answer.status_code == 400 and sentence in answer.json()["error"]["message"]


async def test_the_schema_of_a_tool_leaves_room_for_the_levels_of_a_stored_rollout():
    async with captured(TEXT) as (client, _, _):
        for levels, status in ((189, 200), (190, 400)):
            tool = {"function": {"name": "f", "parameters": {"a": json.loads(nested(levels))}}}
            body = {"messages": [{"role": "user", "content": "x"}], "tools": [tool]}
            answer = await client.post("v1/chat/completions", json=body)
            assert answer.status_code == status, answer.text
        assert "tools.0.function is nested deeper than 190 levels" in answer.text


async def test_anthropic_s_library_is_told_in_its_own_words_that_no_thread_is_held():
    # Its tool runner then sends the whole conversation each time, and not only what is new.
    body = {"model": "any", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    async with captured(TEXT) as (client, policy, _):
        answer = await client.post("v1/messages", json=body | {"thread": {"type": "create"}})
        details = {"error_code": "thread_unsupported_request", "unsupported": []}
        assert (answer.status_code, answer.json()["error"]["details"]) == (400, details)
        assert not policy.seen


@pytest.mark.parametrize(
    ("path", "words"), [("messages", "prompt is too long"), ("chat/completions", "context_length_exceeded")]
)
async def test_a_prompt_that_is_too_long_is_known_by_the_words_that_libraries_look_for(path, words):
    body = {"model": "any", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    async with captured(ContextLengthExceeded("300 tokens of 256")) as (client, _, _capture):
        answer = await client.post(f"v1/{path}", json=body)
    assert words in answer.json()["error"]["message"]


async def test_settings_without_effect_stand_in_the_warnings():
    async with captured(TEXT) as (client, _, capture):
        await sdk(client, capture).chat.completions.create(
            model="any", messages=[{"role": "user", "content": "x"}], temperature=0.1, seed=3,
            response_format={"type": "json_object"}, user="me",
        )  # fmt: skip
        state = (await client.post("end")).json()
        (ignored, unrewarded) = state["trajectory"]["warnings"]
        assert ignored.endswith("apply: response_format, seed, temperature")
        assert "has a reward" in unrewarded
