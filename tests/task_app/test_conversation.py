"""Conversations in the one episode loop, over HTTP, with a scripted model and real interactions.

The first six are the scripts of verl.md 1.3: every answer scored, every instance finalised once.
"""

import json
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from shared_schemas.messages import Message
from shared_schemas.rollouts import MultiTurn
from shared_schemas.task_definition import TaskDefinitionModel
from shared_schemas.trajectory import Trajectory, prompts
from task_app.environments.dialogue import DialogueConfig, DialogueEnvironment
from task_app.episode.actions import Choice, read_action
from task_app.episode.context_tools import Budget
from task_app.episode.conversation import Conversation
from task_app.episode.worker import RLRolloutWorker
from task_app.errors import CriticalError
from task_app.interactions.gsm8k import RIGHT, WRONG, Gsm8kInteraction
from task_app.interactions.live import InteractionReply
from task_app.plugins import InteractionEntry, default_plug_boards
from task_app.protocols import DecisionOutcome, Observation
from tests.task_app.counting import Clock, PlannedPolicy, running_app
from tests.task_app.fake_inference import completion, fake_inference, says, status
from tests.task_app.rollout_client import accept, play

QUESTION = "What is 6 * 7? Answer with #### and the number."


def calls(*functions):
    made = [
        {
            "id": f"c{index}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for index, (name, arguments) in enumerate(functions)
    ]
    return completion({"role": "assistant", "content": None, "tool_calls": made})


@asynccontextmanager
async def playing(*answers):
    """A client, a function that makes dialogue requests, the fake server, and what interactions told."""
    events = []

    class Watched(Gsm8kInteraction):
        async def start_interaction(self, instance_id=None, **kwargs):
            events.append("start")
            return await super().start_interaction(instance_id, **kwargs)

        async def generate_response(self, instance_id, messages, **kwargs):
            found = await super().generate_response(instance_id, messages, **kwargs)
            events.append(f"score {found[2]:g}")
            return found

        async def finalize_interaction(self, instance_id, **kwargs):
            events.append("finalize")
            await super().finalize_interaction(instance_id, **kwargs)

    boards = replace(default_plug_boards(), interactions={"gsm8k": InteractionEntry("gsm8k", Watched, {})})
    async with (
        fake_inference(*answers) as fake,
        running_app(boards, allowed_inference_hosts=("127.0.0.1",)) as client,
    ):

        def request(rollout_id="a", **changes):
            return {
                "rollout_id": rollout_id, "run_id": "r", "start": {"seed": 1},
                "env": {"env_name": "dialogue", "config": {"prompt": QUESTION}},
                "policy": {"policy_name": "openai", "config": {
                    "inference_url": fake.url, "model": "m", "max_attempts": 1, "ask_token_ids": False,
                }},
                "interaction": {}, "ground_truth": "42", **changes,
            }  # fmt: skip

        yield client, request, fake, events


async def played(client, *requests):
    return list((await play(client, *requests)).values())


@pytest.mark.parametrize(
    ("answers", "changes", "scores", "ending"),
    [
        (["#### 42"], {}, [1.0], "interaction_done"),
        (["#### 41", "#### 42"], {}, [0.0, 1.0], "interaction_done"),
        (["#### 42"], {"limits": {"max_decisions": 1}}, [1.0], "interaction_done"),
        (["#### 41", "#### 40"], {"limits": {"max_decisions": 2}}, [0.0, 0.0], "max_decisions"),
        (["#### 41", "#### 40"], {"multi_turn": {"max_user_turns": 1}}, [0.0, 0.0], "max_user_turns"),
        (["#### 41"], {"multi_turn": {"max_episode_tokens": 2}}, [0.0], "episode_tokens"),
    ],
)  # fmt: skip
async def test_every_answer_is_scored_and_every_instance_finalised_once(answers, changes, scores, ending):
    async with playing(*map(says, answers)) as (client, request, fake, events):
        [rollout] = await played(client, request(**changes))
    episode = rollout.trajectory
    assert [part.value for step in episode.steps for part in step.reward_parts] == scores
    assert {part.source for step in episode.steps for part in step.reward_parts} == {"interaction"}
    assert events == ["start", *(f"score {score:g}" for score in scores), "finalize"]
    assert (episode.stop_reason, episode.outcome_reward) == (ending, scores[-1])
    assert "last answer" in episode.outcome_definition
    assert episode.terminated == (ending == "interaction_done")
    assert len(fake.bodies) == len(answers), "no model is asked once the episode has ended"
    assert "42" not in str([body["messages"] for body in fake.bodies]).replace("#### 42", "")


async def test_a_conversation_grows_and_the_wire_with_it_and_not_with_its_square():
    async with playing(says("#### 1"), says("#### 2"), says("#### 42")) as (client, request, fake, _):
        [rollout] = await played(client, request())
    wrong = {"role": "user", "content": WRONG}
    said = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "#### 1"}, wrong,
        {"role": "assistant", "content": "#### 2"}, wrong,
        {"role": "assistant", "content": "#### 42"},
    ]  # fmt: skip
    asked = [[{key: m[key] for key in ("role", "content")} for m in body["messages"]] for body in fake.bodies]
    assert asked == [said[:1], said[:3], said[:5]]
    episode = rollout.trajectory
    told = [step.observation_data for step in episode.steps]
    assert [(seen.messages_reused, len(seen.messages)) for seen in told] == [(0, 1), (1, 2), (3, 2)]
    again = [[{"role": m.role, "content": m.content} for m in prompt] for prompt in prompts(episode.steps)]
    assert again == asked, "what the wire carries spells every prompt"
    assert [(m.role, m.content, m.model_extra["msg_id"]) for m in episode.full_history] == [
        (m["role"], m["content"], number) for number, m in enumerate(said)
    ]
    assert RIGHT not in str(episode.full_history), "feedback after the last answer is not shown"
    first, _, last = [step.step_info.user_answer for step in episode.steps]
    assert (first, last.unshown) == (None, RIGHT), "but kept; the words before stand in the next prompt"
    again_and_over = ["GENERATING", "INTERACTING"] * 2 + ["COMPLETED"]
    assert list(episode.states) == ["PENDING", "GENERATING", "INTERACTING", *again_and_over]
    assert Trajectory.model_validate_json(episode.model_dump_json()) == episode


