"""Child processes of a service: they are started, found ready, watched, started again, and end with it.

A child's standard input is a pipe whose other end only the parent holds, so it closes however the parent
ends: our own programs end then (`service_kit/own_process.py`). A command that is not ours runs under a guard
(`service_kit/guard.py`), which ends all that it starts. `Worker` keeps the process of a role running.
"""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from asyncio.subprocess import PIPE as PIPE
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, BinaryIO, NoReturn, Protocol, Self

import structlog

from service_kit.console import utf8_output
from service_kit.output import Output
from service_kit.own_process import READY

log = structlog.get_logger("service_kit")

# Variables that a program and its libraries need to run as they do here, and that hold no keys.
_WITHOUT_KEYS = (
    "PATH", "HOME", "USER", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT", "HF_HOME",
)  # fmt: skip
_GUARD = Path(__file__).parent / "guard.py"
# For a guard to kill what it guards; it takes milliseconds.
_GUARD_S = 10.0
# For the pipes of a process without a guard, which one in another session may hold for ever.
_PIPES_S = 5.0
_PROBE_EVERY_S = 10.0
_TAIL_BYTES = 65_536


class Process(Protocol):
    """The process of a role; `Child` is one on this machine."""

    @property
    def pid(self) -> int:
        """Of its machine."""

    async def address(self) -> str | None:
        """Return the address that it prints when it is ready; None if it ends before."""
        async for line in self.lines():
            if line.startswith(READY):
                return line.removeprefix(READY)
        return None

    def lines(self) -> AsyncIterator[str]:
        """Yield the further lines of its stdout, until it closes; a long one is cut, and says so."""

    async def ended(self) -> int:
        """Wait for its end, and return the exit code; negative if a signal or its node's loss ended it."""

    def signal(self, number: int) -> None:
        """Send it a signal; none if it has ended."""

    async def end(self, grace_s: float) -> bool:
        """Ask it to end, and kill it after `grace_s`; return whether it was killed."""

    def kill_rest(self) -> None:
        """Kill the processes that it has left behind, right after its end; later calls do nothing."""
        return None  # where something else does so


