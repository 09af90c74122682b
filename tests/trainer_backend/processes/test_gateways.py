"""Gateways that are processes of their own: real children, a real task app, real kills."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from pydantic import SecretStr

from shared_schemas.rollouts import RolloutRequest
from tests.conftest import ListReporter, at_the_task_app, policy_server, tiny_job, warmed_up
from tests.processes import until
from tests.trainer_backend.learner.hand_made import change
from trainer_backend import job_parts, learner_parts
from trainer_backend.collect.batch import Batch
from trainer_backend.collect.dispatcher import Dispatcher
from trainer_backend.collect.plan import Inference, retried
from trainer_backend.errors import EngineStopped, NotPlaced, WeightsRefused
from trainer_backend.inference.served_policy import PolicyFacts
from trainer_backend.job.schema import JobConfig
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.models import load_model_folder
from trainer_backend.processes.gateway import Gateway, load_s
from trainer_backend.processes.gateways import Gateways, divide_table
from trainer_backend.processes.launching import LOCAL, Place, Process, Role
from trainer_backend.processes.policy_server import first_breakdown
from trainer_backend.run.fixed_setup import FixedSetup
from trainer_backend.rundir.layout import RunDirectory, create_run
from trainer_backend.rundir.spool import plan_id, request_digests


class Learner:
    """A learner whose folders can be cut short."""

    def __init__(self, real: LocalLearner) -> None:
        self.real = real
        self.damage = ""

    def publish(self, folder: Path, part: str) -> None:
        if self.damage == "missing":
            return
        self.real.publish(folder, part)
        if self.damage == "cut":
            weights = folder / "model.safetensors"
            os.truncate(weights, weights.stat().st_size // 2)

    def score_ids(self, ids: Sequence[int]) -> list[float]:
        return self.real.score_ids(ids)


def answers(batch: Batch) -> dict[str, list[Any]]:
    """By the plan's id, the exact tokens of each decision."""
    return {
        plan_id(rollout.rollout_id): [step.policy_logprobs for step in rollout.trajectory.steps]
        for rollout in batch.rollouts
        if rollout.trajectory is not None
    }


async def versions(inference: Inference) -> list[int]:
    """The version that each gateway serves."""
    assert inference.key is not None
    headers, served = {"Authorization": f"Bearer {inference.key.get_secret_value()}"}, []
    async with aiohttp.ClientSession(headers=headers) as session:
        for url in inference.urls:
            async with session.get(f"{url}/v1/models") as reply:
                served.append((await reply.json())["data"][0]["policy_version"])
    return served


class FirstElsewhere:
    """A launcher that places the first gateway as on another machine, at ports of its own."""

    async def start(self, role: Role) -> Process:
        if role.name != "gateway_0":
            return await LOCAL.start(role)
        place = Place(host="127.0.0.1")
        return await LOCAL.start(replace(role, command=lambda here: role.command(place), descriptors=()))

    def key(self, variable: str) -> str:
        return LOCAL.key(variable)


def make_learner(job: JobConfig) -> Learner:
    return Learner(LocalLearner.fresh(learner_parts.learner_config(job), []))


