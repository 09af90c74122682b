"""Child processes of a service, which end with their parent.

A child's standard input is a pipe whose other end only the parent holds, so it closes however the parent
ends.
"""

import asyncio
import ctypes
import gc
import os
import signal
import sys
import threading
from asyncio.subprocess import PIPE as PIPE
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Self

from service_kit.console import utf8_output
from service_kit.output import Output

# Variables that a program and its libraries need to run as they do here, and that hold no keys.
_WITHOUT_KEYS = (
    "PATH", "HOME", "USER", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT", "HF_HOME",
)  # fmt: skip
# A service prints this with its address to stdout when it is ready.
READY = "listening on "
_ORPHANED = 1
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_TAIL_BYTES = 65_536


class Child:
    """A child process; `start` makes one."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._has_rest = True

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        env: Mapping[str, str] = os.environ,
        descriptors: Sequence[int] = (),
    ) -> Self:
        """Start the command, whose output goes to a file, or is this process's own.

        With PIPE `address` can read its stdout. It inherits the open `descriptors` under the same numbers.
        """
        # In its own session, so that Ctrl-C reaches only this process, which ends its children in order.
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=stdout, stderr=stderr, env=utf8_output(env),
            start_new_session=True, pass_fds=descriptors,
        )  # fmt: skip
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative if a signal killed it."""
        return self._process.returncode

    async def address(self) -> str | None:
        """The address that it prints when it is ready; None if it ends before."""
        return await address_in(self.lines())

    async def lines(self) -> AsyncIterator[str]:
        """The further lines of its stdout, until it closes; a long one is cut, and says so."""
        assert self._process.stdout is not None
        while line := await _line(self._process.stdout):
            yield line.decode(errors="replace").strip()

    async def ended(self) -> int:
        """Wait for its end, and return the exit code."""
        if self._process.stdout is not None:
            while await self._process.stdout.read(65_536):
                pass  # a full pipe would block it
        return await self._process.wait()

    def signal(self, number: int) -> None:
        # Not the process's own send_signal: that reaps a child that has just ended, and then asyncio finds no
        # exit code and makes one up.
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def kill_rest(self) -> None:
        """Kill what it has left behind, right after its end; later calls do nothing.

        Its number may be another process's by then.
        """
        if not self._has_rest:
            return
        self._has_rest = False
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def end(self, grace_s: float) -> bool:
        """Ask it to end, and kill it after `grace_s`; return whether it was killed."""
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await self._process.wait()
            return True
        return False


async def address_in(lines: AsyncIterator[str]) -> str | None:
    """The address in the ready line of a service's stdout; None if that closes before."""
    async for line in lines:
        if line.startswith(READY):
            return line.removeprefix(READY)
    return None


async def _line(stream: asyncio.StreamReader) -> bytes:
    """The next line, of which no more is kept than fits the stream's buffer; empty where the stream ends."""
    kept, cut = b"", 0
    while True:
        try:
            part, ends = await stream.readuntil(b"\n"), True
        except asyncio.IncompleteReadError as error:
            part, ends = error.partial, True
        except asyncio.LimitOverrunError as error:
            part, ends = await stream.readexactly(error.consumed), False
        if kept:
            cut += len(part.rstrip(b"\n"))
        else:
            kept = part
        if ends:
            return kept if not cut else kept + f" ... and {cut} more bytes\n".encode()


def name_exit(code: int) -> str:
    """Name how a process ended, by its exit code: `exit code 3`, or the signal that killed it."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
    return f"{name} (often the system, short of memory)" if name == "SIGKILL" else name


def last_line(log: Path) -> str:
    """The last line of a child's log that says something, from its last bytes; empty where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].strip() if lines else ""


def without_keys(ours: Mapping[str, str], more: Sequence[str] = ()) -> dict[str, str]:
    """Of a service's environment variables those that a child may have: without keys, or listed by name."""
    return {name: ours[name] for name in (*_WITHOUT_KEYS, *more) if name in ours}


async def end_group(process: Process, output: Output, *, at_most_s: float | None = None) -> None:
    """Kill a child that leads a process group, with all of the group, and release its pipes.

    A process that it started in another session may hold its pipes for ever: its end is waited for so long.
    """
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(TimeoutError):
        async with asyncio.timeout(at_most_s):
            await process.wait()
    output.end()
    # asyncio's Process has no public way to close a pipe that another process still holds, or that was too
    # full to read on. It takes effect in the loop's next turn.
    process._transport.close()  # type: ignore[attr-defined]
    await asyncio.sleep(0)


def begin_imports() -> None:
    """Stop the garbage collector, which looks through all imports so far: a sixth of their time."""
    gc.disable()


def end_imports() -> None:
    """Let it collect again, but never look through what was imported."""
    gc.freeze()
    gc.enable()


def end_with_parent() -> None:
    """End this process without saving when its parent ends; all files are valid at any time."""
    when_parent_ends(lambda: os._exit(_ORPHANED))


def kill_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends, even if this one is stopped.

    Linux alone has that; elsewhere nothing happens, and `end_with_parent` ends a process that still runs.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def when_parent_ends(call: Callable[[], object]) -> None:
    """Call the function on a thread when standard input closes."""

    def watch() -> None:
        # Read the descriptor, because a thread inside sys.stdin holds its lock when the interpreter ends.
        while os.read(sys.stdin.fileno(), 65_536):
            pass
        call()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
