"""What a person writes who has source 2 alone: the worker, a policy, an OpenAI server; real episodes."""

import pytest

from shared_schemas.trajectory import StopReason
from task_app.errors import InvalidRequest
from tests.task_app.fake_inference import completion, fake_inference
from turnwise import (
    AgentPolicy,
    Message,
    OpenAIAgentPolicy,
    OpenAIConfig,
    RLRolloutWorker,
    TaskDefinitionModel,
)

MOVE = {"type": "tool_call", "name": "interact_many", "arguments": {"actions": ["move_right", "noop"]}}
ADVICE = {"role": "system", "content": "Stay near the lake."}


class Moves(AgentPolicy):
    """`get_action` and nothing else, as Task 2.2 has it; the moves in order, then a terminate action."""

    def __init__(self, *moves):
        self._moves = [*moves]
        self.observations = []
        self.tools = None

    async def get_action(self, observation, available_tools_specs=None):
        self.observations.append(observation)
        self.tools = available_tools_specs
        action = self._moves.pop(0) if self._moves else {"type": "terminate"}
        return action, str(action.get("content")), {"logprob": -0.25, "tokens": ["mo", "ve"]}, 0.5


async def test_an_episode_of_the_environment_that_the_task_names_is_played():
    task = TaskDefinitionModel(
        name="first night", resource_type="crafter", messages=[ADVICE], ground_truth={"answer": 7}
    )
    policy = Moves(MOVE, {"type": "text", "content": "I wait."})
    steps, messages, ground_truth = await RLRolloutWorker(task, policy, 5).run_episode()
    assert ground_truth == {"answer": 7}
    assert [step.action_taken["type"] for step in steps] == ["tool_call", "text", "terminate"]
    assert [step.is_done for step in steps] == [False, False, True]
    assert steps[0].env_rewards is not None and len(steps[0].env_rewards) == 2  # both moves were carried out
    assert [step.policy_value_estimate for step in steps] == [0.5, 0.5, 0.5]
    assert steps[0].policy_logprobs == {"logprob": -0.25, "tokens": ["mo", "ve"]}
    assert type(steps[0]).model_validate_json(steps[0].model_dump_json()) == steps[0]
    # The observation of each decision is a list of messages: the task's, then the environment's.
    assert policy.tools[0]["function"]["name"] == "interact_many"
    for observation in policy.observations:
        assert isinstance(observation, list)
        assert all(isinstance(message, Message) for message in observation)
        assert [message.role for message in observation] == ["system", "user"]
        assert observation[0].content == "Stay near the lake."
    assert messages[0] == Message(**ADVICE)
    assert [message.content for message in messages if message.role == "assistant"][1] == "I wait."


async def test_the_third_argument_is_the_most_decisions_and_holds_against_the_tasks_own():
    task = TaskDefinitionModel(resource_type="crafter", max_episode_steps=9)
    worker = RLRolloutWorker(task_definition=task, agent_policy=Moves(MOVE, MOVE, MOVE), max_episode_steps=2)
    steps, _, _ = await worker.run_episode()
    assert (len(steps), steps[-1].stop_reason) == (2, StopReason.MAX_DECISIONS)
    with pytest.raises(ValueError, match="max_episode_steps"):
        RLRolloutWorker(task, Moves(), 0)


class Looks(Moves):
    """Notes at each decision what the worker has collected."""

    async def get_action(self, observation, available_tools_specs=None):
        history = self.worker.current_messages_history
        self.seen.append((history, len(self.worker.collected_step_data), [*observation]))
        return await super().get_action(observation, available_tools_specs)


@pytest.mark.parametrize(
    ("given", "limit"),
    [({"resource_type": "crafter"}, 2), ({"resource_type": "crafter", "max_episode_steps": 2}, None)],
)
async def test_a_worker_has_the_published_attributes_before_during_and_after_its_episode(given, limit):
    policy = Looks(MOVE, MOVE)
    policy.seen, task = [], TaskDefinitionModel(messages=[ADVICE], ground_truth=7, **given)
    policy.worker = worker = RLRolloutWorker(task, policy, limit)
    assert (worker.agent_policy, worker.max_episode_steps) == (policy, 2)
    assert worker.task_definition == task.model_copy(update={"max_episode_steps": 2})
    assert (worker.current_messages_history, worker.collected_step_data) == ([Message(**ADVICE)], [])
    steps, messages, _ = await worker.run_episode()
    (first, none, prompt), (second, one, _) = policy.seen
    assert (none, one, first) == (0, 1, prompt)
    assert second == steps[0].resulting_messages_history
    assert (worker.collected_step_data, worker.current_messages_history) == (steps, messages)
    # Lists of the caller's own.
    worker.collected_step_data.clear()
    worker.current_messages_history.clear()
    assert (worker.collected_step_data, worker.current_messages_history) == (steps, messages)