async def test_siblings_that_answered_differently_are_in_different_states_though_they_are_told_the_same():
    keys = ["default", "text_last_2"]
    episodes = []
    for answer in ("#### 41", "#### 43", "#### 41"):
        async with playing(says(answer), says("#### 42")) as (client, request, _, _):
            [rollout] = await played(client, request(state_keys=keys))
        episodes.append([step.observation_data.state_keys for step in rollout.trajectory.steps])
    low, high, again = episodes
    assert low == again and low[0] == high[0], "the question is one state"
    assert all(low[1][name] != high[1][name] for name in keys)


async def test_an_outage_in_the_middle_fails_the_rollout_and_finalises():
    outage = status(400, {"error": {"message": "no"}})
    async with playing(says("#### 41"), outage) as (client, request, _, events):
        [rollout] = await played(client, request())
    assert (rollout.status, rollout.failure.code) == ("failed", "inference_refused")
    assert events == ["start", "score 0", "finalize"]


UNREADABLE = {"role": "assistant", "content": "#### 42 <tool", "tool_call_error": "no end tag"}


@pytest.mark.parametrize(
    ("answer", "words", "said", "reason"),
    [
        (calls(("look", {})), "", ("tool", "c0"), ""),
        (completion(UNREADABLE), "#### 42 <tool", ("user", None), "no end tag"),
    ],
    ids=["a tool call", "a call that cannot be read"],
)
async def test_what_is_no_answer_in_a_dialogue_is_told_so_and_not_scored(answer, words, said, reason):
    async with playing(answer, says("#### 42")) as (client, request, fake, events):
        [rollout] = await played(client, request())
    first = rollout.trajectory.steps[0]
    assert first.step_info.invalid_reason and not first.reward_parts
    *_, own, result = fake.bodies[1]["messages"]
    assert (own["role"], own.get("content") or "") == ("assistant", words)
    assert (result["role"], result.get("tool_call_id")) == said
    assert result["content"].startswith(f"error: {reason}")
    assert events == ["start", "score 1", "finalize"]


CRAFTER = {"env": {"env_name": "crafter"}}
DOCUMENTS = {"env": {"env_name": "documents", "config": {"generate": {}}}, "ground_truth": None}


def opening_with(*roles):
    prompt = [{"role": role, "content": None} for role in roles]
    return {"env": {"env_name": "dialogue", "config": {"prompt": prompt}}}


