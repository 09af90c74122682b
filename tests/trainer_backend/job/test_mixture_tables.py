"""[rollout_only] and [rollout_allocation_schedule]: what they take, and how everything else is refused."""

from pathlib import Path
from typing import Any

import pytest
import tomli

from trainer_backend.errors import JobError
from trainer_backend.job.load import dump_job, load_job, parse_job
from trainer_backend.job.schema import JobConfig
from trainer_backend.rundir.new_job import load_new_job

HALF = {"type": "constant", "alpha": 0.5}


def make_job(**tables: Any) -> JobConfig:
    whole = {"model": {"path": "m"}, "rollout_only": {"model_path": "teacher"}, **tables}
    whole.setdefault("rollout_allocation_schedule", HALF)
    given = {name: table for name, table in whole.items() if table is not None}
    return parse_job(given, where="job.toml").config


@pytest.mark.parametrize(
    "published",
    [
        HALF,
        {"type": "linear", "alpha_0": 0.1, "beta": 0.01, "max_alpha": 1.0},
        {"type": "exponential", "gamma": 0.05},
        {"type": "step", "switch_steps": [100, 500, 1000], "initial_policy": "fixed"},
    ],
)
def test_the_published_tables_are_taken(published: dict[str, Any]):
    only = {"model_path": "/a/model", "temperature": 0.8, "top_p": 0.95, "top_k": 40}
    rollout = {"allow_truncated_sampling": True, "temperature": 0.7, "max_tokens": 9}
    job = make_job(rollout_only=only, rollout_allocation_schedule=published, rollout=rollout)
    (fixed,) = job.fixed_policies
    assert (fixed.name, fixed.model_path) == ("fixed", Path("/a/model"))
    sampling = job.rollout.choose_sampling(fixed)
    # What it leaves open is that of the rollouts.
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.8, 0.95, 40, 9)
    assert job.rollout.choose_sampling().temperature == 0.7
    assert parse_job(tomli.loads(dump_job(job)), where="run").config == job


def test_several_fixed_policies_have_names_and_read_back():
    job = make_job(
        rollout_only=[{"model_path": "a", "name": "teacher"}, {"name": "off"}, {"model_path": "b"}]
    )
    assert [table.name for table in job.fixed_policies] == ["teacher", "fixed"]
    with pytest.raises(KeyError):
        job.fixed("off")
    assert parse_job(tomli.loads(dump_job(job)), where="run").config == job


def test_a_job_without_fixed_policies_is_written_as_before():
    written = dump_job(make_job(rollout_only=None, rollout_allocation_schedule=None))
    assert "rollout_only" not in written and "rollout_allocation_schedule" not in written


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


def test_a_key_of_several_tables_cannot_be_set_by_a_flag(tmp_path: Path):
    two = '[[rollout_only]]\nmodel_path = "a"\n[[rollout_only]]\nname = "b"\nmodel_path = "b"'
    with pytest.raises(JobError, match="rollout_only is several tables, of which --set names none"):
        load_job(written(tmp_path, two), ["rollout_only.temperature=0.5"])


def test_a_server_makes_way_for_a_folder_and_the_other_way_round(tmp_path: Path):
    base = written(tmp_path, '[rollout_only]\ninference_url = "http://x"\nmodel = "q"')
    over = tmp_path / "over.toml"
    over.write_text('[rollout_only]\nmodel_path = "a"\n')
    with pytest.raises(JobError, match="model = 'q' without inference_url"):
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
