"""[rollout_only] and [rollout_allocation_schedule]: what they take, and how everything else is refused."""

import re
from pathlib import Path
from typing import Any

import pytest
import tomli

from trainer_backend.errors import JobError
from trainer_backend.job.load import dump_job, load_job, parse_job
from trainer_backend.job.schema import JobConfig
from trainer_backend.rundir.new_job import load_new_job

HALF = {"type": "constant", "alpha": 0.5}
NAN, INFINITE = float("nan"), float("inf")


def job_of(**tables: Any) -> JobConfig:
    whole = {"model": {"path": "m"}, "rollout_only": {"model_path": "teacher"}, **tables}
    whole.setdefault("rollout_allocation_schedule", HALF)
    given = {name: table for name, table in whole.items() if table is not None}
    return parse_job(given, where="job.toml").config


def refusal(**tables: Any) -> str:
    with pytest.raises(JobError) as caught:
        job_of(**tables)
    return str(caught.value)


@pytest.mark.parametrize(
    "published",
    [
        {"type": "constant", "alpha": 0.5},
        {"type": "linear", "alpha_0": 0.1, "beta": 0.01, "max_alpha": 1.0},
        {"type": "exponential", "gamma": 0.05},
        {"type": "step", "switch_steps": [100, 500, 1000], "initial_policy": "fixed"},
    ],
)
def test_the_published_tables_are_taken(published: dict[str, Any]):
    only = {"model_path": "/a/model", "temperature": 0.8, "top_p": 0.95, "top_k": 40}
    job = job_of(
        rollout_only=only, rollout_allocation_schedule=published, rollout={"allow_truncated_sampling": True}
    )
    (fixed,) = job.fixed_policies
    assert (fixed.name, fixed.model_path) == ("fixed", Path("/a/model"))
    sampling = job.rollout.sampling_of(fixed)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.8, 0.95, 40)
    assert job.rollout.sampling_of().temperature == 1.0


def test_what_a_fixed_policy_leaves_open_is_that_of_the_rollouts():
    job = job_of(rollout={"temperature": 0.7, "max_tokens": 9})
    sampling = job.rollout.sampling_of(job.fixed("fixed"))
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.7, 1.0, 0, 9)


def test_several_fixed_policies_have_names():
    job = job_of(rollout_only=[{"model_path": "a", "name": "teacher"}, {"name": "off"}, {"model_path": "b"}])
    assert [table.name for table in job.fixed_policies] == ["teacher", "fixed"]
    with pytest.raises(KeyError):
        job.fixed("off")


def test_a_table_without_a_model_is_not_active():
    job = job_of(rollout_only={"temperature": 0.5}, rollout_allocation_schedule=None)
    assert job.fixed_policies == ()


@pytest.mark.parametrize(
    "only", [{"model_path": "a"}, [{"model_path": "a"}, {"model_path": "b", "name": "b"}]]
)
def test_a_resolved_job_reads_back(only: Any):
    job = job_of(rollout_only=only)
    assert parse_job(tomli.loads(dump_job(job)), where="run").config == job


