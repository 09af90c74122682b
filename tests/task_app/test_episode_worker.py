"""RLRolloutWorker over the counting environment: what every step carries, and how an episode ends."""

from itertools import pairwise

import pytest

from shared_schemas.rewards import StepRewards
from shared_schemas.rollouts import MultiTurn
from shared_schemas.task_definition import TaskDefinitionModel
from shared_schemas.trajectory import RewardPart, StopReason, Trajectory, prompts
from task_app.environments.documents.environment import DocumentsConfig, DocumentsEnvironment
from task_app.episode.conversation import Conversation
from task_app.episode.decisions import step_metadata
from task_app.episode.worker import RLRolloutWorker
from task_app.errors import (
    Conflict,
    ContextLengthExceeded,
    CriticalError,
    DeadlineExceeded,
    PolicyUnavailable,
)
from tests.task_app.counting import (
    Clock,
    CountingConfig,
    CountingEnvironment,
    PlannedPolicy,
    WaitingPolicy,
    add,
)

ON = StepRewards(enabled=True, mode="decision_stepwise")
TEXT = {"type": "text", "content": "I think."}


def task(**facts):
    return TaskDefinitionModel(resource_type="counting", **{"max_episode_steps": 3, **facts})


def worker(*moves, length=1_000, step_rewards=ON, policy=None, clock=None, final_view=False, **facts):
    return RLRolloutWorker(
        task_definition=task(**facts),
        environment=CountingEnvironment(CountingConfig(length=length)),
        agent_policy=policy or PlannedPolicy(*moves),
        seed=7,
        step_rewards=step_rewards,
        final_view=final_view,
        **({"clock": clock} if clock else {}),
    )


async def played(*moves, **options):
    one = worker(*moves, **options)
    await one.run_episode()
    return one.trajectory()


async def test_every_step_and_the_trajectory_carry_what_the_design_says():
    trajectory = await played(add("a"), add("a", "b"), add("x"))
    first, second, third = trajectory.steps
    assert [step.turn for step in trajectory.steps] == [1, 2, 3]
    assert [step.env_rewards for step in trajectory.steps] == [(1.0,), (0.0, 1.0), (0.0,)]
    assert second.observation_data.achievements_counts == {"a": 1, "b": 0}
    assert second.observation_data.achievements_status == {"a": True, "b": False}
    assert second.observation_data.reward_last_step == 1.0
    assert second.next_observation is not None
    assert second.next_observation.achievements_counts == {"a": 2, "b": 1}
    assert second.next_observation.messages == ()
    assert second.metadata.decision_rewards is not None
    assert second.metadata.decision_rewards.unique == ("b",)
    assert second.metadata.decision_rewards.all == ("a", "b")
    assert second.step_info.executed_actions == ("a", "b")
    assert third.system_step_index == 2
    assert first.observation_data.messages[-1].content == "step 0 past=0"
    assert third.observation_data.messages[-1].content == "step 3 past=2"
    assert (trajectory.env_name, trajectory.policy_name, trajectory.seed) == ("counting", "planned", 7)
    assert (trajectory.outcome_reward, trajectory.env_steps) == (2.0, 4)
    assert trajectory.outcome_definition == "number of different names counted"
    assert trajectory.achievements_counts == {"a": 2, "b": 1}
    assert trajectory.stop_reason is StopReason.MAX_DECISIONS
    assert (trajectory.terminated, trajectory.truncated) == (False, True)


async def test_a_worker_runs_one_episode_and_has_no_trajectory_before_its_end():
    one = worker(add("1"), length=1)
    with pytest.raises(Conflict, match="has not finished"):
        one.trajectory()
    await one.run_episode()
    with pytest.raises(Conflict, match="runs one"):
        await one.run_episode()
    assert one.trajectory().steps == one.steps
    failing = worker(policy=PlannedPolicy(PolicyUnavailable("gone")))
    for error in (PolicyUnavailable, Conflict):  # its environment is closed
        with pytest.raises(error):
            await failing.run_episode()


