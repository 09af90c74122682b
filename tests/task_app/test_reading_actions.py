"""From what a policy or a caller sends to what an environment carries out."""

import pytest

from task_app.episode.actions import NO_TOOL_CALL, json_object, read_action, requests_from_wire


def call(arguments: str, name: str = "add") -> dict[str, str]:
    return {"id": "1", "name": name, "arguments": arguments}


def test_several_calls_of_one_message_stay_in_order():
    read = read_action({"type": "tool_call", "tool_calls": [call('{"n": 1}'), call('{"n": 2}')]})
    assert [request.arguments for request in read.requests] == [{"n": 1}, {"n": 2}]
    assert [one.function.arguments for one in read.tool_calls] == ['{"n": 1}', '{"n": 2}']


@pytest.mark.parametrize("arguments", [{"n": 1}, '{"n": 1}'])
def test_the_single_form_of_source_2_is_one_call(arguments):
    read = read_action({"type": "tool_call", "name": "add", "arguments": arguments})
    assert [(one.id, one.function.name) for one in read.tool_calls] == [("call_0", "add")]
    assert [request.arguments for request in read.requests] == [{"n": 1}]


@pytest.mark.parametrize(
    ("change", "agrees"),
    [
        ({"arguments": {"n": 1}}, True),
        ({"arguments": '{"n":1}'}, True),
        ({"arguments": {"n": 2}}, False),
        ({"name": "take", "arguments": {"n": 1}}, False),
        ({"arguments": "{"}, False),
    ],
)
def test_an_action_in_both_forms_says_the_same_in_both(change, agrees):
    action = {"type": "tool_call", "name": "add", **change, "tool_calls": [call('{"n": 1}')]}
    if agrees:
        assert read_action(action).requests[0].raw_arguments == '{"n": 1}'
        return
    with pytest.raises(ValueError, match="change both, or leave one out"):
        read_action(action)


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "3", "null", "[" * 100_000, "NaN", '{"n": NaN}', '{"n": 1e999}']
)
def test_arguments_that_are_no_json_object_are_kept_as_text(text):
    assert json_object(text) is None
    (request,) = read_action({"type": "tool_call", "tool_calls": [call(text)]}).requests
    assert (request.arguments, request.raw_arguments) == (None, text)


def test_text_is_an_invalid_action_with_a_reason():
    assert read_action({"type": "text", "content": "hm"}).invalid_reason == NO_TOOL_CALL
    assert read_action({"type": "text", "content": "hm", "invalid_reason": "why"}).invalid_reason == "why"


def test_an_action_of_another_type_is_a_fault_of_the_policy():
    with pytest.raises(ValueError, match="'tool_call', 'text', 'terminate'"):
        read_action({"type": "dance"})


@pytest.mark.parametrize(
    "wire",
    [
        {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"n": 1}'}},
        {"tool": "add", "args": {"n": 1}},
        {"tool_name": "add", "arguments": {"n": 1}},
        {"name": "add", "arguments": '{"n": 1}'},
    ],
)
def test_every_known_form_of_a_tool_call_is_read(wire):
    (request,) = requests_from_wire([wire])
    assert (request.name, request.arguments) == ("add", {"n": 1})


def test_a_call_without_a_tool_is_refused_with_its_place():
    with pytest.raises(ValueError, match=r"tool_calls\.1"):
        requests_from_wire([{"tool": "add"}, {"args": {}}])


def test_arguments_of_another_type_are_left_for_the_environment_to_refuse():
    (request,) = requests_from_wire([{"tool": "add", "args": [1]}])
    assert (request.arguments, request.raw_arguments) == (None, "[1]")


@pytest.mark.parametrize("text", ['{"a": "\\ud83d"}', '{"a": "\\uD83D"}', '{"a": "\ud83d"}'])
def test_half_a_character_in_arguments_becomes_a_question_mark(text):
    assert json_object(text) == {"a": "?"}
