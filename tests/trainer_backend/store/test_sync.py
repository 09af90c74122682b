"""From run directories into the store, on both databases: all, once, again where it changed; what is kept."""

import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, func, select

from tests.trainer_backend.store.conftest import NOON
from tests.trainer_backend.store.runs import checkpoint, episodes, evaluate, finish, metrics_row
from trainer_backend.errors import JobError, RunDirectoryError
from trainer_backend.job.load import load_job
from trainer_backend.rundir.checkpoint_paths import BestMark, mark_best
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.rundir.rollout_files import write_rollouts
from trainer_backend.rundir.rollout_index import RolloutFile
from trainer_backend.store import jobs, reads, reads_rollouts
from trainer_backend.store.database import Store, StoreUnavailable, UnknownJob, open_store
from trainer_backend.store.retention import RetentionTable, remove_old_files
from trainer_backend.store.rows import Job
from trainer_backend.store.sync import sync_run
from trainer_backend.store.tables import METADATA


@pytest.fixture
def job(store: Store, run: RunDirectory) -> str:
    return jobs.create(store, Job(name="a", config="", home="here", run_dir=str(run.path)))[0].id


def whole(store: Store) -> dict[str, list[tuple[Any, ...]]]:
    """Everything that the store has of runs, without the numbers that it gives out itself."""
    own_numbers = ("number", "file", "modified_ns")  # given out by the store itself, or by the disk
    with store.read() as connection:
        return {
            name: sorted(map(tuple, connection.execute(select(*columns))), key=repr)
            for name, table in METADATA.tables.items()
            if (columns := [column for column in table.c if column.name not in own_numbers])
            and name != "jobs"
        }


def count(store: Store, name: str) -> int:
    with store.read() as connection:
        return connection.scalar(select(func.count()).select_from(METADATA.tables[name])) or 0


def test_a_sync_brings_everything_and_the_next_one_finds_nothing_new(store, run, job):
    for iteration in (1, 2):
        finish(run, iteration)
    evaluate(run, 2, 3.0)
    checkpoint(run, 2, 100)
    assert sync_run(store, job, run)
    rows = {name: count(store, name) for name in METADATA.tables}
    # Two iterations of three rollouts, an evaluation of one; their files, and metrics.jsonl.
    assert rows == {"jobs": 1, "rollouts": 2 * 3 + 1, "synced_files": 3 + 1}
    assert not sync_run(store, job, run)
    assert {name: count(store, name) for name in METADATA.tables} == rows


def test_a_sync_after_every_write_gives_the_same_store_as_one_at_the_end(store, run, job, tmp_path):
    sync_run(store, job, run)
    for iteration in (1, 2, 3):
        finish(run, iteration)
        assert sync_run(store, job, run)
    late = open_store(f"sqlite:///{tmp_path}/late.db", clock=lambda: NOON)
    late_job, _ = jobs.create(late, Job(name="a", config="", home="here", run_dir=str(run.path)))
    sync_run(late, late_job.id, run)
    assert whole(store) == whole(late)
    late.close()


def test_what_a_resumed_run_forgot_is_forgotten_and_its_rows_get_numbers_above_the_old_ones(store, run, job):
    for iteration in (1, 2, 3):
        finish(run, iteration)
    sync_run(store, job, run)
    last = reads.metric_lines(store, job)[-1]
    run.forget_after(1)
    run.append_metrics(metrics_row(2, **{"loss/kl": 0.5}))  # done again, and it came out otherwise
    seen = reads.metric_lines(store, job, after=last.number)
    assert [(line.iteration, "loss/kl" in line.row) for line in seen] == [(1, False), (2, True)]
    assert sync_run(store, job, run)
    assert reads.metric_lines(store, job) == seen  # before the sync as after it
    run.append_metrics(metrics_row(3))
    assert reads.metric_lines(store, job, after=seen[-1].number)[0].number == seen[-1].number + 1
    assert reads_rollouts.learning_iteration(store, job, "run/train/1/0/0") == 1
    assert reads_rollouts.learning_iteration(store, job, "run/train/3/0/0") is None