async def test_two_gateways_sample_what_one_process_does_refuse_a_cut_publish_and_end_with_the_run(
    trained: Any, tmp_path: Path
):
    # One request at a time, so that its numbers do not depend on what else is being sampled.
    own = {**warmed_up(trained), "inference__deterministic": True}
    alone, apart = tiny_job(**own), tiny_job(**own, cluster={}, services__gateways=2)
    directory, reporter = create_run(apart, tmp_path / "run"), ListReporter()
    async with job_parts.task_apps(at_the_task_app(alone), tmp_path / "log") as apps:
        dispatcher, learner = Dispatcher(apps, timeout_s=300), make_learner(alone)
        change(learner.real)
        with policy_server(alone) as here:
            async with here.serving(learner.real) as actor:
                await actor.publish(1)
                planner = job_parts.planner(alone, "alone", actor.inference)
                expected = answers(await dispatcher.collect(planner.training(1)))
        learner = make_learner(apart)
        with job_parts.gateways(apart, FixedSetup(), directory, reporter.say, FirstElsewhere()) as gateways:
            planner = job_parts.planner(apart, "apart", gateways.inference)
            async with gateways.serving(learner) as server:
                server.watch(reporter)
                await server.publish(0)
                change(learner.real)
                await server.publish(1)
                found = await server.while_serving(dispatcher.collect(planner.training(1)))
                totals, each = await server.totals(), [await one.totals() for one in server.gateways]
                for damage, version, told in (
                    ("missing", 9, "no such folder"),
                    ("cut", 5, "the file cannot be read"),
                ):
                    learner.damage = damage
                    with pytest.raises(WeightsRefused, match=told) as caught:
                        await server.publish(version)
                    assert f"version_{version}" in str(caught.value)
                    assert await versions(gateways.inference) == [1, 1], "the version before serves"
                pids = [gateway.pid for gateway in server.gateways]
    assert answers(found) == expected and len(expected) == 8
    asked = [requests["requests"] for requests in each]
    assert min(asked) >= 8 and sum(asked) == 64 == totals["requests"]
    assert len(set(gateways.inference.urls)) == 2
    for gateway in ("gateway_0", "gateway_1"):
        states = [state for role, name, state in reporter.processes if (role, name) == ("gateway", gateway)]
        assert states == ["starting", "serving", "serving"]  # of versions 0 and 1
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


class Unplaced:
    """A gateway without room anywhere; it stands for the weights too."""

    renew, serve_again, servers, restarts, known_totals = None, None, None, 0, {"requests": 3}

    def __init__(self) -> None:
        self.ready = asyncio.Event()

    async def write(self, policy_version: int) -> None: ...

    async def deliver(self, work: Awaitable[None]) -> None:
        await work

    async def keep(self, version: None) -> str:
        raise NotPlaced("no node has room", hint="Add one.")

    async def totals(self) -> dict[str, float]:
        await self.ready.wait()
        raise AssertionError("it is never ready")

    async def verify(self) -> list[str]:
        await self.ready.wait()
        raise AssertionError("it is never ready")

    async def close(self) -> None: ...


async def test_a_run_that_is_stopped_before_its_first_publish_does_not_wait_for_gateways_that_never_start():
    unplaced: Any = Unplaced()
    assert await Gateways(unplaced, [unplaced], unplaced).verify() == []


async def test_gateways_without_a_place_end_the_run_with_the_launchers_error():
    unplaced: Any = Unplaced()
    gateways = Gateways(unplaced, [unplaced], unplaced)
    with pytest.raises(NotPlaced, match=r"no node has room\. Add one\."):
        await gateways.publish(0)
    assert await gateways.totals() == {"requests": 3, "gateway_restarts": 0}
    await gateways.close()


class FolderLearner:
    """A learner whose folders are empty."""

    def publish(self, folder: Path, part: str) -> None:
        folder.mkdir(parents=True)


Scripted = Callable[..., AbstractAsyncContextManager[tuple[Gateways, ListReporter]]]


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scripted:
    """Gateways whose process does what a script of `scripted_child` says."""
    shutil.copy(Path(__file__).with_name("scripted_child.py"), tmp_path / "sitecustomize.py")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    @asynccontextmanager
    async def serving(script: str, *, serves: bool = True) -> AsyncIterator[tuple[Gateways, ListReporter]]:
        monkeypatch.setenv("SCRIPT", script)
        job, reporter = tiny_job(cluster={}), ListReporter()
        directory = create_run(job, tmp_path / "run")
        with job_parts.gateways(job, FixedSetup(), directory, reporter.say) as gateways:
            async with asyncio.timeout(60), gateways.serving(FolderLearner()) as server:
                if serves:
                    await server.publish(0)
                yield server, reporter

    return serving


