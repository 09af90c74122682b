"""A job from its post to its end, whatever is asked of it on the way, and whatever becomes of its process."""

import asyncio
import os
from pathlib import Path

import pytest

from tests.trainer_backend.jobs.served import Served, serving, settings_for
from trainer_backend.rundir.lock import run_lock
from trainer_backend.rundir.state import read_log, read_status
from trainer_backend.store import jobs
from trainer_backend.store.jobs import state_of_run
from trainer_backend.store.rows import Job


async def test_a_job_waits_runs_and_succeeds_and_all_that_it_did_is_in_the_store(served: Served):
    job_id = await served.post("quick")
    job = await served.until(job_id, "succeeded")
    assert (job["attempt"], job["code"], job["progress"]["iteration"]) == (1, None, 2)
    assert job["created"] <= job["started"] <= job["ended"]
    assert Path(job["run_dir"]).name.startswith("quick-")
    assert job["run_id"].startswith("quick.")
    answer = await served.client.get(f"/jobs/{job_id}/metrics", params={"names": "episode/outcome_reward"})
    assert answer.json()["series"] == {
        "episode/outcome_reward": {
            "iterations": [1, 2], "values": [1.5, 2.5], "low": [1.5, 2.5], "high": [1.5, 2.5],
        }
    }  # fmt: skip
    told = (await served.client.get(f"/jobs/{job_id}/log")).json()["lines"]
    assert [line["text"] for line in told] == ["start 1", "iteration 1", "iteration 2"]


async def test_as_many_run_at_a_time_as_were_allowed_and_the_rest_in_order(tmp_path: Path):
    async with serving(settings_for(tmp_path, max_jobs=2)) as served:
        ids = [await served.post("waiting") for _ in range(4)]
        for job_id in ids[:2]:
            await served.until_it_trains(job_id)
        assert [(await served.job(job_id))["state"] for job_id in ids[2:]] == ["queued", "queued"]
        await release(served, ids[1])
        await served.until(ids[1], "succeeded")
        await served.until(ids[2], "running")
        assert (await served.job(ids[3]))["state"] == "queued"


async def test_a_paused_job_goes_on_where_it_was(served: Served):
    job_id = await served.post("waiting")
    await iterate(served, job_id, 1)
    assert (await served.ask("pause", job_id)).json()["state"] in ("pausing", "paused")
    job = await served.until(job_id, "paused")
    assert (job["code"], job["wanted"]) == (None, "pause")
    assert (await served.ask("resume", job_id)).json()["state"] in ("queued", "running")
    await iterate(served, job_id, 2)
    await release(served, job_id)
    job = await served.until(job_id, "succeeded")
    assert (job["attempt"], job["progress"]["iteration"]) == (2, 2)


async def test_a_job_that_does_not_stop_in_time_is_killed(tmp_path: Path):
    async with serving(settings_for(tmp_path, stop_grace_s=0.1)) as served:
        job_id = await served.train("stubborn")
        await served.ask("cancel", job_id)
        await served.until(job_id, "cancelled")
        other = await served.train("stubborn")
        await served.ask("pause", other)
        job = await served.until(other, "paused")
        assert (job["code"], "SIGKILL" in job["detail"]) == ("killed", True)


async def test_a_crash_is_started_again(served: Served):
    job_id = await served.post("crashing")
    await release(served, job_id)
    job = await served.until(job_id, "succeeded")
    assert (job["attempt"], job["code"], job["detail"]) == (3, None, None)


async def test_the_files_of_a_run_say_what_killed_its_process(tmp_path: Path):
    async with serving(settings_for(tmp_path, restarts=0)) as served:
        job_id = await served.post("crashing")
        job = await served.until(job_id, "failed")
        folder = Path((await served.row(job_id)).run_dir)
        assert "killed by SIGKILL" in job["detail"]
        assert state_of_run(read_status(folder)) == ("failed", "killed", job["detail"])
        assert read_log(folder)[0][-1].text == f"failed: {job['detail']}"


