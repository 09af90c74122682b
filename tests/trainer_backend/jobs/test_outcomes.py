"""What becomes of a job whose process has ended, and of one that is paused, resumed or cancelled."""

import dataclasses
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from tests.trainer_backend.jobs.rows import NOON, job, replace
from trainer_backend.errors import (
    AdvantageError,
    JobError,
    JobTeachesNothing,
    LearnerFailed,
    NothingToLearnFrom,
    RunNotWritten,
    TaskAppError,
)
from trainer_backend.jobs.processes import job_command, last_words, start_process, without_secrets
from trainer_backend.jobs.slots import Slot
from trainer_backend.jobs.states import Ending, changes_for, decide_outcome, without_process
from trainer_backend.rundir.files import write_errors
from trainer_backend.rundir.state import (
    DONE,
    FAILED,
    FAULTY,
    FULL,
    REFUSED,
    STOPPED,
    RunState,
    choose_exit_code,
)
from trainer_backend.store.database import JobConflict
from trainer_backend.store.jobs import refuse_leap
from trainer_backend.store.rows import JobState

KILLED = -signal.SIGKILL
SAID = RunState("failed", 17, iteration=3, code="task_app_failed", detail="no task app answers")
UPDATING = RunState("training", 17, iteration=3, stage="update 4")
BETWEEN, STARTING = RunState("training", 17, iteration=3), RunState("starting", 17)


def not_written(number):
    """The error of a file that could not be written for that reason."""
    with pytest.raises(RunNotWritten) as caught, write_errors(Path("state.json")):
        raise OSError(number, "why")
    return caught.value


WISHES = (("running", "run"), ("pausing", "pause"), ("pausing", "run"), ("cancelling", "cancel"))
# By exit code, the state that follows each of these states and wishes.
TABLE = {
    DONE: ("succeeded", "succeeded", "succeeded", "succeeded"),
    **dict.fromkeys((STOPPED, -signal.SIGTERM), ("paused", "paused", "queued", "cancelled")),
    REFUSED: ("failed", "failed", "failed", "cancelled"),
    **dict.fromkeys((FAILED, KILLED), ("running", "paused", "queued", "cancelled")),
}


def ended(row, exit_code, *, state=SAID, crashes=1, restarts=3, said=None):
    ending = Ending(exit_code, state, crashes, said)
    return decide_outcome(row, ending, restarts=restarts, first_wait_s=1.0, now=NOON)


@pytest.mark.parametrize("exit_code", TABLE)
def test_every_end_with_every_wish(exit_code):
    for (state, wanted), after in zip(WISHES, TABLE[exit_code], strict=True):
        row = job(state=state, wanted=wanted)
        outcome = ended(row, exit_code)
        assert outcome.changes.get("state", state) == after, (state, wanted)
        assert outcome.changes.get("wanted", wanted) == "pause" or after != "paused"
        assert (outcome.restart_in_s is not None) == (after == "running")
        assert (outcome.changes.get("ended") is not None) == (after in ("succeeded", "failed", "cancelled"))
        refuse_leap(row, after)
    assert ended(job(), STOPPED).changes["code"] == "stopped"


@pytest.mark.parametrize("exit_code", [FAILED, REFUSED, KILLED])
def test_a_run_that_has_ended_has_succeeded_whatever_became_of_its_process_after_that(exit_code):
    last = RunState("ended", 17, iteration=9)
    outcome = ended(job(), exit_code, state=last, crashes=9, said="report.html cannot be written")
    assert (outcome.changes["state"], outcome.changes["code"]) == ("succeeded", None)
    assert outcome.restart_in_s is None
    why = "SIGKILL" if exit_code == KILLED else "report.html cannot be written"
    assert outcome.changes["detail"].startswith("the run has ended and is saved; after that: ")
    assert why in outcome.changes["detail"]


def test_waits_double_up_to_a_minute():
    waits = [ended(job(), FAILED, crashes=crashes, restarts=99).restart_in_s for crashes in range(1, 9)]
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    told = "restart 1 of 3 in 1 s after: no task app answers"
    assert ended(job(), FAILED).changes == {"code": "restarting", "detail": told}


def test_what_the_job_itself_causes_is_not_tried_a_third_time_and_an_outage_is():
    slot, row = Slot(), job()

    def is_over(exit_code, iteration):
        slot.ending = None
        said = RunState("failed", 17, iteration=iteration, code="credit_failed", detail="no advantage")
        ending = slot.record_end(Ending(exit_code, said))
        changes = decide_outcome(row, ending, restarts=9, first_wait_s=1.0, now=NOON).changes
        return changes.get("state") == "failed" and "no advantage (twice after the same" in changes["detail"]

    assert not any(is_over(FAILED, 3) for _ in range(3))
    assert [is_over(FAULTY, 3), is_over(FAILED, 3), is_over(FAULTY, 3)] == [False, False, True]
    assert [is_over(FAULTY, 4), is_over(FAULTY, 4)] == [False, True], "an iteration further it counts again"


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (JobTeachesNothing("prompts are too long"), REFUSED),
        (JobError("model.path"), REFUSED),
        (AdvantageError("raised"), FAULTY),
        (LearnerFailed("KeyError"), FAULTY),
        (ZeroDivisionError("in a plug-in"), FAULTY),
        (NothingToLearnFrom("no answer"), FAILED),
        (TaskAppError("no answer"), FAILED),
        (ConnectionResetError(), FAILED),
        (MemoryError(), FAILED),
        (OSError(errno.ENOSPC, "no space left"), FULL),
        (not_written(errno.EDQUOT), FULL),
        (not_written(errno.EROFS), FAILED),
    ],
)
def test_an_error_says_by_its_kind_whether_another_start_would_meet_it(error, exit_code):
    assert choose_exit_code(error) == exit_code


