"""The versions of the tables, up and down, with data, on both databases."""

from collections.abc import Iterator

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import inspect

from tests.trainer_backend.store.conftest import NOON
from tests.trainer_backend.store.postgres import Postgres
from trainer_backend.store import jobs
from trainer_backend.store.database import Store, StoreUnavailable, migrate, open_store
from trainer_backend.store.jobs import NewJob
from trainer_backend.store.tables import Base


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    """Of a database of its own: what a test does to its tables concerns no other."""
    found = open_store(url, clock=lambda: NOON)
    yield found
    found.close()


def tables(store: Store) -> set[str]:
    with store.read() as connection:
        return set(inspect(connection).get_table_names()) - {"alembic_version"}


def go(store: Store, revision: str) -> None:
    with store.migration() as connection:
        migrate(connection, store.shown, revision)


def test_the_migrations_make_what_the_models_say(store: Store):
    with store.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []


def test_who_must_wait_too_long_for_another_that_migrates_is_told(postgres: Postgres):
    with postgres.database() as url:
        store = open_store(url)
        with (
            store.migration() as first,
            pytest.raises(StoreUnavailable, match=r"others have held its tables for 0\.05 s") as told,
        ):
            migrate(first, store.shown)  # which holds the lock until it ends
            with store.migration() as second:
                migrate(second, store.shown, lock_s=0.05)
        assert "stop services of an earlier version" in str(told.value)
        store.close()


def test_down_to_nothing_and_up_again_gives_an_empty_store(store: Store):
    jobs.create(store, NewJob("a", config="", home="here"))
    go(store, "base")
    assert tables(store) == set()
    go(store, "head")
    assert tables(store) == set(Base.metadata.tables)
    assert jobs.find(store).items == ()


def test_a_migration_that_fails_leaves_the_version_that_was_there(store: Store):
    job, _ = jobs.create(store, NewJob("a", config="", home="here"))

    def down_and_fail() -> None:
        with store.migration() as connection:
            migrate(connection, store.shown, "base")
            raise RuntimeError("the machine goes down here")

    with pytest.raises(RuntimeError):
        down_and_fail()
    assert tables(store) == set(Base.metadata.tables)
    assert jobs.get(store, job.id) == job
