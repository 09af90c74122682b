"""Child processes of a service: start, readiness, supervision, restart, and end with the parent.

A child's standard input is a pipe whose other end only the parent holds, so it closes however the parent
ends. Our own programs then exit (`service_kit/own_process.py`). Any other command runs under a guard
(`service_kit/guard.py`), which kills it and all its descendants. `Worker` keeps a process running.
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

# Environment variables that programs need and that hold no keys.
_WITHOUT_KEYS = (
    "PATH", "HOME", "USER", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT", "HF_HOME",
)  # fmt: skip
_GUARD = Path(__file__).parent / "guard.py"
# Time for a guard to kill its command and descendants, which takes milliseconds.
_GUARD_S = 10.0
# Time for the pipes of an unguarded process to close; a descendant in another session may never close them.
_PIPES_S = 5.0
_PROBE_EVERY_S = 10.0
_TAIL_BYTES = 65_536


class Process(Protocol):
    """A process on this machine (`Child`) or on another one."""

    @property
    def pid(self) -> int:
        """The process id on its machine."""

    async def address(self) -> str | None:
        """Return the address that the process prints when it is ready; None if it ends before."""
        async for line in self.lines():
            if line.startswith(READY):
                return line.removeprefix(READY)
        return None

    def lines(self) -> AsyncIterator[str]:
        """Yield the next lines of the process's stdout until that closes; a long line is cut and marked."""

    async def ended(self) -> int:
        """Wait for the end; return the exit code, negative after a signal or the loss of the node."""

    def signal(self, number: int) -> None:
        """Send a signal to the process, unless it has ended."""

    async def end(self, grace_s: float) -> bool:
        """Send SIGTERM, and SIGKILL after `grace_s`; return whether the process was killed."""

    def kill_rest(self) -> None:
        """Kill the descendants that are left right after the process's end; later calls do nothing."""
        return None  # by default, another process kills them


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
        """Start a command; by default it inherits this process's stdout and stderr.

        Args:
            stdout: must be PIPE for `address` and `lines`.
            prints: receives stdout and stderr, except one that is given; `end_all` ends `prints`.
            descriptors: open descriptors that the child inherits under the same numbers.
            is_ours: the command exits when its standard input closes. Any other command gets a guard, which
                kills the command and its descendants.
            line_bytes: longer lines are cut.

        Raises:
            OSError: the command cannot be run.
        """

        with prints.given() if prints is not None else nullcontext() as end:
            # A session of its own: Ctrl-C reaches only this process, which then ends its children in order.
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
        while line := await _read_line(self.stdout):
            yield line.decode(errors="replace").strip()

    async def ended(self) -> int:
        if self._process.stdout is not None:
            while await self._process.stdout.read(65_536):
                pass  # a full pipe would block the process
        return await self._process.wait()

    def signal(self, number: int) -> None:
        """Send a signal to the command; under a guard, SIGKILL also kills all its descendants."""
        # asyncio's send_signal may reap a child that has just ended; asyncio then invents an exit code.
        if self._process.returncode is None:
            is_guarded_kill = self._guarded_pid is not None and number == signal.SIGKILL
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGQUIT if is_guarded_kill else number)

    def kill_rest(self) -> None:
        if not self._has_rest or self._guarded_pid is not None:  # a guard kills them itself
            return
        self._has_rest = False  # later, the process id may belong to another process
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
        """Kill the process and its descendants and close its pipes, even if this call is cancelled."""
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
        # asyncio has no public way to close a pipe that another process holds or that is full. Closing takes
        # effect in the loop's next turn.
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
        if self._process.returncode is None:  # kill a stopped guard; the next guard sees its end
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
        await self._process.wait()


@cache
def can_guard() -> bool:
    """Whether the system supports guards; if not, warn once in the log."""
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
    """Yield the command line under a guard, and both ends of the guard's report pipe: reading, writing.

    After the guard has started, close the writing end, and read the other end until it closes.
    """
    near_end, far_end = os.pipe()
    with open(near_end, "rb", buffering=0) as report, open(far_end, "wb", buffering=0) as writing_end:
        yield [sys.executable, "-I", "-S", str(_GUARD), str(far_end), *command], report, writing_end


