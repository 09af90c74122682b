"""The same tests on SQLite and on a real PostgreSQL."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from sqlalchemy import text

from tests.trainer_backend.store.postgres import Postgres
from tests.trainer_backend.store.runs import new_run
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.store.database import Store, open_store
from trainer_backend.store.tables import METADATA

NOON = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


@pytest.fixture(params=["sqlite", "postgresql"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Of an empty database."""
    if kind == "sqlite":
        yield f"sqlite:///{tmp_path}/store.db"
        return
    with request.getfixturevalue("postgres").database() as address:
        yield address


@pytest.fixture(scope="session")
def shared(postgres: Postgres) -> Iterator[str]:
    """A database that tests use one after the other: making one for each would take most of their time."""
    with postgres.database() as address:
        open_store(address).close()
        yield address


@pytest.fixture
def store(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """An empty store of this version."""
    if kind == "sqlite":
        found = open_store(f"sqlite:///{tmp_path}/store.db", clock=lambda: NOON)
    else:
        found = open_store(request.getfixturevalue("shared"), clock=lambda: NOON)
        with found.write() as connection:
            connection.execute(text(f"TRUNCATE {', '.join(METADATA.tables)} RESTART IDENTITY"))
    yield found
    found.close()


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return new_run(tmp_path / "run")


@pytest.fixture
def together() -> Callable[[int, Callable[[int], Any]], list[Any]]:
    """The results of so many threads that begin their work at the same moment."""

    def run(threads: int, work: Callable[[int], Any]) -> list[Any]:
        barrier = Barrier(threads)

        def one(number: int) -> Any:
            barrier.wait()
            return work(number)

        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(one, range(threads)))

    return run
