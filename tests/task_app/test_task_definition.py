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


def test_a_request_and_its_task_say_the_same():
    env = {"env_name": "counting", "config": {"length": 3}}
    request = RolloutRequest(**rollout("a", env=env, limits=LIMITS, ground_truth=TRUTH))
    task = TaskDefinitionModel.of_request(request)
    assert (task.resource_type, task.base_resource_config) == ("counting", {"length": 3})
    assert (task.max_episode_steps, task.limits) == (4, request.limits)
    assert task.ground_truth == TRUTH


def test_the_defaults_are_those_of_a_request():
    assert TaskDefinitionModel(resource_type="counting").limits == RolloutLimits()


@pytest.mark.parametrize("word", OTHER_PLACES)
def test_a_published_word_without_a_meaning_here_is_refused_with_the_place_of_its_fact(word):
    with pytest.raises(ValidationError, match=f"{word!r} of a published task definition is not read here; "):
        TaskDefinitionModel(resource_type="counting", **{word: "x"})


def test_an_unknown_word_is_refused_with_the_likely_one():
    with pytest.raises(ValidationError, match=r"unknown key 'max_episode_step'\. Did you mean 'max_episode"):
        TaskDefinitionModel(resource_type="counting", max_episode_step=3)


def test_the_bounds_are_those_of_a_request():
    for wrong in ({"max_episode_steps": 0}, {"termination_regex": "("}, {"timeout_s": 0}):
        with pytest.raises(ValidationError):
            TaskDefinitionModel(resource_type="counting", **wrong)


@pytest.mark.parametrize("value", [float("nan"), "x" * 100_000, object(), b"x"])
def test_a_ground_truth_is_json_and_bounded(value):
    with pytest.raises(ValidationError, match="ground_truth"):
        TaskDefinitionModel(resource_type="counting", ground_truth=value)


def test_no_log_shows_a_ground_truth():
    request = RolloutRequest(**rollout("a", ground_truth="forty-two"))
    assert "forty-two" not in repr(request) + repr(TaskDefinitionModel.of_request(request))