async def test_a_refused_job_fails_at_once_and_can_be_queued_again(served: Served):
    job_id = await served.post("refused")
    job = await served.until(job_id, "failed")
    assert (job["attempt"], job["code"], job["detail"]) == (1, "job_invalid", "model.path holds no model")
    await served.ask("resume", job_id)
    job = await served.until(job_id, "failed")
    while job["attempt"] < 2:
        job = await served.until(job_id, "failed")
    # Refused before it could write a state, it has failed with what it printed.
    job = await served.until(await served.post("mute"), "failed")
    assert (job["code"], job["detail"]) == ("refused", "sinks.wandb cannot be opened")


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
async def test_a_restart_of_the_service_goes_on_with_what_ran_and_what_waited(tmp_path: Path, killed: bool):
    settings = settings_for(tmp_path)
    async with serving(settings, killed=killed) as served:
        running, waiting = [await served.post("waiting") for _ in range(2)]
        await iterate(served, running, 1)
    async with serving(settings) as served:
        await served.until_it_trains(running)
        assert (await served.job(waiting))["state"] == "queued"
        await iterate(served, running, 2)
        await release(served, running)
        job = await served.until(running, "succeeded")
        assert (job["attempt"], job["progress"]["iteration"]) == (2, 2)
        await served.until_it_trains(waiting)


@pytest.mark.parametrize(("verb", "state"), [("pause", "paused"), ("cancel", "cancelled")])
async def test_what_was_asked_before_a_kill_of_the_service_is_done_after_it(tmp_path, verb, state):
    settings = settings_for(tmp_path)
    async with serving(settings, killed=True) as served:
        job_id = await served.train("stubborn")
        await served.ask(verb, job_id)
    async with serving(settings) as served:
        job = await served.until(job_id, state)
        assert (job["wanted"], job["attempt"], job["ended"] is None) == (verb, 1, verb == "pause")


async def test_fewer_places_after_a_restart_put_the_youngest_back_into_the_queue(tmp_path: Path):
    async with serving(settings_for(tmp_path, max_jobs=2)) as served:
        first, second = [await served.post("waiting") for _ in range(2)]
        await served.until_it_trains(first)
        await served.until_it_trains(second)
    async with serving(settings_for(tmp_path, max_jobs=1)) as served:
        await served.until_it_trains(first)
        waiting = await served.until(second, "queued")
        assert (waiting["attempt"], (await served.job(first))["attempt"]) == (1, 2)


async def pause_one(served: Served) -> tuple[str, Path]:
    """A job that has trained and is paused, and its run directory."""
    job_id = await served.train("waiting")
    await served.ask("pause", job_id)
    return job_id, Path((await served.until(job_id, "paused"))["run_dir"])


async def test_a_run_directory_in_which_another_process_trains_is_waited_for(served: Served):
    job_id, folder = await pause_one(served)
    with run_lock(folder):
        await served.ask("resume", job_id)
        job = await served.until(job_id, "running")
        while job["code"] != "waiting":
            job = await served.until(job_id, "running")
        assert f"{folder} is being trained by process {os.getpid()}" in job["detail"]
    await release(served, job_id)
    job = await served.until(job_id, "succeeded")
    assert (job["attempt"], job["code"]) == (2, None)


async def test_and_not_without_end(tmp_path: Path):
    settings = settings_for(tmp_path)
    async with serving(settings.model_copy(update={"lock_wait_s": 0.0})) as served:
        job_id, folder = await pause_one(served)
        with run_lock(folder):
            await served.ask("resume", job_id)
            job = await served.until(job_id, "failed")
        assert f"{folder} is being trained by process {os.getpid()}" in job["detail"]


async def test_a_job_that_this_version_cannot_read_has_failed(served: Served):
    new = Job(
        name="old",
        config="[gone]\nkey = 1\n",
        home=served.service.data.home,
        run_dir=str(served.service.data.path / "old"),
    )
    row, _ = await asyncio.to_thread(jobs.create, served.service.store, new)
    job = await served.until(row.id, "failed")
    assert (job["code"], "gone is not a key" in job["detail"]) == ("job_invalid", True)


async def iterate(served: Served, job_id: str, iteration: int) -> None:
    """Let a waiting job do one more."""
    job = await served.until_it_trains(job_id)
    Path(job["run_dir"], "iterate").touch()
    await served.until(job_id, "running", iteration=iteration)


async def release(served: Served, job_id: str) -> None:
    """Let it come to its end."""
    job = await served.when(job_id, lambda job: job["progress"])
    Path(job["run_dir"], "go").touch()