def test_a_job_without_fixed_policies_is_written_as_before():
    written = dump_job(parse_job({"model": {"path": "m"}}, where="job.toml").config)
    assert "rollout_only" not in written
    assert "rollout_allocation_schedule" not in written


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"type": "linaer", "alpha": 0.5}, "type is 'linaer'. Did you mean 'linear'. Known: adaptive, "),
        ({"alpha": -0.1}, "alpha is -0.1: Input should be greater than or equal to 0"),
        ({"alpha": 1.5}, "alpha is 1.5: Input should be less than or equal to 1"),
        ({"alpha": NAN}, "alpha is nan: Input should be a finite number"),
        ({"alpha": "half"}, "alpha is 'half': "),
        (
            {"type": "linear", "alpha_0": 2, "beta": 0.1},
            "alpha_0 is 2: Input should be less than or equal to 1",
        ),
        ({"type": "linear", "alpha_0": 0.1, "beta": -1}, "beta is -1: Input should be greater than or equal"),
        (
            {"type": "linear", "alpha_0": 0.1, "beta": INFINITE},
            "beta is inf: Input should be a finite number",
        ),
        (
            {"type": "linear", "alpha_0": 0.9, "beta": 0.1, "max_alpha": 0.5},
            r"alpha_0 \(0.9\) is above max_alp",
        ),
        ({"type": "linear", "alpha_0": 0.1}, "beta is required with type = 'linear'"),
        ({"type": "exponential", "gamma": -1.0}, "gamma is -1.0: Input should be greater than or equal to 0"),
        ({"type": "exponential", "gamma": NAN}, "gamma is nan: Input should be a finite number"),
        ({"type": "step", "switch_steps": [5, 3]}, r"switch_steps is \[5, 3\]: step 3 comes after 5"),
        ({"type": "step", "switch_steps": [5, 5]}, r"switch_steps is \[5, 5\]: step 5 is given twice"),
        (
            {"type": "step", "switch_steps": [0]},
            "switch_steps.0 is 0: Input should be greater than or equal to 1",
        ),
        ({"type": "step", "switch_steps": [1.5]}, "switch_steps.0 is 1.5: Input should be a valid integer"),
        ({"type": "step"}, "switch_steps is required with type = 'step'"),
        ({"type": "step", "switch_steps": [2], "initial_policy": "fixd"}, "Did you mean 'fixed'?"),
        ({"type": "adaptive", "alpha_0": 0.0}, "alpha_0 is 0; adaptive compares the two"),
        ({"type": "adaptive", "alpha_0": 0.05}, r"alpha_0 \(0.05\) is below min_alpha \(0.1\)"),
        ({"type": "adaptive", "alpha_0": 0.05, "max_alpha": 0.05}, r"min_alpha \(0.1\) is above max_alpha"),
        ({"type": "adaptive", "alpha_0": 0.5, "window": 0}, "window is 0: "),
        ({"alpha": 0.5, "gamma": 0.1}, "gamma is not read by type = 'constant'; known to: exponential"),
        (
            {"alpha": 0.5, "switch_steps": [1]},
            "switch_steps is not read by type = 'constant'; known to: step",
        ),
        ({"type": "linear", "alpha_0": 0.1, "beta": 0.1, "min_alpha": 0.2}, "known to: adaptive"),
        ({"alpha": 0.5, "unit": "step"}, "unit is 'step'; known: group, iteration, rollout"),
        ({"alpha": 0.5, "units": "group"}, "units is not a key. Did you mean 'unit'?"),
        ({"alpha": 0.5, "selection": "reward"}, "selection = 'reward' chooses among several .* 'fixed'"),
    ],
)
def test_a_schedule_that_is_none_is_refused(keys: dict[str, Any], told: str):
    message = refusal(rollout_allocation_schedule=keys)
    assert message.startswith("job.toml: rollout_allocation_schedule.")
    assert re.search(told, message)


