"""Two real task apps over real sockets, processes where one is killed: it stays away, or comes back."""

import asyncio
import signal
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest
from pydantic import SecretStr

from tests.conftest import TASK_APP_KEY, task_app_thread, tiny_job
from tests.trainer_backend.collect.task_app_process import TaskAppProcess, started
from trainer_backend import job_parts
from trainer_backend.collect.apps import TaskApps
from trainer_backend.collect.batch import Batch
from trainer_backend.collect.dispatcher import Dispatcher
from trainer_backend.collect.plan import Inference
from trainer_backend.collect.task_apps import describe
from trainer_backend.collect.trial import try_job
from trainer_backend.pages.stored import played_frames

JOB = tiny_job(rollout__max_turns=20, warmup__episodes=24, rollout__max_concurrent_rollouts=8)
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


def place(rollout: dict[str, Any]) -> tuple[str, int]:
    return rollout["group_id"], rollout["sibling"]


@pytest.fixture(scope="module")
def undisturbed() -> list[Any]:
    async def collect() -> list[Any]:
        async with TaskApps([url], TASK_APP_KEY, timeout_s=20) as apps:
            return played(await Dispatcher(apps, timeout_s=120).collect(PLAN))

    with task_app_thread() as url:
        return asyncio.run(collect())


async def test_two_collections_of_one_run_at_the_same_time_each_get_their_own(undisturbed):
    with task_app_thread() as url:
        async with TaskApps([url], TASK_APP_KEY, timeout_s=20) as apps:
            dispatcher = Dispatcher(apps, timeout_s=120, max_running=8)
            parts = await asyncio.gather(dispatcher.collect(PLAN[:12]), dispatcher.collect(PLAN[12:]))
    assert [len(part.rollouts) for part in parts] == [12, 12]
    assert sorted(played(parts[0]) + played(parts[1]), key=place) == sorted(undisturbed, key=place)
    assert [part.failures for part in parts] == [{}, {}]
    assert [[figures.finished for figures in part.apps.values()] for part in parts] == [[12], [12]]


async def test_a_task_app_started_again_on_its_port_takes_work_in_the_same_batch(tmp_path, undisturbed):
    first, second = TaskAppProcess(tmp_path / "a"), TaskAppProcess(tmp_path / "b")
    killed, lost, back = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def kill(done: int, total: int) -> None:
        if done == 1:
            second.child.signal(signal.SIGKILL)
            first.child.signal(signal.SIGSTOP)  # it finishes nothing before the other one is back
            killed.set()

    def tell(sentence: str) -> None:
        if sentence.startswith("task app lost: "):
            lost.set()
        if sentence == f"task app answers: {second.url}":
            back.set()

    async with (
        started(first, second),
        TaskApps([first.url, second.url], TASK_APP_KEY, timeout_s=60, tell=tell) as apps,
    ):
        before = apps.members[1].instance_id
        dispatcher = Dispatcher(apps, timeout_s=120, max_running=8)
        collecting = asyncio.ensure_future(dispatcher.collect(PLAN, kill))
        await killed.wait()
        await second.child.ended()
        await lost.wait()  # started sooner, it would answer a retry, and the loss would go unseen
        await second.start()
        await back.wait()
        first.child.signal(signal.SIGCONT)
        found = await collecting
        await dispatcher.ack("run", found.all)
        after = apps.members[1].instance_id
    assert played(found) == undisturbed
    assert after != before
    assert [rollout for rollout in found.rollouts if rollout.instance_id == after]
    figures = found.apps[f"127.0.0.1:{second.port}"]
    assert (figures.outages, figures.answers) == (1, True)
    assert figures.losses >= 1 and not found.failed
    assert found.failures == {"task_app_lost": figures.losses}
    assert sum(part.finished for part in found.apps.values()) == len(PLAN) == 24


async def test_a_name_with_two_addresses_is_two_task_apps(undisturbed):
    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.1", "127.0.0.2"]

    with task_app_thread() as first:
        port = urlsplit(first).port or 0
        name = f"dns+http://task-apps:{port}"
        with task_app_thread(host="127.0.0.2", port=port) as second:
            async with TaskApps([name], TASK_APP_KEY, timeout_s=20, resolve=resolve) as apps:
                assert [app.url for app in apps.serving] == [first, second]
                found = await Dispatcher(apps, timeout_s=120, max_running=8).collect(PLAN)
    assert played(found) == undisturbed
    assert {figures.answers for figures in found.apps.values()} == {True}
    assert min(figures.finished for figures in found.apps.values()) >= 1


async def test_the_siblings_of_a_group_live_on_one_task_app():
    plan = job_parts.planner(JOB, "run").prompts(4)
    plan = [
        request.model_copy(update={"group_id": f"g{number // 4}", "rollout_id": f"run/{number}"})
        for number, request in enumerate(plan * 4)
    ]
    with task_app_thread() as first, task_app_thread() as second:
        async with TaskApps([first, second], TASK_APP_KEY, timeout_s=20) as apps:
            found = await Dispatcher(apps, timeout_s=120).collect(plan)
    homes: dict[str, set[str]] = {}
    for rollout in found.rollouts:
        homes.setdefault(rollout.group_id, set()).add(rollout.instance_id)
    assert [len(instances) for instances in homes.values()] == [1] * 4
    assert sorted(figures.finished for figures in found.apps.values()) == [8, 8]


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
