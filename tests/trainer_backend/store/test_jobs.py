"""Jobs on both databases: made once, changed by compare-and-set, claimed in order; by many at once, too."""

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from tests.trainer_backend.store.conftest import NOON
from trainer_backend.store import jobs
from trainer_backend.store.database import (
    IdempotencyConflict,
    JobChanged,
    JobConflict,
    Store,
    UnknownCursor,
    UnknownJob,
    open_store,
)
from trainer_backend.store.rows import Job


def made(store: Store, name: str = "a", **given) -> Job:
    return jobs.create(store, Job(name=name, config="", home="here", **given))[0]


def test_a_job_is_read_back_as_it_was_made(store: Store):
    new = Job(name="a", config='x = "é"', home="here", run_dir="/runs/a", tags={"source": "cli"})
    job, fresh = jobs.create(store, new)
    assert fresh
    assert jobs.get(store, job.id) == job
    assert (job.state, job.wanted, job.config, job.tags) == ("queued", "run", 'x = "é"', {"source": "cli"})
    assert job.created == NOON and job.created.utcoffset() == timedelta(0)
    assert (job.version, job.attempt, job.started) == (1, 0, None)


def test_a_request_that_is_sent_again_makes_no_second_job_and_no_other_has_its_key_or_directory(store: Store):
    first = Job(name="a", config="", home="here", run_dir="/runs/a", idempotency_key="k", body_hash="one")
    job, _ = jobs.create(store, first)
    assert jobs.create(store, first) == (job, False)
    with pytest.raises(IdempotencyConflict, match=job.id):
        made(store, idempotency_key="k", body_hash="two")
    with pytest.raises(JobConflict, match="/runs/a"):
        made(store, run_dir="/runs/a")
    assert jobs.find(store).items == (job,)


def test_pages_hand_out_every_job_once_newest_first_though_others_come_meanwhile(store: Store):
    old = [made(store, str(number)) for number in range(5)]
    first = jobs.find(store, limit=2)
    made(store, "new")
    second = jobs.find(store, limit=2, cursor=first.cursor)
    third = jobs.find(store, limit=2, cursor=second.cursor)
    assert [*first.items, *second.items, *third.items] == old[::-1]
    assert third.cursor is None


def test_a_page_is_narrowed_by_state_home_and_origin(store: Store):
    mine, other = made(store), jobs.create(store, Job(name="b", config="", home="there", origin="cli"))[0]
    assert (jobs.counts(store, "here"), jobs.counts(store, "there")) == ({"queued": 1}, {"queued": 1})
    running = jobs.transition(store, mine, state="running")
    assert jobs.counts(store, "here") == {"running": 1}
    assert jobs.find(store, states=["running"]).items == (running,)
    assert jobs.find(store, home="there").items == jobs.find(store, origin="cli").items == (other,)


def test_a_cursor_that_is_none_of_ours_is_refused(store: Store):
    for cursor in ("", "x", "-1", "2147483648", "9" * 18, "1" * 40):
        with pytest.raises(UnknownCursor, match="cursor is"):
            jobs.find(store, cursor=cursor)


def test_a_change_that_was_decided_on_an_old_version_is_refused_and_changes_nothing(store: Store):
    job = made(store)
    cancelled = jobs.transition(store, job, state="cancelled", wanted="cancel")
    with pytest.raises(JobChanged, match="is cancelled now, and was queued"):
        jobs.transition(store, job, state="running")
    assert jobs.get(store, job.id) == cancelled
    assert (cancelled.version, cancelled.name) == (2, "a")


def test_a_state_changes_only_to_those_that_may_follow_but_for_a_run_of_the_terminal(store: Store):
    for state, then, after in (
        ("succeeded", "queued", "none"),
        ("cancelling", "running", "cancelled, failed, succeeded"),
        ("paused", "running", "cancelled, queued"),
    ):
        job = made(store, state=state)
        told = f"is {state} and cannot become {then}; what may follow: {after}"
        with pytest.raises(JobConflict, match=told):
            jobs.transition(store, job, state=then)
    job = made(store, origin="cli", state="succeeded")
    assert jobs.transition(store, job, state="running").state == "running"


def test_a_decision_may_change_nothing_and_an_error_in_it_leaves_the_job_as_it_was(store: Store):
    job = made(store)
    assert jobs.change(store, job.id, lambda found: None) == job
    job = jobs.change(store, job.id, lambda found: {"detail": found.name})
    assert job.detail == "a"

    def refuse(found: Job) -> jobs.Changes:
        raise JobConflict("not now")

    with pytest.raises(JobConflict, match="not now"):
        jobs.change(store, job.id, refuse)
    assert jobs.get(store, job.id) == job


