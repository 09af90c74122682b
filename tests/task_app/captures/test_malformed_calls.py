"""A call that is wrong in one place is refused with the place; what a model wrote may be sent back."""

import json
from typing import Any

import pytest

from task_app.captures.calls import Call
from task_app.errors import InvalidRequest
from task_app.routes.captures import DIALECTS
from tests.malformed import DELETED, VALUES, absences, malformed, names_item
from tests.task_app.counting import PlannedPolicy, boards
from tests.task_app.served import served_app
from tests.trainer_backend.inference.test_malformed_requests import CHAT

SCHEMA = {"type": "object", "properties": {}}
RESPONSES: dict[str, Any] = {
    "model": "m",
    "instructions": "i",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
        {"type": "reasoning", "summary": []},
    ],
    "tools": [{"type": "function", "name": "f", "description": "d", "parameters": SCHEMA}],
    "tool_choice": "auto", "text": {"format": {"type": "text"}}, "max_output_tokens": 5, "stream": False,
}  # fmt: skip
MESSAGES: dict[str, Any] = {
    "model": "m",
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}]},
    ],
    "max_tokens": 9, "stop_sequences": ["x"], "stream": False,
    "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}], "tool_choice": {"type": "auto"},
}  # fmt: skip
ODD = (3, ["x"], [[]], [{}], {"type": ["x"]}, {"format": "text"})
OWN = "messages.1.content.0.input.a"  # an argument, in which null is a value
# Keys of clients that no body above has.
OTHERS = ["user", "metadata", "max_completion_tokens", "previous_response_id", "conversation", "background",
          "functions", "modalities", "stream_options", "response_format", "text", "thinking"]  # fmt: skip


def read(path: str, body: dict[str, Any]) -> Call | str | None:
    """A call, or the place that is refused."""
    try:
        return DIALECTS[path].read(body)
    except InvalidRequest as error:
        return error.where


@pytest.mark.parametrize(
    ("path", "body"), [("chat/completions", CHAT), ("responses", RESPONSES), ("messages", MESSAGES)]
)
def test_a_key_that_is_null_counts_as_absent(path: str, body: dict[str, Any]):
    for place, without, with_null in absences(body, OTHERS):
        if place != OWN:  # also where it is needed: the same place is refused
            assert read(path, with_null) == read(path, without), place


def test_a_null_that_an_agent_gives_a_tool_stays():
    block = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": None}, "cache_control": None}
    tool = {"name": "f", "input_schema": {**SCHEMA, "properties": {"a": {"default": None}}, "title": None}}
    messages = [{"role": "assistant", "content": [block]}]
    call = DIALECTS["messages"].read({"messages": messages, "tools": [tool]})
    assert [one.function.arguments for one in call.messages[0].tool_calls or ()] == ['{"a":null}']
    assert call.tools[0].function.parameters == {**SCHEMA, "properties": {"a": {"default": None}}}


def test_true_is_not_one_choice():
    assert read("chat/completions", {**CHAT, "n": True}) == "n"
    assert read("responses", {**RESPONSES, "background": 0}) == "background"


@pytest.mark.parametrize(
    ("path", "body", "needed"),
    [
        (
            "chat/completions",
            CHAT,
            ("messages.0.content.0.text", "messages.2.tool_calls.0.id", "tools.0.function"),
        ),
        ("responses", RESPONSES, ("input.0.content.0.text", "input.1.call_id", "tools.0.name")),
        ("messages", MESSAGES, ("system.0.text", "messages.1.content.0.id", "tools.0.name")),
    ],
)
def test_one_wrong_place_is_named(path: str, body: dict[str, Any], needed: tuple[str, ...]):
    DIALECTS[path].read(body)
    refused = {}
    for place, value, wrong in malformed(body, (*VALUES, *ODD, DELETED)):
        try:
            DIALECTS[path].read(wrong)
        except InvalidRequest as error:  # any other error would be a 500
            assert names_item(error.where or "", place), (place, value, error.detail)
            refused[place, str(value)] = error.where
    for place in needed:
        assert refused[place, "None"] == refused[place, "[]"] == place