async def test_at_most_three_past_decisions_reach_the_prompt():
    trajectory = await played(add("a"), max_episode_steps=6)
    prompts = [step.observation_data.messages[-1].content for step in trajectory.steps]
    assert [prompt[-1] for prompt in prompts if prompt] == ["0", "1", "2", "3", "3", "3"]


async def test_the_ground_truth_comes_back_and_the_policy_never_sees_it():
    policy = PlannedPolicy(add("a"))
    one = worker(policy=policy, ground_truth={"answer": "forty-two"})
    _, _, ground_truth = await one.run_episode()
    assert ground_truth == {"answer": "forty-two"}
    assert "forty-two" not in repr(policy.seen) + one.trajectory().model_dump_json()


async def test_the_conversation_after_a_decision_begins_the_one_after_the_next():
    steps, messages, ground_truth = await worker(add("a"), TEXT, add("b"), max_episode_steps=3).run_episode()
    roles = "system user assistant tool user assistant user assistant tool"
    assert ([message.role for message in messages], ground_truth) == (roles.split(), None)
    histories = [step.resulting_messages_history for step in steps]
    assert [step.system_step_index for step in steps] == [0, 1, 2]
    assert all(later[: len(one)] == one for one, later in pairwise(histories))
    assert histories[-1] == messages
    # The n-th answer, from 0, is that of the step with this index.
    answers = [message for message in messages if message.role == "assistant"]
    assert [answers[step.assistant_turn_index].tool_calls or () for step in steps] == [
        step.tool_calls for step in steps
    ]


async def test_a_step_of_a_conversation_knows_its_prompt_and_what_followed_while_the_wire_stays_linear():
    config = DocumentsConfig(
        document_content="Ada did. " * 40, question="Who?", ground_truth="Ada", chunk_size=100, indexed=True
    )
    environment = DocumentsEnvironment(config)
    read = {"type": "tool_call", "name": "readChunk", "arguments": {"enable_scan": True}}
    one = RLRolloutWorker(
        task_definition=task(),
        environment=environment,
        agent_policy=PlannedPolicy(read),
        prompts=Conversation(environment, MultiTurn(statelm_enabled=True)),
        seed=7,
    )
    steps, messages, _ = await one.run_episode()
    shown = [step.observation_data for step in steps]
    assert [len(seen.messages) for seen in shown] == [2, 2, 2] and list(map(len, shown)) == [2, 4, 6]
    assert [tuple(seen) for seen in shown] == list(prompts(steps))
    histories = [step.resulting_messages_history for step in steps]
    assert [len(history) for history in histories] == [4, 6, 8]
    assert histories[-1] == messages and histories[0] == messages[:4]
    assert str(shown[1]) != str(shown[1].model_copy(update={"messages_reused": 0})), "all that it saw"
    sent = Trajectory.model_validate_json(one.trajectory().model_dump_json())
    assert sent.steps == tuple(steps), "what a process remembers is no part of a step"
    with pytest.raises(ValueError, match="2 messages"):
        list(sent.steps[1].observation_data)
    with pytest.raises(ValueError, match=r"step 2 .*resulting_messages_history"):
        sent.steps[1].resulting_messages_history  # noqa: B018


async def test_neither_the_policy_nor_later_steps_change_what_was_recorded():
    policy = PlannedPolicy(add("a"), add("a", "b"))
    one = worker(policy=policy, max_episode_steps=5)
    await one.run_episode()
    first = policy.seen[0]
    assert (first.data, [message.content for message in first]) == ({"step": 0}, ["count", "step 0 past=0"])
    with pytest.raises(ValueError, match="frozen"):
        first[0].content = "other"
    assert one.trajectory().steps[0].observation_data.messages == tuple(policy.seen[0])


# Moves, options; stop reason, decisions, env steps, and whether the task itself ended.
ENDS = [
    ([add("a"), add("end")], {}, "environment_done", 2, 2, True),
    ([add("a", "a")], {"length": 3}, "environment_done", 2, 3, False),
    ([add("a"), {"type": "terminate"}], {}, "terminate_action", 2, 1, True),
    ([TEXT], {"max_episode_steps": 50, "max_invalid_decisions": 4}, "invalid_action", 4, 4, False),
    # A valid decision between does not reset the count of invalid ones.
    ([TEXT, add("a"), TEXT], {"max_invalid_decisions": 2}, "invalid_action", 3, 3, False),
    ([add("a"), ContextLengthExceeded("9 of 8 tokens")], {}, "context_length", 1, 1, False),
]


