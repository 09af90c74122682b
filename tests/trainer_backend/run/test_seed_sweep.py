"""`turnwise train JOB --seeds 0,1`, and files that a job names and that are not there."""

from pathlib import Path

import pytest

from tests.conftest import tiny_job
from trainer_backend.errors import JobError
from trainer_backend.job.load import dump_job
from trainer_backend.operator_plugins import load_plugins
from trainer_backend.rundir.checkpoint_paths import STATE_FILE
from trainer_backend.rundir.new_job import load_new_job
from trainer_backend.rundir.state import RunState, write_state
from trainer_backend.terminal.train_command import run_of_each_seed


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(dump_job(tiny_job(job__runs_dir=str(tmp_path / "runs"), training__iterations=3)))
    return path


def planned(job: Path, seeds: str, *, run: Path | None = None, overrides: tuple[str, ...] = ()):
    return list(run_of_each_seed([job], run, None, overrides, seeds=seeds))


def test_every_seed_has_a_directory_and_a_job_of_its_own(job: Path, tmp_path: Path):
    runs = planned(job, "0, 7", overrides=("training.group_size=2",))
    assert [run.directory.path for run in runs] == [tmp_path / f"runs/tiny-seeds/seed_{n}" for n in (0, 7)]
    assert [run.directory.job().job.seed for run in runs] == [0, 7]
    assert {run.directory.job().training.group_size for run in runs} == {2}
    assert not any(run.resume for run in runs)


def test_a_run_is_made_when_it_is_its_turn(job: Path, tmp_path: Path):
    next(run_of_each_seed([job], tmp_path / "sweep", None, (), seeds="0,1"))
    assert [path.name for path in (tmp_path / "sweep").iterdir()] == ["seed_0"]


def test_given_again_what_is_done_is_left_and_what_was_begun_goes_on(job: Path, tmp_path: Path):
    first, second = planned(job, "0,1", run=tmp_path / "sweep")
    for run, last in ((first, 3), (second, 2)):
        run.directory.append_metrics({"kind": "evaluation", "iteration": last})
        checkpoint = run.directory.checkpoints / f"iteration_{last}"
        checkpoint.mkdir()
        (checkpoint / STATE_FILE).touch()
        write_state(run.directory.path, RunState("ended", 1, last))
    again = planned(job, "0,1,2", run=tmp_path / "sweep")
    assert [(run.directory.path.name, run.resume) for run in again] == [("seed_1", True), ("seed_2", False)]


def test_the_run_of_another_job_is_not_continued(job: Path, tmp_path: Path):
    planned(job, "0", run=tmp_path / "sweep")
    with pytest.raises(JobError, match="seed_0 holds a run of another job"):
        planned(job, "0", run=tmp_path / "sweep", overrides=("training.group_size=2",))


ESTIMATOR = """
from trainer_backend.operator_plugins import estimator
@estimator("of_a_sweep")
def mine(*_): return {}
"""


@pytest.mark.parametrize(
    ("key", "code"),
    [("job.trainer_plugins", ESTIMATOR), ("services.task_plugins", "ENVIRONMENTS = {}")],
)
def test_all_seeds_run_one_code(job: Path, tmp_path: Path, key: str, code: str):
    file = tmp_path / "sweep_plugin.py"
    file.write_text(code)
    runs = run_of_each_seed([job], None, None, [f'{key}=["{file}"]'], seeds="0,1")
    next(runs)
    file.write_text(f"{code}  # of another kind")
    with pytest.raises(JobError, match=rf"{key} has changed since the first seed"):
        next(runs)
    load_plugins([])


@pytest.mark.parametrize(
    ("seeds", "told"), [("0,x", "expected whole numbers"), ("", "expected whole"), ("1,2,1", "comes twice")]
)
def test_what_are_no_seeds_is_refused(job: Path, seeds: str, told: str):
    with pytest.raises(JobError, match=told):
        planned(job, seeds)


def test_seeds_need_a_job_and_no_run_to_resume(job: Path, tmp_path: Path):
    for given in ((None, None, None), ([job], None, tmp_path)):
        with pytest.raises(JobError, match="--seeds needs a job TOML and no --resume"):
            list(run_of_each_seed(*given, (), seeds="0"))


@pytest.mark.parametrize(
    ("key", "tables"),
    [
        ("multi_turn.interaction_config_path", '[multi_turn]\nenable = true\ninteraction_config_path = "{}"'),
        ("services.task_plugins", '[services]\ntask_plugins = ["{}"]'),
        ("services.mcp_servers", '[services]\nmcp_servers = "{}"'),
        ("services.textarena_python", '[services]\ntextarena_python = "{}"'),
    ],
)
def test_a_file_that_is_not_there_is_told_before_a_run_begins(key, tables, tmp_path):
    meant = tmp_path / "users.yaml"
    meant.touch()
    job = tmp_path / "job.toml"
    job.write_text(f'[model]\npreset = "tiny-0.3m"\n{tables.format(tmp_path / "user.yaml")}\n')
    with pytest.raises(JobError) as found:
        load_new_job(job)
    told = f"{key} is '{tmp_path / 'user.yaml'}', which is no file. Did you mean '{meant}'?"
    assert str(found.value) == f"{job}: {told}"
    job.write_text(job.read_text().replace("user.yaml", "users.yaml"))
    load_new_job(job)
