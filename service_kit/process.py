"""Starts, supervises, restarts and ends the child processes of a service.

A child ends when its parent ends. Turnwise's own programs exit when their standard input closes
(`service_kit/own_process.py`). The standard input is a pipe whose other end is open only in the parent, so it
closes even if the parent is killed. Any other command runs under a guard (`service_kit/guard.py`), which
kills the command and all of its descendants when the parent ends.
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

# Environment variables that programs need and that contain no keys.
_WITHOUT_KEYS = (
    "PATH", "HOME", "USER", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT", "HF_HOME",
)  # fmt: skip
_GUARD = Path(__file__).parent / "guard.py"
# Time limit for a guard to kill its command and all descendants, which usually takes milliseconds.
_GUARD_S = 10.0
# Time limit for an unguarded process to close its pipes; a descendant in another session may keep them open.
_PIPES_S = 5.0
_PROBE_EVERY_S = 10.0
_TAIL_BYTES = 65_536


class Process(Protocol):
    """A running process that the service started, on this machine (`Child`) or on another one."""

    @property
    def pid(self) -> int:
        """The process id, on the machine where the process runs."""

    async def address(self) -> str | None:
        """Wait until the process is ready and return the address that it prints; None if it ends first."""
        async for line in self.lines():
            if line.startswith(READY):
                return line.removeprefix(READY)
        return None

    def lines(self) -> AsyncIterator[str]:
        """Yield the lines of the process's stdout that were not read yet, until stdout closes.

        A line that is too long is cut, and a mark is added at its end.
        """

    async def ended(self) -> int:
        """Wait until the process has ended, and return its exit code.

        The code is negative if a signal killed the process or if its machine was lost.
        """

    def signal(self, number: int) -> None:
        """Send a signal to the process, unless it has ended."""

    async def end(self, grace_s: float) -> bool:
        """Send SIGTERM, and also SIGKILL if the process has not ended after `grace_s`.

        Return whether SIGKILL was needed.
        """

    def kill_rest(self) -> None:
        """Kill the descendants of the process that still run after the process has ended.

        Only the first call has an effect.
        """
        return None  # by default, another process kills the descendants


class Child(Process):
    """A child process on this machine; create it with `start`."""

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
        """Start a command as a child process; by default it inherits this process's stdout and stderr.

        Args:
            stdout, stderr: as for `subprocess.Popen`. The methods `address` and `lines` need stdout=PIPE.
            prints: receives stdout if `stdout` is None, and stderr if `stderr` is None. The method `end_all`
                also ends `prints`.
            folder: working directory of the command.
            descriptors: open file descriptors that the child inherits under the same numbers.
            is_ours: whether the command is a program of Turnwise, which exits when its standard input closes.
                Any other command runs under a guard, which kills the command and its descendants.
            line_bytes: `lines` cuts longer lines to this size.

        Raises:
            OSError: the command cannot be run.
        """

        with prints.given() if prints is not None else nullcontext() as end:
            # In a new session, the child gets no Ctrl-C. Only this process gets it, and it then ends its
            # children.
            async def spawn(command: Sequence[str], *more: int) -> asyncio.subprocess.Process:
                return await asyncio.create_subprocess_exec(
                    *command, stdin=PIPE, stdout=end if stdout is None else stdout, env=utf8_output(env),
                    stderr=end if stderr is None else stderr, cwd=folder, start_new_session=True,
                    pass_fds=(*descriptors, *more), limit=line_bytes,
                )  # fmt: skip

            if is_ours or not can_guard():
                return cls(await spawn(command), prints)
            with _under_guard(command) as (guarded, report, writing_end):
                child = cls(await spawn(guarded, writing_end.fileno()), prints)
                writing_end.close()
                reader = asyncio.StreamReader()
                transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                    lambda: asyncio.StreamReaderProtocol(reader), report
                )
                try:
                    child._guarded_pid = _read_report(await reader.read(), command)
                except BaseException:
                    await child.end_all()
                    raise
                finally:
                    transport.close()
                return child

    @property
    def pid(self) -> int:
        return self._guarded_pid or self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while the process runs, and negative if a signal killed it."""
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
        while line := await _read_line(self.stdout):
            yield line.decode(errors="replace").strip()

    async def ended(self) -> int:
        if self._process.stdout is not None:
            while await self._process.stdout.read(65_536):
                pass  # read and discard, because the process would block on a full pipe
        return await self._process.wait()

    def signal(self, number: int) -> None:
        """Send a signal to the command; if it has a guard, SIGKILL also kills all of its descendants."""
        # asyncio's send_signal may reap a child that has just ended, and the exit code would be lost.
        if self._process.returncode is None:
            is_guarded_kill = self._guarded_pid is not None and number == signal.SIGKILL
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGQUIT if is_guarded_kill else number)

    def kill_rest(self) -> None:
        if not self._has_rest or self._guarded_pid is not None:  # a guard kills all descendants itself
            return
        self._has_rest = False  # never kill this group again, because the system may reuse the process id
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
        """Kill the process and its descendants, and close its pipes.

        If this call is cancelled, it still completes this work before it raises the CancelledError.
        """
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
        # asyncio has no public function that closes a pipe if another process holds it open or if it is full.
        # The transport closes in the next iteration of the event loop, so yield to the loop once.
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
        if self._process.returncode is None:  # the first guard is stopped: the next guard notices its death
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
        await self._process.wait()


