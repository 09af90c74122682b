"""A process of the operator's, which reads and writes lines of JSON."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from task_app.environments.foreign.peer import ForeignFailed, Reach
from task_app.environments.foreign.wire import json_of, late, too_much

# For the imports and downloads of a start, which take seconds on an idle machine.
START_S = 120.0
# Variables that a program needs to run, and that hold no keys.
_VARIABLES = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "HF_HOME")
_CHUNK_BYTES = 65_536


class Child:
    """The process; its stderr is the task app's.

    Args:
        name: of the environment, in errors.
        source: what names the command, in errors.
        variables: its further environment variables.
        folder: where it runs; None: where the task app does.
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
        self._name = name
        self._reach = reach
        self._read = b""
        environment = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder,
                env={**environment, **(variables or {})}, start_new_session=True,
            )  # fmt: skip
        except OSError as exc:
            raise ForeignFailed(f"{name}: the command of {source} does not run: {exc}") from exc

    def tell(self, message: Mapping[str, Any]) -> None:
        stdin = self._process.stdin
        assert stdin is not None, "made with a pipe"
        try:
            stdin.write(json.dumps(message).encode() + b"\n")
            stdin.flush()
        except OSError as exc:
            raise self._ended() from exc

    def lines(self, deadline_s: float) -> Iterator[Any]:
        """The values of the process's next lines; all that are taken arrive within the deadline."""
        until_s = time.monotonic() + deadline_s
        while True:
            line, newline, rest = self._read.partition(b"\n")
            if len(line) > self._reach.max_bytes:
                raise too_much(self._name, self._reach)
            if newline:
                self._read = rest
                yield json_of(line, self._name)
            else:
                self._read += self._chunk(until_s, deadline_s)

    def close(self, *, grace_s: float = 0.0) -> None:
        """Kill the process and what it has forked, which may hold its pipes.

        Args:
            grace_s: it has this long to end by itself once its stdin is closed.
        """
        if grace_s:
            with suppress(OSError):
                assert self._process.stdin is not None, "made with a pipe"
                self._process.stdin.close()
            until_s = time.monotonic() + grace_s
            with suppress(ForeignFailed):
                while True:
                    self._chunk(until_s, grace_s)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None, "made with pipes"
            with suppress(OSError):
                pipe.close()
        self._process.wait()

    def _chunk(self, until_s: float, deadline_s: float) -> bytes:
        stdout = self._process.stdout
        assert stdout is not None, "made with a pipe"
        with DefaultSelector() as selector:  # select() knows no descriptors beyond 1023
            selector.register(stdout, EVENT_READ)
            rest_s = until_s - time.monotonic()
            if rest_s <= 0 or not selector.select(rest_s):
                raise late(self._name, deadline_s)
        chunk = os.read(stdout.fileno(), _CHUNK_BYTES)
        if not chunk:
            raise self._ended()
        return chunk

    def _ended(self) -> ForeignFailed:
        return ForeignFailed(f"{self._name} has ended its process; the task app's stderr says why")