def test_a_run_that_begins_again_with_a_file_of_the_same_size_is_seen(store, run, job):
    run.append_metrics(metrics_row(1, **{"loss/kl": 0.25}))
    sync_run(store, job, run)
    size = run.metrics_file.stat().st_size
    run.forget_after(-1)
    run.append_metrics(metrics_row(1, **{"loss/kl": 0.75}))
    assert run.metrics_file.stat().st_size == size
    assert sync_run(store, job, run)
    (line,) = reads.metric_lines(store, job)
    assert line.row["loss/kl"] == 0.75
    # Of two rows of one kind and iteration the later one stands.
    run.append_metrics(metrics_row(1, **{"new": 1.0}))
    assert reads.series(store, [job], ["loss/kl", "new"])[job].keys() == {"new"}


def test_a_rollout_file_that_is_written_again_replaces_its_rollouts_and_a_copy_is_not_indexed(
    store: Store, run: RunDirectory, job: str
):
    finish(run, 1)
    path = run.rollouts_file("iteration_1")
    path.with_name("iteration_1_old.parquet").write_bytes(path.read_bytes())
    sync_run(store, job, run)
    assert count(store, "rollouts") == 3
    write_rollouts(path, episodes(1, run="again")[:1])
    assert sync_run(store, job, run)
    (row,) = reads_rollouts.rollouts(store, job).items
    assert (row.rollout_id, row.reward) == ("again/train/1/0/0", None)  # not credited yet


def test_a_broken_rollout_file_is_told_and_holds_up_nothing_else(store: Store, run: RunDirectory, job: str):
    for iteration in (1, 2):
        finish(run, iteration)
    run.rollouts_file("iteration_1").write_bytes(b"PAR1 but no more")
    with pytest.raises(RunDirectoryError, match=r"iteration_1.parquet cannot be read"):
        sync_run(store, job, run)
    assert {row.iteration for row in reads_rollouts.rollouts(store, job).items} == {2}
    assert len(reads.metric_lines(store, job)) == 2


def test_checkpoints_follow_the_folders_and_the_best_mark(store: Store, run: RunDirectory, job: str):
    checkpoint(run, 5, 100)
    checkpoint(run, 10, 50)
    (run.checkpoints / "iteration_5_backup").mkdir()
    mark_best(BestMark(run.checkpoints / "iteration_5", 0.5))
    row = jobs.get(store, job)
    found = reads.checkpoints(row)
    assert [(item.folder, item.best, item.bytes) for item in found] == [
        ("iteration_5", True, 100),
        ("iteration_10", False, 50),
    ]
    mark_best(BestMark(run.checkpoints / "iteration_10", 0.5))
    assert [item.best for item in reads.checkpoints(row)] == [False, True]


def test_a_job_that_is_gone_is_told_and_takes_its_run_with_it(store: Store, run: RunDirectory, job: str):
    finish(run, 1)
    checkpoint(run, 1, 10)
    sync_run(store, job, run)
    jobs.change(store, job, lambda _: {"state": "cancelled"})
    jobs.remove(store, job)
    assert {name: count(store, name) for name in METADATA.tables} == dict.fromkeys(METADATA.tables, 0)
    with pytest.raises(UnknownJob):
        sync_run(store, job, run)


def test_syncs_of_one_run_at_the_same_time_bring_everything_once(store, run, job, together):
    for iteration in (1, 2):
        finish(run, iteration)
    together(4, lambda _: sync_run(store, job, run))
    assert (count(store, "rollouts"), count(store, "synced_files")) == (6, 3)


def full(store: Store) -> None:
    """From now on the disk under a SQLite store has no page left."""
    store.engine.dispose()

    def no_more(connection: sqlite3.Connection, _record: object) -> None:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}").close()

    event.listen(store.engine, "connect", no_more)


