"""What each update has learned from, and what of it a resumed run forgets."""

from pathlib import Path

import pytest

from trainer_backend.errors import RunDirectoryError
from trainer_backend.rundir.spool import (
    LedgerEntry,
    append_to_ledger,
    cut_ledger,
    plan_id,
    read_ledger,
)


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


def test_a_planned_rollout_has_one_id_in_every_start_and_attempt():
    assert plan_id("crafter.0123.4567/train/3/0/1") == plan_id("crafter.0123.89ab/train/3/0/1:2")
    assert plan_id("run.1/train/3/0/1") == "train/3/0/1"
    assert plan_id("a") == "a"
