"""The versions of the tables, up and down, with data, on both databases."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, MetaData, inspect

from tests.trainer_backend.store import version_1
from tests.trainer_backend.store.conftest import NOON
from tests.trainer_backend.store.postgres import Postgres
from tests.trainer_backend.store.runs import finish, new_run
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.store import jobs, reads, reads_rollouts
from trainer_backend.store.database import Store, StoreUnavailable, migrate, open_store
from trainer_backend.store.reads_rollouts import RolloutFilter
from trainer_backend.store.rows import Job
from trainer_backend.store.sync import sync_run
from trainer_backend.store.tables import METADATA


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
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []


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
    jobs.create(store, Job(name="a", config="", home="here"))
    go(store, "base")
    assert tables(store) == set()
    go(store, "head")
    assert tables(store) == set(METADATA.tables)
    assert jobs.find(store).items == ()


def test_a_migration_that_fails_leaves_the_version_that_was_there(store: Store):
    job, _ = jobs.create(store, Job(name="a", config="", home="here"))

    def down_and_fail() -> None:
        with store.migration() as connection:
            migrate(connection, store.shown, "base")
            raise RuntimeError("the machine goes down here")

    with pytest.raises(RuntimeError):
        down_and_fail()
    assert tables(store) == set(METADATA.tables)
    assert jobs.get(store, job.id) == job


OLD_CONFIG = """\
[rollout]
env_name = "crafter"

[model]
path = "/models/small"

[retention]
decisions_days = 2.5
"""


def fill_version_1(connection: Connection, run: RunDirectory) -> None:
    """Two files with rollouts of mixed numbers, as of two syncs at once; rows of metrics up to number 7.

    The numbers of PostgreSQL's own sequences, which begin at 1, stay free.
    """
    tables = MetaData()
    tables.reflect(connection)

    def put(table: str, **values: Any) -> None:
        connection.execute(tables.tables[table].insert().values(values))

    about = {
        "config": OLD_CONFIG,
        "run_dir": str(run.path),
        "origin": "api",
        "home": "here",
        "tags": {"a": "b"},
    }
    now = {"state": "paused", "wanted": "run", "attempt": 1, "created": NOON, "version": 4}
    put("jobs", number=3, id="x", name="old", **about, **now)
    for number in (1, 2):
        facts = run.rollouts_file(f"iteration_{number}").stat()
        seen = {"size": facts.st_size, "modified_ns": facts.st_mtime_ns, "decisions": True}
        put("synced_files", number=100 + number, job=3, name=f"rollouts/iteration_{number}.parquet", **seen)
    for number, name in ((103, "metrics.jsonl"), (104, "ledger.jsonl")):
        seen = {"size": 9, "modified_ns": 9, "digest": "9", "decisions": False}
        put("synced_files", number=number, job=3, name=name, **seen)
    for number, file, place in ((1, 1, 0), (2, 2, 0), (3, 1, 1), (4, 2, 1), (5, 1, 2), (6, 2, 2)):
        own = {"rollout_id": f"run/train/{file}/0/{place}", "group_id": f"train/{file}/0", "sibling": place}
        more = {"stage": "train", "attempt": 0, "policy": "p", "status": "finished", "decisions": 3}
        put("rollouts", number=100 + number, job=3, file=100 + file, iteration=file, **own, **more)
    said = {"action": "a", "unique_delta": 0, "ach_delta": 0, "unique": [], "env_reward": 0.0}
    put("decisions", rollout=101, turn=1, **said)
    put("metric_rows", number=7, job=3, kind="iteration", iteration=2, row={"episode/outcome_reward": 0.5})
    put("iterations", job=3, iteration=2, finished=NOON)
    put("consumed", job=3, planned="train/1/0/0", rollout_id="run/train/1/0/0", iteration=1)


def test_a_database_of_version_1_keeps_its_jobs_and_rollouts_and_its_files_are_read_again(
    store: Store, tmp_path: Path
):
    run = new_run(tmp_path / "run")
    for iteration in (1, 2):
        finish(run, iteration)
    go(store, "base")
    with store.migration() as connection:
        version_1.create(connection)
        fill_version_1(connection, run)
    go(store, "head")
    with store.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []
    (job,) = reads.runs(store).items
    assert (job.id, job.name, job.state, job.tags, job.version) == ("x", "old", "paused", {"a": "b"}, 4)
    assert (job.environment, job.model, "decisions_days" in job.config) == ("crafter", "small", False)
    assert (job.iteration, job.finished, job.outcome) == (2, NOON, 0.5)
    rows = reads_rollouts.rollouts(store, "x", descending=False).items
    assert [row.iteration for row in rows] == [1, 2, 1, 2, 1, 2]
    assert [row.rollout_id for row in rows] == [f"run/train/{row.iteration}/0/{row.place}" for row in rows]
    assert reads_rollouts.count_rollouts(store, "x", RolloutFilter(iteration=2)) == (3, True)
    assert reads_rollouts.learning_iteration(store, "x", "run/train/1/0/0") == 1
    assert sync_run(store, "x", run)
    assert [line.number for line in reads.metric_lines(store, "x")] == [8, 9]
    assert reads_rollouts.rollouts(store, "x", descending=False).items == rows  # not read again