def test_the_oldest_queued_job_of_the_service_is_claimed(store: Store):
    jobs.create(store, Job(name="elsewhere", config="", home="there"))
    first, second = made(store, "first"), made(store, "second")
    claimed = jobs.claim(store, "here")
    assert claimed is not None and claimed.id == first.id
    assert (claimed.state, claimed.attempt, claimed.started) == ("running", 1, NOON)
    again = jobs.claim(store, "here")
    assert again is not None and again.id == second.id
    assert jobs.claim(store, "here") is None
    # Claimed again, a job forgets how it ended.
    job = made(store, state="failed")
    job = jobs.transition(store, job, state="queued", code="task_app_failed", detail="gone", ended=NOON)
    claimed = jobs.claim(store, "here")
    assert claimed is not None
    assert (claimed.code, claimed.detail, claimed.ended) == (None, None, None)


def test_a_job_goes_only_after_its_end(store: Store):
    job = made(store)
    with pytest.raises(JobConflict, match="cancel it first"):
        jobs.remove(store, job.id)
    ended = jobs.transition(store, job, state="cancelled")
    assert jobs.remove(store, job.id) == ended
    with pytest.raises(UnknownJob):
        jobs.get(store, job.id)
    assert made(store).number > ended.number, "a number is not used again"


def test_texts_that_a_database_cannot_hold_are_held_with_a_mark(store: Store):
    job = made(store)
    said = jobs.change(store, job.id, lambda _: {"detail": "nul \0, half \ud800, \N{PILE OF POO}"})
    assert said.detail == "nul \N{REPLACEMENT CHARACTER}, half ?, \N{PILE OF POO}"
    with pytest.raises(UnknownJob):
        jobs.get(store, "\0")


THREADS = 6


@pytest.fixture
def stores(url: str):
    """Two, each with connections of its own, as of two processes."""
    found = (open_store(url), open_store(url))
    yield found
    for store in found:
        store.close()


Together = Callable[[int, Callable[[int], Any]], list[Any]]


def test_each_queued_job_is_claimed_by_one(stores: tuple[Store, Store], together: Together):
    made = [jobs.create(stores[0], Job(name=str(n), config="", home="here"))[0].id for n in range(30)]

    def claim_all(number: int) -> list[Job]:
        found = []
        while (job := jobs.claim(stores[number % 2], "here")) is not None:
            found.append(job)
        return found

    claimed = [job for found in together(THREADS, claim_all) for job in found]
    assert Counter(job.id for job in claimed) == Counter(made)
    assert {job.attempt for job in claimed} == {1}


def test_no_change_is_lost(stores: tuple[Store, Store], together: Together):
    job, _ = jobs.create(stores[0], Job(name="a", config="", home="here"))

    def count(number: int) -> None:
        for _ in range(10):
            jobs.change(stores[number % 2], job.id, lambda found: {"attempt": found.attempt + 1})

    together(THREADS, count)
    now = jobs.get(stores[0], job.id)
    assert (now.attempt, now.version) == (10 * THREADS, 10 * THREADS + 1)


def test_of_those_who_decided_on_the_same_version_one_is_heard(
    stores: tuple[Store, Store], together: Together
):
    job, _ = jobs.create(stores[0], Job(name="a", config="", home="here"))

    def finish(number: int) -> str | None:
        try:
            return jobs.transition(stores[number % 2], job, state="cancelled", detail=str(number)).detail
        except JobChanged:
            return None

    heard = [detail for detail in together(THREADS, finish) if detail is not None]
    assert heard == [jobs.get(stores[0], job.id).detail]


def test_a_request_that_is_sent_many_times_at_once_makes_one_job(stores, together):
    def post(number: int) -> tuple[str, bool] | None:
        body = "other" if number == 0 else "one"
        try:
            job, fresh = jobs.create(
                stores[number % 2], Job(name="a", config="", home="here", idempotency_key="k", body_hash=body)
            )
        except IdempotencyConflict:
            return None
        return job.id, fresh

    answers = [answer for answer in together(THREADS, post) if answer is not None]
    (job,) = jobs.find(stores[0]).items
    assert {job_id for job_id, _ in answers} == {job.id}
    assert sum(fresh for _, fresh in answers) == 1
    assert len(answers) in (1, THREADS - 1)  # the other body came first, or was refused


def test_services_that_start_together_on_an_empty_database_all_find_its_tables(url: str, together: Together):
    def start(_number: int) -> int:
        store = open_store(url)
        try:
            return len(jobs.find(store).items)
        finally:
            store.close()

    assert together(THREADS, start) == [0] * THREADS
