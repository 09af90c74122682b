"""Rollouts over HTTP that name a reward function: judged, failed by it, refused, cancelled."""

from pathlib import Path

from task_app.operator_plugins import with_plugins
from tests.task_app.counting import boards, rollout, running_app
from tests.task_app.rollout_client import accept, wait_for_all

FILE = Path(__file__).with_name("judges.py")


def judges():
    return with_plugins(boards(), [FILE])


async def test_each_rollout_has_what_its_function_says_and_fails_alone():
    # two decisions, each a rise of "a": the environment's own outcome is 1 different name
    async with running_app(judges(), reward_deadline_s=2.0) as client:
        await accept(
            client,
            rollout("judged", reward_function="fair"),
            rollout("plain"),
            rollout("true", reward_function="truth", ground_truth={"answer": 42}),
            rollout("misfit", reward_function="misfit"),
            rollout("hangs", reward_function="hangs"),
            rollout("raises", reward_function="truth"),
        )
        found = await wait_for_all(client, 6)
    assert_judged(found["judged"].trajectory, found["plain"].trajectory)
    assert found["true"].trajectory.outcome_reward == 42.0
    misfit = found["misfit"].trajectory
    assert [step.base_reward for step in misfit.steps] == [1.0, None]
    assert len(misfit.warnings) == 3
    failures = {name: one.failure for name, one in found.items() if one.failure}
    assert {name: (told.code, told.decisions_done) for name, told in failures.items()} == {
        "hangs": ("reward_function_deadline", 2),
        "raises": ("reward_function_failed", 2),
    }
    assert found["hangs"].trajectory is None, "never a reward of 0"


def assert_judged(judged, plain):
    assert (judged.outcome_reward, judged.outcome_definition) == (11.0, "score of the reward function 'fair'")
    assert [step.base_reward for step in judged.steps] == [0.0, 0.25]
    assert [[(part.source, part.value) for part in step.reward_parts] for step in judged.steps] == [
        [("user", 0.0)],
        [("user", 0.25)],
    ]
    assert judged.warnings == ()
    assert judged.user_reward.environment_outcome_reward == plain.outcome_reward == 1.0
    assert judged.user_reward.environment_outcome_definition == plain.outcome_definition
    assert plain.user_reward is None


async def test_info_names_the_functions_and_an_unknown_one_is_refused_before_anything_is_played():
    async with running_app(judges()) as client:
        found = (await client.get("/info")).json()["capabilities"]["reward_functions"]
        answer = await accept(client, rollout("r", reward_function="fare"))
    assert (found["fair"], found["together"]) == ("pointwise", "batch")
    assert answer.status_code == 422
    problem = answer.json()
    assert (problem["code"], problem["where"]) == ("unknown_name", "rollouts.0.reward_function")
    assert "Did you mean 'fair'?" in problem["detail"]


async def test_a_rollout_is_cancelled_while_it_is_judged():
    async with running_app(judges()) as client:
        await accept(client, rollout("r", reward_function="hangs"))
        answer = await client.delete("/rollouts/r")
    assert answer.json()["status"] == "cancelled"
