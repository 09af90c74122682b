"""Parses each posted job in a separate process, which is killed if it takes too long or too much memory.

`python -m trainer_backend.jobs.check_process` is a server with a single thread that has imported the parser.
It forks a child for each job, which takes milliseconds. When the child ends, all of its memory is freed.
"""

import asyncio
import gc
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import psutil

from service_kit.own_process import kill_with_parent
from service_kit.process import Guarded, name_exit
from trainer_backend.errors import CheckEnded, TooManyChecks, TrainerError
from trainer_backend.jobs.processes import without_secrets

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# Seconds for the server's imports, and for a process's exit. A process that hangs on a disk is abandoned.
_IMPORT_S, _EXIT_S = 120.0, 2.0
# Outcomes of a call. _EXIT comes with the exit code of the process, negative for a signal.
_READY, _RESULT, _ERROR, _NO_MEMORY, _EXIT = "ready", "returned", "raised", "no memory", "ended"
_STDERR = 2
# A library's threads would not survive a fork.
_ALONE = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class CheckProcess:
    """Calls functions that parse a client's input in a separate process, one at a time, in order.

    At most `at_most` calls may run or wait. `at_most_s` and `at_most_bytes` limit the time and the added
    memory of each call. Plug-ins are imported once, when the process starts.
    """

    def __init__(
        self,
        *,
        at_most_s: float = 5.0,
        at_most_bytes: int = 512 << 20,
        at_most: int = 64,
        plugins: Sequence[Path] = (),
    ) -> None:
        self._plugins = plugins
        self._at_most_s, self._at_most_bytes, self._at_most = at_most_s, at_most_bytes, at_most
        self._under_way = 0
        self._server: Guarded | None = None
        self._connection: Connection | None = None
        self._closed = False
        self._thread = ThreadPoolExecutor(1, "checks")

    def start(self) -> None:
        """Start the server, so that the first call does not wait for its imports."""
        self._thread.submit(self._connect)

    async def ask(
        self, call: Callable[Arguments, Result], *arguments: Arguments.args, **keywords: Arguments.kwargs
    ) -> Result:
        """Call a module-level function in the process. Function, arguments and result are pickled.

        Raises:
            TrainerError: the function raised it.
            CheckEnded: the call took too long or too much memory, or its process was killed.
            TooManyChecks: `at_most` calls already run or wait.
        """
        if self._under_way >= self._at_most:
            raise TooManyChecks(
                f"{self._under_way} jobs wait to be checked, the most that this service takes"
            )
        request = pickle.dumps((partial(call, *arguments, **keywords), self._at_most_s, self._at_most_bytes))
        self._under_way += 1
        try:
            loop = asyncio.get_running_loop()
            kind, result = await loop.run_in_executor(self._thread, self._exchange, request)
        finally:
            self._under_way -= 1
        if kind == _ERROR:
            raise result
        if kind != _RESULT:
            raise self._error(kind, result)
        answer: Result = result
        return answer

    def close(self) -> None:
        """End the server; the result of a running call is lost."""
        self._closed = True
        if self._server is not None:
            self._server.kill()
        self._thread.shutdown(cancel_futures=True)
        self._end()

    def _error(self, kind: str, exit_code: int) -> Exception:
        if kind == _NO_MEMORY:
            limit = f"{self._at_most_bytes >> 20} MiB of memory"
            return CheckEnded(f"checking the job needed more than {limit}, and was ended")
        if exit_code == -signal.SIGALRM:
            return CheckEnded(f"checking the job took longer than {self._at_most_s:g} s, and was ended")
        if exit_code < 0:
            return CheckEnded(f"checking the job was ended by {name_exit(exit_code)}")
        return RuntimeError(f"the process that checks a job ended with {name_exit(exit_code)}; see stderr")

    def _exchange(self, request: bytes) -> tuple[str, Any]:
        """Send a request to the server; return the outcome and its value. Runs on `_thread`."""
        connection = self._connect()
        try:
            connection.send_bytes(request)
            # A child ends itself at its time limit. If it hangs on a disk, child and server are abandoned.
            if connection.poll(self._at_most_s + _EXIT_S):
                return _message(connection)
            exit_code = -signal.SIGALRM
        except (OSError, EOFError):  # the server was killed
            exit_code = -signal.SIGKILL
        self._end()
        if not self._closed:
            self.start()
        return _EXIT, exit_code

    def _connect(self) -> Connection:
        """Return the connection to the server. If no server runs, start one and wait for its imports."""
        if self._connection is not None:
            return self._connection
        connection, theirs = Pipe()
        with theirs:
            self._server = Guarded(
                [sys.executable, "-m", __name__, *map(str, self._plugins)],
                stdin=theirs.fileno(), stdout=_STDERR, env=without_secrets() | _ALONE,
            )  # fmt: skip
        self._connection = connection
        try:
            if not connection.poll(_IMPORT_S):
                self._server.kill()
            _message(connection)
        except (OSError, EOFError):
            self._end()
            raise
        return connection

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        self._connection = self._server = None


def _message(connection: Connection) -> tuple[str, Any]:
    message: tuple[str, Any] = pickle.loads(connection.recv_bytes())
    return message


def serve(connection: Connection) -> None:
    """Answer each request in a forked child, until the other end closes the connection."""
    connection.send_bytes(pickle.dumps((_READY, None)))
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            kill_with_parent(parent)
            _answer(connection, request)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            connection.send_bytes(pickle.dumps((_EXIT, os.waitstatus_to_exitcode(status))))


def _answer(connection: Connection, request: bytes) -> None:
    call, at_most_s, at_most_bytes = pickle.loads(request)
    signal.setitimer(signal.ITIMER_REAL, at_most_s)  # ends this process even while a library holds the GIL
    most, hard = psutil.Process().memory_info().vms + at_most_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        answer: tuple[str, Any] = (_RESULT, call())
    except TrainerError as error:
        answer = (_ERROR, error)
    except MemoryError:
        answer = (_NO_MEMORY, 0)
    message = pickle.dumps(answer)
    signal.setitimer(signal.ITIMER_REAL, 0)  # from here on, a kill would cut the answer short
    connection.send_bytes(message)


def main(*plugins: str) -> None:
    import trainer_backend.jobs.posted  # noqa: F401  # once for all forks
    from trainer_backend.operator_plugins import load_packages, load_plugins

    connection = Connection(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # for plug-ins that read stdin
    with suppress(TrainerError):  # the check of each job reports the error
        load_packages()
        load_plugins([Path(file) for file in plugins])
    gc.freeze()  # otherwise garbage collection in a fork would copy the pages of all imports
    serve(connection)


if __name__ == "__main__":
    main(*sys.argv[1:])
