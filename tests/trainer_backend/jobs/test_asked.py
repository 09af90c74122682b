"""What pause, resume and cancel do in every state."""

from typing import get_args

import pytest

from tests.trainer_backend.jobs.rows import NOON, job, replace
from trainer_backend.jobs.states import changes_for
from trainer_backend.store.database import JobConflict
from trainer_backend.store.jobs import refuse_leap
from trainer_backend.store.rows import JobState

# Of each verb the states before and after it; in the others it is refused.
TABLE = {
    "pause": {"queued": "paused", "running": "pausing", "pausing": "pausing", "paused": "paused"},
    "resume": {
        **{"queued": "queued", "running": "running", "pausing": "pausing"},
        **dict.fromkeys(("paused", "cancelled", "failed"), "queued"),
    },
    "cancel": {
        **dict.fromkeys(("queued", "paused", "cancelled", "failed"), "cancelled"),
        **dict.fromkeys(("running", "pausing", "cancelling"), "cancelling"),
    },
}


@pytest.mark.parametrize("state", get_args(JobState))
@pytest.mark.parametrize("verb", TABLE)
def test_every_verb_in_every_state_and_the_second_time_it_changes_nothing(verb, state):
    row = job(state=state, wanted="pause" if state in ("pausing", "paused") else "run")
    if (after := TABLE[verb].get(state)) is None:
        with pytest.raises(JobConflict, match=f"is {state}, so there is nothing to {verb}"):
            changes_for(verb, row, NOON)
        return
    once = replace(row, **(changes_for(verb, row, NOON) or {}))
    assert once.state == after
    refuse_leap(row, after)
    twice = changes_for(verb, once, NOON)
    assert twice is None or replace(once, **twice) == once


def test_resumed_while_it_pauses_and_paused_again():
    pausing = job(state="pausing", wanted="pause")
    resumed = replace(pausing, **changes_for("resume", pausing, NOON))
    assert (resumed.state, resumed.wanted) == ("pausing", "run")
    assert changes_for("pause", resumed, NOON) == {"wanted": "pause"}


def test_a_job_that_is_resumed_is_no_failure_any_more():
    failed = job(state="failed", code="crashed", detail="why", ended=NOON)
    assert changes_for("resume", failed, NOON) == {
        "state": "queued", "wanted": "run", "ended": None, "code": None, "detail": None,
    }  # fmt: skip
