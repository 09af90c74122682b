"""TaskDefinitionModel: the facts of a rollout request in source 2's words, and which words are refused."""

import pytest
from pydantic import ValidationError

from shared_schemas.rollouts import RolloutLimits, RolloutRequest
from shared_schemas.task_definition import OTHER_PLACES, TaskDefinitionModel
from tests.task_app.counting import rollout

LIMITS = {
    "max_decisions": 4,
    "max_invalid_decisions": 2,
    "invalid_action_penalty": -0.5,
    "timeout_s": 9.5,
    "termination_regex": "done",
    "termination_target": "text",
}
TRUTH = {"answer": [1, None, "x"]}
NO_TRUTHS = (float("nan"), "x" * 100_000, object(), b"x")


def test_a_request_and_its_task_say_the_same():
    env = {"env_name": "counting", "config": {"length": 3}}
    request = RolloutRequest(**rollout("a", env=env, limits=LIMITS, ground_truth=TRUTH))
    task = TaskDefinitionModel.of_request(request)
    assert (task.resource_type, task.base_resource_config) == ("counting", {"length": 3})
    assert (task.max_episode_steps, task.limits) == (4, request.limits)
    assert task.ground_truth == TRUTH


def test_the_defaults_are_those_of_a_request():
    assert TaskDefinitionModel(resource_type="counting").limits == RolloutLimits()


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        *(
            ({word: "x"}, f"{word!r} of a published task definition is not read here; ")
            for word in OTHER_PLACES
        ),
        ({"max_episode_step": 3}, r"unknown key 'max_episode_step'\. Did you mean 'max_episode"),
        ({"max_episode_steps": 0}, "max_episode_steps"),
        ({"termination_regex": "("}, "termination_regex"),
        ({"timeout_s": 0}, "timeout_s"),
        *(({"ground_truth": value}, "ground_truth") for value in NO_TRUTHS),
    ],
)
def test_a_fact_of_another_name_or_bound_is_refused(facts, words):
    with pytest.raises(ValidationError, match=words):
        TaskDefinitionModel(resource_type="counting", **facts)


def test_no_log_shows_a_ground_truth():
    request = RolloutRequest(**rollout("a", ground_truth="forty-two"))
    assert "forty-two" not in repr(request) + repr(TaskDefinitionModel.of_request(request))