# The policy's words: texts without a call, and calls whose arguments no reader accepts.
TEXTS = {
    "nul": "a\0b",
    "half a character": "a\ud83d",
    "nothing": "",
    "marks": '<|call|> add {"names',
    "control": "\x01\x1b[\u2028\uffff",
}
ARGUMENTS = {
    "no object": "[1",
    "nan": '{"a": NaN}',
    "beyond a float": '{"a": 1e999}',
    "a long integer": '{"a": ' + "9" * 400 + "}",
    "nul": '{"a": "\\u0000", "\\u0000": 1}',
    "bare nul": '{"a": "\0"}',
    "half a character": '{"a": "\\ud83d"}',
    "deep": '{"a": ' + "[" * 300 + "]" * 300 + "}",
    "many keys": json.dumps({str(number): 1 for number in range(10_001)}),
}
USER = {"role": "user", "content": "x"}


def chat(reply):
    """The next request's messages: the answer as it came, and the result of a call, which quotes it."""
    if reply is None:
        return {"messages": [USER]}
    message = reply["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": call["function"]["arguments"] + "\0\ud83d"}
        for call in message.get("tool_calls", ())
    ]
    return {"messages": [USER, message, *(results or [USER])]}


def responses(reply):
    if reply is None:
        return {"input": [USER]}
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": item["arguments"]}
        for item in reply["output"]
        if item["type"] == "function_call"
    ]
    return {"input": [USER, *reply["output"], *(results or [USER])]}


def messages(reply):
    if reply is None:
        return {"messages": [USER], "max_tokens": 9}
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": json.dumps(block["input"])}
        for block in reply["content"]
        if block["type"] == "tool_use"
    ]
    answer = {"role": "assistant", "content": reply["content"]}
    told = {"role": "user", "content": results} if results else USER
    return {"messages": [USER, answer, told], "max_tokens": 9}


def moves():
    for name, text in TEXTS.items():
        yield f"text: {name}", {"type": "text", "content": text, "invalid_reason": "it cannot be read"}
    for name, text in ARGUMENTS.items():
        call = {"id": "c", "name": "add\0", "arguments": text}
        yield f"call: {name}", {"type": "tool_call", "tool_calls": [call], "content": "a\0"}


@pytest.mark.parametrize(
    ("path", "request_after"), [("chat/completions", chat), ("responses", responses), ("messages", messages)]
)
async def test_an_answer_that_is_no_call_may_be_sent_back(path, request_after):
    policies = {name: PlannedPolicy(move) for name, move in moves()}
    plug_boards = boards(**{name: lambda policy=policy: policy for name, policy in policies.items()})
    async with served_app(plug_boards) as (client, _):
        for name, policy in policies.items():
            capture = (await client.post("/captures", json={"policy": {"policy_name": name}})).json()
            reply = None
            for _ in range(2):
                answer = await client.post(
                    f"/captures/{capture['capture_id']}/v1/{path}",
                    content=json.dumps({"model": "m", **request_after(reply)}),
                    headers={"Content-Type": "application/json"},
                )
                assert answer.status_code == 200, (name, answer.text)
                reply = answer.json()
            end = (await client.post(f"/captures/{capture['capture_id']}/end")).json()
            first, second = end["trajectory"]["steps"]
            # The policy reads what it wrote, letter by letter: the ids of its answer can go on.
            assert second["observation_data"]["messages_reused"] == 1
            _, own, _ = policy.seen[1]
            written = [call["function"] for call in first["tool_calls"]]
            assert (own.content or "") == (first["action_taken"].get("content") or "")
            assert [call.function.model_dump() for call in own.tool_calls or ()] == written
