"""The process that trains a job: how it is started and stopped, and why it ended."""

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
# The first words of faulthandler's report of a signal such as SIGSEGV.
_CRASH = "Fatal Python error: "
# The service's secrets, which jobs do not need.
_OWN_KEYS = frozenset({TRAINER_KEY, f"{TRAINER_KEY}_FILE", "TURNWISE_DATABASE_URL", "PGPASSWORD"})
Command = Callable[[Path], Sequence[str]]


def job_command(run_dir: Path) -> Sequence[str]:
    return (sys.executable, "-m", "trainer_backend.terminal.job_process", str(run_dir))


class JobProcess(Child):
    log_start = 0
    """The size of process.log when this process was started. The output of this process begins there."""
    stopping: "asyncio.Task[bool] | None" = None
    """The task that `stop` starts: it ends the process, and returns whether a kill was needed."""

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM, unless an earlier call did. The process then saves its finished work and ends.

        If it has not ended after `grace_s` seconds, a task kills it; the caller does not wait for this.
        """
        self.stopping = self.stopping or asyncio.ensure_future(self.end(grace_s))


def without_secrets(config: str = "", environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return `environ` without the service's secrets, for the process of a job.

    The learner's keys are also removed, unless the TOML `config` of the job names an external learner.
    """
    cluster = parse_tables(config).get("cluster")
    is_external = isinstance(cluster, dict) and cluster.get("launcher") == "external"
    return without(_OWN_KEYS if is_external else _OWN_KEYS | KEYS_OF_THE_LEARNER, environ)


async def start_process(
    run_dir: Path, environment: Mapping[str, str], *, command: Command = job_command
) -> JobProcess:
    """Start the process of a job. It also ends when this process ends."""
    with (run_dir / PROCESS_LOG).open("ab") as log:
        start = log.tell()  # before the new process moves this position
        process = await JobProcess.start(command(run_dir), stdout=log, stderr=log, env=environment)
        process.log_start = start
    return process


def last_words(job: Job, process: JobProcess) -> Ending:
    """Return how a process ended: its exit code, and what it wrote to state.json and process.log."""
    assert process.exit_code is not None, "the process has ended"
    if job.run_dir is None:
        return Ending(process.exit_code)
    folder = Path(job.run_dir)
    state = read_state(folder)
    own = state if state is not None and state.pid == process.pid else None
    lines = last_lines(folder / PROCESS_LOG, process.log_start)
    last = lines[-1] if lines else ""
    error = last.removeprefix(ERROR) if last.startswith(ERROR) else None
    # The stacks of all threads follow the _CRASH line.
    line = next((line for line in lines if line.startswith(_CRASH)), last)
    last_line = clip(line.strip(), _MOST_SHOWN)
    return Ending(process.exit_code, own, error=error, last_line=last_line)


def record_death(job: Job, ending: Ending) -> None:
    """Write why a process failed to state.json and run.log, unless the process wrote its end there itself."""
    wrote = ending.state is not None and ending.state.state in FINAL
    if job.run_dir is None or wrote or ending.exit_code == DONE or is_stop(ending.exit_code):
        return
    folder, (code, detail) = Path(job.run_dir), explain(ending)
    state = read_state(folder)
    if state is None or (state.code, state.detail) == (code, detail):  # equal after an interrupted round
        return
    with suppress(RunDirectoryError):  # a full disk may be the reason
        end = replace(state, state="failed", stage="", done=0, total=0, code=code, detail=detail)
        write_state(folder, replace(end, since=now()))
        append_log(folder, f"failed: {detail}")
