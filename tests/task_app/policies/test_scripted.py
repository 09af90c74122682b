"""Policies that follow rules: scripted play of Crafter, labels of a teacher, sums."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from statistics import mean

import pytest
from pydantic import SecretStr

from shared_schemas.messages import Message
from shared_schemas.task_definition import TaskDefinitionModel
from task_app.environments.crafter.balrog import BalrogEnvironment
from task_app.environments.crafter.environment import CrafterConfig, CrafterEnvironment
from task_app.environments.crafter.map_memory import MapMemory
from task_app.environments.crafter.rules import ACTIONS
from task_app.episode.worker import RLRolloutWorker
from task_app.errors import UnknownName
from task_app.plugins import POLICIES, PlugBoards, PolicyContext, PolicyPlugin, default_plug_boards
from task_app.policies.labelled import LabelledConfig, LabelledPolicy
from task_app.policies.scripted import NO_TOOLS, CrafterTeacher, RandomConfig, RandomPolicy, TeacherConfig
from task_app.policies.sums import SumsTeacher, SumsTeacherConfig, solve
from task_app.protocols import PolicyObservation, ToolRequest
from task_app.settings import Settings
from tests.task_app.fake_inference import Answer, completion, fake_inference, says


async def play(
    policy, seed: int, *, decisions: int = 50, max_actions: int = 4
) -> tuple[float, list[list[str]]]:
    environment = CrafterEnvironment(CrafterConfig(max_actions=max_actions))
    data, made = environment.reset(seed).data, []
    tools = [tool.model_dump() for tool in environment.tools()]
    for _ in range(decisions):
        action, raw, logprobs, value = await policy.get_action(PolicyObservation((), data), tools)
        assert (raw, logprobs, value) == (None, None, None)
        arguments = json.loads(action["tool_calls"][0]["arguments"])
        made.append(arguments["actions"])
        outcome = environment.step([ToolRequest(action["tool_calls"][0]["name"], arguments)])
        assert outcome.invalid_reason is None
        data = outcome.observation.data
        if outcome.terminated:
            break
    return environment.outcome_reward(), made


@pytest.mark.parametrize("memory", [False, True])
async def test_the_teacher_unlocks_at_least_ten_achievements_in_200_steps(memory):
    scores = [(await play(CrafterTeacher(TeacherConfig(memory=memory)), seed))[0] for seed in range(4)]
    assert mean(scores) >= 10


@pytest.mark.parametrize("memory", [False, True])
async def test_the_teacher_is_deterministic_and_a_used_one_starts_afresh(memory):
    teacher = CrafterTeacher(TeacherConfig(memory=memory, max_actions=3))
    first = await play(teacher, 5, decisions=25, max_actions=3)
    await play(teacher, 6, decisions=5, max_actions=3)
    assert await play(teacher, 5, decisions=25, max_actions=3) == first
    assert all(1 <= len(actions) <= 3 for actions in first[1])


async def test_epsilon_mixes_in_random_decisions_that_follow_the_seed():
    def made(seed: int):
        return play(CrafterTeacher(TeacherConfig(epsilon=0.5, max_actions=4, seed=seed)), 5, decisions=25)

    assert await made(0) == await made(0)
    assert (await made(0))[1] != (await made(1))[1]


async def test_random_play_uses_every_action_and_the_full_length():
    _, made = await play(RandomPolicy(RandomConfig(max_actions=4, seed=1)), 2, decisions=50)
    assert {len(actions) for actions in made} == {4}
    assert {action for actions in made for action in actions} == set(ACTIONS)


def test_the_memory_of_another_episode_is_dropped_even_when_its_start_was_not_seen():
    def at_step(environment, noops):
        environment.step([ToolRequest("interact_many", {"actions": ["noop"] * noops})])
        return environment.step([ToolRequest("interact_many", {"actions": ["move_left"]})]).observation.data

    first, second = CrafterEnvironment(), CrafterEnvironment()
    first.reset(1)
    second.reset(2)
    seen, other = at_step(first, 5), at_step(second, 2)
    used = MapMemory()
    used.facts(seen)
    assert used.facts(other) == MapMemory().facts(other)


@pytest.mark.parametrize("policy", [CrafterTeacher(TeacherConfig(epsilon=0.3)), RandomPolicy()])
async def test_where_an_environment_takes_words_the_action_is_said_in_its_words(policy):
    environment = BalrogEnvironment(CrafterConfig(text="balrog"))
    observation = environment.reset(4)
    for _ in range(60):
        action, *_ = await policy.get_action(PolicyObservation((), observation.data), [])
        outcome = environment.answer(action["content"])
        assert (action["type"], outcome.invalid_reason) == ("text", None)
        observation = outcome.observation
    assert environment.outcome_reward() >= 1


@pytest.mark.parametrize("data", [{"answers": 1}, {"answer_names": 1}, {"answer_names": [1, 2]}])
async def test_data_of_another_kind_under_a_like_name_are_no_words_to_answer_with(data):
    action, *_ = await RandomPolicy().get_action(PolicyObservation((), data), [])
    assert action["content"] == NO_TOOLS


def test_a_memory_of_cells_outside_the_world_is_refused():
    memory = MapMemory()
    memory.restore({"step": 3, "cells": [[-4, 67, "void"]]})
    assert memory.snapshot() == {"step": 3, "cells": [[-4, 67, "void"]]}
    with pytest.raises(ValueError, match="no map of cells"):
        memory.restore({"step": 3, "cells": [[0, 200, "grass"]]})


TEACHER = {"teacher": "crafter_teacher", "teacher_config": {"max_actions": 4}}


def waiting() -> Answer:
    function = {"name": "interact_many", "arguments": json.dumps({"actions": ["noop"]})}
    call = {"id": "call_1", "type": "function", "function": function}
    return completion({"role": "assistant", "content": None, "tool_calls": [call]})


def policy_at(url: str) -> LabelledPolicy:
    config = LabelledConfig(inference_url=url, model="m", ask_token_ids=False, **TEACHER)
    return LabelledPolicy(config, CrafterTeacher(TeacherConfig(max_actions=4)))


def actions_in(label: Mapping) -> list[str]:
    (call,) = label["tool_calls"]
    return json.loads(call["function"]["arguments"])["actions"]


async def test_the_model_s_call_is_executed_and_the_teacher_s_recorded_even_where_the_model_s_is_refused():
    async with fake_inference(waiting(), says("hm")) as fake:
        task = TaskDefinitionModel(
            resource_type="crafter", base_resource_config={"text": "compact", "max_actions": 4}
        )
        worker = RLRolloutWorker(task, policy_at(fake.url), 2, seed=5)
        first, second = (await worker.run_episode())[0]
    environment = CrafterEnvironment(CrafterConfig(text="compact", max_actions=4))
    teacher = CrafterTeacher(TeacherConfig(max_actions=4))
    assert first.step_info.executed_actions == ("noop",)
    assert actions_in(first.action_taken["label"]) == teacher.actions(environment.reset(5).data)
    assert second.step_info.invalid_reason is not None
    assert actions_in(second.action_taken["label"]) == teacher.actions(environment.step([]).observation.data)


async def test_a_snapshot_holds_the_count_of_the_model_and_the_state_of_the_teacher():
    observation = PolicyObservation((), CrafterEnvironment().reset(1).data)
    async with fake_inference(waiting()) as fake:
        policy, other = policy_at(fake.url), policy_at(fake.url)
        await policy.get_action(observation, [])
        other.restore(policy.snapshot())
        assert other.snapshot() == policy.snapshot()
    assert policy.snapshot()["turn"] == 1 and "teacher" in policy.snapshot()


@pytest.mark.parametrize("name", ["labeller", "crafter_teacher"])
def test_the_teacher_is_looked_up_on_the_boards_that_name_the_policy(name):
    boards = PlugBoards({}, {"labelled": POLICIES["labelled"], "labeller": POLICIES["crafter_teacher"]})
    config = {"inference_url": "http://127.0.0.1:1", "model": "m", "teacher": name}
    context = PolicyContext(Settings(), open_session=None)
    if name == "labeller":
        assert boards.policy("labelled", config, context).name == "labelled"
        with pytest.raises(UnknownName, match="labeller"):
            default_plug_boards().policy("labelled", config, context)
    else:
        with pytest.raises(UnknownName, match="teacher"):
            boards.policy("labelled", config, context)


@pytest.mark.parametrize("epsilon", [0.0, 1.0])
async def test_a_random_detour_of_the_teacher_is_marked_in_the_label_and_not_in_the_action(epsilon):
    observation = PolicyObservation((), CrafterEnvironment().reset(1).data)
    async with fake_inference(waiting()) as fake:
        config = LabelledConfig(inference_url=fake.url, model="m", ask_token_ids=False, **TEACHER)
        policy = LabelledPolicy(config, CrafterTeacher(TeacherConfig(epsilon=epsilon)))
        action, *_ = await policy.get_action(observation, [])
    assert action["label"].get("exploratory", False) is (epsilon == 1.0)
    assert "exploratory" not in action


async def test_a_teacher_behind_a_server_gets_neither_the_key_nor_the_rollout_id_of_the_model_that_plays():
    contexts: list[PolicyContext] = []

    def built(config: TeacherConfig, context: PolicyContext) -> CrafterTeacher:
        contexts.append(context)
        return CrafterTeacher(config)

    boards = PlugBoards(
        {}, {"labelled": POLICIES["labelled"], "crafter_teacher": PolicyPlugin(TeacherConfig, built)}
    )
    context = PolicyContext(
        Settings(), open_session=None, rollout_id="r", inference_key=SecretStr("of the model")
    )
    config = {"ask_token_ids": False, "model": "m", **TEACHER}
    async with fake_inference(waiting()) as fake:
        policy = boards.policy("labelled", {**config, "inference_url": fake.url}, context)
        await policy.get_action(PolicyObservation((), CrafterEnvironment().reset(1).data), [])
    assert [headers["authorization"] for headers in fake.headers] == ["Bearer of the model"]
    assert [(context.rollout_id, context.inference_key) for context in contexts] == [(None, None)]


DATA = Path(__file__).parents[3] / "configs/data"


@pytest.mark.parametrize("name", ["arithmetic.jsonl", "short_sums.jsonl"])
def test_every_row_of_the_data_sets_is_worked_out_as_it_stands_there(name):
    for line in (DATA / name).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        assert solve(row["question"]) == row["answer"]


@pytest.mark.parametrize(
    ("slip", "answer"),
    [(0, "3 * 3 = 9\n9 - 5 = 4\n#### 4"), (-2, "3 * 3 = 9\n9 - 5 = 2\n#### 2"), (-9, None)],
)
def test_a_slip_is_one_of_the_last_step_and_never_below_0(slip, answer):
    question = "Gus has 3 nails. Gus triples them. Gus gives away 5. How many nails does Gus have now?"
    assert solve(question, slip=slip) == (answer or "3 * 3 = 9\n9 - 5 = 0\n#### 0")


async def test_it_is_right_as_often_as_it_is_asked_to_be_and_the_same_for_a_seed():
    seen = PolicyObservation((Message(role="user", content="Ada has 4 plums. Ada finds 3 more."),), {})

    async def answers(seed):
        teacher = SumsTeacher(SumsTeacherConfig(right=0.7, seed=seed))
        return [(await teacher.get_action(seen))[0]["content"] for _ in range(400)]

    found = await answers(3)
    assert found == await answers(3)
    right = sum(text.endswith("#### 7") for text in found) / len(found)
    assert right == pytest.approx(0.7, abs=0.07)
    numbers = {int(re.findall(r"#### (\d+)", text)[0]) for text in found}
    assert numbers == {5, 6, 7, 8, 9}


def test_a_text_that_doubles_ten_thousands_of_times_is_worked_out_from_its_beginning():
    lines = solve("Ada has 1 plum. " + "Ada doubles them. " * 50_000).splitlines()
    assert (lines[0], lines[-1]) == ("1 * 2 = 2", f"#### {2**99}")
    assert solve("Ada has " + "9" * 5_000 + " plums.") == "#### 0"
