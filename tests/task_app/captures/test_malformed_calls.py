"""A call that is wrong in one place is refused with the place, in each dialect."""

from typing import Any

import pytest

from task_app.captures.calls import Call
from task_app.errors import InvalidRequest
from task_app.routes.captures import DIALECTS
from tests.malformed import DELETED, VALUES, absences, malformed, names_item
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