@pytest.mark.parametrize(("moves", "options", "reason", "decisions", "env_steps", "is_over"), ENDS)
async def test_an_episode_ends_for_its_reason_and_only_its_last_step_is_done(
    moves, options, reason, decisions, env_steps, is_over
):
    trajectory = await played(*moves, **options)
    assert (trajectory.stop_reason, len(trajectory.steps)) == (reason, decisions)
    assert trajectory.env_steps == env_steps
    assert (trajectory.terminated, trajectory.truncated) == (is_over, not is_over)
    assert [step.is_done for step in trajectory.steps] == [False] * (decisions - 1) + [True]
    last = trajectory.steps[-1]
    assert (last.terminated, last.truncated, last.stop_reason) == (is_over, not is_over, reason)
    assert last.reward_parts == (), "a fresh prompt that does not fit costs no penalty"
    for step, move in zip(trajectory.steps, moves, strict=False):
        assert bool(step.step_info.invalid_reason) == (move is TEXT)


async def test_a_refused_decision_pays_the_penalty_and_a_terminate_decision_is_not_paid_again():
    moves = (TEXT, add("a"), {"type": "terminate"})
    _, valid, last = steps = (await played(*moves, invalid_action_penalty=-0.25)).steps
    penalty = (RewardPart(source="penalty", value=-0.25),)
    assert [step.reward_parts for step in steps] == [penalty, (), ()]
    assert (valid.next_observation.reward_last_step, last.env_rewards) == (1.0, ())
    assert last.next_observation.reward_last_step == 0.0
    assert last.next_observation.achievements_counts == {"a": 1, "b": 0}


async def test_slowness_after_a_completed_decision_is_data():
    clock = Clock()
    policy = PlannedPolicy(add("a"), on_ask=clock.tick)
    trajectory = await played(policy=policy, clock=clock, timeout_s=2.0, max_episode_steps=9)
    assert trajectory.stop_reason is StopReason.DEADLINE
    assert (len(trajectory.steps), trajectory.wall_s) == (2, 2.0)
    assert trajectory.steps[0].step_info.policy_s == 1.0


class FailingPolicy(WaitingPolicy):
    """Decides once, and then retries for ever."""

    pending_failure = None

    async def get_action(self, observation, available_tools_specs=None):
        if not self.asked.is_set():
            self.asked.set()
            return add("a"), None, None, None
        self.pending_failure = "status 503"
        return await super().get_action(observation)


# Moves or a policy; the error, its words, and the decisions before it.
FAILURES = [
    ([ContextLengthExceeded("9 of 8 tokens")], ContextLengthExceeded, "9 of 8 tokens", 0),
    (WaitingPolicy, DeadlineExceeded, "", 0),
    (FailingPolicy, PolicyUnavailable, "limits.timeout_s passed during an outage: status 503", 1),
    ([add("a"), add("a"), PolicyUnavailable("down")], PolicyUnavailable, "down", 2),
    ([add("a"), add("boom")], CriticalError, "environment.step raised KeyError: 'boom'", 1),
    ([ZeroDivisionError("oh")], CriticalError, "policy planned raised ZeroDivisionError", 0),
    ([{"type": "dance"}], CriticalError, "'dance'", 0),
]


@pytest.mark.parametrize(("given", "error", "words", "decisions"), FAILURES)
async def test_what_hinders_an_episode_fails_it_and_is_no_end_of_its_own(given, error, words, decisions):
    one = worker(*given) if isinstance(given, list) else worker(policy=given(), timeout_s=0.05)
    with pytest.raises(error) as caught:
        await one.run_episode()
    assert words in str(caught.value)
    assert caught.value.decisions_done == decisions


