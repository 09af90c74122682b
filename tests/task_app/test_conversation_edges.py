"""Conversations at their edges: what is refused, who counts as the user, what is kept of an answer."""

from contextlib import asynccontextmanager

import pytest

from shared_schemas.messages import Message
from shared_schemas.rollouts import MultiTurn
from shared_schemas.task_definition import TaskDefinitionModel
from task_app.environments.dialogue import DialogueConfig, DialogueEnvironment
from task_app.episode.actions import Choice, read_action
from task_app.episode.context_tools import Budget
from task_app.episode.conversation import Conversation
from task_app.episode.worker import RLRolloutWorker
from task_app.errors import CriticalError
from task_app.interactions.gsm8k import RIGHT
from task_app.interactions.live import InteractionReply
from task_app.protocols import DecisionOutcome, Observation
from tests.task_app.counting import Clock
from tests.task_app.fake_inference import completion, says
from tests.task_app.test_conversation import played, playing

NOW = Observation("a question", {})


async def test_a_reply_that_could_not_be_read_is_no_answer_and_is_not_scored():
    broken = completion({"role": "assistant", "content": "#### 42 <tool", "tool_call_error": "no end tag"})
    async with playing(broken, says("#### 42")) as (client, request, fake, events):
        [rollout] = await played(client, request())
    first = rollout.trajectory.steps[0]
    assert (first.step_info.invalid_reason, first.reward_parts) == ("no end tag", ())
    assert [message["content"] for message in fake.bodies[1]["messages"][1:]] == [
        "#### 42 <tool",
        "error: no end tag",
    ]
    assert events == ["start", "score 1", "finalize"]


async def test_the_last_words_of_the_user_are_kept_though_no_prompt_shows_them():
    async with playing(says("#### 41"), says("#### 42")) as (client, request, _, _events):
        [rollout] = await played(client, request())
    first, last = rollout.trajectory.steps
    assert first.step_info.user_answer is None, "its words stand in the next prompt"
    assert last.step_info.user_answer.unshown == RIGHT


async def test_a_few_shot_opening_does_not_count_as_answers():
    opening = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "#### 2"},
        {"role": "user", "content": "6 * 7?"},
    ]
    env = {"env_name": "dialogue", "config": {"prompt": opening}}
    async with playing(says("#### 41"), says("#### 42")) as (client, request, _, _events):
        [rollout] = await played(client, request(env=env))
    episode = rollout.trajectory
    answers = [m.content for m in episode.full_history[len(opening) :] if m.role == "assistant"]
    assert [answers[step.assistant_turn_index] for step in episode.steps] == ["#### 41", "#### 42"]


class Told:
    """An interaction that answers once, with this."""

    def __init__(self, reply):
        self.reply = reply

    async def respond(self, messages):
        return self.reply

    @asynccontextmanager
    async def opened(self):
        yield self


def talking(multi_turn, interaction=None):
    """A dialogue, by hand: what its environment does with a decision is said with each decision."""
    environment = DialogueEnvironment(DialogueConfig(prompt="a question"))
    environment.reset(0)
    conversation = Conversation(environment, multi_turn, interaction and interaction.opened())
    conversation.begin(())
    return conversation


async def decided(conversation, action, **outcome):
    async def execute(read):
        return DecisionOutcome(NOW, env_rewards=(0.0,), executed_actions=("answer",), **outcome)

    return await conversation.carry_out(Choice(action), read_action(action), NOW, execute, Budget())


def called(*names):
    made = [
        {"id": f"c{i}", "name": name, "arguments": arguments} for i, (name, arguments) in enumerate(names)
    ]
    return {"type": "tool_call", "tool_calls": made}


WORDS = {"type": "text", "content": "words", "invalid_reason": None}


async def test_the_metadata_of_an_answer_is_kept_with_its_decision():
    reply = InteractionReply(False, "go on", None, {"mood": "patient"})
    conversation = talking(MultiTurn(), Told(reply))
    async with conversation.open():
        carried = await decided(conversation, WORDS)
    assert (carried.answer.metadata, carried.answer.unshown) == ({"mood": "patient"}, None)


class Slow(Told):
    """Its answer takes three seconds of the test's clock."""

    def __init__(self, clock):
        super().__init__(InteractionReply(True, "", 1.0, {}))
        self._clock = clock

    async def respond(self, messages):
        self._clock.now_s += 3.0
        return await super().respond(messages)


class Thinks:
    """A policy that takes half a second of it."""

    def __init__(self, clock):
        self._clock = clock

    async def get_action(self, observation, available_tools_specs=None):
        self._clock.now_s += 0.5
        return WORDS, None, None, None


async def test_the_time_of_the_interaction_stands_apart_from_that_of_the_environment():
    clock = Clock()
    environment = DialogueEnvironment(DialogueConfig(prompt="a question"))
    worker = RLRolloutWorker(
        TaskDefinitionModel(resource_type="dialogue"),
        Thinks(clock),
        environment=environment,
        prompts=Conversation(environment, MultiTurn(), Slow(clock).opened(), clock=clock),
        clock=clock,
    )
    (step,), _, _ = await worker.run_episode()
    took = step.step_info
    assert (took.policy_s, took.environment_s, took.interaction_s) == (0.5, 0.0, 3.0)


async def test_answers_of_the_environment_count_as_the_users_too():
    conversation = talking(MultiTurn(max_user_turns=1))
    first = await decided(conversation, WORDS, result="and then?")
    second = await decided(conversation, WORDS, result="and then?")
    assert [first.user_is_silent, second.user_is_silent] == [False, True]
    said = [message.content for message in conversation.history.view()]
    assert said == ["a question", "words", "and then?", "words"]


@pytest.mark.parametrize("results", [(), ("one", "two")])
async def test_an_environment_that_owes_a_call_its_text_breaks_the_episode_by_name(results):
    conversation = talking(MultiTurn())
    told = rf"environment 'dialogue' gave {len(results)} results for 1 calls"
    with pytest.raises(CriticalError, match=told):
        await decided(conversation, called(("look", {})), results=results)


async def test_an_edit_behind_the_call_that_ends_the_episode_is_not_carried_out():
    conversation = talking(MultiTurn(statelm_enabled=True))
    conversation.history = conversation.history.with_message(Message(role="assistant", content="reading"))
    action = called(
        ("checkBudget", {}), ("finish", {}), ("deleteContext", {"message_ids": [1]}), ("look", {})
    )
    carried = await decided(
        conversation, action, terminated=True, results=("answered", "error: not carried out: it had ended")
    )
    before, ending, after, late = carried.outcome.results
    assert "shown in full" in before and ending == "answered"
    assert after == "error: not carried out: the episode had ended before"
    assert late == "error: not carried out: it had ended"
    assert not conversation.history.had_delete_operation