def _read_report(report: bytes, command: Sequence[str]) -> int:
    """Return the process id of a guarded command. Raises OSError if the command could not be run."""
    pid, _, error = report.partition(b"\n")
    if error or not pid:  # an empty report: the guard was killed before
        number = int(error or errno.ESRCH)
        raise OSError(number, os.strerror(number), command[0])
    return int(pid)


class Guarded(subprocess.Popen[bytes]):
    """A command under a guard, for synchronous code: SIGKILL, as of `kill`, also kills its descendants.

    On a system without guards, each signal goes to the whole process group of the command. `options` are
    those of Popen. Raises OSError if the command cannot be run.
    """

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str] = os.environ, **options: Any
    ) -> None:
        # A session of its own: Ctrl-C reaches only this process, which then ends its children in order.
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
    """Keeps one process running: restarts it whenever it ends.

    A subclass defines how the process starts, when it is ready, and how its end is handled.
    """

    stop_s = 10.0
    """Seconds between SIGTERM and SIGKILL."""
    ready_s: float | None = None
    """Most seconds from the start until the process is ready; None: no limit."""
    silence_s: float | None = None
    """A process that answers no probe for these seconds is killed; None sends no probes."""
    pauses_s = (0.5, 10.0)
    """First and longest pause before a restart, in seconds; the pause doubles after each failure."""
    healthy_s = 30.0
    """A process that ran at least these seconds is restarted without a pause."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.process: Process | None = None
        self.ready = asyncio.Event()
        self.may_start = asyncio.Event()
        """No process is started until this event is set; workers may share one event."""
        self.may_start.set()
        self.restarts = 0
        self._clock = clock

    async def start(self) -> Process:
        """Start the process."""
        raise NotImplementedError

    async def serve(self, process: Process) -> bool:
        """Return True once the process is ready; False if it has ended before or has to be ended."""
        return await process.address() is not None

    async def live(self, process: Process) -> None:
        """Return when a ready process has ended or has to be ended."""
        await process.ended()

    async def probe(self) -> None:
        """Send a probe. Any answer shows that the process lives, even an error other than TimeoutError."""

    def on_silence(self, what: str) -> None:
        """Report that the process is killed because it was not ready in time or answered no probe."""

    def on_end(self, code: int, lasted_s: float, pause_s: float) -> None:
        """Report that the process ended with `code` after `lasted_s`, and restarts after `pause_s`.

        An exception raised here ends `run_forever`, for example after too many restarts in a row.
        """
        raise NotImplementedError

    def on_no_start(self, error: Exception, pause_s: float) -> None:
        """Report an error of `start` and return for a retry; by default, raise it to end `run_forever`."""
        raise error

    async def run_forever(self) -> NoReturn:
        """Run and restart the process until cancelled; a cancellation ends the process in order."""
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
        """End the process and its descendants; return whether it was killed."""
        was_killed = await process.end(self.stop_s)
        process.kill_rest()
        return was_killed

    async def _watch(self, process: Process) -> int:
        """Supervise a process from its start to its end; return the exit code."""
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
    """Read the next line, cut to the size of the stream's buffer; empty at the end of the stream."""
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
    """Describe an exit code: `exit code 3`, or the name of the signal that killed the process."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
    return f"{name} (often the system, short of memory)" if name == "SIGKILL" else name


def last_line(log: Path) -> str:
    """Return the last line of a child's log that is not blank; empty if there is none."""
    return (last_lines(log) or [""])[-1].strip()


def last_lines(log: Path, start: int = 0) -> list[str]:
    """Return the last lines of a child's log, not before the byte `start`."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return []


def without_keys(ours: Mapping[str, str], more: Sequence[str] = ()) -> dict[str, str]:
    """Select the environment variables that hold no keys, and the variables named in `more`."""
    return {name: ours[name] for name in (*_WITHOUT_KEYS, *more) if name in ours}


def without(names: Collection[str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}
