"""Runs a child process that the operator configures, and exchanges lines of JSON with it."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from typing import IO, Any

from service_kit.output import Output
from service_kit.process import Guarded, without_keys
from task_app.environments.foreign.peer import ForeignDeadline, ForeignFailed
from task_app.environments.foreign.wire import late, parse_json, too_much
from task_app.settings import Reach

# Time limit for the start of a process: its imports and downloads take seconds on an idle machine.
START_S = 120.0
_CHUNK_BYTES = 65_536
_open_processes: set[Guarded] = set()


class Child:
    """A child process. Its stderr is copied to the task app's log, up to a limit per call.

    Args:
        name: the name of the environment, which errors quote.
        source: the setting that contains the command, such as the name of a variable; errors quote it.
        variables: environment variables, in addition to those of the task app that `without_keys` keeps.
        folder: the working directory; by default that of the task app.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        reach: Reach,
        *,
        source: str,
        variables: Mapping[str, str] | None = None,
        folder: str | None = None,
    ) -> None:
        self._name, self._reach, self._read = name, reach, b""
        try:
            self._output = Output("environment", name)
            with self._output.given() as stderr:
                self._process = Guarded(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, cwd=folder,
                    env={**without_keys(os.environ), **(variables or {})},
                )  # fmt: skip
        except (OSError, ValueError) as exc:  # ValueError: an invalid name of a variable
            raise ForeignFailed(f"{name}: the command of {source} does not run: {exc}") from exc
        _open_processes.add(self._process)
        assert self._process.stdin is not None and self._process.stdout is not None, "made with pipes"
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)

    def tell(self, message: Mapping[str, Any]) -> None:
        """Write a message as one line. Raises ForeignDeadline if the process does not read it in time."""
        until_s = time.monotonic() + self._reach.environment_deadline_s
        text = memoryview(json.dumps(message).encode() + b"\n")
        while text:
            self._wait(self._stdin, EVENT_WRITE, until_s, self._reach.environment_deadline_s)
            try:
                text = text[os.write(self._stdin.fileno(), text) :]
            except OSError as exc:
                raise self._ended() from exc

    def lines(self, deadline_s: float) -> Iterator[Any]:
        """Parse and yield the next lines that the process writes. Blank lines are skipped.

        `deadline_s` limits the time for all these lines together. They also count as one call for the limit
        of stderr in the log.
        """
        self._output.begin_call()
        until_s = time.monotonic() + deadline_s
        while True:
            line, newline, rest = self._read.partition(b"\n")
            if len(line) > self._reach.max_environment_bytes:
                raise too_much(self._name, self._reach)
            if newline:
                self._read = rest
                if line.strip():
                    yield parse_json(line, self._name)
            else:
                self._read += self._read_chunk(until_s, deadline_s)

    def close(self, *, grace_s: float = 0.0) -> None:
        """End the process and its descendants, because a descendant may keep the pipes open.

        If `grace_s` is 0, kill them at once. Otherwise close stdin and wait `grace_s` for the process to end.
        If it does not end, send SIGTERM and wait `grace_s` again; then kill whatever is left.
        """
        try:
            if grace_s:
                self._stdin.close()
                if not self._ends_within(grace_s):
                    self._process.terminate()
                    self._ends_within(grace_s)
        except OSError:
            pass  # no file descriptor is free, so the wait is not possible
        finally:
            self._process.kill()
            _open_processes.discard(self._process)
            for pipe in (self._stdin, self._stdout):
                with suppress(OSError):
                    pipe.close()
            self._process.wait()
            self._output.end()

    def _ends_within(self, seconds: float) -> bool:
        """Discard the process's output until it closes stdout; return whether it closes stdout in time."""
        until_s = time.monotonic() + seconds
        try:
            while True:
                self._read_chunk(until_s, seconds)
        except ForeignDeadline:
            return False
        except ForeignFailed:
            return True

    def _read_chunk(self, until_s: float, deadline_s: float) -> bytes:
        self._wait(self._stdout, EVENT_READ, until_s, deadline_s)
        chunk = os.read(self._stdout.fileno(), _CHUNK_BYTES)
        if not chunk:
            raise self._ended()
        return chunk

    def _wait(self, pipe: IO[bytes], event: int, until_s: float, deadline_s: float) -> None:
        with DefaultSelector() as selector:  # select() supports no descriptors above 1023
            selector.register(pipe, event)
            rest_s = until_s - time.monotonic()
            if rest_s <= 0 or not selector.select(rest_s):
                raise late(self._name, deadline_s)

    def _ended(self) -> ForeignFailed:
        return ForeignFailed(f"{self._name} has ended its process; the task app's log says why")


def end_all(grace_s: float) -> None:
    """End all child processes when the service ends, even if an environment is still in a call.

    Wait up to `grace_s` for processes that are already being closed. Send SIGTERM to the remaining processes,
    wait up to `grace_s` again, and kill those that still run.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        until_s = time.monotonic() + grace_s
        while _open_processes and time.monotonic() < until_s:
            time.sleep(0.02)
        for process in tuple(_open_processes):
            process.send_signal(number)
