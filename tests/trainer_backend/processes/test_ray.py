"""Roles that Ray places, on one node of this machine."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

import trainer_backend
from tests.processes import until
from tests.trainer_backend.processes.ray_orchestrator import role
from trainer_backend.errors import JobError
from trainer_backend.processes.launching import Place
from trainer_backend.processes.ray import Node, RayLauncher, never_fits, on_node, refuse_other_release


def test_what_no_node_could_ever_hold_is_told_with_what_there_is():
    nodes = [{"CPU": 8.0, "GPU": 4.0}, {"CPU": 8.0}]
    assert never_fits(nodes, {"CPU": 2.0, "GPU": 2.0}, 2) is None
    assert never_fits(nodes, {"CPU": 5.0}, 2) is None
    assert never_fits(nodes, {"CPU": 5.0}, 3) is not None
    assert never_fits(nodes, {"CPU": 2.0, "GPU": 8.0}, 1) == (
        "it needs 1 times 2 CPU and 8 GPU, each on one node, and the nodes have 8 CPU and 4 GPU; "
        "8 CPU and 0 GPU"
    )
    assert never_fits([], {"CPU": 1.0}, 1).endswith("the nodes have nothing")


def test_a_node_with_another_release_is_refused_by_its_name():
    with pytest.raises(JobError, match=r"the node 10\.0\.0\.7 has turnwise 0\.0\.1, and this machine has"):
        refuse_other_release([Node("10.0.0.7", 1, "python", "/opt/turnwise", "0.0.1")])


def test_files_of_the_package_are_named_as_they_lie_on_a_node():
    node = Node("10.0.0.7", 1, "/opt/bin/python", "/opt/trainer_backend", "0.0.1")
    here = str(Path(trainer_backend.__file__).parent)
    assert on_node(sys.executable, node) == "/opt/bin/python"
    assert on_node(f"{here}/inference/vllm_worker", node) == "/opt/trainer_backend/inference/vllm_worker"
    assert on_node(f"{here}_of_mine/model", node) == f"{here}_of_mine/model"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    node = {"num_cpus": 2, "include_dashboard": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KEY_OF_NODES", "not for roles")
        cluster = Cluster(initialize_head=True, head_node_args=node)
    yield cluster.address
    cluster.shutdown()


@asynccontextmanager
async def opened(address: str, run: str, say: Callable[[str], None] = print) -> AsyncIterator[RayLauncher]:
    launcher = RayLauncher(run, 60.0, say)
    await launcher.open(address)
    try:
        yield launcher
    finally:
        await launcher.close()


async def test_a_process_is_placed_and_followed_by_another_and_what_cannot_be_is_told(
    address: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    lines: list[str] = []
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    async with opened(address, "run", lines.append) as launcher:
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.wait()
        loop.remove_signal_handler(signal.SIGTERM)
        assert "SIGTERM received" not in capfd.readouterr().err, "a stop is no crash"
        process = await launcher.start(role("learner", tmp_path))
        first = await process.address()
        assert first is not None and first.startswith("http://") and first.endswith(" the key None")
        os.kill(process.pid, signal.SIGKILL)
        assert await process.ended() == -signal.SIGKILL
        process = await launcher.start(role("learner", tmp_path))
        assert await process.address() == first, "in the place of the one before"
        assert await process.end(10.0) is False
        assert await process.ended() == -signal.SIGTERM
        process = await launcher.start(role("learner", tmp_path, count=2))
        assert await process.address() != first, "a job with other resources has other places"
        await process.end(10.0)
        pair = role("learner", tmp_path, count=2)
        replicas = [await launcher.start(replace(pair, name=f"{n}", replica=n)) for n in range(2)]
        assert len({await one.address() for one in replicas}) == 2, "each has a place of its own"
        assert await replicas[1].end(10.0) is False
        assert await replicas[0].end(10.0) is False
        with pytest.raises(JobError, match=r"many can never be placed by Ray: it needs 3 times 1 CPU"):
            await launcher.start(role("many", tmp_path, count=3))
        missing = replace(role("learner", tmp_path), command=lambda place: ["/nowhere/python"])
        with pytest.raises(JobError, match=r"cannot be started at [0-9.]+: /nowhere/python: No") as refusal:
            await launcher.start(missing)
        assert refusal.value.hint is None, "a disk is not what is missing"
        with pytest.raises(JobError, match=r"other cannot be started at .*, which does not see .*nowhere"):
            await launcher.start(role("other", tmp_path / "nowhere"))
    assert lines == []


# It listens where it is told to, without a word.
SILENT = (
    "import signal, socket, sys; "
    "listener = socket.create_server((sys.argv[1], int(sys.argv[2]))); signal.pause()"
)


async def test_a_server_without_a_ready_line_is_given_a_port_of_its_node_and_is_killed_there(
    address: str, tmp_path: Path
):
    places: list[Place] = []

    def command(place: Place) -> list[str]:
        places.append(place)  # in this process, where `VllmServer` takes its address from it
        return [sys.executable, "-c", SILENT, place.host, str(place.port)]

    server = replace(role("server", tmp_path), command=command, has_ready_line=False, is_ours=False)
    async with opened(address, "server") as launcher:
        process = await launcher.start(server)
        [place] = places

        def answers() -> bool:
            with socket.socket() as client:
                return client.connect_ex((place.host, place.port)) == 0

        await until(answers)
        process.signal(signal.SIGKILL)
        assert await process.ended() == -signal.SIGKILL


async def orchestrator_at(*words: object) -> tuple[asyncio.subprocess.Process, tuple[str, str]]:
    command = (sys.executable, "-m", "tests.trainer_backend.processes.ray_orchestrator", *map(str, words))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    return process, await next_start(process)


async def next_start(orchestrator: asyncio.subprocess.Process) -> tuple[str, str]:
    """Number and address of the process that it starts next."""
    assert orchestrator.stdout is not None
    pid, _, place = (await orchestrator.stdout.readline()).decode().strip().partition(" ")
    return pid, place


async def test_after_a_killed_orchestrator_the_next_one_has_its_places_and_nothing_of_it_runs(
    address: str, tmp_path: Path
):
    orchestrator, (pid, place) = await orchestrator_at(address, tmp_path, "killed", "30")
    orchestrator.kill()
    await orchestrator.communicate()
    async with opened(address, "killed") as launcher:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
        process = await launcher.start(role("learner", tmp_path))
        assert await process.address() == place


async def test_an_orchestrator_that_was_paused_for_longer_than_its_lease_is_given_places_again(
    address: str, tmp_path: Path
):
    orchestrator, (pid, _) = await orchestrator_at(address, tmp_path, "paused", "2")
    async with opened(address, "witness"):
        try:
            orchestrator.send_signal(signal.SIGSTOP)
            while any(actor["name"] == "paused" for actor in ray.util.list_named_actors(all_namespaces=True)):
                await asyncio.sleep(0.05)
            with pytest.raises(ProcessLookupError):
                os.kill(int(pid), 0)
            orchestrator.send_signal(signal.SIGCONT)
            again, place = await next_start(orchestrator)
            assert again != pid and place.startswith("http://")
        finally:
            orchestrator.kill()
            await orchestrator.communicate()


async def test_a_ray_that_is_not_there_is_told_at_once():
    launcher = RayLauncher("run", 60.0, print)
    with pytest.raises(JobError, match=r"ray_address = '127\.0\.0\.1:9': there is no Ray: "):
        await launcher.open("127.0.0.1:9")