def test_a_disk_that_was_full_costs_nothing_the_next_sync_catches_up(tmp_path: Path, run: RunDirectory):
    store = open_store(f"sqlite:///{tmp_path}/store.db", clock=lambda: NOON)
    job, _ = jobs.create(store, Job(name="a", config="", home="here", run_dir=str(run.path)))
    finish(run, 1)
    sync_run(store, job.id, run)
    full(store)
    item = episodes(2)[0]
    group = [item.model_copy(update={"rollout_id": f"{n}{'x' * 2_000}"}) for n in range(100)]
    write_rollouts(run.rollouts_file("iteration_2"), group)
    with pytest.raises(StoreUnavailable, match="full"):
        sync_run(store, job.id, run)
    store.close()
    again = open_store(f"sqlite:///{tmp_path}/store.db", clock=lambda: NOON)
    sync_run(again, job.id, run)
    assert count(again, "rollouts") == 103
    again.close()


def test_an_older_run_without_ledger_or_credit_is_indexed(store: Store, run: RunDirectory, job: str):
    write_rollouts(run.rollouts_file("warmup"), episodes(0))
    os.utime(run.rollouts_file("warmup"), ns=(0, 0))
    sync_run(store, job, run)
    row = reads_rollouts.rollouts(store, job).items[0]
    assert (row.stage, row.iteration, row.reward) == ("warmup", 0, None)


def test_the_newest_iterations_and_all_evaluations_stay(tmp_path: Path):
    files = [
        RolloutFile(tmp_path / f"{stage}_{iteration}", "", stage, iteration, 0, 0)
        for iteration in (1, 2, 3)
        for stage in ("train", "branches", "evaluation", "warmup", "prompts")
    ]
    for file in files:
        file.path.touch()
    rest = remove_old_files(RetentionTable(rollout_files_iterations=2), files)
    assert {file.path for file in rest} == {*tmp_path.iterdir()}
    assert {file.path.name for file in files} - {file.path.name for file in rest} == {"train_1", "branches_1"}
    assert remove_old_files(RetentionTable(rollout_files_iterations=3), rest) == rest


def test_files_of_old_iterations_are_deleted_only_where_that_is_asked(store: Store, run: RunDirectory):
    job = jobs.create(store, Job(name="a", config="", home="here"))[0].id
    for iteration in (1, 2, 3):
        finish(run, iteration)
    evaluate(run, 1, 3.0)
    sync_run(store, job, run)
    assert len(list(run.rollouts.glob("*.parquet"))) == 4
    run.replace_job(run.job().model_copy(update={"retention": RetentionTable(rollout_files_iterations=2)}))
    assert sync_run(store, job, run)
    left = {"evaluation_1.parquet", "iteration_2.parquet", "iteration_3.parquet"}
    assert {path.name for path in run.rollouts.glob("*.parquet")} == left
    assert {Path(row.file).name for row in reads_rollouts.rollouts(store, job).items} == left


def test_a_retention_that_cannot_be_read_deletes_nothing(store: Store, run: RunDirectory):
    job = jobs.create(store, Job(name="a", config="", home="here"))[0].id
    for iteration in (1, 2):
        finish(run, iteration)
    (run.path / "job.toml").write_text("[retention]\nrollout_files_iterations = 0\n")
    with pytest.raises(RunDirectoryError, match=r"job.toml: \[retention\] cannot be read"):
        sync_run(store, job, run)
    assert len(run.iteration_files()) == 2


def test_a_run_of_a_version_that_bounded_decisions_is_read_and_a_new_job_is_told_why_it_cannot(
    store: Store, run: RunDirectory, tmp_path: Path
):
    job = jobs.create(store, Job(name="a", config="", home="here"))[0].id
    text = (run.path / "job.toml").read_text().replace("[retention]", "[retention]\ndecisions_iterations = 3")
    (run.path / "job.toml").write_text(text)
    finish(run, 1)
    assert sync_run(store, job, run)
    assert run.job().retention == RetentionTable()
    (tmp_path / "new.toml").write_text(text)
    with pytest.raises(JobError, match=r"retention.decisions_iterations is not a key.*holds no decisions"):
        load_job(tmp_path / "new.toml")
