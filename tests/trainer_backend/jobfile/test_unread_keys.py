"""A key of [algorithm] that nothing reads is refused where it stands."""

import pytest
import tomli

from trainer_backend.errors import JobError
from trainer_backend.job import dump_job, parse_job

MODEL = {"preset": "tiny-0.3m"}
STEPWISE = {"step_rewards_enabled": True, "step_rewards_mode": "decision_stepwise"}


def job_of(algorithm, training=None):
    return parse_job({"model": MODEL, "algorithm": algorithm, "training": training or {}}, where="job.toml")


@pytest.mark.parametrize(
    ("algorithm", "training", "message"),
    [
        (
            {"advantage": "stepwise", "omega": 0.3},
            {},
            "job.toml: algorithm.omega is not read by algorithm.advantage = 'stepwise'; known to: gigpo",
        ),
        (
            {"advantage": "gigpo", "step_advantage_w": 2.0},
            {},
            "algorithm.step_advantage_w is not read by algorithm.advantage = .gigpo.; known to: gigpo_add",
        ),
        (
            {"advantage": "stepwise", "gae_lambda": 0.5},
            {},
            "algorithm.gae_lambda is not read by algorithm.advantage = 'stepwise'; known to: gae, gae_token",
        ),
        (
            {"advantage": "gae", "gae_token_lambda": 0.5},
            {},
            "algorithm.gae_token_lambda is not read by algorithm.advantage = 'gae'; known to: gae_token",
        ),
        (
            {"advantage": "grpo"},
            {"value_trunk_gradient": True},
            "training.value_trunk_gradient needs a critic, which algorithm.advantage = 'grpo' has not; known "
            "to: gae, gae_token",
        ),
        ({"loss": "cispo"}, {"clip_dual": 3.0}, "training.clip_dual is not read by algorithm.loss = 'cispo'"),
        (
            {"advantage": "gigpo", "default_step_reward": -0.01},
            STEPWISE,
            "for decisions without rewards of their own; training.step_rewards_mode is 'decision_stepwise'",
        ),
        ({}, {"kl_kind": "k2"}, "training.kl_kind is not read while training.kl_coef is 0"),
        (
            {},
            {"kl_coef": 0.1, "kl_reward_kind": "k3"},
            "training.kl_reward_kind is not read while training.kl_reward_coef is 0",
        ),
        (
            {},
            {"constant_tokens": 64},
            "training.constant_tokens is not read by training.aggregation = 'token_mean'; known to: constant",
        ),
    ],
)
def test_a_key_without_effect_is_refused(algorithm, training, message):
    with pytest.raises(JobError, match=message):
        job_of(algorithm, training)


def test_what_is_read_is_taken_and_a_resolved_job_reads_back():
    loaded = job_of({"advantage": "gigpo", "omega": 0.3, "loss": "gspo"}, {"clip_dual": 3.0})
    again = parse_job(tomli.loads(dump_job(loaded.config)), where="run")
    assert again.config == loaded.config


def test_a_critic_takes_its_keys_and_needs_no_siblings():
    training = {"value_coef": 0.1, "value_clip": 0.2, "value_learning_rate": 1.0, "group_size": 1}
    loaded = job_of({"advantage": "gae_token", "gae_lambda": 0.5, "gae_token_lambda": 0.9}, training)
    assert loaded.warnings == ()
    alone = job_of({"advantage": "rloo"}, {"group_size": 1})
    assert "group_size is 1" in alone.warnings[0]


def test_gamma_is_the_tasks_and_may_stand_beside_any_estimator():
    assert job_of({"advantage": "grpo", "gamma": 0.9}).config.algorithm.gamma == 0.9
