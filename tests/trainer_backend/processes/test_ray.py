"""Roles that Ray places, on one node of this machine."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

import trainer_backend
from tests.trainer_backend.inference.fake_vllm_environment import fake_environment
from tests.trainer_backend.processes.test_vllm_servers import ECHO, SERVER, command, table
from trainer_backend.errors import JobError
from trainer_backend.parts import Hardware
from trainer_backend.processes.launching import Place, Resources, Role
from trainer_backend.processes.ray import Node, RayLauncher, never_fits, on_node, refuse_other_release
from trainer_backend.processes.vllm_servers import VllmServers
from trainer_backend.rundir.layout import RunDirectory


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


# It says where it is placed, who has started it, its key, and one of its node's, and then waits.
SCRIPT = (
    "import os, sys; print('listening on', sys.argv[1], os.getppid(), os.environ['KEY'], "
    "os.environ.get('KEY_OF_NODES'), flush=True); input()"
)


def role(name: str, folder: Path, **keys: Any) -> Role:
    def command(place: Place) -> list[str]:
        return [sys.executable, "-c", SCRIPT, f"http://{place.host}"]

    resources = Resources(name, device="cpu", **keys)
    return Role(
        name, command, {"KEY": "the key"}, folder / f"{name}.log", frozenset({"KEY_OF_NODES"}),
        resources=resources,
    )  # fmt: skip


async def test_a_process_is_placed_and_followed_by_another_and_what_cannot_be_is_told(
    address: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    lines: list[str] = []
    launcher = RayLauncher("run", 60.0, lines.append)
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    await launcher.open(address)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.wait()
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
        with pytest.raises(JobError, match=r"many can never be placed by Ray: it needs 3 times 1 CPU"):
            await launcher.start(role("many", tmp_path, count=3))
        missing = replace(role("learner", tmp_path), command=lambda place: ["/nowhere/python"])
        with pytest.raises(JobError, match=r"cannot be started at [0-9.]+: /nowhere/python: No") as refusal:
            await launcher.start(missing)
        assert refusal.value.hint is None, "a disk is not what is missing"
        with pytest.raises(JobError, match=r"other cannot be started at .*, which does not see .*nowhere"):
            await launcher.start(role("other", tmp_path / "nowhere"))
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        await launcher.close()
    assert lines == []


async def test_a_vllm_server_on_a_node_announces_its_address_and_the_next_one_when_it_is_started_again(
    address: str, tmp_path: Path
):
    python, version = fake_environment(tmp_path / "vllm"), tmp_path / "version_0"
    (tmp_path / "vllm" / SERVER).write_text(ECHO)
    version.mkdir()
    (version / "config.json").write_text("{}")
    lines: list[str] = []
    launcher = RayLauncher("vllm", 60.0, lines.append)
    await launcher.open(address)
    run = RunDirectory(tmp_path, "run")
    servers = VllmServers(
        table(python), Hardware("float32"), run, lines.append, launcher=launcher, device="cpu"
    )
    moves: list[tuple[str, str]] = []

    async def moved(url: str, new_url: str) -> None:
        moves.append((url, new_url))

    servers.on_move(moved)
    try:
        await servers.start(version)
        (url,) = servers.urls
        assert f"--port {url.rpartition(':')[2]} " in await command(url), "it listens on its node"
        servers.renew(url)
        while (
            f"vLLM server {url} ended with SIGKILL (often the system, short of memory); it is restarted"
            not in lines
        ):
            await asyncio.sleep(0.05)
        while not moves:
            await asyncio.sleep(0.05)
        assert moves == [(url, *servers.urls)] and url not in servers.urls
        assert f"--model {run.weights / 'start'} " in await command(servers.urls[0])
    finally:
        await servers.stop()
        await launcher.close()


# An orchestrator that starts a role whenever it has ended, and tells where.
ORCHESTRATOR = """
import asyncio, sys
from pathlib import Path
from tests.trainer_backend.processes.test_ray import RayLauncher, role

async def work(address, folder, run, lease_s):
    launcher = RayLauncher(run, 60.0, lambda line: None, float(lease_s))
    await launcher.open(address)
    while True:
        process = await launcher.start(role("learner", Path(folder)))
        print(process.pid, await process.address(), flush=True)
        await process.ended()

asyncio.run(work(*sys.argv[1:]))
"""


async def orchestrator_at(*words: object) -> tuple[asyncio.subprocess.Process, tuple[str, str]]:
    command = (sys.executable, "-c", ORCHESTRATOR, *map(str, words))
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
    launcher = RayLauncher("killed", 60.0, print)
    await launcher.open(address)
    try:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
        process = await launcher.start(role("learner", tmp_path))
        assert await process.address() == place
    finally:
        await launcher.close()


async def test_an_orchestrator_that_was_paused_for_longer_than_its_lease_is_given_places_again(
    address: str, tmp_path: Path
):
    orchestrator, (pid, _) = await orchestrator_at(address, tmp_path, "paused", "2")
    launcher = RayLauncher("witness", 60.0, print)
    await launcher.open(address)
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
        await launcher.close()


async def test_a_ray_that_is_not_there_is_told_at_once():
    launcher = RayLauncher("run", 60.0, print)
    with pytest.raises(JobError, match=r"ray_address = '127\.0\.0\.1:9': there is no Ray: "):
        await launcher.open("127.0.0.1:9")
