"""What a run writes down of itself for those who watch: run.log and state.json."""

import re
from pathlib import Path

import pytest

from tests.conftest import ListReporter, tiny_job
from tests.trainer_backend.rundir.disk import full_disk
from trainer_backend.errors import TaskAppError
from trainer_backend.run.reporters import RecordingReporter
from trainer_backend.rundir.layout import RunDirectory, create_run
from trainer_backend.rundir.state import GONE, RunState, read_log, read_state


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return create_run(tiny_job(), tmp_path / "run")


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def load_state(run: RunDirectory) -> RunState:
    state = read_state(run.path)
    assert state is not None
    return state


def test_what_is_said_goes_on_and_stands_in_the_log_over_all_starts(run: RunDirectory):
    for text in ("first [start]", "second\nstart"):
        inner = ListReporter()
        RecordingReporter(run, inner).say(text)
        assert inner.lines == [text]
    lines, earlier = read_log(run.path)
    assert [line.text for line in lines] == ["first [start]", "second\nstart"]
    assert all(line.time.endswith("+00:00") for line in lines)
    assert earlier == 0
    assert read_log(run.path, last=1) == (lines[1:], 1)


def test_a_new_stage_is_written_at_once_and_how_far_it_is_once_a_second(run: RunDirectory):
    clock, inner = Clock(), ListReporter()
    reporter = RecordingReporter(run, inner, clock=clock)
    assert (load_state(run).state, load_state(run).stage) == ("starting", "")
    for seconds, done, seen in ((0.0, 0, 0), (0.5, 1, 0), (1.0, 2, 2), (1.9, 3, 2), (2.0, 4, 4)):
        clock.seconds = seconds
        reporter.stage("collect 1", done, 8)
        state = load_state(run)
        assert (state.state, state.stage, state.done, state.total) == ("training", "collect 1", seen, 8)
    reporter.stage("evaluate 1", 0, 4)
    assert (load_state(run).state, load_state(run).stage) == ("evaluating", "evaluate 1")
    assert len(inner.stages) == 6


def test_a_finished_iteration_is_told_and_since_when_the_state_is_what_it_is(run: RunDirectory):
    reporter = RecordingReporter(run, ListReporter())
    reporter.stage("collect 1", 0, 8)
    began = load_state(run).since
    reporter.metrics({"kind": "iteration", "iteration": 1}, "iteration 1")
    assert (load_state(run).iteration, load_state(run).since) == (1, began)


def test_processes_are_recorded_each_for_itself_and_a_changed_state_at_once(run: RunDirectory):
    clock, inner = Clock(), ListReporter()
    reporter = RecordingReporter(run, inner, clock=clock)

    def seen() -> list[tuple[str, str, str, int | None, str]]:
        return [(one.name, one.host, one.state, one.version, one.word) for one in load_state(run).processes]

    reporter.process("a", role="replica", state="serving", version=3, host="b.example")
    reporter.process("a", role="gateway", state="starting", word="reads a model")  # another process
    assert seen() == [("a", "b.example", "serving", 3, ""), ("a", "", "starting", None, "reads a model")]
    clock.seconds = 0.9
    reporter.process("a", role="gateway", state="starting", word="listens")
    assert seen()[1][4] == "reads a model"  # a word alone is written once a second
    clock.seconds = 1.0
    reporter.process("a", role="gateway", state="starting", word="answers")
    assert seen()[1][4] == "answers"
    began = load_state(run).processes
    reporter.stage("collect 1", 0, 8)
    reporter.process("a", role="replica", state="lost", word="no answer")
    assert seen() == [("a", "b.example", "lost", 3, "no answer"), ("a", "", "starting", None, "answers")]
    assert load_state(run).processes[1].since == began[1].since
    assert load_state(run).stage == "collect 1"
    reporter.process("a", role="replica", state=GONE)
    assert [name for name, *_ in seen()] == ["a"] and load_state(run).processes[0].role == "gateway"
    assert len(inner.processes) == 6
    for start_again in (reporter.starts_again, lambda: RecordingReporter(run, inner)):
        reporter.process("b", role="replica", state="serving")
        assert len(seen()) > 0
        start_again()  # another start has other processes
        assert seen() == []


def test_a_start_that_fails_early_leaves_what_was_left_behind_to_the_next(run: RunDirectory):
    first = RecordingReporter(run, ListReporter())
    first.runs_as("tiny.1")  # and is killed
    assert first.left_behind == ""
    with pytest.raises(TaskAppError), RecordingReporter.opened(run, ListReporter()):
        raise TaskAppError("no app answers")  # before anything at task apps could be ended
    third = RecordingReporter(run, ListReporter())
    assert third.left_behind == "tiny.1"
    third.runs_as("tiny.3")
    assert load_state(run).run_id == "tiny.3"


def test_every_start_is_counted(run: RunDirectory):
    assert [RecordingReporter(run, ListReporter()).resumes for _ in range(3)] == [0, 1, 2]
    assert load_state(run).starts == 3


@pytest.mark.parametrize(
    ("error", "state", "code", "detail"),
    [
        (TaskAppError("no app answers"), "failed", "task_app_failed", "no app answers"),
        (ZeroDivisionError("oh"), "failed", "crashed", r"ZeroDivisionError: oh \(test_recording\.py:\d+\)"),
        (KeyboardInterrupt(), "stopped", "", "stopped by KeyboardInterrupt"),
    ],
)
def test_the_last_state_says_how_it_ended(run: RunDirectory, error, state: str, code: str, detail: str):
    with pytest.raises(type(error)), RecordingReporter.opened(run, ListReporter()) as reporter:
        reporter.stage("collect 1", 3, 8)
        raise error
    last = load_state(run)
    assert (last.state, last.code, last.stage) == (state, code, "")
    assert re.fullmatch(detail, last.detail)
    reason = f"failed: {last.detail}" if state == "failed" else last.detail
    assert [line.text for line in read_log(run.path)[0]] == [reason]


def test_an_error_on_the_way_out_does_not_replace_the_last_word(run: RunDirectory):
    with pytest.raises(ZeroDivisionError), RecordingReporter.opened(run, ListReporter()) as reporter:
        reporter.end("stopped", detail="a user asked")
        raise ZeroDivisionError
    assert (load_state(run).state, load_state(run).detail) == ("stopped", "a user asked")


def test_a_full_disk_is_told_once_for_each_file_and_ends_nothing(run: RunDirectory):
    inner = ListReporter()
    reporter = RecordingReporter(run, inner)
    with full_disk():
        for name in ("collect 1", "update 1"):
            reporter.say(name)
            reporter.stage(name, 0, 1)
    told = [line for line in inner.lines if "cannot be written" in line]
    assert [line.split(" cannot")[0].rsplit("/", 1)[1] for line in told] == ["run.log", "state.json"]
    assert load_state(run).state == "starting"


def test_what_is_slow_is_said_and_stays_with_the_state_of_this_start(run: RunDirectory):
    inner = ListReporter()
    reporter = RecordingReporter(run, inner)
    reporter.note("kernels do not run")
    reporter.stage("collect 1", 0, 8)
    assert load_state(run).notes == ("kernels do not run",)
    assert inner.lines == [line.text for line in read_log(run.path)[0]] == ["kernels do not run"]
    reporter.starts_again()
    assert load_state(run).notes == ()
    reporter.note("kernels do not run")
    RecordingReporter(run, inner)
    assert load_state(run).notes == ()
