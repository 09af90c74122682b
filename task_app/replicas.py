"""`--replicas N`: starts N equal task apps on one machine, each in its own process with its own port.

All replicas have the same settings and keys. A replica that ends is restarted on the same port, so that its
URL stays valid. If a replica ends repeatedly, the pause before its restart grows up to a limit.
"""

import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import urlsplit

import structlog

from service_kit.own_process import when_parent_ends
from service_kit.process import PIPE, Child, Process, Worker
from service_kit.tasks import racing
from task_app.settings import Settings

log = structlog.get_logger("task_app")

# Exit code of a task app whose settings, port or plug-in file is wrong. A restart would not help.
_BAD_SETTINGS = 2
# Seconds that a process has to end after its drain.
_END_S = 15.0


class StartFailed(Exception):
    """A replica cannot start because of wrong settings. The replica has already printed the reason."""


class Replica(Worker):
    """Runs the process of one replica, and restarts it. Log lines contain its index, from 0.

    If `port` is 0, the operating system chooses a free port, which the replica uses again after a restart.
    """

    def __init__(self, index: int, arguments: Sequence[str], port: int, *, end_s: float) -> None:
        super().__init__()
        self.url, self.stop_s = "", end_s
        self._index, self._arguments, self._port = index, tuple(arguments), port

    async def start(self) -> Child:
        command = (sys.executable, "-m", "task_app", "--port", str(self._port), *self._arguments)
        return await Child.start(command, stdout=PIPE)

    async def serve(self, process: Process) -> bool:
        url = await process.address()
        if url is not None:
            self.url = url
            self._port = urlsplit(url).port or self._port
            log.info("replica_ready", replica=self._index, url=url, pid=process.pid)
        return url is not None

    def on_end(self, code: int, lasted_s: float, pause_s: float) -> None:
        if code == _BAD_SETTINGS and not self.url:
            raise StartFailed
        log.warning(
            "replica_ended", replica=self._index, url=self.url, exit_code=code,
            lifetime_s=round(lasted_s, 1), next_start_in_s=pause_s,
        )  # fmt: skip

    async def end(self, process: Process) -> bool:
        was_killed = await super().end(process)
        if was_killed:
            log.warning("replica_killed", replica=self._index, after_s=self.stop_s)
        return was_killed


async def run_replicas(settings: Settings) -> int:
    """Run the replicas until SIGTERM or SIGINT, and return the exit code.

    With `exit_with_parent`, the end of the parent process stops them too. When all replicas are ready, print
    `task_url = [...]`, a line for the table [services] of a job.
    """
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    def stop_from_thread() -> None:
        with suppress(RuntimeError):  # the loop may be closed already
            loop.call_soon_threadsafe(stop.set)

    if settings.exit_with_parent:
        when_parent_ends(stop_from_thread)
    replicas = [
        Replica(
            index, _make_arguments(settings, index), settings.port and settings.port + index,
            end_s=settings.drain_s + _END_S,
        )
        for index in range(settings.replicas or 0)
    ]  # fmt: skip

    async def announce() -> None:
        for replica in replicas:
            await replica.ready.wait()
        # 0.0.0.0 and :: are no addresses for clients; callers on this machine use the loopback address.
        urls = [
            replica.url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
            for replica in replicas
        ]
        print(f"task_url = {json.dumps(urls)}", flush=True)
        await stop.wait()

    ends = (stop.wait(), announce(), *[replica.run_forever() for replica in replicas])
    try:
        async with racing(*ends) as tasks:
            for task in tasks:
                if task.done():
                    task.result()
        return 0
    except StartFailed:
        return _BAD_SETTINGS


def _make_arguments(settings: Settings, index: int) -> list[str]:
    """Return a replica's command-line options except --port; it inherits all environment variables."""
    words = ["--exit-with-parent", "--host", settings.host]
    for host in settings.allowed_inference_hosts:
        words += ["--allow-inference-host", host]
    for file in settings.plugins:
        words += ["--plugins", str(file)]
    if settings.interaction_config_path is not None:
        words += ["--interactions", str(settings.interaction_config_path)]
    if settings.state_dir is not None:
        words += ["--state-dir", str(settings.state_dir / f"replica-{index}")]
    return words
