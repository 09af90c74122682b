"""`--set`: what it changes, and who is blamed when the job is wrong afterwards."""

from pathlib import Path

import pytest

from trainer_backend.errors import JobError
from trainer_backend.job.load import load_job
from trainer_backend.rundir.new_job import load_new_job

JOB = """
[model]
preset = "tiny-0.3m"
[rollout]
policy_config = { max_attempts = 2 }
[training]
step_rewards_beta = 0.1
group_size = 8
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def refusal(path: Path, *overrides: str) -> str:
    """The message, with the path of the file as FILE."""
    with pytest.raises(JobError) as caught:
        load_new_job(path, overrides)
    return str(caught.value).replace(str(path), "FILE")


def test_overrides_are_toml_values_and_bare_words(path: Path):
    overrides = ["training.group_size=4", "job.name=other", "rollout.env_config.text=compact"]
    job = load_job(path, overrides).config
    assert (job.training.group_size, job.job.name) == (4, "other")
    assert job.rollout.env_config == {"text": "compact"}


@pytest.mark.parametrize(
    "override",
    ["training", "training.group_size", "group_size=4", "model.preset.x=1", "job.trainer_plugins_sha256=[]"],
)
def test_an_override_that_names_no_key_is_refused(path: Path, override: str):
    with pytest.raises(JobError, match="--set"):
        load_job(path, [override])


@pytest.mark.parametrize(
    ("override", "place"),
    [
        ("training.group_sise=4", "--set training.group_sise=…: training.group_sise is not a key"),
        ("trainning.group_size=4", "--set trainning.group_size=…: trainning is not a key"),
        ("num_generations=8", "--set num_generations=…: num_generations is not a key. Did you mean train"),
        ("actor_rollout_ref.rollout.n=5", "--set actor_rollout_ref.rollout.n=…: actor_rollout_ref.rollout"),
        ("training.group_size=0", "--set training.group_size=…: training.group_size is 0: "),
        ("evaluation.seeds=[1, -1]", "--set evaluation.seeds=…: evaluation.seeds.1 is -1: "),
        ("warmup.episodes=0", "--set warmup.episodes=…: warmup.episodes is 0: "),
        ("training.rewards=3", "--set training.rewards=…: training.rewards is 3, but it is a table"),
        ("training.rewards.step_reward_mode=off", "--set training.rewards.step_reward_mode=…: training"),
        ("rollout.step_rewards_mode=of", "--set rollout.step_rewards_mode=…: training.step_rewards_mode is"),
        ("algorithm.advantage=stepwize", "--set algorithm.advantage=…: algorithm.advantage is 'stepwize'"),
        ("model.preset=tiny", "--set model.preset=…: model.preset is 'tiny'"),
    ],
)
def test_a_wrong_key_or_value_that_came_with_set_is_blamed_on_it(path: Path, override: str, place: str):
    assert refusal(path, override).startswith(place)


def test_a_model_folder_that_came_with_set_is_blamed_on_it(path: Path, tmp_path: Path):
    path.write_text(f'[model]\npath = "{tmp_path}"\n')
    assert refusal(path).startswith("FILE: model.path is ")
    assert refusal(path, "model.path=nowhere").startswith("--set model.path=…: model.path is 'nowhere'")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("model.revision=main", "FILE with --set model.revision=…: model.revision = 'main' without"),
        ("rollout.policy_config.seed=1", "FILE with --set rollout.policy_config.seed=…: rollout.policy"),
        ("training.group_size=7", "FILE with --set training.group_size=…: rollout.episodes_per_batch (64)"),
    ],
)
def test_what_contradicts_the_file_is_blamed_on_both(path: Path, override: str, told: str):
    assert refusal(path, override).startswith(told)


@pytest.mark.parametrize(
    "home",
    [
        "training.step_rewards_beta=0.2",
        "training.rewards.step_rewards_beta=0.2",
        "training.rewards={ step_rewards_beta = 0.2 }",
        "rollout.step_rewards_beta=0.2",
    ],
)
def test_a_reward_switch_is_overridden_from_any_of_its_homes_and_the_last_one_counts(path: Path, home: str):
    other = "training.step_rewards_beta=0.3"
    for overrides, beta in (([home], 0.2), ([other, home], 0.2), ([home, other], 0.3)):
        assert load_job(path, overrides).config.training.step_rewards_beta == beta


def test_a_mistake_in_the_file_is_not_blamed_on_an_override(path: Path):
    path.write_text(JOB + "iterations = -1\n")
    assert refusal(path, "training.group_size=4").startswith("FILE: training.iterations is -1: ")


def test_of_two_overrides_the_one_that_won_or_is_nearest_is_blamed(path: Path):
    table_and_key = refusal(path, "warmup.episodes=5", "warmup.epochs=0")
    assert table_and_key.startswith("--set warmup.epochs=…: warmup.epochs is 0: ")
    assert refusal(path, "job.seed=1", "job.seed=-1").startswith("--set job.seed=…: job.seed is -1: ")


@pytest.mark.parametrize(
    ("override", "place"),
    [
        ('services.task_api_key=["hush"]', "--set services.task_api_key=…: "),
        ("services.task_api_kez=hush", "--set services.task_api_kez=…: "),
        ("services.task_api_key.x=hush", ""),
    ],
)
def test_a_key_that_came_with_set_is_not_repeated(path: Path, override: str, place: str):
    path.write_text(JOB + '[services]\ntask_api_key = "a"\n')
    message = refusal(path, override)
    assert message.startswith(place)
    assert "hush" not in message
