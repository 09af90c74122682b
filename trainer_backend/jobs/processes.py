"""The process of a job: its start in its run directory, its stop, and its last message."""

import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from service_kit.keys import TRAINER_KEY
from service_kit.process import Child, last_lines, without
from trainer_backend.errors import RunDirectoryError
from trainer_backend.jobs.states import Ending, explain, is_stop
from trainer_backend.learner.calls import KEYS_OF_THE_LEARNER
from trainer_backend.pages.figures import clip
from trainer_backend.rundir.files import now
from trainer_backend.rundir.state import DONE, ERROR, FINAL, append_log, read_state, write_state
from trainer_backend.store.rows import Job, parse_tables

PROCESS_LOG = "process.log"
_MOST_SHOWN = 300
# How faulthandler begins to tell of a signal such as SIGSEGV.
_CRASH = "Fatal Python error: "
# The service's secrets, which jobs do not need.
_OWN_KEYS = frozenset({TRAINER_KEY, f"{TRAINER_KEY}_FILE", "TURNWISE_DATABASE_URL", "PGPASSWORD"})
Command = Callable[[Path], Sequence[str]]


def job_command(run_dir: Path) -> Sequence[str]:
    return (sys.executable, "-m", "trainer_backend.terminal.job_process", str(run_dir))


class JobProcess(Child):
    log_start = 0
    """The bytes of process.log that earlier processes of the job wrote."""
    stopping: "asyncio.Task[bool] | None" = None
    """Its end after a signal to stop; the result says whether it had to be killed."""

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM once: the process saves its finished work and ends, or is killed after `grace_s`.

        A task of the event loop kills it, since the caller may be waiting for a store that hangs.
        """
        self.stopping = self.stopping or asyncio.ensure_future(self.end(grace_s))


def without_secrets(config: str = "", environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a job's process, by the job's TOML; an external learner's job has its key."""
    cluster = parse_tables(config).get("cluster")
    is_external = isinstance(cluster, dict) and cluster.get("launcher") == "external"
    return without(_OWN_KEYS if is_external else _OWN_KEYS | KEYS_OF_THE_LEARNER, environ)


async def start_process(
    run_dir: Path, environment: Mapping[str, str], *, command: Command = job_command
) -> JobProcess:
    """Start the process of a job. It ends with this process at the latest."""
    with (run_dir / PROCESS_LOG).open("ab") as log:
        start = log.tell()  # before it shares the position
        process = await JobProcess.start(command(run_dir), stdout=log, stderr=log, env=environment)
        process.log_start = start
    return process


def last_words(job: Job, process: JobProcess) -> Ending:
    """Return what a process wrote (job_process.py) before it ended, without what earlier ones wrote."""
    assert process.exit_code is not None, "the words are the last ones once it has ended"
    if job.run_dir is None:
        return Ending(process.exit_code)
    folder = Path(job.run_dir)
    state = read_state(folder)
    own = state if state is not None and state.pid == process.pid else None
    lines = last_lines(folder / PROCESS_LOG, process.log_start)
    last = lines[-1] if lines else ""
    error = last.removeprefix(ERROR) if last.startswith(ERROR) else None
    # After that line come the stacks of all threads.
    line = next((line for line in lines if line.startswith(_CRASH)), last)
    last_line = clip(line.strip(), _MOST_SHOWN)
    return Ending(process.exit_code, own, error=error, last_line=last_line)


def record_death(job: Job, ending: Ending) -> None:
    """Write why a process ended that could not write it itself, for readers of the run's files."""
    wrote = ending.state is not None and ending.state.state in FINAL
    if job.run_dir is None or wrote or ending.exit_code == DONE or is_stop(ending.exit_code):
        return
    folder, (code, detail) = Path(job.run_dir), explain(ending)
    state = read_state(folder)
    if state is None or (state.code, state.detail) == (code, detail):  # the second: by an interrupted round
        return
    with suppress(RunDirectoryError):  # a disk without room may be why it ended
        end = replace(state, state="failed", stage="", done=0, total=0, code=code, detail=detail)
        write_state(folder, replace(end, since=now()))
        append_log(folder, f"failed: {detail}")