async def test_a_gateway_that_dies_again_and_again_ends_the_run_with_its_logs_last_line(
    scripted: Scripted, tmp_path: Path
):
    (tmp_path / "began").touch()  # so that no start ever serves
    async with scripted("hears of moves", serves=False) as (server, _):
        RunDirectory(tmp_path / "run", "run").gateway_log(0).write_text("its last words\n", encoding="utf-8")
        publish = asyncio.ensure_future(server.publish(0))
        killed: set[int] = set()
        while not publish.done():
            await asyncio.sleep(0.01)
            pid = server.gateways[0].pid
            if pid is not None and pid not in killed:
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineStopped) as caught:
            await publish
    assert len(killed) == 3
    assert "gateway_0 ended 3 times without answering a request, with SIGKILL" in str(caught.value)
    assert str(caught.value).endswith("gateway_0.log ends with: its last words")


async def test_totals_of_broken_gateways_are_the_newest_that_are_known(scripted: Scripted):
    async with scripted("breaks in loads") as (server, _):
        assert await server.totals() == {"requests": 3, "gateway_restarts": 0}
        with pytest.raises(EngineStopped, match="gateway_0: its engine has failed"):
            await server.publish(1)
        assert await server.totals() == {"requests": 3, "gateway_restarts": 0}


async def test_a_gateway_that_lives_and_gives_no_sign_of_life_is_killed_and_started_again(
    scripted: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Gateway, "silence_s", 0.2)
    async with scripted("wedges") as (server, reporter):
        server.watch(reporter)
        await until(lambda: (tmp_path / "starts").read_text().split() == ["0", "0"])
        await server.gateways[0].ready.wait()
    assert [state for role, _, state in reporter.processes if role == "gateway"][-2:] == [
        "starting",
        "serving",
    ]
    assert reporter.lines[:2] == [
        "gateway_0 has given no sign of life for 0.2 s, and is killed",
        "gateway_0 ended with SIGKILL (often the system, short of memory), and is started again",
    ]


async def test_the_first_totals_are_asked_for_until_there_are_some(scripted: Scripted):
    async with scripted("no first totals") as (server, _):
        assert await server.totals() == {"requests": 3, "gateway_restarts": 0}


async def test_a_process_that_started_with_the_version_before_a_load_serves_no_one(
    scripted: Scripted, tmp_path: Path
):
    """The reply to the load comes after the death of its process, when the next one is starting."""
    async with scripted("answers after its end") as (server, reporter):
        (gateway,) = server.gateways
        publish = asyncio.ensure_future(server.publish(1))
        await until(lambda: (tmp_path / "starts").read_text().split() == ["0", "0"])
        (tmp_path / "answer").touch()
        await publish
        (tmp_path / "ready").touch()
        await gateway.ready.wait()
    assert (tmp_path / "starts").read_text().split() == ["0", "0", "1"]
    assert reporter.lines[-1] == "gateway_0 serves version 1 again"


async def test_a_gateway_that_starts_is_told_of_servers_that_have_moved_once_it_serves(
    scripted: Scripted, tmp_path: Path
):
    async with scripted("hears of moves") as (server, _):
        assert server.gateways[0].pid is not None
        os.kill(server.gateways[0].pid, signal.SIGKILL)
        await until(lambda: (tmp_path / "starts").read_text().split() == ["0", "0"])
        await server.move_server("http://a", "http://b")
        (tmp_path / "ready").touch()
        await until((tmp_path / "moves").exists)
    assert (tmp_path / "moves").read_text() == '["http://a","http://b"]'


async def test_a_load_that_meets_a_dead_engine_before_its_gateway_ended_is_asked_again(
    scripted: Scripted, tmp_path: Path
):
    async with scripted("outlives its engine") as (server, reporter):
        publish = asyncio.ensure_future(server.publish(1))
        await until((tmp_path / "answered").exists)
        (tmp_path / "end").touch()
        await publish
    assert reporter.lines[0] == "gateway_0 ended with exit code 1, and is started again"


