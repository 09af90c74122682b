"""Files of lines, the ledger and measured advantages too: what kills, full disks and resumes leave."""

from pathlib import Path

import pytest

from tests.trainer_backend.rundir.disk import full_disk
from trainer_backend.core.truth import TrueAdvantage
from trainer_backend.errors import RunDirectoryError, RunNotWritten
from trainer_backend.rundir.files import append_line, read_lines, replace_lines
from trainer_backend.rundir.spool import (
    LedgerEntry,
    append_to_ledger,
    cut_ledger,
    plan_id,
    read_ledger,
)
from trainer_backend.rundir.truth_file import TruthFile, TruthSetting


def test_lines_come_back_in_order(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    assert read_lines(path) == []
    append_line(path, {"n": 1}, durable=True)
    assert read_lines(path) == [{"n": 1}]
    append_line(path, {"n": 2}, durable=False)
    assert read_lines(path) == [{"n": 1}, {"n": 2}]


def test_a_part_of_a_line_is_read_when_it_is_whole_and_what_a_kill_left_does_not_swallow_the_next_one(
    tmp_path: Path,
):
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1}\n{"n": ')
    assert read_lines(path) == [{"n": 1}]
    with path.open("a") as file:
        file.write("2}\n{")
    append_line(path, {"n": 3}, durable=True)
    assert read_lines(path) == [{"n": 1}, {"n": 2}, {"n": 3}]


def test_of_a_line_that_does_not_fit_the_disk_nothing_stays(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    append_line(path, {"n": 1}, durable=True)
    with full_disk(len('{"n": 1}\n') + 5), pytest.raises(RunNotWritten, match=r"a\.jsonl cannot be written"):
        append_line(path, {"n": 2}, durable=True)
    assert path.read_text() == '{"n": 1}\n'


def test_what_is_no_object_is_no_line_and_a_replaced_file_holds_its_new_lines_alone(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'[1]\n\xff\xfe\n\n{"n": 1}\n')
    assert read_lines(path) == [{"n": 1}]
    replace_lines(path, [{"n": 7}], durable=True)
    assert read_lines(path) == [{"n": 7}]


def test_lines_come_back_and_those_of_iterations_to_be_done_again_are_dropped(tmp_path: Path):
    cut_ledger(tmp_path, 7)  # of a version without a ledger, which gets none by being resumed
    assert read_ledger(tmp_path) == [] == list(tmp_path.iterdir())
    lines = [LedgerEntry(1, 1, ("a", "b")), LedgerEntry(2, 1, ()), LedgerEntry(3, 2, ("c",))]
    for line in lines:
        append_to_ledger(tmp_path, line)
    assert read_ledger(tmp_path) == lines
    cut_ledger(tmp_path, 2)
    assert read_ledger(tmp_path) == lines[:2]


def test_the_same_planned_rollout_is_not_learned_from_twice_whatever_start_has_played_it(tmp_path: Path):
    append_to_ledger(tmp_path, LedgerEntry(1, 1, ("run.1/train/1/0/0", "run.1/train/1/0/1:1")))
    append_to_ledger(tmp_path, LedgerEntry(2, 2, ("run.2/train/2/0/0",)))
    before = read_ledger(tmp_path)
    for again in ("run.2/train/1/0/0", "run.1/train/1/0/0", "run.3/train/1/0/1"):
        told = f"rollout {plan_id(again)} was learned from in iterations 1 and 3"
        with pytest.raises(RunDirectoryError, match=told):
            append_to_ledger(tmp_path, LedgerEntry(3, 3, ("run.3/train/3/0/0", again)))
    with pytest.raises(RunDirectoryError, match="train/3/0/0 was learned from in iterations 3 and 3"):
        append_to_ledger(tmp_path, LedgerEntry(3, 3, ("run.3/train/3/0/0", "run.3/train/3/0/0:1")))
    assert read_ledger(tmp_path) == before
    cut_ledger(tmp_path, 1)  # its weights are gone, so it is learned from again
    append_to_ledger(tmp_path, LedgerEntry(2, 2, ("run.3/train/2/0/0",)))


TRUTH = TrueAdvantage("a", 1, 0.0, 0.5, 0.1, None, 2, 0, 2, 9)
SETTING = TruthSetting(
    run_id="r", iteration=1, checkpoint="iteration_0", digest="d1", gamma=0.9, continuations=2, horizon=None,
    fresh_draws=False, seed=0, rewards={}, play={},
)  # fmt: skip


def begun(path: Path, setting: TruthSetting) -> Path:
    TruthFile.open(path, setting).add(TRUTH)
    return path


def test_other_weights_of_the_same_name_do_not_go_on_with_a_file(tmp_path: Path):
    path = begun(tmp_path / "truth.jsonl", SETTING)
    assert TruthFile.open(path, SETTING).truths == {("a", 1): TRUTH}
    for digest in ("d2", None):
        with pytest.raises(RunDirectoryError, match="was measured with digest"):
            TruthFile.open(path, SETTING.model_copy(update={"digest": digest}))


def test_a_file_of_before_there_were_digests_goes_on_with_any(tmp_path: Path):
    path = begun(tmp_path / "truth.jsonl", SETTING.model_copy(update={"digest": None}))
    assert TruthFile.open(path, SETTING).truths
    with pytest.raises(RunDirectoryError, match="was measured with gamma"):
        TruthFile.open(path, SETTING.model_copy(update={"gamma": 0.8}))
