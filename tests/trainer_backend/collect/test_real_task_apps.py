"""Real task apps over real sockets: a process that is killed and comes back, and one that stays away."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from service_kit.process import PIPE, Child
from tests.conftest import TASK_APP_KEY, task_app, task_app_thread, tiny_job
from trainer_backend import job_parts
from trainer_backend.collect.apps import TaskApps
from trainer_backend.collect.batch import Batch
from trainer_backend.collect.dispatcher import Dispatcher
from trainer_backend.collect.plan import Inference
from trainer_backend.collect.task_apps import describe
from trainer_backend.collect.trial import try_job
from trainer_backend.pages.stored import played_frames

JOB = tiny_job(rollout__max_turns=20, warmup__episodes=16, rollout__max_concurrent_rollouts=8)
PLAN = job_parts.planner(JOB, "run").warmup()


def played(batch: Batch) -> list[Any]:
    """What came of each rollout, in order, but for where it ran and how long it took."""
    times = {"policy_s", "environment_s", "interaction_s"}
    return [
        rollout.model_dump(
            mode="json",
            exclude={
                "instance_id": True,
                "trajectory": {"wall_s": True, "steps": {"__all__": {"step_info": times}}},
            },
        )
        for rollout in batch.rollouts
    ]


class TaskAppProcess:
    """A process of its own, that a test may kill and start again on the same port. Use `started`."""

    child: Child
    url, port = "", 0

    def __init__(self, log_file: Path) -> None:
        self.log_file = log_file

    async def start(self) -> None:
        listens = ("--host", "127.0.0.1", "--port", str(self.port), "--exit-with-parent")
        with self.log_file.open("ab") as log:
            self.child = await Child.start(
                (sys.executable, "-m", "task_app", *listens), stdout=PIPE, stderr=log,
                env={**os.environ, "ENVIRONMENT_API_KEY": TASK_APP_KEY.get_secret_value()},
            )  # fmt: skip
        url = await self.child.address()
        assert url is not None, self.log_file.read_text()
        self.url, self.port = url, int(url.rpartition(":")[2])


@asynccontextmanager
async def started(task_app: TaskAppProcess) -> AsyncIterator[None]:
    await task_app.start()
    try:
        yield
    finally:
        await task_app.child.end_all()


@pytest.mark.usefixtures("tries_without_waits")
async def test_a_task_app_started_again_on_its_port_takes_work_in_the_same_batch(tmp_path):
    async with TaskApps([task_app()], TASK_APP_KEY, timeout_s=20) as apps:
        undisturbed = played(await Dispatcher(apps, timeout_s=120).collect(PLAN))
    process, lost = TaskAppProcess(tmp_path / "log"), asyncio.Event()

    def kill(done: int, total: int) -> None:
        if done == 1:
            process.child.signal(signal.SIGKILL)

    def tell(sentence: str) -> None:
        if sentence.startswith("task app lost: "):
            lost.set()

    async with (
        started(process),
        TaskApps([process.url], TASK_APP_KEY, timeout_s=60, lost_wait_s=120, tell=tell) as apps,
    ):
        (app,) = apps.members
        before = app.instance_id
        dispatcher = Dispatcher(apps, timeout_s=200, max_running=8)
        collecting = asyncio.ensure_future(dispatcher.collect(PLAN, kill))
        await lost.wait()  # started sooner, it would answer a retry, and the loss would go unseen
        await process.child.ended()
        await process.start()
        found = await collecting
        await dispatcher.ack("run", found.all)
    assert played(found) == undisturbed
    assert {rollout.instance_id for rollout in found.rollouts} == {before, app.instance_id}
    (figures,) = found.apps.values()
    assert (figures.finished, figures.outages, figures.answers) == (len(PLAN), 1, True) and not found.failed
    assert figures.losses >= 1
    assert found.failures == {"task_app_lost": figures.losses}


@pytest.mark.usefixtures("tries_without_waits")
async def test_one_that_is_not_there_at_the_start_is_told_and_the_other_does_everything(tmp_path):
    with task_app_thread() as one, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: every connection is refused
        gone = f"http://127.0.0.1:{taken.getsockname()[1]}"
        services = JOB.services.model_copy(
            update={"task_url": (gone, one), "task_api_key": TASK_APP_KEY, "request_timeout_s": 5.0}
        )
        job = JOB.model_copy(update={"services": services})
        async with job_parts.task_apps(job, tmp_path / "log") as apps:
            assert describe(apps).startswith(f"task app: {one}; not there: {gone}: GET /info: ")
            planner = job_parts.planner(
                job, "run", Inference("http://127.0.0.1:9", "tiny/actor", SecretStr(""))
            )
            await try_job(planner, apps, from_scratch=True)
            found = await Dispatcher(apps, timeout_s=60).collect(PLAN[:2])
        assert [figures.finished for figures in found.apps.values()] == [0, 2]
        episode = found.rollouts[0].trajectory
        frames = await asyncio.to_thread(
            played_frames, job.services, job.rollout.env_config, episode, {0, len(episode.steps)}
        )
    assert list(frames) == [0, len(episode.steps)]
