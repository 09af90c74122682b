"""A model plays and a teacher labels: the model's action is executed, the teacher's is recorded with it."""

import json
from collections.abc import Mapping

import pytest
from pydantic import SecretStr

from shared_schemas.task_definition import TaskDefinitionModel
from task_app.environments.crafter.environment import CrafterConfig, CrafterEnvironment
from task_app.episode.worker import RLRolloutWorker
from task_app.errors import UnknownName
from task_app.plugins import POLICIES, PlugBoards, PolicyContext, PolicyPlugin, default_plug_boards
from task_app.policies.labelled import LabelledConfig, LabelledPolicy
from task_app.policies.scripted import CrafterTeacher, TeacherConfig
from task_app.protocols import PolicyObservation
from task_app.settings import Settings
from tests.task_app.fake_inference import Answer, completion, fake_inference, says

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
            resource_type="crafter",
            base_resource_config={"text": "compact", "max_actions": 4},
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
