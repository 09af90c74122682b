"""What bench/study_faults.py trains in: a trainer service, its PostgreSQL, a task app, each to be killed."""

import secrets
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import httpx
import psutil

from bench.fault_processes import Database, Server, children, free_port, holders
from bench.kit import ROOT

Kind = Literal["service", "job", "task_app", "database", "learner", "gateway"]
KINDS: tuple[Kind, ...] = ("service", "job", "task_app", "database")
JOB_PROCESS = "trainer_backend.terminal.job_process"
# The processes that a job with [cluster] starts, by the module that they run.
OF_A_JOB: Mapping[Kind, str] = {
    "learner": "trainer_backend.learner.process",
    "gateway": "trainer_backend.processes.gateway_process",
}
# What has not come to anything by then never will.
PATIENCE_S = 1800.0
# A process of a job whose service is gone ends at once.
_MOMENT_S, _ORPHANED_S = 1.0, 60.0
_ANSWER_S = 5.0


class Posted(NamedTuple):
    """A posted job: `times` of the attempts until the service answered with `code`, and its id."""

    job_id: str
    times: int
    code: int


class Installation:
    """An operator's installation on this machine; `with` ends it.

    Attributes:
        runs: the service's data directory.
        task_url: of the task app.
        refusals: answers that nothing here explains: not a word of a store that is away.
    """

    def __init__(self, folder: Path) -> None:
        self.runs, self._folder = folder / "runs", folder
        self.refusals: list[str] = []
        app_port, port = free_port(), free_port()
        self.task_url = f"http://127.0.0.1:{app_port}"
        key, app_key = secrets.token_hex(16), secrets.token_hex(16)
        environ = {"ENVIRONMENT_API_KEY": app_key, "PYTHONPATH": str(ROOT)}
        python = (sys.executable, "-m")
        self.database = Database()
        app = (*python, "task_app", "--port", str(app_port), "--exit-with-parent")
        self._app = Server(app, environ, folder / "task_app.log")
        trainer = (*python, "trainer_backend", "trainer", "--port", str(port), "--exit-with-parent")
        store = {"TRAINER_API_KEY": key, "TURNWISE_DATABASE_URL": self.database.url}
        self._service = Server(
            (*trainer, "--data-dir", str(self.runs), "--allow-task-url", self.task_url),
            {**environ, **store},
            folder / "service.log",
        )
        self._http = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", headers={"X-API-Key": key}, timeout=_ANSWER_S
        )

    def __enter__(self) -> Self:
        until_s = time.monotonic() + PATIENCE_S
        while self.ask("/jobs") is None and time.monotonic() < until_s:
            time.sleep(0.05)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._service.kill()
        self._app.kill()
        self.database.close(self._folder / "postgresql.log")
        self._http.close()

    def post(self, toml: str, key: str) -> Posted:
        """Post a job, with one key, until the service confirms it."""
        until_s, times = time.monotonic() + PATIENCE_S, 0
        headers = {"Content-Type": "application/toml", "Idempotency-Key": key}
        while time.monotonic() < until_s:
            times += 1
            answer = self._answer("POST", "/jobs", content=toml, headers=headers)
            if answer is not None:
                return Posted(answer.json()["id"], times, answer.status_code)
            if self.refusals:
                break
            time.sleep(0.05)
        told = self.refusals or f"none answered in {PATIENCE_S:g} s"
        raise SystemExit(f"{self._folder}: no service took the job: {told}")

    def ask(self, path: str, **query: str) -> Any:
        """The service's answer; None if it or its store is away."""
        answer = self._answer("GET", path, params=query)
        return None if answer is None else answer.json()

    def _answer(self, method: str, path: str, **named: Any) -> httpx.Response | None:
        try:
            answer = self._http.request(method, path, **named)
        except httpx.TransportError:
            return None
        if answer.is_error and answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
            self.refusals.append(f"{method} {path}: {answer.status_code} {answer.text[:200]}")
        return answer if answer.is_success else None

    def job_process(self) -> psutil.Process | None:
        return next(iter(children(self._service.pid, JOB_PROCESS)), None)

    def processes(self, kind: Kind) -> list[psutil.Process]:
        """The job's process, or those of this kind that it has started, oldest first."""
        job = self.job_process()
        if job is None or kind == "job":
            return [] if job is None else [job]
        return children(job.pid, OF_A_JOB[kind])

    def is_there(self, kind: Kind) -> bool:
        """Whether there is a process of this kind to be killed."""
        return kind in self._killable or bool(self.processes(kind))

    def kill(self, kind: Kind) -> None:
        """Kill the process, of several the oldest, with SIGKILL; a job's processes end with its service."""
        of_job = [process for each in ("job", *OF_A_JOB) for process in self.processes(each)]
        if kind in self._killable:
            self._killable[kind].kill()
        else:
            for process in self.processes(kind)[:1]:
                process.kill()
        if kind in ("job", "service"):
            psutil.wait_procs(of_job, timeout=_MOMENT_S)

    def left_behind(self) -> set[int]:
        """Processes beside the service that write in its data directory, long after the job has ended."""
        until_s = time.monotonic() + _ORPHANED_S
        while (others := holders(self.runs) - {self._service.pid}) and time.monotonic() < until_s:
            time.sleep(0.1)
        return others

    def start(self, kind: Kind) -> None:
        """Start the killed process again; what belongs to a job is restarted by the supervisor or the job."""
        if kind in self._killable:
            self._killable[kind].start()

    def keep_up(self) -> list[Kind]:
        """Restart processes that ended by themselves, like `restart: unless-stopped`."""
        servers: dict[Kind, Server] = {"service": self._service, "task_app": self._app}
        ended = [kind for kind, server in servers.items() if server.ended]
        for kind in ended:
            servers[kind].start()
        return ended

    @property
    def _killable(self) -> Mapping[Kind, Server | Database]:
        return {"service": self._service, "task_app": self._app, "database": self.database}
