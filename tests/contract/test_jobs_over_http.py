"""Real jobs through a real `turnwise trainer`: posted, watched, killed with it, finished after it."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from tests.conftest import TASK_APP_KEY, rows_of, task_app, tiny_job
from tests.processes import ROOT, service, wait_until
from trainer_backend.__main__ import app
from trainer_backend.job.load import dump_job
from trainer_backend.rundir.layout import open_run
from trainer_backend.rundir.rollout_files import finished_rows
from trainer_backend.rundir.spool import read_ledger
from trainer_backend.rundir.state import read_status
from trainer_backend.terminal.jobs_client import JobsClient

KEY = "a-key-of-the-contract-tests"
ESTIMATOR = (ROOT / "examples/plugins/medians.py").read_text(encoding="utf-8")
KEYS = {"TRAINER_API_KEY": KEY, "ENVIRONMENT_API_KEY": TASK_APP_KEY.get_secret_value()}


@contextmanager
def trainer(folder: Path, data_dir: str = "runs") -> Iterator[tuple["subprocess.Popen[str]", JobsClient]]:
    """`turnwise trainer` as a process, with the estimator of medians.py, and a client of it."""
    (folder / "medians.py").write_text(ESTIMATOR, encoding="utf-8")
    words = ("trainer", "--port", "0", "--data-dir", data_dir, "--plugins", "medians.py")
    with (
        (folder / "trainer.log").open("ab") as log,
        service(
            "trainer_backend", *words, environ=KEYS | {"TASK_URL": task_app()}, cwd=folder, stderr=log
        ) as (process, url),
    ):
        yield process, JobsClient(url, {**os.environ, **KEYS})


def turnwise(url: str, *arguments: str) -> str:
    done = CliRunner().invoke(app, ["jobs", *arguments, "--url", url], env={"TRAINER_API_KEY": KEY})
    assert done.exit_code == 0, done.output
    return done.stdout


def moved(command: str, folder: Path, data_dir: str) -> None:
    words = [command, str(folder / "backup.tar"), "--data-dir", str(folder / data_dir)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and "jobs: 1, run directories: 1" in done.output
    assert (folder / "backup.tar").stat().st_mode & 0o77 == 0


@pytest.mark.timeout(600)
def test_a_job_survives_the_service_that_runs_it(tmp_path: Path):
    """It goes on from a backup of what the kill left, in another folder under the same id."""
    job = tmp_path / "job.toml"
    short = {"warmup__episodes": 4, "warmup__epochs": 1, "evaluation__instances": 1}
    text = dump_job(tiny_job(training__iterations=4, evaluation__every_n_iters=4, **short))
    assert text.count('advantage = "stepwise"') == 1
    job.write_text(text.replace('advantage = "stepwise"', 'advantage = "median_return"'))
    with trainer(tmp_path) as (_, first):
        job_id = turnwise(first.url, "submit", str(job), "--idempotency-key", "one").split()[0]
        for name, data, _ in first.events(f"/jobs/{job_id}/events"):
            if name == "metrics" and data["kind"] == "iteration":
                break
        shown = first.get(f"/jobs/{job_id}")
        assert shown["state"] == "running"
    wait_until(lambda: read_status(Path(shown["run_dir"])).interrupted)
    moved("backup", tmp_path, "runs")
    moved("restore", tmp_path, "elsewhere")
    with trainer(tmp_path, "elsewhere") as (process, second):
        again = turnwise(second.url, "submit", str(job), "--idempotency-key", "one").split()[0]
        assert again == job_id, "the key is remembered over the restart"
        told = [data["text"] for name, data, _ in second.events(f"/jobs/{job_id}/events") if name == "log"]
        found = second.get(f"/jobs/{job_id}")
        assert (found["state"], found["attempt"], found["progress"]["iteration"]) == ("succeeded", 2, 4)
        assert any(line.startswith("resumed from") for line in told)
        assert "tiny" in turnwise(second.url, "list")
        assert "resumed from" in turnwise(second.url, "logs", job_id[:12])
        curve = second.get(f"/jobs/{job_id}/metrics", names="reward/mean")["series"]["reward/mean"]
        assert curve["iterations"] == [1, 2, 3, 4]
        assert httpx.get(f"{second.url}/jobs").status_code == 401, "without the key"
        process.terminate()
        assert process.wait() == 0
    assert KEY not in (tmp_path / "trainer.log").read_text()
    run = open_run(Path(found["run_dir"]))
    stored = finished_rows(run.iterations()[4], ["estimator"])
    assert stored and all(row["estimator"] == "median_return" for row in stored)
    assert [row["iteration"] for row in rows_of(run, "iteration")] == [1, 2, 3, 4]
    trained = [name for line in read_ledger(run.path) for name in line.rollout_ids]
    assert len(trained) == len(set(trained)) == 4 * 8, "each rollout once"
    assert run.path.parent == tmp_path / "elsewhere"
