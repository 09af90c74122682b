"""Runs that others train: found, followed, brought into the store."""

import asyncio
import os
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from tests.conftest import tiny_job
from trainer_backend.jobs.slots import wait_for_threads
from trainer_backend.jobs.watcher import News, Watcher
from trainer_backend.rundir.layout import RunDirectory, create_run
from trainer_backend.rundir.lock import run_lock
from trainer_backend.rundir.rollout_files import write_rollouts
from trainer_backend.rundir.state import RunState, append_log, write_state
from trainer_backend.store import jobs, reads
from trainer_backend.store.rows import Job

ROW = {"kind": "iteration", "iteration": 1, "reward/mean": 0.5}
STATE = RunState("training", 17, iteration=1, stage="collect 4", since="2026-11-21T12:00:00.000+00:00")


@pytest.fixture
def watcher(store, data):
    return Watcher(store, data, News())


@pytest.fixture
def run(data) -> RunDirectory:
    return create_run(tiny_job(), data.path / "tiny")


def only(store):
    (job,) = jobs.find(store).items
    return job


def test_a_run_of_the_command_line_is_found_with_its_metrics(store, watcher, run):
    run.append_metrics(ROW)
    watcher.look(everything=True)
    job = only(store)
    assert (job.name, job.origin, job.run_dir, job.run_id) == ("tiny", "cli", str(run.path), run.run_id)
    assert reads.metric_lines(store, job.id, kind="iteration")[-1].row == ROW
    watcher.look(everything=True)
    assert only(store).version == job.version, "nothing new is nothing changed"


@pytest.mark.parametrize(
    ("state", "end_s"),
    [
        pytest.param(
            replace(STATE, state="ended", since="1970-01-12T13:47:20+00:00"), 1_000_040, id="as it said"
        ),
        pytest.param(STATE, 1_000_060, id="killed, so when it last wrote"),
    ],
)
def test_a_run_that_is_found_after_its_end_ended_then(store, watcher, run, state, end_s):
    write_state(run.path, state)
    for name, time_s in (("run.json", 1_000_000), ("state.json", 1_000_060)):
        os.utime(run.path / name, (time_s, time_s))
    watcher.look(everything=True)
    times = [datetime.fromtimestamp(time_s, UTC) for time_s in (1_000_000, end_s)]
    assert [only(store).started, only(store).ended] == times


def test_a_run_that_ends_again_has_ended_when_it_last_did(store, watcher, run):
    for hour in (1, 2):  # it is not seen to run in between
        state = replace(STATE, state="failed", code=f"x{hour}", since=f"2026-01-01T0{hour}:00:00+00:00")
        write_state(run.path, state)
        watcher.look(everything=True)
        assert only(store).ended == datetime(2026, 1, 1, hour, tzinfo=UTC)


@pytest.mark.parametrize(
    ("state", "held", "seen"),
    [
        (STATE, True, "running"),
        (replace(STATE, state="ended"), False, "succeeded"),
        (replace(STATE, state="stopped"), False, "paused"),
        (replace(STATE, state="failed", code="x", detail="why"), False, "failed"),
        (STATE, False, "failed"),
        (None, False, "paused"),
    ],
)
def test_its_state_is_what_its_lock_and_its_last_word_say(store, watcher, run, state, held, seen):
    if state is not None:
        write_state(run.path, state)
    if held:
        with run_lock(run.path):
            watcher.look(everything=True)
    else:
        watcher.look(everything=True)
    job = only(store)
    assert job.state == seen
    assert (job.ended is not None) == (seen in ("succeeded", "failed"))


def test_one_that_was_killed_says_so_and_one_that_goes_on_does_not_any_more(store, watcher, run):
    write_state(run.path, STATE)
    watcher.look(everything=True)
    assert (only(store).code, "its last stage: collect 4" in only(store).detail) == ("killed", True)
    with run_lock(run.path):
        watcher.look(everything=True)
        assert (only(store).state, only(store).code, only(store).ended) == ("running", None, None)


def test_a_look_tells_of_what_is_new_and_of_nothing_else(store, watcher, run):
    with run_lock(run.path):
        watcher.look(everything=True)
        job_id = only(store).id
        assert watcher.look(everything=False) == []
        run.append_metrics(ROW)
        assert watcher.look(everything=False) == [job_id]
        append_log(run.path, "a line")
        assert watcher.look(everything=False) == [job_id]
        assert watcher.look(everything=False) == []
    assert watcher.registry.get_sample_value("turnwise_trainer_syncs_total") == 2, (
        "a line of the log is nothing that the store keeps"
    )


def test_a_run_of_an_older_version_is_shown_whatever_keys_its_job_has(store, watcher, run):
    text = '[job]\nname = "old"\n[gone]\nkey = 1\n'
    (run.path / "job.toml").write_text(text)
    watcher.look(everything=True)
    assert (only(store).name, only(store).config) == ("old", text)


