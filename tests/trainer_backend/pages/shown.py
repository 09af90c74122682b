"""The dashboard over runs that can be worked by hand: a store, an application, a client."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from fastapi import FastAPI
from starlette.testclient import TestClient

from tests.conftest import tiny_job
from tests.trainer_backend.pages.hand_made import small_run
from trainer_backend.errors import JobError, TaskAppError
from trainer_backend.jobs.posted import Checked, Finding
from trainer_backend.pages.app import router
from trainer_backend.pages.page import Dashboard
from trainer_backend.pages.stored import Frames, FrameSource
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.rundir.rollout_files import Credit, read_rollouts, write_rollouts
from trainer_backend.store import jobs
from trainer_backend.store.database import JobConflict, Store, open_store
from trainer_backend.store.rows import Job
from trainer_backend.store.sync import sync_run

NOON = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
PNG = b"\x89PNG of a game"


def numbered_run(path: Path) -> RunDirectory:
    """`small_run` with ids as a real run has them: `r/train/2/1/0` is of iteration 2, group 1, sibling 0.

    Group 0 of an iteration plays world 1 for two decisions, group 1 world 2 for one.
    """
    run = small_run(tiny_job(), path)
    for iteration in (1, 2):
        credits = [Credit([1.0, 0.5 * iteration], [0.0, 0.0]), Credit([3.0], [0.0])]
        _write(run, f"iteration_{iteration}", f"r/train/{iteration}", credits)
    for iteration in (0, 2):
        _write(run, f"evaluation_{iteration}", f"r/eval/{iteration}", None)
    return run


def _write(run: RunDirectory, name: str, prefix: str, credits: Sequence[Credit] | None) -> None:
    path = run.rollouts_file(name)
    named = [
        item.model_copy(update={"rollout_id": f"{prefix}/{number}/0"})
        for number, item in enumerate(read_rollouts(path))
    ]
    write_rollouts(path, named, credits)


class DeskOfTests:
    """Keeps what it is asked; refuses what holds `wrong`."""

    def __init__(self, store: Store) -> None:
        self.store, self.submitted, self.asked = store, [], []

    async def check(self, text: str) -> Checked:
        if "wrong" in text:
            wrong = Finding(severity="error", text="wrong <b>is</b> not a key", line=2)
            return Checked(ok=False, findings=(wrong,))
        unread = Finding(severity="warning", text="[compute] is not read", line=None)
        return Checked(ok=True, findings=(unread,) if "compute" in text else ())

    async def submit(self, text: str, form: str) -> Job:
        if "wrong" in text:
            raise JobError("wrong is not a key")
        self.submitted.append((text, form))
        return jobs.create(self.store, Job(name="new", config=text, home="h"))[0]

    async def control(self, job_id: str, action: str) -> Job:
        job = jobs.get(self.store, job_id)
        if job.state == "succeeded":
            raise JobConflict(f"job {job_id} is succeeded, so there is nothing to {action}")
        self.asked.append((job_id, action))
        return job


def drawn(_services, _config, episode, turns):
    """A picture for each turn; of world 2 nobody draws any."""
    if episode.seed == 2:
        raise TaskAppError("nobody <i>draws</i> this")
    return {turn: PNG + str(turn).encode() for turn in turns}


class Shown:
    """A dashboard with its client."""

    def __init__(self, folder: Path, *, runs_jobs: bool = True, source: FrameSource = drawn) -> None:
        self.store = open_store(f"sqlite:///{folder}/store.db", clock=lambda: NOON)
        self.desk = DeskOfTests(self.store)
        self.dashboard = Dashboard(
            self.store, self.desk if runs_jobs else None, lambda: NOON,
            examples=(("demo", "[model]\n"), ("other", "# other\n")), frames=Frames(source),
        )  # fmt: skip
        app = FastAPI()
        app.include_router(router)
        app.state.dashboard = self.dashboard
        self.client = TestClient(app, follow_redirects=False)

    def add(self, run: RunDirectory, name: str = "tiny", **changes) -> str:
        """The id of a job for a run directory, synced."""
        config = (run.path / "job.toml").read_text()
        new = {"name": name, "config": config, "home": "h", "state": "succeeded", "run_dir": str(run.path)}
        job, _ = jobs.create(self.store, Job(**(new | {"run_id": run.run_id} | changes)))
        sync_run(self.store, job.id, run)
        return job.id

    def small(self, path: Path, **changes) -> str:
        return self.add(numbered_run(path), **changes)

    def page(self, address: str, status: int = 200) -> str:
        answer = self.client.get(address)
        assert answer.status_code == status, answer.text
        return answer.text