async def test_the_first_helper_takes_the_message_history_as_shown_also_in_a_subclass():
    class Adds(RLRolloutWorker):
        def _prepare_policy_observation(self, current_messages_history):
            hint = Message(role="user", content="It is night.")
            return super()._prepare_policy_observation([*current_messages_history, hint])

    policy = Moves(MOVE)
    worker = Adds(TaskDefinitionModel(resource_type="crafter", messages=[ADVICE]), policy, 1)
    # Before the environment has started, too.
    assert [one.content for one in worker._prepare_policy_observation([])] == ["It is night."]
    await worker.run_episode()
    assert [message.content for message in policy.observations[0]][::2] == [ADVICE["content"], "It is night."]
    prepared = worker._prepare_policy_observation(worker.current_messages_history)
    assert [*prepared][:-1] == worker.current_messages_history


async def test_equal_workers_are_siblings_of_one_start():
    task = TaskDefinitionModel(resource_type="crafter", max_episode_steps=1)
    firsts = []
    for options in ({}, {}, {"seed": 3}):
        policy = Moves(MOVE)
        await RLRolloutWorker(task, policy, **options).run_episode()
        firsts.append(policy.observations[0])
    assert firsts[0] == firsts[1] != firsts[2]


async def test_the_messages_of_a_task_are_the_only_opening_of_a_dialogue():
    opening = [ADVICE, {"role": "user", "content": "How deep is it?"}]
    policy = Moves({"type": "text", "content": "Two metres."})
    task = TaskDefinitionModel(resource_type="dialogue", messages=opening)
    steps, messages, _ = await RLRolloutWorker(task, policy, 4).run_episode()
    # Nobody answers in it, so an answer ends it.
    assert (len(steps), steps[0].stop_reason) == (1, StopReason.ENVIRONMENT_DONE)
    assert [message.content for message in policy.observations[0]] == [
        "Stay near the lake.",
        "How deep is it?",
    ]
    assert [(one.role, one.content) for one in messages][-1] == ("assistant", "Two metres.")
    twice = task.model_copy(update={"base_resource_config": {"prompt": "How deep is it?"}})
    with pytest.raises(InvalidRequest, match=r"messages and base_resource_config\.prompt are both given"):
        RLRolloutWorker(twice, Moves())


async def test_the_openai_policy_is_called_directly_or_by_a_worker_and_tells_a_plain_servers_log_probs():
    content = [{"token": "Two", "logprob": -0.5, "top_logprobs": []}, {"token": ".", "logprob": -0.125}]
    answer = completion({"role": "assistant", "content": "Two."}, choice={"logprobs": {"content": content}})
    question = Message(role="user", content="How deep is it?")
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    async with fake_inference(answer) as server:
        config = OpenAIConfig(inference_url=server.url, model="m", ask_token_ids=False, logprobs=True)
        policy = OpenAIAgentPolicy(config, inference_key="sk-of-the-test")
        action, text, log_probs, value = await policy.get_action([ADVICE, question], [tool])
        task = TaskDefinitionModel(resource_type="dialogue", messages=[question.model_dump()])
        steps, _, _ = await RLRolloutWorker(task, OpenAIAgentPolicy(config), 1).run_episode()
    asked = server.bodies[0]
    assert [message["role"] for message in asked["messages"]] == ["system", "user"]
    assert (asked["tools"], asked["logprobs"]) == ([tool], True)
    assert "return_token_ids" not in asked
    assert server.headers[0]["authorization"] == "Bearer sk-of-the-test"
    assert (action["type"], action["content"], text, value) == ("text", "Two.", "Two.", None)
    kept = {"tokens": ["Two", "."], "logprobs": [-0.5, -0.125]}
    assert log_probs.items() >= kept.items() and steps[0].policy_logprobs == kept
