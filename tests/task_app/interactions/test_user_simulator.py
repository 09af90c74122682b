"""A user played by a language model: what it is asked, how it ends, what it scores, what it may not."""

import aiohttp
import pytest

from service_kit.errors import SettingsError
from shared_schemas.messages import FunctionCall, Message, ToolCall
from task_app.errors import InteractionFailed
from task_app.interactions.config_file import load_interactions
from task_app.interactions.service import Interactions
from task_app.interactions.user_simulator import UserSimulatorInteraction
from task_app.plugins import InteractionEntry, PolicyContext
from task_app.settings import Settings
from tests.task_app.fake_inference import fake_inference, says, status
from tests.task_app.interactions.opening import said

NAME = "task_app.interactions.user_simulator.UserSimulatorInteraction"


async def answers(*served, config=None, kwargs=None, asked=("a",), ground_truth=None):
    """What the simulator answers to each of `asked`, and what its server was sent."""
    settings = Settings(interaction_deadline_s=10.0)
    async with fake_inference(*served) as server, aiohttp.ClientSession() as session:
        given = {"inference_url": server.url, "model": "m", "max_attempts": 2, **(config or {})}
        entry = InteractionEntry("user", UserSimulatorInteraction, given)
        context = PolicyContext(settings=settings, open_session=lambda: session, rollout_id="r")
        room = Interactions({"user": entry}, settings, lambda rollout_id: context)
        opened = room.open("user", kwargs or {}, rollout_id="r", ground_truth=ground_truth)
        async with opened as live:
            found = [
                await live.respond(said(*asked[:count]) if isinstance(asked[0], str) else asked)
                for count in range(1, len(asked) + 1)
            ]
        return found, server


async def test_the_conversation_stands_as_text_in_one_message_with_the_rows_words():
    instructions = "You want {query}. Say {end_marker} at the end."
    found, server = await answers(
        says("Thanks!"), config={"instructions": instructions}, kwargs={"query": "tea"}, asked=("Here.",)
    )
    (body,) = server.bodies
    assert body["messages"] == [
        {"role": "system", "content": "You want tea. Say [END] at the end."},
        {"role": "user", "content": "User: What is 6 x 7?\n\nAssistant: Here.\n\nThe user's next message:"},
    ]
    assert body.keys() == {"model", "messages", "temperature", "top_p", "max_tokens"}
    assert (found[0].should_terminate, found[0].response, found[0].score) == (False, "Thanks!", None)


async def test_the_marker_ends_the_episode_and_is_not_said():
    found, _ = await answers(
        says("Go on."), says("Thank you. [END]"), config={"score": "ended"}, asked=("a", "b")
    )
    assert [(one.should_terminate, one.response, one.score) for one in found] == [
        (False, "Go on.", 0.0),
        (True, "Thank you.", 1.0),
    ]


async def test_a_score_by_the_ground_truth():
    found, _ = await answers(
        says("No."), config={"score": "gsm8k"}, ground_truth="42", asked=("#### 41", "#### 42")
    )
    assert [one.score for one in found] == [0.0, 1.0]
    with pytest.raises(InteractionFailed, match=r"'gsm8k'.*ground_truth"):
        await answers(says("No."), config={"score": "gsm8k"})
    with pytest.raises(InteractionFailed, match="ground_truth is a str"):
        await answers(says("No."), config={"score": "gsm8k"}, ground_truth="Paris")


async def test_messages_without_text_and_the_system_message_are_left_out():
    call = ToolCall(id="c", function=FunctionCall(name="f", arguments="{}"))
    conversation = (
        Message(role="system", content="be brief"),
        Message(role="user", content="q"),
        Message(role="assistant", content=None, tool_calls=(call,)),
        Message(role="tool", content="found", tool_call_id="c"),
    )
    _, server = await answers(says("x"), asked=conversation)
    assert server.bodies[0]["messages"][1]["content"] == "User: q\n\nTool: found\n\nThe user's next message:"


async def test_instructions_that_name_what_the_row_does_not_give_fail_the_start():
    told = r"interaction 'user': start_interaction: instructions name \{query\}, which .* do not give"
    with pytest.raises(InteractionFailed, match=told):
        await answers(says("x"), config={"instructions": "You want {query}."})


async def test_its_key_goes_to_its_server_and_into_no_error(monkeypatch):
    key = "sk-the-key-of-the-user-simulator"
    monkeypatch.setenv("USER_KEY", key)
    _, server = await answers(says("x"), config={"api_key_env": "USER_KEY"})
    assert server.headers[0]["authorization"] == f"Bearer {key}"
    refusing = status(400, {"error": {"message": f"bad key {key}"}})
    with pytest.raises(InteractionFailed) as failed:
        await answers(refusing, config={"api_key_env": "USER_KEY"})
    assert failed.value.detail == (
        "interaction 'user': generate_response: the inference server refused: status 400  bad key [key]"
    )


async def test_its_context_length_is_a_failure_and_never_the_end_of_the_policys():
    full = status(400, {"error": {"code": "context_length_exceeded", "message": "too long"}})
    with pytest.raises(InteractionFailed) as failed:
        await answers(full)
    assert failed.value.code == "interaction_failed"


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("{model: m}", "config.inference_url: Field required"),
        ("{inference_url: 'http://example.org', model: m}", "inference host example.org:80 is not on this"),
        ("{inference_url: 'http://localhost:1', model: m, api_key_env: NOT_SET_AT_ALL}", "which is not set"),
        ("{inference_url: 'http://localhost:1', model: m, api_key_env: ENVIRONMENT_API_KEY}", "is a key of"),
        ("{inference_url: 'http://localhost:1', model: m, scores: none}", "Did you mean 'score'"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_its_config_is_told_at_the_start(tmp_path, config, told):
    file = tmp_path / "a.yaml"
    file.write_text(f"interaction: [{{class_name: {NAME}, config: {config}}}]", encoding="utf-8")
    with pytest.raises(SettingsError) as refused:
        load_interactions(file, Settings())
    assert told in refused.value.detail
