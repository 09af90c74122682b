"""The process of a job: its start in its run directory, its stop, and its last message."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from service_kit.children import Child
from service_kit.keys import TRAINER_KEY
from trainer_backend.learner.calls import KEYS_OF_THE_LEARNER
from trainer_backend.rundir.state import ERROR, RunState, read_state
from trainer_backend.store.rows import JobRow, tables_of

PROCESS_LOG = "process.log"
_LAST_BYTES = 8192
# The service's secrets, which jobs do not need; one whose learner is somebody else's has that key.
_OWN_KEYS = frozenset({TRAINER_KEY, f"{TRAINER_KEY}_FILE", "TURNWISE_DATABASE_URL", "PGPASSWORD"})
WITHHELD = _OWN_KEYS | KEYS_OF_THE_LEARNER
Command = Callable[[Path], Sequence[str]]


def job_command(run_dir: Path) -> Sequence[str]:
    """Return the command line of a job's process."""
    return (sys.executable, "-m", "trainer_backend.terminal.job_process", str(run_dir))


class JobProcess(Child):
    """The process of a job.

    Attributes:
        is_stopping: whether a signal to stop was sent.
        late: whether it had to be killed after that.
    """

    is_stopping = late = False

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM once: the process saves its finished work and ends, or is killed after `grace_s`.

        A timer of the event loop kills it, since the caller may be waiting for a store that hangs.
        """
        if not self.is_stopping:
            self.is_stopping = True
            self.signal(signal.SIGTERM)
            asyncio.get_running_loop().call_later(grace_s, self._kill_late)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def _kill_late(self) -> None:
        if self.exit_code is None:
            self.late = True
            self.kill()


def environment_of(config: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a job's process, by the job's TOML."""
    cluster = tables_of(config).get("cluster")
    is_external = isinstance(cluster, dict) and cluster.get("launcher") == "external"
    withheld = _OWN_KEYS if is_external else WITHHELD
    return {name: value for name, value in environ.items() if name not in withheld}


async def start_process(
    run_dir: Path, environment: Mapping[str, str], *, command: Command = job_command
) -> JobProcess:
    """Start the process of a job. It ends with this process at the latest."""
    with (run_dir / PROCESS_LOG).open("ab") as log:
        return await JobProcess.start(
            command(run_dir),
            stdout=log,
            stderr=log,
            env=environment,
        )


def last_words(job: JobRow, process: JobProcess) -> tuple[RunState | None, str | None]:
    """Read the last state and the last error that this process wrote (job_process.py); None: it wrote none.

    The state of an earlier process of the job does not count.
    """
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
