"""The process of a job: started on its run directory, told to stop, waited for."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from trainer_backend.rundir.state import RunState, read_state
from trainer_backend.running.exit_codes import ERROR
from trainer_backend.store.rows import JobRow

PROCESS_LOG = "process.log"
_LAST_BYTES = 8192
# The service's own secrets, which no job needs.
WITHHELD = frozenset({"TRAINER_API_KEY", "TRAINER_API_KEY_FILE", "TURNWISE_DATABASE_URL", "PGPASSWORD"})
Command = Callable[[Path], Sequence[str]]


def job_command(run_dir: Path) -> Sequence[str]:
    """What is started for a job."""
    return (sys.executable, "-m", "trainer_backend.running.job_process", str(run_dir))


class JobProcess:
    """A started process.

    Attributes:
        told: a signal to stop was sent.
        late: it had to be killed after that.
        exit_code: None while it runs; negative: the signal that killed it.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.told = self.late = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    def stop(self, grace_s: float) -> None:
        """Ask it to save what is finished, and to end; once. After that time it is killed, by a clock of its
        own: whoever asked may be waiting for a store that hangs."""
        if not self.told:
            self.told = True
            self._signal(signal.SIGTERM)
            asyncio.get_running_loop().call_later(grace_s, self._kill_late)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _kill_late(self) -> None:
        if self.exit_code is None:
            self.late = True
            self.kill()

    async def ended(self) -> int:
        """Wait for its end."""
        return await self._process.wait()

    def _signal(self, number: int) -> None:
        # Not the process's own send_signal: it reaps a child that has just ended, and asyncio, which comes
        # second then, makes up an exit code.
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)


async def start_process(
    run_dir: Path, *, command: Command = job_command, environ: Mapping[str, str] = os.environ
) -> JobProcess:
    """Start the process of a job. It lives as long as this one at most: its standard input is our pipe.

    Raises:
        OSError: it cannot be started, or its log not be written.
    """
    with (run_dir / PROCESS_LOG).open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *command(run_dir),
            stdin=asyncio.subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={name: value for name, value in environ.items() if name not in WITHHELD},
            # Its own session: Ctrl-C reaches this process alone, which then stops its jobs in order.
            start_new_session=True,
        )
    return JobProcess(process)


def last_words(job: JobRow, process: JobProcess) -> tuple[RunState | None, str | None]:
    """What this process wrote last of its run, not what one before it did; and the error that it printed at
    its end (job_process.py). None: it did not."""
    folder = None if job.run_dir is None else Path(job.run_dir)
    if folder is None:
        return None, None
    state = read_state(folder)
    return state if state is not None and state.pid == process.pid else None, _printed_error(folder)


def _printed_error(folder: Path) -> str | None:
    try:
        with (folder / PROCESS_LOG).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
            lines = file.read().decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return None
    return lines[-1].removeprefix(ERROR) if lines and lines[-1].startswith(ERROR) else None
