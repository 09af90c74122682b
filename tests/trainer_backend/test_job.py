"""Reading a job: what is accepted, and the words in which everything else is refused."""

from pathlib import Path

import pytest

from trainer_backend.errors import JobError
from trainer_backend.job import dump_job, load_job, parse_job

MODEL = {"model": {"preset": "tiny-0.3m"}}


def refusal(document: dict[str, object]) -> str:
    with pytest.raises(JobError) as caught:
        parse_job({**MODEL, **document}, where="job.toml")
    return str(caught.value)


def test_a_job_needs_no_more_than_a_model():
    job = parse_job(MODEL, where="job.toml").config
    assert job.warmup is None
    assert not job.training.step_rewards_enabled  # absent switches mean off


def test_a_misspelt_key_is_refused_with_its_place_and_what_was_meant():
    message = refusal({"training": {"step_reward_mode": "off"}})
    assert message.startswith("job.toml: training.step_reward_mode is not a key; known: ")
    assert message.endswith("Did you mean 'step_rewards_mode'?")


def test_a_misspelt_table_is_refused_with_what_was_meant():
    assert "Did you mean 'training'?" in refusal({"trainning": {}})


def test_a_misspelt_value_is_refused_with_the_known_ones():
    message = refusal({"training": {"step_rewards_mode": "decision_step"}})
    assert message == (
        "job.toml: training.step_rewards_mode is 'decision_step'; known: decision_stepwise, env_sparse, off. "
        "Did you mean 'decision_stepwise'?"
    )


def test_an_unknown_estimator_is_refused_before_anything_starts():
    message = refusal({"algorithm": {"advantage": "stepwize"}})
    assert "algorithm.advantage is 'stepwize'" in message
    assert "Did you mean 'stepwise'?" in message


def test_a_number_out_of_bounds_is_refused_with_the_bound():
    assert "algorithm.gamma is 1.5" in refusal({"algorithm": {"gamma": 1.5}})


def test_a_number_that_is_not_finite_is_refused():
    assert "training.learning_rate is inf" in refusal({"training": {"learning_rate": float("inf")}})


def test_groups_must_fill_a_batch():
    message = refusal({"rollout": {"episodes_per_batch": 10}, "training": {"group_size": 4}})
    assert "must be a multiple of training.group_size (4)" in message


def test_truncated_sampling_must_be_asked_for():
    assert "allow_truncated_sampling" in refusal({"rollout": {"top_p": 0.9}})
    accepted = parse_job(
        {**MODEL, "rollout": {"top_p": 0.9, "allow_truncated_sampling": True}}, where="job.toml"
    )
    assert accepted.config.rollout.top_p == 0.9


@pytest.mark.parametrize("home", ["training", "rollout", "training.rewards"])
def test_the_switches_are_read_from_each_of_their_published_homes(home: str):
    switches = {"step_rewards_enabled": True, "step_rewards_mode": "env_sparse"}
    document = {"training": {"rewards": switches}} if home == "training.rewards" else {home: switches}
    training = parse_job({**MODEL, **document}, where="job.toml").config.training
    assert (training.step_rewards_enabled, training.step_rewards_mode) == (True, "env_sparse")


def test_two_homes_may_agree_but_not_differ():
    both = {"training": {"step_rewards_beta": 0.1}, "rollout": {"step_rewards_beta": 0.1}}
    assert parse_job({**MODEL, **both}, where="job.toml").config.training.step_rewards_beta == 0.1
    message = refusal({"training": {"step_rewards_beta": 0.1}, "rollout": {"step_rewards_beta": 0.2}})
    assert "training.step_rewards_beta = 0.1, rollout.step_rewards_beta = 0.2" in message


def test_tables_of_other_backends_are_accepted_with_a_warning_that_names_them():
    loaded = parse_job({**MODEL, "compute": {"gpu_type": "H100"}}, where="job.toml")
    assert loaded.warnings == ("[compute] is for other backends and is not read",)


def test_beta_that_looks_into_the_future_is_told():
    warnings = parse_job({**MODEL, "training": {"step_rewards_beta": 0.1}}, where="job.toml").warnings
    assert any('step_rewards_horizon = "max_decisions"' in line for line in warnings)


def test_overrides_are_toml_values_and_bare_words(tmp_path: Path):
    path = tmp_path / "job.toml"
    path.write_text('[model]\npreset = "tiny-0.3m"\n')
    job = load_job(
        path, ["training.group_size=4", "job.name=other", "rollout.env_config.text=compact"]
    ).config
    assert (job.training.group_size, job.job.name, job.rollout.env_config) == (
        4,
        "other",
        {"text": "compact"},
    )


@pytest.mark.parametrize("override", ["training", "training.group_size", "group_size=4", "model.preset.x=1"])
def test_an_override_that_names_no_key_is_refused(tmp_path: Path, override: str):
    path = tmp_path / "job.toml"
    path.write_text('[model]\npreset = "tiny-0.3m"\n')
    with pytest.raises(JobError, match="--set"):
        load_job(path, [override])


@pytest.mark.parametrize(
    ("text", "told"),
    [(None, "no such file"), ("[model\n", "not valid TOML"), (b"\xff\xfe", "cannot be read")],
)
def test_a_file_that_is_no_toml_is_refused_with_its_path(tmp_path: Path, text: str | bytes | None, told: str):
    path = tmp_path / "job.toml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(JobError, match=told) as caught:
        load_job(path)
    assert str(caught.value).startswith(str(path))


def test_a_resolved_job_reads_back_as_itself_and_holds_no_key(tmp_path: Path):
    job = parse_job({**MODEL, "services": {"task_url": "http://h:1", "task_api_key": "hush-hush"}}, where="x")
    path = tmp_path / "job.toml"
    path.write_text(dump_job(job.config))
    assert "hush" not in path.read_text()
    assert load_job(path).config.model_dump(exclude={"services"}) == job.config.model_dump(
        exclude={"services"}
    )
    assert load_job(path).config.services.task_url == ("http://h:1",)
