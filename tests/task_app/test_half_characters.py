"""Half a character (a lone surrogate) that a model wrote: nothing that holds one may break.

One that a request brings is refused at the edge (guards/test_content.py).
"""

import json

from shared_schemas.json_text import encodable_json
from shared_schemas.rollouts import Rollout
from shared_schemas.task_definition import TaskDefinitionModel
from shared_schemas.trajectory import Trajectory
from task_app.episode.worker import RLRolloutWorker
from task_app.plugins import default_plug_boards
from tests.task_app.counting import CountingEnvironment, PlannedPolicy, rollout, running_app
from tests.task_app.fake_inference import fake_inference, raw
from tests.task_app.rollout_client import accept, wait_for_all

HALF = "\ud83d"


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
        found = (await wait_for_all(client, 1))["a"]
    assert found.failure is None
    assert found.trajectory is not None
    assert len(found.trajectory.steps) == 4
    assert Rollout.model_validate_json(found.model_dump_json()) == found
    assert HALF not in json.dumps(fake.bodies, ensure_ascii=False), "the next prompt is clean too"