def reading_with(*tools, enabled=True):
    return {
        **DOCUMENTS, "interaction": None,
        "multi_turn": {"statelm_enabled": enabled, "context_tools": list(tools)},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "where", "told"),
    [
        ({"interaction": None}, "interaction", "have no score of their own"),
        ({"interaction": {"name": "gsm8"}}, "interaction.name", "Did you mean 'gsm8k'"),
        (CRAFTER, "interaction", "no effect in 'crafter'"),
        ({**CRAFTER, "interaction": None, "multi_turn": {"max_user_turns": 1}}, "multi_turn", "no effect"),
        ({"snapshot_turns": [2]}, "snapshot_turns", "no episode can continue it"),
        (opening_with(), "env.config.prompt", "prompt is [] (list); it is a text or a list of messages"),
        (opening_with("robot"), "env.config.prompt", "prompt[0].role is 'robot' (str); known: system, user,"),
        (opening_with("user"), "env.config.prompt", "prompt[0].content is None (NoneType); it is a text"),
        (DOCUMENTS, "interaction", "never be asked in 'documents', where only tool calls count"),
        (reading_with("deleteContex"), "multi_turn.context_tools", "Did you mean 'deleteContext'?"),
        (reading_with("undoEdit", "undoEdit"), "multi_turn.context_tools", "'undoEdit' is named more"),
        (reading_with("undoEdit", enabled=False), "multi_turn", "none of them would be offered"),
    ],
)  # fmt: skip
async def test_what_would_have_no_effect_is_refused_with_its_place(changes, where, told):
    async with playing(says("x")) as (client, request, _, events):
        answer = await accept(client, request(**changes))
    problem = answer.json()
    assert answer.status_code == 422 and not events, problem
    assert problem["where"] == f"rollouts.0.{where}", problem
    assert told in problem["detail"] + str(problem.get("hint")), problem


DOCUMENT = [f"Paragraph {n}. The colour of box {n} is {'red' if n == 7 else 'blue'}." for n in range(10)]
READING = {"document_content": "\n\n".join(DOCUMENT), "question": "What colour is box 7?", "chunk_size": 120}


def documents(request, **multi_turn):
    return {
        **request(interaction=None, ground_truth=None, multi_turn=multi_turn),
        "env": {"env_name": "documents", "config": {**READING, "ground_truth": "red"}},
    }


async def test_a_document_is_read_by_calls_and_a_delete_leaves_stubs():
    script = [
        calls(("buildIndex", {})),
        calls(("readChunk", {"chunk_id": 0}), ("readChunk", {"chunk_id": 1})),
        calls(("deleteContext", {"message_ids": [5]})),
        calls(("deleteContext", {"message_ids": [0]})),
        calls(("finish", {"answer": "red"})),
    ]
    with capture_logs() as logs:
        async with playing(*script) as (client, request, fake, _):
            [rollout] = await played(client, documents(request, statelm_enabled=True))
    episode = rollout.trajectory
    assert (episode.stop_reason, episode.outcome_reward) == ("environment_done", 1.0)
    called = "GENERATING PROCESSING_TOOLS"
    states = [f"PENDING {called}", called, called, f"PENDING {called}", f"{called} TERMINATED"]
    assert [" ".join(step.states) for step in episode.steps] == states
    (edit,) = [line for line in logs if line["event"] == "context_edited"]
    used = episode.steps[2].step_info
    assert edit["used_tokens"] == used.prompt_tokens + used.completion_tokens
    assert json.loads(edit["result"]) == {"status": "success", "deleted_msg_ids": [5]}
    assert {"deleteContext", "checkBudget"} <= {tool.function.name for tool in episode.tools}
    assert episode.deleted_msg_ids == (5,) and episode.had_delete_operation
    shown = [body["messages"] for body in fake.bodies]
    before, after = shown[2][5], shown[3][5]
    assert "Paragraph" in before["content"] and "Paragraph" not in after["content"]
    assert (after["role"], after["tool_call_id"]) == (before["role"], before["tool_call_id"])
    assert shown[3][:5] == shown[2][:5]
    assert shown[4][: len(shown[3])] == shown[3], "a delete that deletes nothing changes nothing"
    assert "error" in shown[4][-1]["content"] or "refused" in shown[4][-1]["content"]
    told = [step.observation_data for step in episode.steps]
    assert [list(seen.changed) for seen in told] == [[], [], [], [5], []]
    again = [
        [m.model_dump(mode="json", exclude_none=True) for m in prompt] for prompt in prompts(episode.steps)
    ]
    assert again == shown


