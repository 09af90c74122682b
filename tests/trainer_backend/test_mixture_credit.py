"""Credit for episodes of several policies: who is compared with whom, and what is told of the actor."""

import pytest

from shared_schemas.trajectory import PolicyLogprobs, Sampling
from tests.conftest import tiny_job
from tests.trainer_backend.pages.hand_made import COW, TABLE, WOOD, rollout
from trainer_backend import job_parts
from trainer_backend.credit.credit import Measured
from trainer_backend.errors import SegmentError

MIXTURE = {
    "rollout_only__model_path": "fixed",
    "rollout_allocation_schedule__alpha": 0.5,
    "algorithm__advantage": "grpo_no_std",
    "training__step_rewards_enabled": False,
    "training__step_rewards_mode": "off",
}
EARNED = {0: [()], 1: [WOOD], 2: [WOOD, COW], 3: [WOOD, COW, TABLE]}


def played(model, outcome, *, sibling, group="g", temperature=1.0):
    """An episode that is worth that many achievements; a sampled token a decision."""
    found = rollout(1, EARNED[outcome], group=group, sibling=sibling)
    call = PolicyLogprobs(
        prompt_token_ids=(1, 2), token_ids=(3,), logprobs=(-1.0,), finish_reason="stop", versions=((0, 0),)
    )
    update = {"policy_logprobs": call, "sampling": Sampling(temperature=temperature)}
    steps = tuple(step.model_copy(update=update) for step in found.trajectory.steps)
    told = found.trajectory.model_copy(update={"steps": steps, "model": model})
    return found.model_copy(update={"trajectory": told})


def group_of_four():
    """The actor's are worth 0 and 1, the fixed policy's 3 and 2."""
    models = ["tiny/actor", "tiny/actor", "tiny/fixed", "tiny/fixed"]
    return [
        played(model, outcome, sibling=i)
        for i, (model, outcome) in enumerate(zip(models, [0, 1, 3, 2], strict=True))
    ]


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        ("shared", [-1.5, -0.5, 1.5, 0.5]),  # less the mean of all four, 1.5
        ("per_policy", [-0.5, 0.5, 0.5, -0.5]),  # less 0.5, and less 2.5
    ],
)
def test_siblings_are_compared_with_all_of_their_group_or_with_those_of_their_policy(baseline, expected):
    job = tiny_job(**MIXTURE, rollout_only__baseline=baseline)
    credited = job_parts.credit(job).credit(group_of_four())
    assert [episode.advantages[0] for episode in credited.episodes] == expected
    assert [episode.policy for episode in credited.episodes] == ["actor", "actor", "fixed", "fixed"]
    assert credited.flat == []


def test_a_group_is_flat_by_all_its_episodes_whatever_is_compared():
    job = tiny_job(**MIXTURE, rollout_only__baseline="per_policy", training__skip_flat_groups=True)
    lone = [played("tiny/actor", 0, sibling=0, group="g1"), played("tiny/fixed", 3, sibling=1, group="g1")]
    half = [*lone, played("tiny/fixed", 1, sibling=2, group="g1")]
    assert job_parts.credit(job).credit(lone).flat == ["g1"]
    assert job_parts.credit(job).credit(half).flat == [], "two of the fixed policy differ"
    credited = job_parts.credit(job).credit([*group_of_four(), *lone])
    assert credited.flat == ["g1"] and len(credited.episodes) == 4


def test_decisions_rewards_and_values_are_told_of_the_actors_episodes_alone():
    job = tiny_job(**MIXTURE)
    rollouts = group_of_four()
    metrics = job_parts.credit(job).credit(rollouts).metrics
    assert metrics["decision/count"] == 2.0  # the other two have 3 and 2 decisions
    assert metrics["decision/unique_sum"] == 1.0
    assert metrics["reward/mean"] == 0.5
    assert metrics["advantages/groups"] == 1.0, "what the estimator met is told of all"
    fixed_alone = job_parts.credit(job).credit(rollouts[2:]).metrics
    assert not [name for name in fixed_alone if name.startswith(("decision/", "reward/"))]

    critic = tiny_job(**{**MIXTURE, "algorithm__advantage": "gae"})
    values = {item.rollout_id: [float(i)] * len(item.trajectory.steps) for i, item in enumerate(rollouts)}
    assert job_parts.credit(critic).credit(rollouts, Measured(values)).metrics["value/mean"] == 0.5
    assert "value/mean" not in job_parts.credit(critic).credit(rollouts[2:], Measured(values)).metrics


def test_what_another_policy_sampled_is_scored_at_the_temperature_of_the_actor():
    job = tiny_job(**MIXTURE, rollout__temperature=0.5)
    own = played("tiny/actor", 1, sibling=0, temperature=0.5)
    other = played("tiny/fixed", 1, sibling=1, temperature=0.8)
    for item in (own, other):
        (segment,) = job_parts.credit(job).policies.segments_by(item)
        assert set(segment.temperatures) == {0.5}
        assert set(segment.logprobs) == {-1.0}, "as it was sampled"


def test_a_remote_policy_whose_server_calls_its_model_as_the_job_calls_its_actor_is_not_the_actor():
    remote = {"rollout_only__inference_url": "http://h/v1", "rollout_only__model": "tiny/actor"}
    left = {key: value for key, value in MIXTURE.items() if key != "rollout_only__model_path"}
    named = {"rollout_only__name": "teacher", "model": {"path": "m", "device": "cpu"}}
    job = tiny_job(**{**left, **remote, **named})
    assert job_parts.credit(job).policies.policy_by(played("tiny/teacher", 1, sibling=0)) == "teacher", (
        "as it records itself"
    )
    assert job_parts.credit(job).policies.policy_by(played("tiny/actor", 1, sibling=0)) == "actor"


def test_samples_of_a_policy_that_the_job_does_not_have_are_refused_and_not_taken_for_the_actors():
    message = (
        r"rollout r/g/1/0: sampled by 'fixed' \(model 'tiny/fixed'\); the policies of this job are actor"
    )
    with pytest.raises(SegmentError, match=message):
        job_parts.credit(tiny_job()).credit(
            [played("tiny/fixed", 1, sibling=0), played("tiny/actor", 1, sibling=1)]
        )


@pytest.mark.parametrize("model", ["", "gpt", "Qwen/Qwen3-0.6B", "tiny/actor"])
def test_what_names_no_policy_of_the_job_is_the_actors(model):
    assert job_parts.credit(tiny_job()).policies.policy_by(played(model, 1, sibling=0)) == "actor"
