"""A database that answers nothing, at once or after a wait: the service says so, and jobs go on."""

import asyncio
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs

from tests.processes import service, wait_until
from tests.trainer_backend.jobs.served import LONG_S, document, serving, settings_for
from tests.trainer_backend.jobs.test_a_job_s_life import iterate, release
from tests.trainer_backend.store.postgres import Postgres
from trainer_backend.jobs.events import Place, _stream
from trainer_backend.jobs.slots import Line, wait_for_threads
from trainer_backend.rundir.lock import run_lock
from trainer_backend.rundir.state import read_state
from trainer_backend.store.database import StoreUnavailable


@pytest.mark.timeout(300)
async def test_in_the_middle_jobs_go_on_and_all_that_they_did_is_there_afterwards(tmp_path: Path, postgres):
    with postgres.database() as url, capture_logs() as logs:
        async with serving(settings_for(tmp_path, database_url=url, max_jobs=2)) as served:
            ending, staying = [await served.post("waiting") for _ in range(2)]
            folders = [
                Path((await served.until_it_trains(job_id))["run_dir"]) for job_id in (ending, staying)
            ]
            await iterate(served, staying, 1)
            stream = _stream(served.service, staying, Place())
            first = [await anext(stream)]
            await asyncio.to_thread(postgres.kill)
            for method, path in (
                ("GET", "/jobs"),
                ("POST", f"/jobs/{staying}/cancel"),
                ("GET", f"/jobs/{staying}"),
            ):
                answer = await served.client.request(method, path)
                assert (answer.status_code, answer.json()["code"]) == (503, "store_unavailable")
                assert answer.headers["retry-after"] == "5" and str(tmp_path) not in answer.text
            metrics = await served.client.get("/metrics")
            assert "turnwise_trainer_store_up 0.0" in metrics.text
            (folders[0] / "go").touch()  # one job ends, the other continues, and neither can be stored
            (folders[1] / "iterate").touch()
            while b"event: store" not in first[-1]:
                first.append(await anext(stream))
            assert served.service.supervisor is not None
            process = served.service.supervisor.slots[ending].process
            assert process is not None and await process.ended() == 0
            while (await served.client.get("/health")).json()["store"] == "up":
                await asyncio.sleep(0.01)
            await asyncio.to_thread(postgres.start)
            job = await served.until(ending, "succeeded")
            assert job["attempt"] == 1
            await served.until(staying, "running", iteration=2)
            async for event in stream:
                first.append(event)
                if b'"iteration": 2' in event:
                    break
            assert (await served.client.get("/health")).json()["store"] == "up"
            told = [line["event"] for line in logs if line["event"].startswith("store_")]
            assert told == ["store_away", "store_back"], "once each, however long it is away"
            await release(served, staying)
            await served.until(staying, "succeeded")
            found = await served.client.get(f"/jobs/{staying}/metrics?names=policy/version")
            assert found.json()["series"]["policy/version"]["iterations"] == [1, 2]


@contextmanager
def acting(folder: Path, url: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """A service as a process, which gives jobs all the time that they want to end."""
    with (
        service("tests.trainer_backend.jobs.acted_service", str(folder), url, cwd=folder) as found,
        httpx.Client(base_url=found[1], timeout=30.0) as client,
    ):
        yield found[0], client


until = partial(wait_until, within_s=LONG_S)


def started(client: httpx.Client, plays: str) -> tuple[str, Path]:
    """A job that trains: its id and its run directory."""
    job = client.post("/jobs", json={"config": document(plays)}).json()
    folder = Path(job["run_dir"])
    until(lambda: told(folder) == "training")
    return str(job["id"]), folder


def told(folder: Path) -> str | None:
    state = read_state(folder)
    return state.state if state is not None else None


def refused(client: httpx.Client) -> bool:
    """Whether the service takes no connection any more: it has heard the first signal."""
    try:
        client.get("/health")
    except httpx.TransportError:
        return True
    return False


@pytest.mark.timeout(300)
async def test_told_to_stop_it_lets_jobs_save_a_second_signal_kills_the_rest_and_the_next_start_goes_on(
    tmp_path: Path, postgres: Postgres
):
    with postgres.database() as url:
        with acting(tmp_path, url) as (process, client):
            ending, ends = started(client, "waiting")
            staying, stays = started(client, "waiting")
            saving, saves = started(client, "stubborn")
            postgres.freeze()
            try:
                (ends / "go").touch()  # a round hangs in storing that
                until(lambda: client.get("/health").json()["store"] == "away")
                process.send_signal(signal.SIGTERM)
                until(lambda: refused(client) and told(stays) == "stopped")
                process.send_signal(signal.SIGTERM)
                assert process.wait(LONG_S) == 0
                assert (told(ends), told(stays), told(saves)) == ("ended", "stopped", "training")
                with run_lock(saves):  # its process was killed, and has ended
                    pass
            finally:
                postgres.thaw()
        async with serving(settings_for(tmp_path, database_url=url, max_jobs=3, stop_grace_s=0.1)) as served:
            await served.until(ending, "succeeded")
            assert (await served.until_it_trains(staying))["attempt"] == 2
            assert (await served.job(saving))["state"] == "running"


async def test_one_that_hangs_is_given_up_and_holds_one_thread_whatever_is_asked_after_it():
    line, go, done = Line("hanging", "sqlite:///x", 0.05), threading.Event(), []

    def hanging() -> None:
        go.wait()
        done.append("late")

    with pytest.raises(StoreUnavailable, match=r"sqlite:///x did not answer within 0\.05 s"):
        await line.ask(hanging)
    for _ in range(5):
        with pytest.raises(StoreUnavailable):
            await line.ask(done.append, "never")
    assert sum(thread.name.startswith("hanging") for thread in threading.enumerate()) == 1
    async with asyncio.timeout(60):
        await wait_for_threads([line.thread], at_most_s=0.01)  # its end is not waited for without end
    go.set()
    await wait_for_threads([line.thread], at_most_s=60.0)
    assert done == ["late"], "what was given up before it began is not done later"
