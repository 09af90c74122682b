"""From what a policy or a caller sends to what an environment carries out."""

import json
from datetime import UTC, datetime

import pytest

from shared_schemas.trajectory import StopReason, transcript
from task_app.dialects.one_call.plan import plan_rollout
from task_app.dialects.one_call.reply import Cast, Episode, Result, reply
from task_app.dialects.one_call.request import LegacyEnv, LegacyPolicy, LegacyRollout, Stepwise
from task_app.environments.dialogue import DialogueConfig, DialogueEnvironment
from task_app.episode.actions import NO_TOOL_CALL, json_object, read_action, requests_from_wire
from task_app.plugins import default_plug_boards
from task_app.policies.scripted import RandomPolicy
from task_app.protocols import Observation
from task_app.settings import Settings
from tests.trainer_backend.dialogues import AGAIN, TASK, dialogue, reader


def call(arguments: str, name: str = "add") -> dict[str, str]:
    return {"id": "1", "name": name, "arguments": arguments}


@pytest.mark.parametrize(
    ("action", "ids", "texts"),
    [
        ({"tool_calls": [call('{"n": 1}'), call('{"n": 2}')]}, ["1", "1"], ['{"n": 1}', '{"n": 2}']),
        ({"name": "add", "arguments": {"n": 1}}, ["call_0"], ['{"n": 1}']),
        ({"name": "add", "arguments": '{"n": 1}'}, ["call_0"], ['{"n": 1}']),
    ],
)
def test_calls_stay_in_order_and_the_single_form_of_source_2_is_one(action, ids, texts):
    read = read_action({"type": "tool_call", **action})
    assert [(one.id, one.function.name) for one in read.tool_calls] == [(name, "add") for name in ids]
    assert [request.arguments for request in read.requests] == [json.loads(text) for text in texts]
    assert [one.function.arguments for one in read.tool_calls] == texts


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


def test_text_is_an_invalid_action_with_a_reason_and_another_type_a_fault_of_the_policy():
    assert read_action({"type": "text", "content": "hm"}).invalid_reason == NO_TOOL_CALL
    assert read_action({"type": "text", "content": "hm", "invalid_reason": "why"}).invalid_reason == "why"
    with pytest.raises(ValueError, match="'tool_call', 'text', 'terminate'"):
        read_action({"type": "dance"})


@pytest.mark.parametrize(
    ("wire", "arguments", "text"),
    [
        ({"function": {"name": "add", "arguments": '{"n": 1}'}, "id": "1"}, {"n": 1}, '{"n": 1}'),
        ({"tool": "add", "args": {"n": 1}}, {"n": 1}, '{"n":1}'),
        ({"tool_name": "add", "arguments": {"n": 1}}, {"n": 1}, '{"n":1}'),
        ({"name": "add", "arguments": '{"n": 1}'}, {"n": 1}, '{"n": 1}'),
        ({"tool": "add", "args": [1]}, None, "[1]"),  # left for the environment to refuse
    ],
)
def test_every_known_form_of_a_tool_call_is_read_and_one_without_a_tool_refused(wire, arguments, text):
    (request,) = requests_from_wire([wire])
    assert (request.name, request.arguments, request.raw_arguments) == ("add", arguments, text)
    with pytest.raises(ValueError, match=r"tool_calls\.1"):
        requests_from_wire([wire, {"args": {}}])


@pytest.mark.parametrize("text", ['{"a": "\\ud83d"}', '{"a": "\\uD83D"}', '{"a": "\ud83d"}'])
def test_half_a_character_in_arguments_becomes_a_question_mark(text):
    assert json_object(text) == {"a": "?"}


SAID = [("user", TASK.content), ("assistant", "answer 1"), ("user", AGAIN.content), ("assistant", "answer 2")]


def test_a_conversation_says_everything_once():
    assert [(item.role, item.content) for item in transcript(dialogue(0.0, 1.0).steps)] == SAID
    roles = [item.role for item in transcript(reader().steps)]
    assert roles == ["user", "assistant", "tool", "assistant", "tool", "assistant"]


def test_the_legacy_reply_holds_the_whole_prompt_of_each_decision():
    steps = dialogue(0.0, 1.0).steps
    seen = tuple(Observation("", {}, {}, 0.0) for _ in range(3))
    env, policy = LegacyEnv(env_name="dialogue", seed=0), LegacyPolicy(policy_name="random")
    body = LegacyRollout(run_id="r", env=env, policy=policy, ops=("agent", "env"))
    plan = plan_rollout(body, default_plug_boards(), Settings())
    dialogue_of_two = DialogueEnvironment(DialogueConfig(prompt="?"))
    cast = Cast(plan, dialogue_of_two, RandomPolicy(), Stepwise(), None, seed=0, inference_url=None)
    result = Result([Episode(steps, seen, 1.0, StopReason.INTERACTION_DONE)])
    told = reply(result, cast, created_at=datetime(2025, 1, 1, tzinfo=UTC))
    prompts = [
        [(item["role"], item["content"]) for item in step["info"]["meta"]["inference_request"]["messages"]]
        for step in told["trajectories"][0]["steps"]
    ]
    assert prompts == [SAID[:1], SAID[:3]]
