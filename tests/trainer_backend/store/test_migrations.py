"""The versions of the tables, up and down, with data, on both databases."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import inspect, text

from tests.trainer_backend.store.conftest import NOON
from tests.trainer_backend.store.postgres import Postgres
from tests.trainer_backend.store.runs import checkpoint, evaluate, finish, new_run
from tests.trainer_backend.store.test_sync import whole
from trainer_backend.store import jobs
from trainer_backend.store.database import Store, open_store
from trainer_backend.store.errors import StoreUnavailable
from trainer_backend.store.jobs import NewJob
from trainer_backend.store.schema_version import migrate
from trainer_backend.store.sync import sync_run
from trainer_backend.store.tables import Base


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    """Of a database of its own: what a test does to its tables concerns no other."""
    found = open_store(url, clock=lambda: NOON)
    yield found
    found.close()


def tables(store: Store) -> set[str]:
    with store.reading() as connection:
        return set(inspect(connection).get_table_names()) - {"alembic_version"}


def go(store: Store, revision: str) -> None:
    with store.migrating() as connection:
        migrate(connection, store.shown, revision)


def test_the_migrations_make_what_the_models_say(store: Store):
    with store.reading() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []


def test_down_to_jobs_and_up_again_keeps_the_jobs_and_the_next_sync_brings_back_the_rest(
    store: Store, tmp_path: Path
):
    run = new_run(tmp_path / "run")
    job, _ = jobs.create(store, NewJob("a", config='x = "é"', home="here", run_dir=run.path))
    for iteration in (1, 2):
        finish(run, iteration)
    evaluate(run, 2, 3.0)
    checkpoint(run, 2, 100)
    sync_run(store, job.id, run)
    before = whole(store)
    go(store, "0001")
    assert tables(store) == {"jobs"}
    assert jobs.get(store, job.id) == job
    go(store, "head")
    assert jobs.get(store, job.id) == job
    assert sync_run(store, job.id, run)
    assert whole(store) == before


def test_a_key_becomes_one_of_its_service_and_nothing_that_refers_to_a_job_is_lost(
    store: Store, tmp_path: Path
):
    run = new_run(tmp_path / "run")
    job, _ = jobs.create(store, keyed("here", run_dir=run.path))
    last, _ = jobs.create(store, NewJob("b", config="", home="here"))
    jobs.change(store, last.id, lambda _: {"state": "cancelled"})
    jobs.remove(store, last.id)
    finish(run, 1)
    sync_run(store, job.id, run)
    before = whole(store)
    go(store, "0002")
    with store.reading() as connection:
        assert connection.scalar(text("SELECT count(*) FROM rollouts")) == 3
        assert connection.scalar(text("SELECT count(*) FROM consumed")) == 0
    go(store, "head")
    assert jobs.made_by(store, "here", "k", "digest") == job
    assert sync_run(store, job.id, run), "of the ledger, which was read under the run's own ids"
    assert not sync_run(store, job.id, run)
    assert whole(store) == before
    other, made = jobs.create(store, keyed("there"))
    assert made and other.id != job.id
    assert other.number > last.number, "a number is never used twice"


def test_down_again_two_services_keep_their_jobs_and_the_first_one_the_key(store: Store):
    found = [jobs.create(store, keyed(home))[0] for home in ("here", "there")]
    single, _ = jobs.create(store, keyed("there", key="other"))
    go(store, "0002")
    with store.reading() as connection:
        keys = connection.execute(text("SELECT idempotency_key, body_hash FROM jobs ORDER BY number")).all()
    assert list(map(tuple, keys)) == [("k", "digest"), (None, None), ("other", "digest")]
    go(store, "head")
    assert [jobs.get(store, job.id) for job in (*found, single)] == [*found, single]


def keyed(home: str, *, key: str = "k", run_dir: Path | None = None) -> NewJob:
    return NewJob("a", config="", home=home, run_dir=run_dir, idempotency_key=key, body_hash="digest")


def test_who_must_wait_too_long_for_another_that_migrates_is_told(postgres: Postgres):
    with postgres.database() as url:
        store = open_store(url)
        with (
            store.migrating() as first,
            pytest.raises(StoreUnavailable, match=r"others have held its tables for 0\.05 s") as told,
        ):
            migrate(first, store.shown)  # which holds the lock until it ends
            with store.migrating() as second:
                migrate(second, store.shown, lock_s=0.05)
        assert "stop those of an earlier version" in str(told.value)
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
        with store.migrating() as connection:
            migrate(connection, store.shown, "0001")
            raise RuntimeError("the machine goes down here")

    with pytest.raises(RuntimeError):
        down_and_fail()
    assert tables(store) == set(Base.metadata.tables)
    assert jobs.get(store, job.id) == job
