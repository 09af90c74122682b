"""The database as it may be: not there, gone in the middle, full, newer, or none at all."""

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from tests.trainer_backend.store.postgres import Postgres
from trainer_backend.store import jobs
from trainer_backend.store.database import Store, StoreError, StoreUnavailable, open_store
from trainer_backend.store.rows import Job


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("mysql://user:secret@host/db", "names 'mysql'; known: sqlite, postgresql"),
        ("sqlite://", "in memory would forget its jobs"),
        ("sqlite:///:memory:", "in memory would forget its jobs"),
        ("secret", "cannot be read; write sqlite:///FILE"),
        ("postgresql://user:secret@host:port/db", "cannot be read; write sqlite:///FILE"),
    ],
)
def test_an_address_that_cannot_be_one_is_refused_without_its_password(url: str, told: str):
    with pytest.raises(StoreError, match=told) as refused:
        open_store(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("postgresql://u:secret@127.0.0.1:1/db", r"u:\*\*\*@127.0.0.1:1/db cannot be used: .*refused"),
        ("postgres://u@127.0.0.1:1/db?password=secret", r"u@127.0.0.1:1/db cannot be used: .*refused"),
        ("sqlite:///{}/notes.txt", "file is not a database"),
        ("sqlite:///{}/notes.txt/below/store.db", "cannot be made for the store"),
    ],
)
def test_one_that_cannot_be_opened_is_told_without_the_password(tmp_path: Path, url: str, told: str):
    (tmp_path / "notes.txt").write_text("words " * 1000)
    with pytest.raises(StoreUnavailable, match=told) as refused:
        open_store(url.format(tmp_path))
    assert "secret" not in str(refused.value) and refused.value.status == 503
    assert (tmp_path / "notes.txt").read_text() == "words " * 1000


def test_sqlite_keeps_a_write_ahead_log_and_its_references(tmp_path: Path):
    store = open_store(f"sqlite:///{tmp_path}/new/store.db")
    with store.read() as connection:
        assert connection.scalar(text("PRAGMA journal_mode")) == "wal"
        assert connection.scalar(text("PRAGMA foreign_keys")) == 1
    with store.write() as connection:
        connection.execute(text("CREATE TABLE x (y)"))
    # its folder, and every file of it, are the owner's alone
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "new").iterdir()}
    assert modes == dict.fromkeys(["store.db", "store.db-wal", "store.db-shm"], 0o600)
    store.close()


def test_a_database_of_a_newer_version_is_refused_and_left_as_it_is(url: str):
    store = open_store(url)
    with store.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(
        StoreError, match="has version '9999', and this Turnwise knows up to '0003'"
    ) as refused:
        open_store(url)
    assert "A newer Turnwise made it" in str(refused.value)
    with store.read() as connection:
        assert connection.scalar(text("SELECT version_num FROM alembic_version")) == "9999"
    store.close()


def test_what_is_read_in_one_transaction_is_one_state_of_the_store(store: Store):
    with store.read() as connection:
        counting = text("SELECT count(*) FROM jobs")
        assert connection.scalar(counting) == 0
        jobs.create(store, Job(name="a", config="", home="here"))
        assert connection.scalar(counting) == 0
    with store.read() as connection:
        assert connection.scalar(counting) == 1


def test_a_server_that_is_gone_without_a_word_is_not_waited_for(postgres: Postgres):
    with postgres.database() as url:
        for more, idle in (("", "15"), ("&keepalives_idle=99", "99")):
            store = open_store(url + more)
            with store.read() as connection:
                driver: Any = connection.connection.dbapi_connection
                given = driver.info.get_parameters()
            assert (given["keepalives_idle"], given["tcp_user_timeout"]) == (idle, "30000")
            store.close()


def test_a_server_that_is_killed_and_comes_back_is_used_again(postgres: Postgres):
    with postgres.database() as url:
        store = open_store(url)
        job, _ = jobs.create(store, Job(name="a", config="", home="here"))
        postgres.kill()
        try:
            for _ in range(2):  # the first may find a dead connection, the second none
                with pytest.raises(StoreUnavailable, match=r"(?s)cannot be used: .*Runs continue without it"):
                    jobs.get(store, job.id)
            with pytest.raises(StoreUnavailable):
                open_store(url)
        finally:
            postgres.start()
        assert jobs.get(store, job.id) == job
        store.close()


def test_a_transaction_that_the_server_dies_under_is_told_and_leaves_nothing(postgres: Postgres):
    with postgres.database() as url:
        store = open_store(url)
        job, _ = jobs.create(store, Job(name="a", config="", home="here"))

        def die(_found: object) -> jobs.Changes:
            postgres.kill()
            return {"detail": "written"}

        try:
            with pytest.raises(StoreUnavailable):
                jobs.change(store, job.id, die)
        finally:
            postgres.start()
        assert jobs.get(store, job.id) == job
        store.close()