class Child(Process):
    """A child process; `start` makes one."""

    def __init__(self, process: asyncio.subprocess.Process, prints: Output | None = None) -> None:
        self._process, self._prints = process, prints
        self._guarded_pid: int | None = None
        self._has_rest = True

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        prints: Output | None = None,
        env: Mapping[str, str] = os.environ,
        folder: Path | str | None = None,
        descriptors: Sequence[int] = (),
        is_ours: bool = True,
        line_bytes: int = 65_536,
    ) -> Self:
        """Start the command, whose output goes to a file, or is this process's own.

        Args:
            stdout: with PIPE `address` and `lines` can read it.
            prints: takes its stderr, and a stdout that has no other place; ends with the child in `end_all`.
            descriptors: open ones that it inherits under the same numbers.
            is_ours: it ends by itself when its standard input closes. Another command gets a guard, which
                ends it, and whatever it has started.
            line_bytes: most of a line that is kept.

        Raises:
            OSError: it cannot be run.
        """

        with prints.given() if prints is not None else nullcontext() as end:
            # In its own session, so that Ctrl-C reaches only this process, which ends its children in order.
            async def spawn(command: Sequence[str], *more: int) -> asyncio.subprocess.Process:
                return await asyncio.create_subprocess_exec(
                    *command, stdin=PIPE, stdout=end if stdout is None else stdout, env=utf8_output(env),
                    stderr=end if stderr is None else stderr, cwd=folder, start_new_session=True,
                    pass_fds=(*descriptors, *more), limit=line_bytes,
                )  # fmt: skip

            if is_ours or not can_guard():
                return cls(await spawn(command), prints)
            with _under_guard(command) as (guarded, report, let_go):
                child = cls(await spawn(guarded, let_go.fileno()), prints)
                let_go.close()
                try:
                    child._guarded_pid = _read_report(await _read_all(report), command)
                except BaseException:
                    await child.end_all()
                    raise
                return child

    @property
    def pid(self) -> int:
        return self._guarded_pid or self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative if a signal killed it."""
        return self._process.returncode

    @property
    def stdin(self) -> asyncio.StreamWriter:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def stdout(self) -> asyncio.StreamReader:
        assert self._process.stdout is not None
        return self._process.stdout

    async def lines(self) -> AsyncIterator[str]:
        while line := await _line(self.stdout):
            yield line.decode(errors="replace").strip()

    async def ended(self) -> int:
        if self._process.stdout is not None:
            while await self._process.stdout.read(65_536):
                pass  # a full pipe would block it
        return await self._process.wait()

    def signal(self, number: int) -> None:
        """Send a signal to the command; SIGKILL to all that it has started, if it has a guard."""
        # Not the process's own send_signal: that reaps a child that has just ended, and then asyncio finds no
        # exit code and makes one up.
        if self._process.returncode is None:
            is_guarded_kill = self._guarded_pid is not None and number == signal.SIGKILL
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGQUIT if is_guarded_kill else number)

    def kill_rest(self) -> None:
        if not self._has_rest or self._guarded_pid is not None:  # a guard does it
            return
        self._has_rest = False  # its number may be another process's later
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def end(self, grace_s: float) -> bool:
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            await self._kill()
            return True
        return False

    async def end_all(self) -> None:
        """Kill it and all that it has started, and release its pipes, even if the wait is cancelled."""
        end, cancellation = asyncio.ensure_future(self._end_all()), None
        while not end.done():
            try:
                await asyncio.wait([end])
            except asyncio.CancelledError as error:
                cancellation = error
        if self._prints is not None:
            self._prints.end()
        if cancellation is not None:
            raise cancellation
        end.result()

    async def _end_all(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_PIPES_S if self._guarded_pid is None else None):
                await self._kill()
        self.kill_rest()
        # asyncio's Process has no public way to close a pipe that another process still holds, or that was
        # too full to read on. It takes effect in the loop's next turn.
        self._process._transport.close()  # type: ignore[attr-defined]
        await asyncio.sleep(0)

    async def _kill(self) -> None:
        if self._guarded_pid is None:
            self.kill_rest()
        self.signal(signal.SIGKILL)
        with suppress(TimeoutError):
            async with asyncio.timeout(_GUARD_S):
                await self._process.wait()
                return
        if self._process.returncode is None:  # a guard that was stopped; the next one sees that it has ended
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
        await self._process.wait()


@cache
def can_guard() -> bool:
    """Whether the system supports guards; if not, the log says once what is missing."""
    with suppress(AttributeError, OSError):
        os.close(os.pidfd_open(os.getpid()))
        if sys.platform == "linux":
            return True
    why = (
        "the system has no pidfd and subreaper; a process that an agent, environment or function starts in a "
        "session of its own may outlive it"
    )
    log.warning("no_guard", why=why)
    return False


@contextmanager
def _under_guard(command: Sequence[str]) -> Iterator[tuple[list[str], BinaryIO, BinaryIO]]:
    """The command under a guard, the pipe by which that reports, and the end of it that only the guard keeps.

    When the guard has started, close that end here, and read the other one to its end.
    """
    near_end, far_end = os.pipe()
    with open(near_end, "rb", buffering=0) as report, open(far_end, "wb", buffering=0) as let_go:
        yield [sys.executable, "-I", "-S", str(_GUARD), str(far_end), *command], report, let_go


async def _read_all(pipe: BinaryIO) -> bytes:
    reader, loop = asyncio.StreamReader(), asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        return await reader.read()
    finally:
        transport.close()


def _read_report(said: bytes, command: Sequence[str]) -> int:
    """The process id of a command under a guard; OSError: it cannot be run."""
    pid, _, error = said.partition(b"\n")
    if error or not pid:  # without both a kill of the guard came before
        number = int(error or errno.ESRCH)
        raise OSError(number, os.strerror(number), command[0])
    return int(pid)


class Guarded(subprocess.Popen[bytes]):
    """A command under a guard, for code on threads; SIGKILL ends all that it has started.

    It leads a process group, to which signals go where the system has no guard. The options are those of
    Popen. OSError: it cannot be run.
    """

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str] = os.environ, **options: Any
    ) -> None:
        # In its own session, so that Ctrl-C reaches only this process, which ends its children in order.
        options |= {"env": utf8_output(env), "start_new_session": True}
        if not (has_guard := can_guard()):
            super().__init__(command, **options)
        else:
            with _under_guard(command) as (guarded, report, let_go):
                super().__init__(guarded, pass_fds=(let_go.fileno(),), **options)
                let_go.close()
                try:
                    _read_report(report.read(), command)
                except OSError:
                    self.__exit__(None, None, None)  # closes its pipes
                    raise
        self._has_guard = has_guard

    def send_signal(self, sig: int) -> None:
        if not self._has_guard:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, sig)
        else:
            super().send_signal(signal.SIGQUIT if sig == signal.SIGKILL else sig)


class Worker:
    """Keeps the process of a role running: it is started again whenever it ends.

    A role is a subclass: it says how its process starts, when that is ready, and what its end means.
    """

    stop_s = 10.0
    """Between the request to end and the kill."""
    ready_s: float | None = None
    """Most time from the start until it is ready."""
    silence_s: float | None = None
    """A process that gives no sign of life for so long is killed; None: it is not probed."""
    pauses_s = (0.5, 10.0)
    """First and longest pause before a new start; it doubles."""
    healthy_s = 30.0
    """A process that lived so long is started again at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.process: Process | None = None
        self.ready = asyncio.Event()
        self.may_start = asyncio.Event()
        """While it is not set, no process is started; workers may share one."""
        self.may_start.set()
        self.restarts = 0
        self._clock = clock

    async def start(self) -> Process:
        """Start the process."""
        raise NotImplementedError

    async def serve(self, process: Process) -> bool:
        """Return once the process is ready; False if it ends before, or shall end."""
        return await process.address() is not None

    async def live(self, process: Process) -> None:
        """Return when a process that is ready has ended, or shall end."""
        await process.ended()

    async def probe(self) -> None:
        """Ask for a sign of life; any answer is one, also an error that is no TimeoutError."""

    def on_silence(self, what: str) -> None:
        """Report that it is killed, since it was not ready in time, or gave no sign of life."""

    def on_end(self, code: int, lasted_s: float, pause_s: float) -> None:
        """Report an end, by its exit code, and when the next start is; an error of this ends `run_forever`.

        This is where a role gives up: after so many processes in a row that did nothing, say.
        """
        raise NotImplementedError

    def on_no_start(self, error: Exception, pause_s: float) -> None:
        """Report an error of `start` that may pass; by default none does, and it ends `run_forever`."""
        raise error

    async def run_forever(self) -> NoReturn:
        """Run the process, one after another, until cancelled, which ends it in order."""
        pause_s = 0.0
        while True:
            await asyncio.sleep(pause_s)
            await self.may_start.wait()
            start_s, self.process, fault = self._clock(), None, None
            try:
                self.process = await self.start()
            except Exception as error:
                fault = error
            else:
                code = await self._watch(self.process)
            lasted_s, (first_s, most_s) = self._clock() - start_s, self.pauses_s
            pause_s = 0.0 if lasted_s >= self.healthy_s else min(max(2 * pause_s, first_s), most_s)
            if fault is not None:
                self.on_no_start(fault, pause_s)
                continue
            self.on_end(code, lasted_s, pause_s)
            self.restarts += 1

    async def end(self, process: Process) -> bool:
        """End the process and its leftovers; return whether it was killed."""
        was_killed = await process.end(self.stop_s)
        process.kill_rest()
        return was_killed

    async def _watch(self, process: Process) -> int:
        """Return the exit code of a process that has just been started."""
        probes = None
        try:
            async with asyncio.timeout(self.ready_s) as until_ready:
                if await self.serve(process):
                    until_ready.reschedule(None)
                    self.ready.set()
                    probes = asyncio.ensure_future(self._kill_if_silent(process))
                    await self.live(process)
        except TimeoutError:
            if not until_ready.expired():
                raise
            self.on_silence(f"did not serve within {self.ready_s:g} s")
        finally:
            self.ready.clear()
            if probes is not None:
                probes.cancel()
            await self.end(process)
        return await process.ended()

    async def _kill_if_silent(self, process: Process) -> None:
        while self.silence_s is not None:
            await asyncio.sleep(min(_PROBE_EVERY_S, self.silence_s))
            with suppress(Exception):
                try:
                    async with asyncio.timeout(self.silence_s):
                        await self.probe()
                except TimeoutError:
                    self.on_silence(f"has given no sign of life for {self.silence_s:g} s, and is killed")
                    process.signal(signal.SIGKILL)
                    return


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
    """The last line of a child's log that is not blank; empty without one."""
    return (last_lines(log) or [""])[-1].strip()


def last_lines(log: Path, start: int = 0) -> list[str]:
    """The lines of a child's log in its last bytes, from the byte `start` on."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return []


def without_keys(ours: Mapping[str, str], more: Sequence[str] = ()) -> dict[str, str]:
    """Of a service's environment variables those that a child may have: without keys, or listed by name."""
    return {name: ours[name] for name in (*_WITHOUT_KEYS, *more) if name in ours}


def without(names: Collection[str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment variables without some of them."""
    return {name: value for name, value in environ.items() if name not in names}
