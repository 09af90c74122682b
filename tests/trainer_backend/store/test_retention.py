"""What [retention] keeps: a rule that is worked by hand, and what a sync makes of it."""

from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer_backend.store.conftest import NOON
from tests.trainer_backend.store.runs import evaluate, finish, new_run
from trainer_backend.errors import RunDirectoryError
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.rundir.rollout_index import RolloutFile
from trainer_backend.store import jobs, reads_rollouts
from trainer_backend.store.database import Store, open_store
from trainer_backend.store.jobs import NewJob
from trainer_backend.store.retention import RetentionTable, keeps_decisions, keeps_file
from trainer_backend.store.sync import sync_run

DAY_NS = 86_400 * 10**9


def file(iteration: int, *, stage: str = "train", modified_ns: int = 0) -> RolloutFile:
    return RolloutFile(Path(), "", stage, iteration, 0, modified_ns)


def kept(table: RetentionTable, count: int, *, newest: int, age_days: float = 0.0) -> list[int]:
    now_ns = 10 * DAY_NS
    files = [file(number, modified_ns=now_ns - int(age_days * DAY_NS)) for number in range(count)]
    return [item.iteration for item in files if keeps_decisions(table, item, newest=newest, now_ns=now_ns)]


def test_without_keys_everything_stays():
    assert kept(RetentionTable(), 5, newest=4, age_days=1_000) == [0, 1, 2, 3, 4]
    assert keeps_file(RetentionTable(), file(1), newest=10**6)


def test_the_newest_so_many_iterations_stay():
    assert kept(RetentionTable(decisions_iterations=2), 5, newest=4) == [3, 4]


def test_what_is_older_than_so_many_days_goes_whatever_its_iteration():
    table = RetentionTable(decisions_days=1.5)
    assert kept(table, 2, newest=1, age_days=1.25) == [0, 1]
    assert kept(table, 2, newest=1, age_days=1.75) == []


def test_files_of_evaluations_stay():
    table = RetentionTable(rollout_files_iterations=1)
    stages = ("train", "branches", "evaluation", "warmup", "prompts")
    assert [keeps_file(table, file(3, stage=stage), newest=9) for stage in stages] == [
        False,
        False,
        True,
        True,
        True,
    ]


@given(count=st.integers(1, 50), newest=st.integers(0, 100))
def test_of_an_unbroken_run_exactly_so_many_iterations_stay(count: int, newest: int):
    table = RetentionTable(decisions_iterations=count)
    assert len([n for n in kept(table, newest + 1, newest=newest) if n > 0]) == min(count, newest)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return new_run(tmp_path / "run", retention__decisions_iterations=1)


def stored(store: Store, job: str) -> dict[str, tuple[bool, int]]:
    """By file, whether its decisions are said to be stored, and how many there are."""
    rows = reads_rollouts.rollouts(store, job).items
    found: dict[str, tuple[bool, int]] = {}
    for row in rows:
        _, count = found.get(row.file, (False, 0))
        found[row.file] = (row.decisions_stored, count + len(reads_rollouts.decisions(store, row)))
    return found


def test_decisions_leave_the_store_as_iterations_go_by_and_rollouts_stay(store: Store, run: RunDirectory):
    job = jobs.create(store, NewJob("a", config="", home="here"))[0].id
    finish(run, 1)
    sync_run(store, job, run)
    assert stored(store, job) == {"rollouts/iteration_1.parquet": (True, 5)}
    finish(run, 2)
    assert sync_run(store, job, run)
    assert stored(store, job) == {
        "rollouts/iteration_1.parquet": (False, 0),
        "rollouts/iteration_2.parquet": (True, 5),
    }
    assert not sync_run(store, job, run)


def test_a_late_sync_brings_no_decisions_that_would_go_again(store: Store, run: RunDirectory):
    job = jobs.create(store, NewJob("a", config="", home="here"))[0].id
    for iteration in (1, 2, 3):
        finish(run, iteration)
    sync_run(store, job, run)
    assert [counted for _, counted in stored(store, job).values()] == [5, 0, 0]


def test_who_keeps_more_gets_them_back_from_the_files(store: Store, run: RunDirectory):
    job = jobs.create(store, NewJob("a", config="", home="here"))[0].id
    for iteration in (1, 2):
        finish(run, iteration)
    sync_run(store, job, run)
    run.replace_job(run.job().model_copy(update={"retention": RetentionTable()}))
    assert sync_run(store, job, run)
    assert set(stored(store, job).values()) == {(True, 5)}


def test_by_days_a_sync_without_news_takes_them_out(run: RunDirectory, tmp_path: Path):
    run.replace_job(run.job().model_copy(update={"retention": RetentionTable(decisions_days=2)}))
    finish(run, 1)
    modified = run.rollouts_file("iteration_1").stat().st_mtime
    days = [0.0]
    store = open_store(
        f"sqlite:///{tmp_path}/store.db",
        clock=lambda: NOON.fromtimestamp(modified, NOON.tzinfo) + timedelta(days[0]),
    )
    job = jobs.create(store, NewJob("a", config="", home="here"))[0].id
    sync_run(store, job, run)
    assert stored(store, job) == {"rollouts/iteration_1.parquet": (True, 5)}
    days[0] = 2.5
    assert sync_run(store, job, run)
    assert stored(store, job) == {"rollouts/iteration_1.parquet": (False, 0)}
    store.close()


def test_files_of_old_iterations_are_deleted_only_where_that_is_asked(store: Store, run: RunDirectory):
    job = jobs.create(store, NewJob("a", config="", home="here"))[0].id
    for iteration in (1, 2, 3):
        finish(run, iteration)
    evaluate(run, 1, 3.0)
    sync_run(store, job, run)
    assert len(list(run.rollouts.glob("*.parquet"))) == 4
    run.replace_job(run.job().model_copy(update={"retention": RetentionTable(rollout_files_iterations=2)}))
    assert sync_run(store, job, run)
    left = {"evaluation_1.parquet", "iteration_2.parquet", "iteration_3.parquet"}
    assert {path.name for path in run.rollouts.glob("*.parquet")} == left
    assert {Path(name).name for name in stored(store, job)} == left


def test_a_retention_that_cannot_be_read_deletes_nothing(store: Store, run: RunDirectory):
    job = jobs.create(store, NewJob("a", config="", home="here"))[0].id
    for iteration in (1, 2):
        finish(run, iteration)
    (run.path / "job.toml").write_text("[retention]\nrollout_files_iterations = 0\n")
    with pytest.raises(RunDirectoryError, match=r"job.toml: \[retention\] cannot be read"):
        sync_run(store, job, run)
    assert len(run.iteration_files()) == 2
