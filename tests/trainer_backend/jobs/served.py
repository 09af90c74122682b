"""A trainer service with actors for jobs, asked in this process."""

import asyncio
import atexit
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from service_kit.settings import read_settings
from tests.openapi import Document
from trainer_backend.jobs.app import create_app
from trainer_backend.jobs.check_process import CheckProcess
from trainer_backend.jobs.server import open_service
from trainer_backend.jobs.service import Service
from trainer_backend.jobs.settings import Settings
from trainer_backend.store import jobs

ADDRESS = "http://127.0.0.1:8100"
LONG_S = 60.0


@cache
def checks() -> CheckProcess:
    """One for all tests of this process: its imports take a second."""
    made = CheckProcess()
    atexit.register(made.close)
    return made


@cache
def openapi() -> Document:
    """What a service declares, of an app that is not started."""
    with TemporaryDirectory() as folder, open_service(settings_for(Path(folder)), checks()) as service:
        return Document(create_app(service).openapi())


def acted(run_dir: Path) -> Sequence[str]:
    """The command of an actor (acting_job.py)."""
    return (sys.executable, "-m", "tests.trainer_backend.jobs.acting_job", str(run_dir))


def settings_for(data_dir: Path, *, environ: dict[str, str] | None = None, **flags: Any) -> Settings:
    """Of a service in that folder, by its flags; it goes round quickly."""
    found = read_settings(Settings, environ or {}, data_dir=data_dir, **flags)
    return found.model_copy(update={"round_s": 0.05, "first_wait_s": 0.01})


@dataclass
class Served:
    """A service that runs, and a client of it."""

    service: Service
    client: httpx.AsyncClient

    async def post(self, name: str, **tables: Any) -> str:
        """The id of a new job that plays `name`."""
        answer = await self.client.post("/jobs", json={"config": document(name, **tables)})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    async def train(self, name: str) -> str:
        """The id of a new job that plays `name` and trains."""
        job_id = await self.post(name)
        await self.until_it_trains(job_id)
        return job_id

    async def job(self, job_id: str) -> dict[str, Any]:
        answer = await self.client.get(f"/jobs/{job_id}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def ask(self, verb: str, job_id: str) -> httpx.Response:
        return await self.client.post(f"/jobs/{job_id}/{verb}")

    async def when(self, job_id: str, holds: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """The job, once that holds of it."""
        async with asyncio.timeout(LONG_S):
            while True:
                seen = self.service.news.count(job_id)
                if holds(job := await self.job(job_id)):
                    return job
                await self.service.news.wait(job_id, seen, at_most_s=0.2)

    async def until(self, job_id: str, *states: str, iteration: int = 0) -> dict[str, Any]:
        """The job, once it is in one of these states and so far."""
        return await self.when(
            job_id,
            lambda job: job["state"] in states and (job["progress"] or {}).get("iteration", 0) >= iteration,
        )

    async def until_it_trains(self, job_id: str) -> dict[str, Any]:
        """The job, once its process listens: before that a signal would end it at once."""
        await self.until(job_id, "running")
        return await self.when(job_id, lambda job: (job["progress"] or {}).get("state") == "training")

    async def row(self, job_id: str) -> Any:
        return await asyncio.to_thread(jobs.get, self.service.store, job_id)


def document(name: str, **tables: Any) -> dict[str, Any]:
    """A job that is valid, and called so."""
    return {"job": {"name": name}, "model": {"preset": "tiny-0.3m"}, **tables}


@asynccontextmanager
async def serving(settings: Settings, *, killed: bool = False) -> AsyncIterator[Served]:
    """A service, from its start to its stop in order; `killed`: its processes die with it instead.

    Every answer is held against /openapi.json.
    """
    with open_service(settings, checks(), command=acted) as service:
        app = create_app(service)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        hooks = {"response": [openapi().check]}
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url=ADDRESS, event_hooks=hooks) as client,
        ):
            yield Served(service, client)
            if killed:
                await _kill(service)


async def _kill(service: Service) -> None:
    """As kill -9 of a service: pipes close, and nothing is written down."""
    supervisor = service.supervisor
    assert supervisor is not None
    async with supervisor._between_rounds:
        supervisor._closing = True  # no round comes after this one
        processes = [slot.process for slot in supervisor.slots.values() if slot.process is not None]
        supervisor.slots.clear()
        for process in processes:
            process.signal(signal.SIGKILL)
        for process in processes:
            await process.ended()