class CountingTokens(PlannedPolicy):
    """A planned policy whose server tells tokens: as many prompt ids as it was asked before."""

    async def get_action(self, observation, available_tools_specs=None):
        action, raw, _, value = await super().get_action(observation, available_tools_specs)
        n = len(self.seen)
        tokens = {
            "prompt_ids_reused": 0, "prompt_token_ids": (7,) * n, "token_ids": (n,), "logprobs": (-1.0,),
            "finish_reason": "stop", "versions": ((0, 0),),
        }  # fmt: skip
        return action, raw, tokens, value


async def test_where_a_limit_cuts_the_episode_short_the_prompt_of_the_decision_not_made_is_kept():
    policy = CountingTokens(add("a"))
    trajectory = await played(policy=policy, final_view=True)
    assert (trajectory.stop_reason, len(trajectory.steps)) == (StopReason.MAX_DECISIONS, 3)
    assert trajectory.final_view.prompt_token_ids == (7,) * 4
    assert len(policy.seen) == 4 and policy.seen[-1].max_tokens == 1
    assert trajectory.achievements_counts["a"] == 3, "and what was answered is not carried out"
    inside = await played(policy=CountingTokens(add("a")), final_view=True, length=2)
    assert (inside.stop_reason, inside.final_view.prompt_token_ids) == (StopReason.ENVIRONMENT_DONE, (7,) * 3)
    assert (await played(policy=CountingTokens(add("a")))).final_view is None, "it was not requested"


@pytest.mark.parametrize(
    ("moves", "options", "reason"),
    [
        ([add("a"), add("end")], {}, StopReason.ENVIRONMENT_DONE),
        ([{"type": "terminate"}], {}, StopReason.TERMINATE_ACTION),
        ([TEXT], {"max_invalid_decisions": 2}, StopReason.INVALID_ACTION),
        ([add("a"), ContextLengthExceeded("full")], {}, StopReason.CONTEXT_LENGTH),
    ],
)
async def test_an_end_of_the_task_or_of_the_policys_own_doing_has_no_state_to_go_on_from(
    moves, options, reason
):
    policy = CountingTokens(*moves)
    trajectory = await played(policy=policy, final_view=True, **options)
    assert (trajectory.stop_reason, trajectory.final_view) == (reason, None)
    assert [seen.max_tokens for seen in policy.seen] == [None] * len(policy.seen)


async def test_a_state_whose_prompt_does_not_fit_has_no_view_and_the_episode_is_what_it_was():
    policy = CountingTokens(add("a"), add("a"), add("a"), ContextLengthExceeded("full"))
    trajectory = await played(policy=policy, final_view=True)
    assert (trajectory.stop_reason, trajectory.final_view) == (StopReason.MAX_DECISIONS, None)
    assert len(trajectory.steps) == 3 and len(policy.seen) == 4


@pytest.mark.parametrize(
    ("before", "after", "all_names", "unique"),
    [
        # wood was collected before and is collected again; a table is placed for the first time
        ({"wood": 1, "table": 0, "cow": 0}, {"wood": 3, "table": 1, "cow": 0}, ("table", "wood"), ("table",)),
        ({"wood": 1}, {"wood": 1}, (), ()),
    ],
)
def test_the_two_deltas_count_what_rose_and_what_was_new(before, after, all_names, unique):
    record = step_metadata(before, after, turn=5, step_rewards=ON).decision_rewards
    assert record is not None
    assert (record.turn, record.all, record.unique) == (5, all_names, unique)
    assert (record.ach_delta, record.unique_delta) == (len(all_names), len(unique))


@pytest.mark.parametrize(
    ("switches", "counts"),
    [
        (StepRewards(), {"a": 1}),
        (StepRewards(enabled=True, mode="off"), {"a": 1}),
        (StepRewards(enabled=True, mode="env_sparse"), {"a": 1}),
        (StepRewards(enabled=False, mode="decision_stepwise"), {"a": 1}),
        (ON, {}),
    ],
)
def test_no_record_unless_enabled_and_decision_stepwise_or_without_achievements(switches, counts):
    metadata = step_metadata(dict.fromkeys(counts, 0), counts, turn=1, step_rewards=switches)
    assert metadata.decision_rewards is None