@pytest.mark.parametrize(
    ("ending", "code", "told"),
    [
        (Ending(KILLED, UPDATING), "killed", "(often the system, short of memory); its last stage: update"),
        (Ending(-signal.SIGSEGV), "killed", "killed by SIGSEGV; process.log says: 'bye'"),
        (Ending(-200, BETWEEN), "killed", "by signal 200; it was after iteration 3; "),
        (Ending(7, UPDATING), "crashed", "exit code 7; its last stage: update 4; process.log says: 'bye'"),
        (Ending(FULL, STARTING), "disk_full", "its disk is full: no file could be written, "),
        (Ending(FAILED, SAID), "task_app_failed", "no task app answers"),
        (Ending(REFUSED, error="sinks.wandb cannot be opened"), "refused", "sinks.wandb cannot be opened"),
        (Ending(REFUSED, SAID, error="less"), "task_app_failed", "no task app answers"),
    ],
)
def test_one_crash_too_many_is_a_failure_in_the_words_of_the_process_or_by_what_killed_it(ending, code, told):
    ending = dataclasses.replace(ending, crashes=4, last_line="bye")
    changes = decide_outcome(job(), ending, restarts=3, first_wait_s=1.0, now=NOON).changes
    assert (changes["state"], changes["ended"], changes["code"]) == ("failed", NOON, code)
    assert told in changes["detail"]
    assert ("bye" in changes["detail"]) == (ending.exit_code in (-signal.SIGSEGV, -200, 7))


def test_a_job_that_was_to_end_and_has_no_process_has_ended():
    changes = [without_process(job(state=state, wanted=wanted), NOON) or {} for state, wanted in WISHES]
    assert [one.get("state") for one in changes] == [None, "paused", "queued", "cancelled"]


def test_crashes_count_from_the_last_iteration_on_and_each_once():
    slot = Slot()

    def crash(iteration: int) -> int:
        first = slot.record_end(Ending(KILLED, RunState("training", 17, iteration=iteration))).crashes
        assert slot.record_end(Ending(KILLED)).crashes == first, "looked at again, it is the same end"
        slot.process = slot.ending = None
        return first

    assert [crash(0), crash(0), crash(5), crash(5), crash(6)] == [1, 2, 1, 2, 1]
    assert slot.record_end(Ending(DONE, RunState("ended", 17, iteration=6))).crashes == 1


def test_a_jobs_process_has_the_key_of_an_external_learner_and_none_of_the_services():
    service = dict.fromkeys(("PATH", "TRAINER_API_KEY", "PGPASSWORD"), "x")
    keys = dict.fromkeys(("TURNWISE_LEARNER_KEY", "TURNWISE_LEARNER_KEY_FILE"), "y")
    for config in ("", "[cluster]", '[cluster]\nlauncher = "ray"', "cluster = 3", "no TOML"):
        assert without_secrets(config, service | keys) == {"PATH": "x"}
    assert without_secrets('[cluster]\nlauncher = "external"', service | keys) == {"PATH": "x"} | keys


async def test_the_words_of_a_process_are_what_this_start_printed_and_for_a_crash_what_crashed(tmp_path):
    async def run(code):
        process = await start_process(tmp_path, os.environ, command=lambda _: (sys.executable, "-c", code))
        await process.ended()
        return last_words(job(run_dir=str(tmp_path)), process)

    assert await run("print('a'); print('error: no task app')") == Ending(
        0, error="no task app", last_line="error: no task app"
    )
    assert await run("") == Ending(0)
    crash = "import faulthandler, ctypes; faulthandler.enable(); ctypes.string_at(0)"
    assert await run(crash) == Ending(-signal.SIGSEGV, last_line="Fatal Python error: Segmentation fault")


def test_where_nothing_can_be_printed_the_exit_code_still_tells(tmp_path: Path):
    with (
        open("/dev/full", "wb") as full,
        subprocess.Popen(job_command(tmp_path), stdin=subprocess.PIPE, stdout=full, stderr=full) as process,
    ):
        assert process.wait(60) == REFUSED, "no run.json"


# Of each verb the states before and after it; in the others it is refused.
VERBS = {
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
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_in_every_state_and_the_second_time_it_changes_nothing(verb, state):
    row = job(state=state, wanted="pause" if state in ("pausing", "paused") else "run")
    if (after := VERBS[verb].get(state)) is None:
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
