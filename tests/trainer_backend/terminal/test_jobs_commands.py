"""`turnwise jobs …` against a real port, with jobs that are played."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.trainer_backend.jobs.on_a_port import on_a_port
from tests.trainer_backend.jobs.served import settings_for
from trainer_backend.__main__ import app
from trainer_backend.errors import JobError
from trainer_backend.terminal.jobs_client import ServiceRefused, ServiceUnreachable

KEY = "a-key-of-the-terminal"
Ask = Callable[..., str]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("runs")
    with on_a_port(settings_for(folder, environ={"TRAINER_API_KEY": KEY}, max_jobs=4)) as (address, _):
        yield address


@pytest.fixture
def jobs(url: str, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """What a command prints."""
    monkeypatch.setenv("TURNWISE_URL", url)
    monkeypatch.setenv("TRAINER_API_KEY", KEY)

    def ask(*words: str) -> str:
        return CliRunner().invoke(app, ["jobs", *words], catch_exceptions=False).stdout

    return ask


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "job.toml"
    path.write_text('[job]\nname = "quick"\n[model]\npreset = "tiny-0.3m"\n[tags]\nteam = "a"\n')
    return str(path)


def test_a_job_is_sent_followed_listed_shown_and_deleted(jobs, job):
    told = jobs("submit", job, "--follow")
    job_id = told.split()[0]
    assert "iteration 2" in told
    line = next(line for line in jobs("list").splitlines() if job_id[:12] in line)
    assert line.split()[1:4] == ["quick", "succeeded", "2/20"]
    known = json.loads(jobs("show", job_id, "--json"))
    assert line.split()[4:6] == [known["started"][:19], Path(known["run_dir"]).name]
    shown = jobs("show", job_id[:8])
    assert job_id in shown and '{"team": "a"}' in shown
    assert json.loads(jobs("show", job_id, "--json"))["id"] == job_id
    assert 'name = "quick"' in jobs("show", job_id, "--config")
    assert jobs("logs", job_id, "--tail", "1").endswith("iteration 2\n")
    deleted = jobs("delete", job_id)
    assert "deleted; its files stay in" in deleted
    with pytest.raises(ServiceRefused, match="there is no job"):
        jobs("show", job_id)


@pytest.mark.parametrize(("plays", "code"), [("quick", 0), ("refused", 1)])
def test_following_says_by_its_exit_code_how_the_job_has_ended(jobs, job, plays, code):
    asked = ["jobs", "submit", job, "--follow", "--set", f"job.name={plays}"]
    assert CliRunner().invoke(app, asked).exit_code == code
    job_id = json.loads(jobs("list", "--json", "--limit", "1"))["jobs"][0]["id"]
    assert CliRunner().invoke(app, ["jobs", "logs", job_id, "--follow"]).exit_code == code


def test_it_is_paused_resumed_and_cancelled(jobs, job):
    job_id = jobs("submit", job, "--set", "job.name=waiting").split()[0]
    assert jobs("pause", job_id).split()[1] in ("paused", "pausing")
    assert jobs("resume", job_id).split()[1] in ("queued", "running", "pausing")
    assert jobs("cancel", job_id).split()[1] in ("cancelled", "cancelling")
    listed = json.loads(jobs("list", "--json", "--state", "cancelling", "--state", "cancelled"))["jobs"]
    assert job_id in [found["id"] for found in listed]


def test_several_files_and_settings_are_joined_and_paths_stay_as_they_are_written(jobs, job, tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "more.toml").write_text('[data]\npath = "rows"\nevaluation_split = "test"\n')
    told = jobs("submit", job, "--dry-run", "--set", "training.group_size=2")
    assert "group_size = 2" in told
    with pytest.raises(ServiceRefused, match=r"data\.path names a file outside"):
        jobs("submit", job, str(tmp_path / "more.toml"), "--dry-run")


def test_mistakes_are_told_in_the_words_of_the_service(jobs, job, tmp_path, monkeypatch):
    (tmp_path / "bad.toml").write_text("[model\n")
    with pytest.raises(ServiceRefused, match=r"not valid TOML: .*\(at line 1, column 7\)"):
        jobs("submit", str(tmp_path / "bad.toml"))
    with pytest.raises(JobError, match="no such file"):
        jobs("submit", str(tmp_path / "none.toml"))
    with pytest.raises(JobError, match="--follow prints what the run tells"):
        jobs("logs", "x", "--follow", "--part", "process")
    with pytest.raises(ServiceRefused, match="there is no job 'nobody'"):
        jobs("logs", "nobody", "--follow")
    monkeypatch.setenv("TRAINER_API_KEY", "some-other-key")
    with pytest.raises(ServiceRefused, match="Set TRAINER_API_KEY in the environment") as error:
        jobs("list")
    assert KEY not in str(error.value) and "some-other-key" not in str(error.value)


def test_a_service_that_is_not_there_is_told(jobs, url):
    for address, error, told in (
        ("http://127.0.0.1:1", ServiceUnreachable, "no trainer service answers at http://127.0.0.1:1"),
        ("127.0.0.1:8100", ServiceRefused, "which is no http or https URL"),
        (f"{url}/static", ServiceUnreachable, "not as a trainer service does"),
    ):
        with pytest.raises(error, match=told):
            jobs("list", "--url", address)
