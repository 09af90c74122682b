"""`--replicas N`: several task apps on one machine, each a process and a port of its own, kept running.

They share settings and keys, which they have from the environment. A replica that dies is started again on
its port, so that whoever knows its URL finds it there; between two starts lies a bounded back-off.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import structlog

from task_app.settings import Settings

log = structlog.get_logger("task_app")

READY = "listening on "
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
        self._process: asyncio.subprocess.Process | None = None

    async def keep_running(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Until cancelled, which ends the process in order.

        Raises:
            Refused: it could not start at all.
        """
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
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "task_app", "--port", str(self._port), *self._arguments,
            stdin=asyncio.subprocess.PIPE,  # it ends when we do, however we end
            stdout=asyncio.subprocess.PIPE,
            # Its own session: a Ctrl-C reaches the supervisor alone, which then ends it in order.
            start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            text = line.decode(errors="replace").strip()
            if text.startswith(READY):
                self.url = text.removeprefix(READY)
                self._port = urlsplit(self.url).port or self._port
                log.info("replica_ready", replica=self._index, url=self.url, pid=self._process.pid)
                self.ready.set()
        return await self._process.wait()

    async def _end(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(self._end_s):
                await process.wait()
        except TimeoutError:
            log.warning("replica_killed", replica=self._index, after_s=self._end_s)
            process.kill()
            await process.wait()


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
        watch = partial(_watch_stdin, lambda: loop.call_soon_threadsafe(stop.set))
        threading.Thread(target=watch, name="parent-watch", daemon=True).start()
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


def _watch_stdin(ended: Callable[[], object]) -> None:
    # The descriptor itself: a thread inside sys.stdin would hold its lock when the interpreter ends.
    while os.read(sys.stdin.fileno(), 65_536):
        pass
    with suppress(RuntimeError):  # stopped in the meantime, and the loop is closed
        ended()
