"""`--replicas N`: several task apps on one machine, each a process and a port of its own, kept running.

They share settings and keys, which they have from the environment. A replica that dies is started again on
its port, so that whoever knows its URL finds it there; between two starts lies a bounded back-off.
"""

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import structlog

from service_kit.children import PIPE, Child, when_parent_ends
from task_app.settings import Settings

log = structlog.get_logger("task_app")

# Exit code of a process whose settings, port or plug-in file are wrong: another start would change nothing.
_REFUSED = 2
_FIRST_PAUSE_S, _MOST_PAUSE_S = 0.5, 10.0
# A replica that has lived so long is started again at once.
_HEALTHY_S = 30.0
# For a process to end after its drain.
_END_S = 15.0


class Refused(Exception):
    """A replica cannot start; it has said why."""


class Replica:
    """One process, started again whenever it ends.

    Args:
        index: from 0; in its log lines and the name of its state folder.
        arguments: of `python -m task_app`, without its port.
        port: where it listens; 0: a free one, which it keeps over restarts.
        end_s: how long it may take to end when it is told to.
    """

    def __init__(self, index: int, arguments: Sequence[str], port: int, *, end_s: float) -> None:
        self.url = ""
        self.ready = asyncio.Event()
        self._index, self._arguments, self._port, self._end_s = index, tuple(arguments), port, end_s
        self._child: Child | None = None

    async def keep_running(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Until cancelled, which ends the process in order."""
        pause_s = 0.0
        try:
            while True:
                await asyncio.sleep(pause_s)
                started_s = clock()
                code = await self._run_once()
                if code == _REFUSED and not self.url:
                    raise Refused
                lived_s = clock() - started_s
                pause_s = (
                    min(max(2 * pause_s, _FIRST_PAUSE_S), _MOST_PAUSE_S) if lived_s < _HEALTHY_S else 0.0
                )
                log.warning(
                    "replica_ended", replica=self._index, url=self.url, exit_code=code,
                    lived_s=round(lived_s, 1), next_start_in_s=pause_s,
                )  # fmt: skip
        finally:
            await self._end()

    async def _run_once(self) -> int:
        command = (sys.executable, "-m", "task_app", "--port", str(self._port), *self._arguments)
        self._child = child = await Child.start(command, stdout=PIPE)
        url = await child.address()
        if url is not None:
            self.url = url
            self._port = urlsplit(url).port or self._port
            log.info("replica_ready", replica=self._index, url=url, pid=child.pid)
            self.ready.set()
        return await child.ended()

    async def _end(self) -> None:
        if self._child is not None and await self._child.end(self._end_s):
            log.warning("replica_killed", replica=self._index, after_s=self._end_s)


async def supervise(replicas: Sequence[Replica], stop: asyncio.Event, *, tell: Callable[[str], None]) -> int:
    """Keep all running until `stop` is set; the exit code.

    Args:
        tell: is given the line for a job's [services] when all are ready.
    """
    keeping = [asyncio.ensure_future(replica.keep_running()) for replica in replicas]
    stopping = asyncio.ensure_future(_all_set([stop]))
    ready = asyncio.ensure_future(_all_set([replica.ready for replica in replicas]))
    try:
        await asyncio.wait({stopping, ready, *keeping}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            tell(f"task_url = {json.dumps([_local(replica.url) for replica in replicas])}")
            await asyncio.wait({stopping, *keeping}, return_when=asyncio.FIRST_COMPLETED)
        for ended in keeping:
            if ended.done():
                ended.result()
        return 0
    except Refused:
        return _REFUSED
    finally:
        for item in (stopping, ready, *keeping):
            item.cancel()
        await asyncio.gather(stopping, ready, *keeping, return_exceptions=True)


async def _all_set(events: Sequence[asyncio.Event]) -> None:
    for event in events:
        await event.wait()


def run_replicas(options: argparse.Namespace, settings: Settings) -> int:
    """What `python -m task_app --replicas N` does, until SIGTERM, SIGINT or its parent's end."""
    return asyncio.run(_run(options, settings))


async def _run(options: argparse.Namespace, settings: Settings) -> int:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if options.exit_with_parent:
        when_parent_ends(lambda: _tell(loop, stop))
    replicas = [
        Replica(
            index, _arguments(options, settings.state_dir, index), options.port and options.port + index,
            end_s=settings.drain_s + _END_S,
        )
        for index in range(options.replicas)
    ]  # fmt: skip
    return await supervise(replicas, stop, tell=lambda line: print(line, flush=True))


def _arguments(options: argparse.Namespace, state_dir: Path | None, index: int) -> list[str]:
    words = ["--exit-with-parent", "--host", options.host]
    for host in options.allow_inference_host:
        words += ["--allow-inference-host", host]
    for file in options.plugins:
        words += ["--plugins", str(file)]
    if options.interactions is not None:
        words += ["--interactions", str(options.interactions)]
    if state_dir is not None:
        words += ["--state-dir", str(state_dir / f"replica-{index}")]
    return words


def _local(url: str) -> str:
    """As this machine may call it: who listens everywhere is called at the loopback."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def _tell(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """From a thread."""
    with suppress(RuntimeError):  # stopped in the meantime, and the loop is closed
        loop.call_soon_threadsafe(stop.set)
