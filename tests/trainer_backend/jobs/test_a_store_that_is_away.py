"""A database that does not answer: 503 where it is needed, and jobs go on."""

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.trainer_backend.jobs.served import serving, settings_for
from tests.trainer_backend.jobs.test_a_job_s_life import iterate, release
from trainer_backend.jobs.events import Place, _stream


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


@pytest.mark.timeout(300)
async def test_the_same_life_on_postgresql(tmp_path: Path, postgres):
    with postgres.database() as url:
        settings = settings_for(tmp_path, database_url=url)
        async with serving(settings, killed=True) as served:
            running = await served.post("waiting")
            waiting = await served.post("quick")
            await iterate(served, running, 1)
        async with serving(settings) as served:
            await release(served, running)
            assert (await served.until(running, "succeeded"))["attempt"] == 2
            await served.until(waiting, "succeeded")
