"""Processes that a service starts, and the end of the one that started it.

A child lives as long as its parent at most: its standard input is a pipe whose other end the parent alone
holds, so it closes however the parent ends.
"""

import asyncio
import os
import signal
import sys
import threading
from asyncio.subprocess import PIPE as PIPE
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Self

# A service that has come up says so on stdout, with its address after it.
READY = "listening on "
_ORPHANED = 1


class Child:
    """A process that was started; made by `start`."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        env: Mapping[str, str] = os.environ,
    ) -> Self:
        """
        Args:
            stdout, stderr: a file; PIPE for a stdout that `address` reads; None: ours.
        """
        # Its own session: Ctrl-C reaches this process alone, which then ends its children in order.
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=stdout, stderr=stderr, env=env, start_new_session=True
        )
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that killed it."""
        return self._process.returncode

    async def address(self) -> str | None:
        """Where it listens, once it says so; None: it has ended before."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            text = line.decode(errors="replace").strip()
            if text.startswith(READY):
                return text.removeprefix(READY)
        return None

    async def ended(self) -> int:
        """Wait for its end; the exit code."""
        if self._process.stdout is not None:
            while await self._process.stdout.read(65_536):
                pass  # a pipe that nobody empties would stop it
        return await self._process.wait()

    def signal(self, number: int) -> None:
        # Not the process's own send_signal: it reaps a child that has just ended, and asyncio, which comes
        # second then, makes up an exit code.
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    async def end(self, grace_s: float) -> bool:
        """Have it end in order, and kill it after that time; whether it had to be killed."""
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await self._process.wait()
            return True
        return False


def end_with_parent() -> None:
    """End this process, without saving, when its parent ends: files are whole at any moment."""
    when_parent_ends(lambda: os._exit(_ORPHANED))


def when_parent_ends(call: Callable[[], object]) -> None:
    """Call that, on a thread, when standard input closes."""

    def watch() -> None:
        # The descriptor itself: a thread inside sys.stdin would hold its lock when the interpreter ends.
        while os.read(sys.stdin.fileno(), 65_536):
            pass
        call()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