def test_a_load_may_take_as_long_as_a_pool_of_servers_allows_itself():
    table = tiny_job(inference={"engine": "vllm", "urls": ["http://h:1"], "max_model_len": 256}).inference
    assert load_s(table.model_copy(update={"replica_wait_s": 900.0})) == 600 + 3 * 900


async def test_a_version_that_kills_its_gateway_every_time_is_refused_and_the_one_before_serves(
    scripted: Scripted, tmp_path: Path
):
    async with scripted("dies in loads") as (server, _):
        assert await server.totals() == {"requests": 3, "gateway_restarts": 0}
        with pytest.raises(WeightsRefused) as caught:
            await server.publish(1)
        assert "gateway_0 ended 3 times in 'load'" in str(caught.value)
        assert str(caught.value).endswith("gateway_0.log ends with: no memory for version 1")
        assert await server.totals() == {"requests": 6, "gateway_restarts": 3}, "counts never go back"
    assert (tmp_path / "starts").read_text().split() == ["0"] * 4


async def test_an_engine_without_a_keeper_counts_as_broken():
    async def look_after() -> None:
        raise OSError("no space left")

    watch = asyncio.ensure_future(look_after())
    assert (await first_breakdown([], [watch])).startswith("OSError: no space left (test_gateways.py:")


def requests_at(urls: Sequence[str], run_id: str = "run.1") -> list[RolloutRequest]:
    first, *others = urls
    actor = Inference(first, "tiny/actor", SecretStr("key"), 256, other_urls=tuple(others))
    return job_parts.planner(tiny_job(rollout__episodes_per_batch=256), run_id, actor).training(1)


def test_a_rollout_asks_one_gateway_of_all_by_its_place_in_the_plan():
    urls = ("http://a:1", "http://b:1", "http://c:1")
    asked = [request.policy.config["inference_url"] for request in requests_at(urls)]
    # 256 draws of three: a standard deviation is 7.5, and 5 of them are allowed.
    assert all(256 / 3 - 38 < asked.count(url) < 256 / 3 + 38 for url in urls)
    assert asked == [request.policy.config["inference_url"] for request in requests_at(urls, "run.2")]
    actor = Inference("http://a:1", "m", None, other_urls=urls[1:])
    request = requests_at(urls)[0]
    assert actor.for_rollout(retried(request).rollout_id).url == asked[0]
    assert all(request.policy.inference_key is not None for request in requests_at(urls))


def test_no_two_gateways_control_the_same_server():
    urls = [f"http://h:{port}" for port in range(1, 6)]
    table = tiny_job(inference={"engine": "vllm", "urls": urls, "threads": 5, "max_model_len": 256}).inference
    shares = [divide_table(table, number, 2) for number in range(2)]
    assert [share.urls for share in shares] == [tuple(urls[::2]), tuple(urls[1::2])]
    assert [share.threads for share in shares] == [2, 2]
    assert divide_table(table, 0, 1) == table


def test_a_spool_does_not_depend_on_the_number_or_the_addresses_of_the_gateways():
    one, two = ("http://a:1",), ("http://b:1", "http://c:1")
    assert request_digests(requests_at(one), one) == request_digests(requests_at(two, "run.9"), two)
    assert request_digests(requests_at(two), two[:1]) != request_digests(requests_at(two), two)


def test_a_folder_tells_the_same_of_a_policy_as_its_model(model_folders: Mapping[str, Path], tmp_path: Path):
    table = tiny_job().model
    for folder in model_folders.values():
        of_folder = PolicyFacts.of_folder(table, folder)
        of_model = PolicyFacts.of_model(table, *load_model_folder(folder))
        assert (of_folder.stop_ids, of_folder.vocabulary) == (of_model.stop_ids, of_model.vocabulary)
    bare = shutil.copytree(model_folders["qwen3"], tmp_path / "bare")
    (bare / "generation_config.json").unlink()
    of_model = PolicyFacts.of_model(table, *load_model_folder(bare))
    assert PolicyFacts.of_folder(table, bare).stop_ids == of_model.stop_ids
