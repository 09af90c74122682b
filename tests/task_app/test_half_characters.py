"""Half a character (a lone surrogate) passes through JSON as an escape; nothing that holds one may break."""

import json

from shared_schemas.rollouts import Rollout
from shared_schemas.task_definition import TaskDefinitionModel
from shared_schemas.trajectory import Trajectory
from task_app.encoding import encodable_json
from task_app.episode import RLRolloutWorker
from task_app.plugins import default_plug_boards
from tests.task_app.counting import CountingEnvironment, PlannedPolicy, rollout, running_app
from tests.task_app.fake_inference import fake_inference, raw
from tests.task_app.rollout_client import accept, all_of

HALF = "\ud83d"
JSON = {"Content-Type": "application/json"}


def calling_with(arguments, name="add", content=None):
    """The body of a completion; json.dumps writes the half character as an escape, as a server does."""
    call = {"id": f"c{HALF}", "function": {"name": name, "arguments": arguments}}
    return raw(json.dumps({"choices": [{"message": {"content": content, "tool_calls": [call]}}]}))


def test_every_string_of_json_data_is_cleaned_keys_too():
    assert encodable_json({HALF: [HALF, ("é", 1, None)]}) == {"?": ["?", ["é", 1, None]]}


async def test_a_trajectory_of_what_a_policy_wrote_can_be_serialised():
    call = {"id": HALF, "name": f"add{HALF}", "arguments": json.dumps({HALF: HALF})}
    broken = {"id": "1", "name": "add", "arguments": f'{{"{HALF}'}
    policy = PlannedPolicy(
        {"type": "tool_call", "tool_calls": [call, broken], "content": HALF, "thoughts": [HALF]},
        {"type": "text", "content": HALF, "invalid_reason": f"because {HALF}"},
        {"type": "tool_call", "name": "add", "arguments": {"names": [HALF]}},
        {"type": "terminate"},
    )
    worker = RLRolloutWorker(
        task_definition=TaskDefinitionModel(resource_type="counting"),
        environment=CountingEnvironment(),
        agent_policy=policy,
        seed=1,
    )
    _, messages, _ = await worker.run_episode()
    assert all(message.model_dump_json() for message in messages)
    trajectory = worker.trajectory()
    assert Trajectory.model_validate_json(trajectory.model_dump_json()) == trajectory
    first, second, third, _ = trajectory.steps
    assert first.action_taken["thoughts"] == ["?"]
    assert (first.raw_policy_output, second.step_info.invalid_reason) == ("?", "because ?")
    assert third.step_info.executed_actions == ("?",)


async def test_a_rollout_of_the_service_survives_a_model_that_writes_half_characters():
    answers = [
        calling_with(json.dumps({"actions": [HALF]}), "interact_many"),
        calling_with(f'{{"actions": ["{HALF}'),
        calling_with(json.dumps({HALF: 1}), "interact_many", content=HALF),
        calling_with(json.dumps({"actions": ["noop"]}), f"interact{HALF}"),
    ]
    async with fake_inference(*answers) as fake, running_app(default_plug_boards()) as client:
        policy = {"policy_name": "openai", "config": {"inference_url": fake.url, "model": "m"}}
        body = rollout("a", env={"env_name": "crafter"}, policy=policy, limits={"max_decisions": 4})
        await accept(client, body)
        found = (await all_of(client, 1))["a"]
    assert found.failure is None
    assert found.trajectory is not None
    assert len(found.trajectory.steps) == 4
    assert Rollout.model_validate_json(found.model_dump_json()) == found
    assert HALF not in json.dumps(fake.bodies, ensure_ascii=False), "the next prompt is clean too"


async def test_the_environment_routes_answer_half_characters():
    calls = [{"tool": f"add{HALF}", "args": {HALF: HALF}}, {"tool": "add", "args": HALF}]
    async with running_app() as client:
        made = (await client.post("/env/create", json={"env_name": "counting"})).json()
        content = json.dumps({"env_id": made["env_id"], "tool_calls": calls})
        answer = await client.post("/env/step", content=content, headers=JSON)
    assert answer.status_code == 200, answer.text
    assert answer.json()["info"]["invalid_reason"] == "cannot carry out 'add?'"


async def test_the_policy_routes_answer_half_characters():
    answer_of_model = calling_with(HALF, content=HALF)
    async with fake_inference(answer_of_model) as fake, running_app() as client:
        config = {"inference_url": fake.url, "model": "m"}
        made = await client.post("/policy/create", json={"policy_name": "openai", "config": config})
        observation = {"text": HALF, "data": {HALF: HALF}}
        content = json.dumps({"policy_id": made.json()["policy_id"], "observation": observation})
        answer = await client.post("/policy/step", content=content, headers=JSON)
    assert answer.status_code == 200, answer.text
    assert answer.json()["meta"]["raw_policy_output"] == "?"
    assert fake.bodies[0]["messages"][0]["content"] == "?"


async def test_a_config_with_half_a_character_is_the_callers_fault():
    body = rollout("a", env={"env_name": "counting", "config": {"length": HALF, HALF: 1}})
    async with running_app() as client:
        content = json.dumps({"rollouts": [body]})
        answer = await client.post("/rollouts", content=content, headers=JSON)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