def test_a_directory_that_is_no_run_of_ours_is_not_shown_until_it_is_one(store, watcher, run):
    files = {name: (run.path / name).read_text() for name in ("job.toml", "run.json")}
    (run.path / "job.toml").unlink()  # a copy is in progress
    watcher.look(everything=True)
    broken = [("job.toml", text) for text in ("[job", "", "job = 3")]
    for name, text in (*broken, ("run.json", '{"run_id": "x", "format": 99}')):
        (run.path / name).write_text(text)
        for _ in range(2):
            watcher.look(everything=True)
            assert jobs.find(store).items == ()
    for name, text in files.items():
        (run.path / name).write_text(text)
    watcher.look(everything=True)
    assert only(store).name == "tiny"


def test_a_run_that_cannot_be_read_holds_up_no_other_and_is_read_again_once_it_can(store, data, watcher, run):
    text = (run.path / "job.toml").read_text()
    sound = create_run(tiny_job(), data.path / "sound")
    watcher.look(everything=True)
    by_name = {row.run_dir: row.id for row in jobs.find(store).items}
    (run.path / "job.toml").write_bytes(b"\xff")  # unforeseen: UnicodeDecodeError in the sync
    for one in (run, sound):
        one.append_metrics(ROW)
    watcher.look(everything=True)
    assert reads.metric_lines(store, by_name[str(sound.path)], kind="iteration")[-1].row == ROW
    assert watcher.registry.get_sample_value("turnwise_trainer_sync_failures_total") == 1
    (run.path / "job.toml").write_text(text)
    watcher.look(everything=True)
    assert reads.metric_lines(store, by_name[str(run.path)], kind="iteration")[-1].row == ROW


def test_a_row_with_an_unforeseen_error_holds_up_no_other(store, data, watcher, run):
    # os.stat refuses it: ValueError
    jobs.create(store, Job(name="broken", config="", home=data.home, run_dir="nul\0byte"))
    watcher.look(everything=True)
    assert {row.name for row in jobs.find(store).items} == {"broken", "tiny"}
    run.append_metrics(ROW)
    watcher.look(everything=True)
    tiny = next(row for row in jobs.find(store).items if row.name == "tiny")
    assert reads.metric_lines(store, tiny.id, kind="iteration")[-1].row == ROW


async def test_while_a_look_takes_long_the_store_is_asked_too(store, data, run):
    watcher = Watcher(store, data, News(), look_s=0.01, answer_s=0.05)
    watcher.store_up = False  # as after a database that was away
    with ExitStack() as held:
        watcher.look(everything=True)
        lock = watcher._sync_locks[only(store).id]
        held.enter_context(lock)  # the sync of a large run, which takes long
        run.append_metrics(ROW)
        looking = asyncio.ensure_future(watcher.run())
        async with asyncio.timeout(60):
            while not watcher.store_up:
                await asyncio.sleep(0.01)
        assert not looking.done() and lock.locked(), "the look itself has not ended"
        assert watcher.registry.get_sample_value("turnwise_trainer_syncs_total") == 1
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
    await wait_for_threads(watcher.threads, at_most_s=60.0)


@pytest.mark.parametrize("tidies", [True, False])
def test_a_service_that_only_shows_removes_no_files(store, data, run, tidies):
    (run.path / "job.toml").write_text('[job]\nname = "tiny"\n[retention]\nrollout_files_iterations = 1\n')
    for iteration in (1, 2):
        write_rollouts(run.rollouts_file(f"iteration_{iteration}"), [])
    Watcher(store, data, News(), tidies=tidies).look(everything=True)
    left = sorted(path.stem for path in run.iteration_files())
    assert left == (["iteration_2"] if tidies else ["iteration_1", "iteration_2"])


async def test_a_look_wakes_who_waits_for_news(store, data, run):
    news = News()
    watcher = Watcher(store, data, news, look_s=0.01)
    await asyncio.to_thread(watcher.look, everything=True)
    job_id = only(store).id
    with run_lock(run.path):
        looking = asyncio.ensure_future(watcher.run())
        seen = news.count(job_id)
        run.append_metrics(ROW)
        assert await news.wait(job_id, seen, at_most_s=60)
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


async def test_news_that_came_before_the_wait_are_not_missed_and_the_service_s_end_ends_it():
    news = News()
    seen = news.count("a")
    news.tell("a")
    assert await news.wait("a", seen, at_most_s=60)
    assert not await news.wait("a", news.count("a"), at_most_s=0.0)
    news.tell("b")
    assert not await news.wait("a", news.count("a"), at_most_s=0.0), "of another job"
    waiting = asyncio.ensure_future(news.wait("a", news.count("a"), at_most_s=600))
    await asyncio.sleep(0)
    news.close()
    assert not await waiting
