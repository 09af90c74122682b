"""Many at once, as several services on one database: no update is lost, no job is made or claimed twice."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from trainer_backend.store import jobs
from trainer_backend.store.database import IdempotencyConflict, JobChanged, Store, open_store
from trainer_backend.store.rows import Job

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


def test_a_request_that_is_sent_many_times_at_once_makes_one_job(
    stores: tuple[Store, Store], together: Together
):
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
