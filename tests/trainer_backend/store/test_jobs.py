"""Jobs on both databases: made once, changed by compare-and-set, claimed in order."""

from datetime import timedelta

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


def test_a_request_that_is_sent_again_makes_no_second_job(store: Store):
    first = Job(name="a", config="", home="here", idempotency_key="k", body_hash="one")
    job, _ = jobs.create(store, first)
    assert jobs.create(store, first) == (job, False)
    assert jobs.find(store).items == (job,)


def test_a_key_that_was_used_for_another_body_is_a_conflict_that_names_the_job(store: Store):
    job = made(store, idempotency_key="k", body_hash="one")
    with pytest.raises(IdempotencyConflict, match=job.id):
        made(store, idempotency_key="k", body_hash="two")


def test_two_jobs_never_share_a_run_directory(store: Store):
    made(store, run_dir="/runs/a")
    with pytest.raises(JobConflict, match="/runs/a"):
        made(store, run_dir="/runs/a")
    assert len(jobs.find(store).items) == 1


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
    running = jobs.transition(store, mine, state="running")
    assert jobs.find(store, states=["running"]).items == (running,)
    assert jobs.find(store, home="there").items == jobs.find(store, origin="cli").items == (other,)


@pytest.mark.parametrize("cursor", ["", "x", "-1", "2147483648", "9" * 18, "1" * 40])
def test_a_cursor_that_is_none_of_ours_is_refused(store: Store, cursor: str):
    with pytest.raises(UnknownCursor, match="cursor is"):
        jobs.find(store, cursor=cursor)


def test_a_change_that_was_decided_on_an_old_version_is_refused_and_changes_nothing(store: Store):
    job = made(store)
    cancelled = jobs.transition(store, job, state="cancelled", wanted="cancel")
    with pytest.raises(JobChanged, match="is cancelled now, and was queued"):
        jobs.transition(store, job, state="running")
    assert jobs.get(store, job.id) == cancelled
    assert (cancelled.version, cancelled.name) == (2, "a")


@pytest.mark.parametrize(
    ("state", "then", "after"),
    [
        ("succeeded", "queued", "none"),
        ("cancelling", "running", "cancelled, failed, succeeded"),
        ("paused", "running", "cancelled, queued"),
    ],
)
def test_a_state_is_not_left_for_one_that_no_road_leads_to(store: Store, state, then, after):
    job = made(store, state=state)
    with pytest.raises(JobConflict, match=f"is {state} and cannot become {then}; what may follow: {after}"):
        jobs.transition(store, job, state=then)


def test_the_state_of_a_run_of_the_terminal_is_what_is_found_of_it(store: Store):
    job = made(store, origin="cli", state="succeeded")
    assert jobs.transition(store, job, state="running").state == "running"


def test_a_decision_may_be_to_change_nothing(store: Store):
    job = made(store)
    assert jobs.change(store, job.id, lambda found: None) == job
    assert jobs.change(store, job.id, lambda found: {"detail": found.name}).detail == "a"


def test_what_a_decision_raises_leaves_the_job_as_it_was(store: Store):
    job = made(store)

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


def test_a_job_that_is_claimed_again_forgets_how_it_ended(store: Store):
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


def test_a_number_is_not_used_again_after_its_job_is_gone(store: Store):
    gone = jobs.remove(store, made(store, state="failed").id)
    assert made(store).number > gone.number


def test_the_jobs_of_a_service_are_counted_by_state(store: Store):
    for state in ("queued", "failed", "failed"):
        made(store, state=state)
    jobs.create(store, Job(name="elsewhere", config="", home="there"))
    assert jobs.counts(store, "here") == {"queued": 1, "failed": 2}


def test_texts_that_a_database_cannot_hold_are_held_with_a_mark(store: Store):
    job = made(store)
    said = jobs.change(store, job.id, lambda _: {"detail": "nul \0, half \ud800, \N{PILE OF POO}"})
    assert said.detail == "nul \N{REPLACEMENT CHARACTER}, half ?, \N{PILE OF POO}"
    with pytest.raises(UnknownJob):
        jobs.get(store, "\0")