@cache
def can_guard() -> bool:
    """Return whether the system supports guards (`service_kit/guard.py`); if not, log one warning."""
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
    """Prepare the start of a command under a guard.

    Yield the command line that starts the guard, and the reading and the writing end of a pipe. The guard
    reports through this pipe whether the command could be run. After the guard has started, close the writing
    end here, and read the reading end until it closes.
    """
    near_end, far_end = os.pipe()
    with open(near_end, "rb", buffering=0) as report, open(far_end, "wb", buffering=0) as writing_end:
        yield [sys.executable, "-I", "-S", str(_GUARD), str(far_end), *command], report, writing_end


def _read_report(report: bytes, command: Sequence[str]) -> int:
    """Return the command's process id from a guard's report.

    Raises:
        OSError: the command could not be run.
    """
    pid, _, error = report.partition(b"\n")
    if error or not pid:  # the report is empty if the guard was killed before it started the command
        number = int(error or errno.ESRCH)
        raise OSError(number, os.strerror(number), command[0])
    return int(pid)


class Guarded(subprocess.Popen[bytes]):
    """A `subprocess.Popen` that runs its command under a guard, for synchronous code.

    SIGKILL, which `kill` sends, also kills the descendants of the command. On a system that does not support
    guards, each signal is sent to the whole process group of the command.

    Args:
        options: further arguments of Popen.

    Raises:
        OSError: the command cannot be run.
    """

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str] = os.environ, **options: Any
    ) -> None:
        # In a new session, the child gets no Ctrl-C. Only this process gets it, and it then ends its
        # children.
        options |= {"env": utf8_output(env), "start_new_session": True}
        if not (has_guard := can_guard()):
            super().__init__(command, **options)
        else:
            with _under_guard(command) as (guarded, report, writing_end):
                super().__init__(guarded, pass_fds=(writing_end.fileno(),), **options)
                writing_end.close()
                try:
                    _read_report(report.read(), command)
                except OSError:
                    self.__exit__(None, None, None)  # closes the pipes and waits for the guard's end
                    raise
        self._has_guard = has_guard

    def send_signal(self, sig: int) -> None:
        if not self._has_guard:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, sig)
        else:
            super().send_signal(signal.SIGQUIT if sig == signal.SIGKILL else sig)


class Worker:
    """Keeps one process running by restarting it each time it ends.

    A subclass defines how the process is started, when it is ready, and what to do when it ends.
    """

    stop_s = 10.0
    """Seconds that the process has to end after SIGTERM before it gets SIGKILL."""
    ready_s: float | None = None
    """Time limit in seconds from the start of the process until it is ready; None means no limit."""
    silence_s: float | None = None
    """Seconds that a probe may take before the process is killed; None means that no probes are sent."""
    pauses_s = (0.5, 10.0)
    """First and longest pause before a restart, in seconds. The pause doubles with each further restart."""
    healthy_s = 30.0
    """A process that ran for at least this many seconds is restarted without a pause."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.process: Process | None = None
        self.ready = asyncio.Event()
        self.may_start = asyncio.Event()
        """The process is started only while this event is set; several workers may share one event."""
        self.may_start.set()
        self.restarts = 0
        self._clock = clock

    async def start(self) -> Process:
        """Start the process and return it."""
        raise NotImplementedError

    async def serve(self, process: Process) -> bool:
        """Wait until the process is ready and return True.

        Return False if the process ended before it was ready, or if the worker should end it.
        """
        return await process.address() is not None

    async def live(self, process: Process) -> None:
        """Wait until the ready process has ended; return earlier if the worker should end it."""
        await process.ended()

    async def probe(self) -> None:
        """Send a probe to the process and wait for its answer.

        Any exception except TimeoutError counts as an answer, because it shows that the process is alive.
        """

    def on_silence(self, what: str) -> None:
        """Report that the process will be killed, because it was not ready in time or did not answer a probe.

        `what` says which of these happened.
        """

    def on_end(self, code: int, lasted_s: float, pause_s: float) -> None:
        """Handle the end of the process, which ran for `lasted_s` and will be restarted after `pause_s`.

        `code` is the exit code. Raise an exception to end `run_forever`, for example after too many restarts.
        """
        raise NotImplementedError

    def on_no_start(self, error: Exception, pause_s: float) -> None:
        """Handle an exception of `start`, which will be called again after `pause_s`.

        Raise an exception to end `run_forever`. By default, `error` itself is raised.
        """
        raise error

    async def run_forever(self) -> NoReturn:
        """Start the process and restart it each time it ends, until this call is cancelled.

        A cancellation ends the process as `end` does.
        """
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
        """End the process and its descendants; return whether the process had to be killed by SIGKILL."""
        was_killed = await process.end(self.stop_s)
        process.kill_rest()
        return was_killed

    async def _watch(self, process: Process) -> int:
        """Supervise a process that was just started until it has ended, and return its exit code."""
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


async def _read_line(stream: asyncio.StreamReader) -> bytes:
    """Read and return the next line; return b"" at the end of the stream.

    A line that is longer than the stream's buffer is cut, and the number of bytes that were cut is appended.
    """
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
    """Describe an exit code, as `exit code 3` or by the name of the signal that killed the process."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
    return f"{name} (often the system, short of memory)" if name == "SIGKILL" else name


def last_line(log: Path) -> str:
    """Return the last line of a log file that is not blank, or "" if there is none."""
    return (last_lines(log) or [""])[-1].strip()


def last_lines(log: Path, start: int = 0) -> list[str]:
    """Return the lines in the last 64 KiB of a log file, without the bytes before the offset `start`."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return []


def without_keys(ours: Mapping[str, str], more: Sequence[str] = ()) -> dict[str, str]:
    """Return those variables of the environment `ours` that programs need and that contain no API keys.

    `more` names further variables to include.
    """
    return {name: ours[name] for name in (*_WITHOUT_KEYS, *more) if name in ours}


def without(names: Collection[str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}
