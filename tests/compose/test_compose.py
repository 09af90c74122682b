"""The stack on a Docker host: up, a job, each container killed, backup, restore. `make test-compose` runs it.

It builds the images, from stand-ins where PYTHON_IMAGE and POSTGRES_IMAGE name some, on ports of its own.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from trainer_backend.errors import TrainerError
from trainer_backend.job.load import dump_job, load_job
from trainer_backend.terminal.jobs_client import JobsClient

ROOT = Path(__file__).parents[2]
PORT = 18_100
ENVIRON = {**os.environ, "TRAINER_PORT": str(PORT), "TASK_APP_PORTS": "18001"}
FILES = ("docker-compose.yml", "docker-compose.gpu.yml", "docker-compose.ranks.yml")
LONG_S = 900.0


@cache
def why_not() -> str:
    """Why there is no Docker host for this; empty where there is one."""
    for command, reason in (
        (["docker", "compose", "version"], "docker compose is not installed"),
        (["docker", "info"], "no Docker daemon answers"),
    ):
        if (
            shutil.which("docker") is None
            or subprocess.run(command, capture_output=True, check=False).returncode
        ):
            return reason
    return ""


class ComposeFailed(Exception):
    """A command of compose failed; what it printed says why."""


def compose(*words: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    command = ["docker", "compose", "--project-name", "turnwise-test", *words]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRON, check=False, capture_output=True, **options)
    if done.returncode:
        raise ComposeFailed(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr.decode()}")
    return done


@pytest.mark.parametrize("file", FILES)
def test_each_file_is_read_by_compose(file: str):
    if shutil.which("docker") is None or why_not() == "docker compose is not installed":
        pytest.skip("docker compose is not installed")
    files = [word for name in dict.fromkeys((FILES[0], file)) for word in ("--file", name)]
    compose(*files, "config", "--quiet")


@pytest.fixture
def stack() -> Iterator[None]:
    if "TURNWISE_TEST_COMPOSE" not in os.environ or why_not():
        pytest.skip(why_not() or "builds images: make test-compose")
    try:
        compose("up", "--detach", "--build", "--wait")
        yield
    finally:
        compose("down", "--volumes", "--remove-orphans")


def client() -> JobsClient:
    key = compose("exec", "-T", "trainer-backend", "cat", "/keys/trainer/key").stdout.decode().strip()
    return JobsClient(f"http://127.0.0.1:{PORT}", {"TRAINER_API_KEY": key})


def until(job_id: str, *, iteration: int = 0, state: str = "") -> dict[str, object]:
    """The job, once it is so far; containers that start are waited for."""
    until_s = time.monotonic() + LONG_S
    while time.monotonic() < until_s:
        try:
            job = client().get(f"/jobs/{job_id}")
            if job["state"] == "failed":
                pytest.fail(str(job))
            if (job["progress"] or {}).get("iteration", 0) >= iteration and job["state"] == (
                state or job["state"]
            ):
                return job
        except (TrainerError, ComposeFailed):  # 503, too, while the database starts
            pass
        time.sleep(1.0)
    pytest.fail(f"job {job_id} did not come to iteration {iteration} {state}")


@pytest.mark.timeout(3_600)
def test_a_job_survives_every_container_and_a_move_to_new_volumes(stack, tmp_path: Path):
    overrides = ["training.iterations=12", "warmup.episodes=16", "evaluation.instances=4"]
    job = dump_job(load_job(ROOT / "configs/crafter_cpu.toml", overrides).config)
    reply = client().post("/jobs", body=job, headers={"Content-Type": "application/toml"})
    job_id, done = reply["id"], 1
    until(job_id, iteration=done)
    for service in ("task-app", "database", "trainer-backend"):
        compose("kill", "--signal", "KILL", service)
        compose("up", "--detach", "--wait")
        done += 1
        until(job_id, iteration=done)
    archive = compose("exec", "-T", "trainer-backend", "turnwise-trainer", "backup").stdout
    (tmp_path / "backup.tar").write_bytes(archive)
    compose("down", "--volumes")
    with (tmp_path / "backup.tar").open("rb") as file:
        compose("run", "--rm", "-T", "trainer-backend", "turnwise-trainer", "restore", stdin=file)
    compose("up", "--detach", "--wait")
    ended = until(job_id, iteration=12, state="succeeded")
    assert ended["name"] == "crafter_cpu"
