"""What pause, resume and cancel do in every state."""

from datetime import UTC, datetime

import pytest

from tests.trainer_backend.jobs.rows import job, replace
from trainer_backend.jobs.states import changes_for
from trainer_backend.store.database import JobConflict
from trainer_backend.store.jobs import refuse_leap

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
# verb, state before: the state after; the same: nothing changes; None: refused
TABLE = {
    ("pause", "queued"): "paused",
    ("pause", "running"): "pausing",
    ("pause", "pausing"): "pausing",
    ("pause", "paused"): "paused",
    ("pause", "cancelling"): None,
    ("pause", "cancelled"): None,
    ("pause", "succeeded"): None,
    ("pause", "failed"): None,
    ("resume", "queued"): "queued",
    ("resume", "running"): "running",
    ("resume", "pausing"): "pausing",
    ("resume", "paused"): "queued",
    ("resume", "cancelling"): None,
    ("resume", "cancelled"): "queued",
    ("resume", "succeeded"): None,
    ("resume", "failed"): "queued",
    ("cancel", "queued"): "cancelled",
    ("cancel", "running"): "cancelling",
    ("cancel", "pausing"): "cancelling",
    ("cancel", "paused"): "cancelled",
    ("cancel", "cancelling"): "cancelling",
    ("cancel", "cancelled"): "cancelled",
    ("cancel", "succeeded"): None,
    ("cancel", "failed"): "cancelled",
}


@pytest.mark.parametrize(("verb", "state"), TABLE)
def test_every_verb_in_every_state(verb, state):
    row = job(state=state, wanted="pause" if state in ("pausing", "paused") else "run")
    after = TABLE[verb, state]
    if after is None:
        with pytest.raises(JobConflict, match=f"is {state}, so there is nothing to {verb}"):
            changes_for(verb, row, NOW)
        return
    changes = changes_for(verb, row, NOW) or {}
    assert changes.get("state", state) == after
    refuse_leap(row, after)


@pytest.mark.parametrize(("verb", "state"), [key for key, after in TABLE.items() if after is not None])
def test_asked_twice_is_asked_once(verb, state):
    row = job(state=state)
    once = replace(row, **(changes_for(verb, row, NOW) or {}))
    twice = changes_for(verb, once, NOW)
    assert twice is None or replace(once, **twice) == once


def test_wanted_again_while_it_pauses_and_then_not():
    pausing = job(state="pausing", wanted="pause")
    wanted = replace(pausing, **changes_for("resume", pausing, NOW))
    assert (wanted.state, wanted.wanted) == ("pausing", "run")
    assert changes_for("pause", wanted, NOW) == {"wanted": "pause"}


def test_a_job_that_goes_on_is_no_failure_any_more():
    failed = job(state="failed", code="crashed", detail="why", ended=NOW)
    assert changes_for("resume", failed, NOW) == {
        "state": "queued", "wanted": "run", "ended": None, "code": None, "detail": None,
    }  # fmt: skip