@pytest.mark.parametrize(
    ("only", "told"),
    [
        ({"model_path": "x", "tempreature": 1}, "job.toml: rollout_only.tempreature is not a key. Did"),
        ({"model_path": "x", "name": "actor"}, "rollout_only.name is 'actor': 'actor' is the policy that is"),
        ({"model_path": "x", "name": "a/b"}, "rollout_only.name is 'a/b': "),
        ({"model_path": "x", "inference_url": "http://a"}, "'fixed' has both model_path and inference_url"),
        ({"inference_url": "http://a"}, "'fixed': inference_url needs 'model', its name there"),
        ({"model": "some/model"}, "'model' is of an inference_url. Did you mean model_path?"),
        ({"model_path": "x", "api_key_env": "KEY"}, "'api_key_env' is of an inference_url"),
        (
            {"model_path": "x", "temperature": 0},
            "rollout_only.temperature is 0: Input should be greater than 0",
        ),
        ({"model_path": "x", "temperature": NAN}, "rollout_only.temperature is nan: "),
        ({"model_path": "x", "weight": 0}, "rollout_only.weight is 0: "),
        ({"model_path": "x", "behaviour_weight_cap": 0.5}, "rollout_only.behaviour_weight_cap is 0.5: "),
        ({"model_path": "x", "top_p": 0.9}, "'fixed': top_p = 0.9 gives log-probs on a part of"),
        ({"model_path": "x", "objective": "ppo"}, "rollout_only.objective is 'ppo'; known: decoupled, reinf"),
        (
            {"inference_url": "http://x", "model": "q", "temperature": 0.5},
            "raw log-probs are not those of samples with temperature = 0.5: leave it out",
        ),
        (
            {"model_path": "x", "behaviour_weight_floor": 0.5},
            "behaviour_weight_floor is not read by behaviour_weight_mode = 'truncate'",
        ),
        (
            {"model_path": "x", "behaviour_weight_cap": 3.0, "objective": "single_ratio"},
            "behaviour_weight_cap is not read by objective = 'single_ratio', whose policy loss has the ratio",
        ),
        (
            {"model_path": "x", "train_value_head": True},
            "train_value_head needs a critic, which algorithm.advantage = 'stepwise' has not",
        ),
        ([{"model_path": "x"}, {"model_path": "y"}], "two fixed policies are called 'fixed'; give each"),
        (
            [{"model_path": "x"}, {"model_path": "y", "name": "b", "top_p": 2}],
            "job.toml: rollout_only.1.top_p is 2: ",
        ),
        (5, "job.toml: rollout_only is 5: "),
    ],
)
def test_a_fixed_policy_that_is_none_is_refused(only: Any, told: str):
    message = refusal(rollout_only=only)
    assert message.startswith("job.toml: ")
    assert told in message


def test_a_key_that_stands_where_the_name_of_its_variable_belongs_is_not_repeated():
    only = {"inference_url": "http://x", "model": "q", "api_key_env": "sk-secret"}
    for table in (only, [only]):
        message = refusal(rollout_only=table)
        assert "api_key_env" in message
        assert "sk-secret" not in message


def test_a_schedule_without_a_fixed_policy_is_refused():
    assert refusal(rollout_only=None) == (
        "job.toml: [rollout_allocation_schedule] has only the actor to choose: there is no [rollout_only]"
    )
    assert refusal(rollout_only={"top_k": 0}).endswith(
        "[rollout_only] is active only when model_path, or inference_url, is set"
    )


def test_a_fixed_policy_without_a_schedule_is_refused_with_what_to_write():
    assert refusal(rollout_allocation_schedule=None) == (
        "job.toml: [rollout_only] 'fixed' is active, and nothing says how often it samples; write "
        '[rollout_allocation_schedule] with type = "constant" and alpha = 0.5, for one half'
    )


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        (
            {"algorithm": {"advantage": "branch"}},
            "algorithm.advantage = 'branch' measures what the actor would",
        ),
        *[
            (
                {
                    "algorithm": {"advantage": name},
                    "rollout_only": {"model_path": "x", "baseline": "per_policy"},
                },
                f"baseline = 'per_policy' is not read by algorithm.advantage = '{name}', which compares no",
            )
            for name in ("gae", "gae_token", "reinforce_pp")
        ],
        (
            {
                "algorithm": {"loss": "policy_gradient"},
                "rollout_only": {"model_path": "x", "objective": "single_ratio"},
            },
            "algorithm.loss = 'policy_gradient' has none: they would count as the actor's own; use objective "
            "= 'decoupled' or 'reinforce', or one of the losses clipped, dapo, gspo, cispo, sapo",
        ),
        ({"training": {"kl_reward_coef": 0.1}}, "training.kl_reward_coef makes the actor pay for"),
        (
            {
                "model": {"preset": "tiny-0.3m"},
                "rollout_only": {"inference_url": "http://x", "model": "q"},
            },
            "model.preset = 'tiny-0.3m' has no tokenizer to share with it",
        ),
        (
            {
                "rollout_only": [{"model_path": "x", "weight": 2.0}, {"model_path": "y", "name": "b"}],
                "rollout_allocation_schedule": {**HALF, "selection": "reward"},
            },
            "weight is not read with rollout_allocation_schedule.selection = 'reward'",
        ),
        (
            {"training": {"behaviour_weight_floor": 0.5}},
            "training.behaviour_weight_floor is not read by behaviour_weight_mode = 'truncate'",
        ),
    ],
)
def test_what_cannot_go_with_a_mixture_is_refused(tables: dict[str, Any], told: str):
    assert told in refusal(**tables)