async def test_without_the_feature_there_are_no_ids_and_no_delete():
    delete = calls(("deleteContext", {"message_ids": [3]}))
    script = [calls(("buildIndex", {})), delete, calls(("finish", {"answer": "no"}))]
    async with playing(*script) as (client, request, fake, _):
        [rollout] = await played(client, documents(request))
    assert rollout.trajectory.outcome_reward == 0.0
    assert not rollout.trajectory.had_delete_operation
    assert "msg_id" not in str(fake.bodies[-1]["messages"])
    assert "deleteContext" in rollout.trajectory.steps[1].step_info.invalid_reason


async def test_words_where_a_tool_is_due_are_answered_with_what_is_wrong():
    async with playing(says("It is red."), calls(("finish", {"answer": "red"}))) as (
        client,
        request,
        fake,
        _,
    ):
        [rollout] = await played(client, documents(request))
    assert rollout.trajectory.steps[0].step_info.invalid_reason
    told = fake.bodies[1]["messages"][-1]
    assert (told["role"], told["content"][:7]) == ("user", "error: ")


async def test_a_context_that_is_full_costs_the_last_decision_its_penalty():
    full = status(400, {"error": {"code": "context_length_exceeded", "message": "too long"}})
    with capture_logs() as logs:
        async with playing(calls(("buildIndex", {})), full) as (client, request, _, _events):
            [rollout] = await played(client, documents(request))
    [step] = rollout.trajectory.steps
    assert rollout.trajectory.stop_reason == "context_length" and rollout.trajectory.truncated
    assert [(part.source, part.value) for part in step.reward_parts] == [("penalty", -1.0)], "by default"
    assert step.states == ("PENDING", "GENERATING", "PROCESSING_TOOLS", "TERMINATED")
    (warning,) = [line for line in logs if line["event"] == "context_length_exceeded"]
    assert (warning["log_level"], warning["turn"], warning["penalty"]) == ("warning", 1, -1.0)


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


NOW = Observation("a question", {})


class Told:
    """An interaction that answers with this, after so many seconds of the test's clock."""

    def __init__(self, reply, clock=None, seconds=0.0):
        self.reply, self.clock, self.seconds = reply, clock or Clock(), seconds

    async def respond(self, messages):
        self.clock.now_s += self.seconds
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


def called(*calls):
    made = [{"id": f"c{i}", "name": name, "arguments": given} for i, (name, given) in enumerate(calls)]
    return {"type": "tool_call", "tool_calls": made}


WORDS = {"type": "text", "content": "words", "invalid_reason": None}


async def test_the_metadata_of_an_answer_is_kept_with_its_decision():
    reply = InteractionReply(False, "go on", None, {"mood": "patient"})
    conversation = talking(MultiTurn(), Told(reply))
    async with conversation.open():
        carried = await decided(conversation, WORDS)
    assert (carried.answer.metadata, carried.answer.unshown) == ({"mood": "patient"}, None)


async def test_the_time_of_the_interaction_stands_apart_from_that_of_the_environment():
    clock = Clock()
    environment = DialogueEnvironment(DialogueConfig(prompt="a question"))
    slow = Told(InteractionReply(True, "", 1.0, {}), clock, seconds=3.0)
    worker = RLRolloutWorker(
        TaskDefinitionModel(resource_type="dialogue"),
        PlannedPolicy(WORDS, on_ask=clock.tick),
        environment=environment,
        prompts=Conversation(environment, MultiTurn(), slow.opened(), clock=clock),
        clock=clock,
    )
    (step,), _, _ = await worker.run_episode()
    took = step.step_info
    assert (took.policy_s, took.environment_s, took.interaction_s) == (1.0, 0.0, 3.0)


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
    delete = ("deleteContext", {"message_ids": [1]})
    action = called(("checkBudget", {}), ("finish", {}), delete, ("look", {}))
    carried = await decided(conversation, action, terminated=True, results=("answered", "error: too late"))
    before, ending, after, late = carried.outcome.results
    assert "shown in full" in before and ending == "answered"
    assert after == "error: not carried out: the episode had ended before"
    assert late == "error: too late"
    assert not conversation.history.had_delete_operation
