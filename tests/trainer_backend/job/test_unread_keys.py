"""Keys that the choice of an estimator or a loss refuses, and those that it sets."""

import pytest
import tomli

from trainer_backend.errors import JobError
from trainer_backend.job.load import dump_job, parse_job
from trainer_backend.plugins import ESTIMATORS

MODEL = {"preset": "tiny-0.3m"}


def make_job(algorithm, training=None):
    return parse_job({"model": MODEL, "algorithm": algorithm, "training": training or {}}, where="job.toml")


def test_a_later_choice_leaves_out_what_it_does_not_read_and_says_so():
    gae = {"advantage": "gae", "gae_lambda": 0.9}
    job = {"model": MODEL, "algorithm": gae, "training": {"critic": "own"}}

    def load(*overrides):
        return parse_job(job, where="job.toml", overrides=overrides)

    loaded = load("algorithm.advantage=stepwise", "training.group_size=4")
    assert loaded.config == make_job({"advantage": "stepwise"}, {"group_size": 4}).config
    assert [warning.split()[1] for warning in loaded.warnings] == ["algorithm.gae_lambda", "training.critic"]
    left_out = "It is left out, since --set algorithm.advantage=… comes later"
    assert all(warning.endswith(left_out) for warning in loaded.warnings)
    with pytest.raises(JobError, match=r"--set algorithm.gae_lambda=…: algorithm.gae_lambda is not read"):
        load("algorithm.advantage=stepwise", "algorithm.gae_lambda=0.5")  # both are meant
    with pytest.raises(JobError, match=r"algorithm\.omega is not read"):
        load("algorithm.omega=0.3")  # what comes later is meant, and the choice stays


GSPO = {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "decision_mean"}
CISPO = {"clip_low": 1.0, "clip_high": 4.0, "aggregation": "token_mean"}
SAPO = {"tau_pos": 1.0, "tau_neg": 1.05, "aggregation": "decision_mean"}
DAPO = {
    "clip_low": 0.2, "clip_high": 0.28, "aggregation": "token_mean", "skip_flat_groups": True,
    "refill_rounds": 9, "kl_coef": 0.0, "entropy_coef": 0.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("loss", "training", "level"),
    [
        ("gspo", GSPO, "decision"),
        ("cispo", CISPO, "token"),
        ("sapo", SAPO, "token"),
        ("dapo", DAPO, "token"),
    ],
)
def test_a_loss_of_a_paper_brings_its_values_and_they_survive_being_written_and_read(loss, training, level):
    loaded = make_job({"loss": loss})
    again = parse_job(tomli.loads(dump_job(loaded.config)), where="run")
    for config in (loaded.config, again.config):
        assert config.training.model_dump(include=training.keys()) == training
        assert config.algorithm.ratio_level == level
    named_bias = ["training.refill_rounds"] if loss == "dapo" else []
    assert [warning.partition(" ")[0] for warning in loaded.warnings] == named_bias
    assert again.config == loaded.config


def test_what_the_job_says_goes_over_the_paper():
    loaded = make_job(
        {"loss": "gspo", "ratio_level": "episode"}, {"clip_low": 0.2, "aggregation": "constant"}
    )
    table = loaded.config.training
    assert (table.clip_low, table.clip_high, table.aggregation) == (0.2, 4e-4, "constant")


def test_dr_grpo_brings_the_constant_denominator_of_its_paper():
    assert ESTIMATORS["dr_grpo"].compute is ESTIMATORS["grpo_no_std"].compute
    loaded = make_job({"advantage": "dr_grpo"})
    assert (loaded.config.training.aggregation, loaded.warnings) == ("constant", ())
    assert make_job({"advantage": "grpo_no_std"}).config.training.aggregation == "token_mean"


def test_papers_that_differ_leave_the_key_to_the_job():
    chosen = make_job({"advantage": "dr_grpo", "loss": "gspo"}, {"aggregation": "constant"}).config.training
    assert (chosen.aggregation, chosen.clip_high) == ("constant", 4e-4)


def test_a_loss_without_a_paper_of_its_own_has_the_defaults_of_the_tables():
    for algorithm in ({}, {"loss": "clipped"}, {"loss": "policy_gradient"}):
        config = make_job(algorithm).config
        assert (config.training.clip_low, config.training.clip_high) == (0.2, 0.25)
        assert (config.training.aggregation, config.algorithm.ratio_level) == ("token_mean", "token")
