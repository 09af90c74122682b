"""A run goes on with the code that it began with: plug-ins of its task apps, and interactions."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli
import tomli_w

from trainer_backend.errors import JobError
from trainer_backend.job.layers import DIGESTS
from trainer_backend.job.load import LoadedJob, dump_job, load_job, parse_job
from trainer_backend.jobs.posted import validate_job
from trainer_backend.jobs.settings import Bounds
from trainer_backend.operator_plugins import load_plugins
from trainer_backend.rundir.layout import RunDirectory, create_run
from trainer_backend.rundir.new_job import load_new_job
from trainer_backend.terminal.train_command import single_run

TABLES = {
    "job.trainer_plugins": '[job]\ntrainer_plugins = ["code/mine.py"]',
    "services.task_plugins": '[services]\ntask_plugins = ["code/theirs.py", "code/mine.py"]',
    "multi_turn.interaction_config_path": (
        '[multi_turn]\nenable = true\ninteraction_config_path = "code/users.yaml"'
    ),
}
FILES = {
    "mine.py": "from trainer_backend.operator_plugins import estimator\n"
    "@estimator('of_mine')\ndef of_mine(*_): return []\n",
    "theirs.py": "POLICIES = {}\n",
    "users.yaml": 'interaction:\n  - class_name: "mine.Mine"\n  - class_name: users.of_a_shop.Buyer\n',
    "users/of_a_shop.py": "class Buyer: pass\n",
    "users/unused.py": "",
}
# What a run of each key reads, in addition to the modules that these import.
READ = [
    ("job.trainer_plugins", "mine.py"),
    ("services.task_plugins", "theirs.py"),
    ("services.task_plugins", "mine.py"),
    ("multi_turn.interaction_config_path", "users.yaml"),
    ("multi_turn.interaction_config_path", "mine.py"),
    ("multi_turn.interaction_config_path", "users/of_a_shop.py"),
]


@pytest.fixture
def code(tmp_path: Path) -> Iterator[Path]:
    for name, text in FILES.items():
        file = tmp_path / "code" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    yield tmp_path / "code"
    load_plugins([])


def make_run(code: Path, key: str) -> RunDirectory:
    job = code.parent / "job.toml"
    job.write_text(f'[model]\npreset = "tiny-0.3m"\n{TABLES[key]}\n')
    return create_run(load_new_job(job).config, code.parent / "run")


def write_value(run: RunDirectory, key: str) -> str:
    """As TOML, and as a person would write it behind --set."""
    table, _, name = key.partition(".")
    value = tomli.loads((run.path / "job.toml").read_text())[table][name]
    return str(value).replace("'", '"') if isinstance(value, list) else f'"{value}"'


def resumed(run: RunDirectory, *overrides: str) -> LoadedJob:
    """The job with which `turnwise train --resume` goes on."""
    return single_run(None, None, run.path, overrides).loaded


@pytest.mark.parametrize(("key", "name"), READ)
def test_a_run_goes_on_with_no_other_file_until_it_is_named_again(code, key, name):
    run = make_run(code, key)
    begun = resumed(run)
    assert run.job() == begun.config
    (code / name).write_text(FILES[name] + "\n")
    with pytest.raises(JobError) as refused:
        resumed(run)
    accepts = f"{key}={write_value(run, key)}"
    assert str(refused.value) == (
        f"{run.path / 'job.toml'}: {code / name} has changed since the run began. Restore it, begin a new "
        f"run (post the job again), or give this command (turnwise train --resume RUN, truth RUN) --set "
        f"'{accepts}'"
    )
    changed = resumed(run, accepts)
    run.replace_job(changed.config)
    assert resumed(run).config == changed.config != begun.config
    (code / name).write_text(FILES[name])
    with pytest.raises(JobError, match="has changed since the run began"):
        resumed(run)


@pytest.mark.parametrize("key", TABLES)
def test_a_run_that_noted_nothing_goes_on_and_notes_what_is_there(code, key):
    run = make_run(code, key)
    job = tomli.loads((run.path / "job.toml").read_text())
    for table in job.values():
        for digests in DIGESTS.values():
            table.pop(digests.partition(".")[2], None)
    (run.path / "job.toml").write_text(tomli_w.dumps(job))
    run.replace_job(run.job_with(()).config)
    (code / "mine.py").write_text("")
    with pytest.raises(JobError, match=r"mine\.py has changed since the run began"):
        run.job_with(())


def test_a_file_that_no_entry_names_may_change(code):
    run = make_run(code, "multi_turn.interaction_config_path")
    (code / "users/unused.py").write_text("x = 1")
    run.job_with(())


@pytest.mark.parametrize("key", ["services.task_plugins", "multi_turn.interaction_config_path"])
def test_stored_rollouts_are_credited_without_the_code_that_played_them(code, key):
    run = make_run(code, key)
    stored = run.job_of_stored(())
    shutil.rmtree(code)
    assert run.job_of_stored(()) == stored
    # A learner on another machine reads the job so.
    assert parse_job(tomli.loads(dump_job(stored.config)), where="the job").config == stored.config
    with pytest.raises(JobError, match=f"job.toml: {key} names '{code}.*', which cannot be read"):
        run.job_with(())


@pytest.mark.parametrize("key", TABLES)
def test_digests_are_noted_and_never_given(code, key):
    job = make_run(code, key).path / "job.toml"
    with pytest.raises(JobError, match=f"--set '{DIGESTS[key]}': a run notes it; naming {key} accepts"):
        load_job(job, [f"{DIGESTS[key]}=[]"])
    document = tomli.loads(job.read_text())
    table, _, name = DIGESTS[key].partition(".")
    document[table][name] = 3
    with pytest.raises(JobError, match=f"{DIGESTS[key]} is 3: Input should be a valid tuple"):
        parse_job(document, where="the job")


@pytest.mark.parametrize("key", ["services.task_plugins", "multi_turn.interaction_config_path"])
def test_a_posted_job_begins_with_the_files_of_its_start(code, key):
    bounds = Bounds(data_dir=code.parent / "runs", roots=(code.parent,))
    of_another_run = tomli.loads((make_run(code, key).path / "job.toml").read_text())
    of_another_run["job"]["runs_dir"] = str(bounds.data_dir)
    posted = validate_job(of_another_run, bounds)[0].config
    (code / "mine.py").write_text("# changed while the job waited")
    run = create_run(posted, bounds.data_dir / "posted")
    run.job_with(())