def test_a_critic_weighs_what_a_single_ratio_does_not():
    only = {"model_path": "x", "objective": "single_ratio", "behaviour_weight_cap": 3.0}
    found = job_of(rollout_only={**only, "train_value_head": True}, algorithm={"advantage": "gae"})
    assert found.fixed_policies


def test_a_floor_is_read_where_one_policy_masks():
    only = {"model_path": "x", "behaviour_weight_mode": "mask"}
    assert job_of(rollout_only=only, training={"behaviour_weight_floor": 0.5}).fixed_policies


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        ({"alpha": 1.0}, "no policy of [rollout_only] ever samples"),
        ({"alpha": 0.0}, "the actor never samples, so evaluations alone tell how it plays"),
        ({"type": "exponential", "gamma": 0.0}, "is 0 in every iteration: the actor never samples"),
        ({"type": "linear", "alpha_0": 1.0, "beta": 0.1}, "is 1 in every iteration: no policy of"),
        ({"type": "step", "switch_steps": [10_000]}, "is 0 in every iteration: the actor never samples"),
        ({"alpha": 0.5, "unit": "group"}, "baseline = 'per_policy' makes no difference where siblings share"),
    ],
)
def test_what_a_mixture_may_have_got_wrong_is_told(schedule: dict[str, Any], told: str):
    only = {"model_path": "x", **({"baseline": "per_policy"} if "unit" in schedule else {})}
    tables = {"model": {"path": "m"}, "rollout_only": only, "rollout_allocation_schedule": schedule}
    (warning,) = parse_job(tables, where="job.toml").warnings
    assert told in warning


def test_samples_that_weigh_more_beside_what_is_left_are_told_and_may_have_weights_of_episodes():
    tables = {
        "model": {"path": "m"},
        "rollout_only": {"model_path": "x", "behaviour_weight_level": "episode"},
        "rollout_allocation_schedule": {"alpha": 0.5},
        "training": {"skip_certain_above": 0.98, "entropy_coef": 0.0},
    }
    _, warning = parse_job(tables, where="job.toml").warnings
    assert warning.endswith("those of [rollout_only] weigh more beside what is left")


def test_a_fixed_policy_whose_model_was_forgotten_is_told():
    tables = {"model": {"path": "m"}, "rollout_only": {"temperature": 0.5}}
    (warning,) = parse_job(tables, where="job.toml").warnings
    assert warning.startswith("[rollout_only] 'fixed' is not active and samples nothing: neither model_path")


