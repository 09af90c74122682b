"""Who trains a run, and what it says of itself: read from outside, at any moment, of any process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer_backend.rundir.disk import full_disk
from trainer_backend.errors import RunDirectoryError, RunNotWritten
from trainer_backend.rundir.lock import FILE, holder, refuse_if_locked, run_lock
from trainer_backend.rundir.state import ProcessRecord, RunState, read_state, read_status, write_state

HOLDS = """
import sys
from pathlib import Path
from trainer_backend.rundir.lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("holds", flush=True)
    sys.stdin.read()
"""


def test_a_second_trainer_is_refused_by_the_process_of_the_first_until_that_is_killed(tmp_path: Path):
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None and first.stdout.readline() == "holds\n"
        seen = holder(tmp_path)
        assert seen is not None and seen.pid == first.pid
        told = rf"is being trained by process {first.pid} on .*, since 20.*\+00:00; two trainers"
        with pytest.raises(RunDirectoryError, match=told), run_lock(tmp_path):
            raise AssertionError
        first.kill()
        first.wait()
    assert holder(tmp_path) is None
    with run_lock(tmp_path):
        seen = holder(tmp_path)
        assert seen is not None and seen.pid == os.getpid()


def test_looking_for_the_holder_makes_no_lock_and_one_process_does_not_train_twice_either(tmp_path: Path):
    refuse_if_locked(tmp_path)
    assert holder(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    told = f"trained by process {os.getpid()} "
    with run_lock(tmp_path):
        assert holder(tmp_path) == holder(tmp_path) is not None
        with pytest.raises(RunDirectoryError, match=told):
            refuse_if_locked(tmp_path)
        with pytest.raises(RunDirectoryError, match=told), run_lock(tmp_path):
            raise AssertionError
        (tmp_path / FILE).write_text("")  # as before the holder has written who it is
        seen = holder(tmp_path)
        assert seen is not None and (seen.pid, str(seen)) == (0, "another process")


def test_a_directory_that_cannot_be_written_is_told(tmp_path: Path):
    (tmp_path / FILE).mkdir()  # what chmod does to others, root is not told by
    with pytest.raises(RunNotWritten, match="lock cannot be written"), run_lock(tmp_path):
        raise AssertionError


def test_a_state_comes_back_and_one_that_is_broken_or_of_another_version_is_none(tmp_path: Path):
    assert read_state(tmp_path) is None
    replica = ProcessRecord(
        "replica", "http://a:1", "", "lost", None, "no \N{SNOWMAN}", "2026-01-01T00:00:00+00:00"
    )
    state = RunState(
        "training", 7, 3, "collect 4", 2, 8, since="2026-01-01T00:00:00+00:00", starts=2, processes=(replica,)
    )
    write_state(tmp_path, state)
    assert read_state(tmp_path) == state
    for text in (
        "",
        "[]",
        '{"state": "training"}',
        json.dumps({**json.loads((tmp_path / "state.json").read_text()), "state": "dancing"}),
        json.dumps({**json.loads((tmp_path / "state.json").read_text()), "processes": ["replica"]}),
    ):
        (tmp_path / "state.json").write_text(text)
        assert read_state(tmp_path) is None


def test_a_full_disk_leaves_the_state_before(tmp_path: Path):
    write_state(tmp_path, RunState("training", 7))
    with full_disk(), pytest.raises(RunNotWritten):
        write_state(tmp_path, RunState("ended", 7))
    assert read_state(tmp_path) == RunState("training", 7)


@pytest.mark.parametrize(
    ("state", "interrupted"),
    [("starting", True), ("training", True), ("evaluating", True), ("ended", False), ("stopped", False),
     ("failed", False)],
)  # fmt: skip
def test_a_process_that_is_gone_without_a_last_word_was_interrupted(tmp_path: Path, state, interrupted: bool):
    assert not read_status(tmp_path).interrupted, "of a version that wrote no state"
    write_state(tmp_path, RunState(state, 7))
    assert read_status(tmp_path).interrupted is interrupted
    with run_lock(tmp_path):
        assert not read_status(tmp_path).interrupted