def folder_with_model(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def written(folder: Path, only: str, *, model: str = '[model]\npreset = "tiny-0.3m"\n') -> Path:
    path = folder / "job.toml"
    path.write_text(f'{model}{only}\n[rollout_allocation_schedule]\ntype = "constant"\nalpha = 0.5\n')
    return path


def test_a_relative_path_is_one_from_the_folder_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("a", "b"):
        folder_with_model(tmp_path / "jobs" / name)
    monkeypatch.chdir(tmp_path)
    lone = written(tmp_path / "jobs", '[rollout_only]\nmodel_path = "a"')
    assert load_job(lone).config.fixed("fixed").model_path == tmp_path / "jobs" / "a"
    assert load_job(lone, ["rollout_only.model_path=jobs/b"]).config.fixed("fixed").model_path == (
        tmp_path / "jobs" / "b"
    )
    two = '[[rollout_only]]\nmodel_path = "a"\n[[rollout_only]]\nname = "b"\nmodel_path = "b"'
    several = load_new_job(written(tmp_path / "jobs", two)).config
    assert [table.model_path for table in several.fixed_policies] == [
        tmp_path / "jobs" / "a",
        tmp_path / "jobs" / "b",
    ]


def test_the_command_line_of_the_source_is_taken(tmp_path: Path):
    path = tmp_path / "job.toml"
    path.write_text('[model]\npreset = "tiny-0.3m"\n[rollout]\nallow_truncated_sampling = true\n')
    job = load_job(
        path,
        [
            "rollout_only.model_path=/path/to/model",
            "rollout_only.temperature=0.8",
            "rollout_only.top_p=0.95",
            "rollout_only.top_k=40",
            "rollout_allocation_schedule.type=constant",
            "rollout_allocation_schedule.alpha=0.5",
        ],
    ).config
    assert job.fixed("fixed").top_k == 40


def test_a_key_of_several_tables_cannot_be_set_by_a_flag(tmp_path: Path):
    two = '[[rollout_only]]\nmodel_path = "a"\n[[rollout_only]]\nname = "b"\nmodel_path = "b"'
    with pytest.raises(JobError, match="rollout_only is several tables, of which --set names none"):
        load_job(written(tmp_path, two), ["rollout_only.temperature=0.5"])


def test_a_server_makes_way_for_a_folder_and_the_other_way_round(tmp_path: Path):
    base = written(tmp_path, '[rollout_only]\ninference_url = "http://x"\nmodel = "q"')
    over = tmp_path / "over.toml"
    over.write_text('[rollout_only]\nmodel_path = "a"\n')
    with pytest.raises(JobError, match="'model' is of an inference_url"):
        load_job([base, over])
    folder = written(tmp_path, '[rollout_only]\nmodel_path = "a"', model='[model]\npath = "m"\n')
    flags = ["rollout_only.inference_url=http://x", "rollout_only.model=q"]
    assert load_job(folder, flags).config.fixed("fixed").model_path is None


def test_a_new_run_needs_the_model_of_its_fixed_policy(tmp_path: Path):
    teacher = folder_with_model(tmp_path / "teacher")
    assert load_new_job(written(tmp_path, f'[rollout_only]\nmodel_path = "{teacher}"')).config.fixed_policies

    job = written(tmp_path, f'[rollout_only]\nmodel_path = "{tmp_path}/teachr"')
    told = rf"rollout_only.model_path is .*teachr', which is no folder. Did you mean '{teacher}'?"
    with pytest.raises(JobError, match=told):
        load_new_job(job)
    load_job(job)  # a resumed run is told when it looks for it

    (tmp_path / "empty").mkdir()
    with pytest.raises(JobError, match=r"empty', which holds no model: config\.json is missing"):
        load_new_job(written(tmp_path, f'[rollout_only]\nmodel_path = "{tmp_path}/empty"'))


def test_a_run_directory_stands_for_its_best_checkpoint(tmp_path: Path):
    run = tmp_path / "runs" / "old"
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    job = written(tmp_path, f'[rollout_only]\nmodel_path = "{run}"')
    with pytest.raises(JobError, match=r"rollout_only\.model_path: .*old has no checkpoint yet"):
        load_new_job(job)
    checkpoint = folder_with_model(run / "checkpoints" / "iteration_3")
    (checkpoint / "state.json").write_text("{}")
    assert load_new_job(job).config.fixed_policies


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://user:hunter2@h:1/v1", "inference_url may not hold a user name or password"),
        ("ftp://h?key=hunter2", "inference_url is 'ftp://h', which is no http or https URL with a host"),
        ("h:8000/v1", "inference_url is 'h:8000/v1', which is no http or https URL"),
    ],
)
def test_an_address_is_looked_at_when_the_job_is_read_and_a_password_in_it_is_not_repeated(
    url: str, told: str
):
    message = refusal(rollout_only={"inference_url": url, "model": "m"})
    assert f"[rollout_only] 'fixed': {told}" in message
    assert "hunter2" not in message
