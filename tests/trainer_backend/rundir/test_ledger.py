"""What each update has learned from, and what of it a resumed run forgets."""

from pathlib import Path

from trainer_backend.rundir.ledger import FILE, Consumed, append_consumed, forget_consumed_after, read_ledger


def test_lines_come_back_and_those_of_iterations_to_be_done_again_are_dropped(tmp_path: Path):
    assert read_ledger(tmp_path) == []
    lines = [Consumed(1, 1, ("a", "b")), Consumed(2, 1, ()), Consumed(3, 2, ("c",))]
    for line in lines:
        append_consumed(tmp_path, line)
    assert read_ledger(tmp_path) == lines
    forget_consumed_after(tmp_path, 2)
    assert read_ledger(tmp_path) == lines[:2]


def test_a_run_of_a_version_without_a_ledger_gets_none_by_being_resumed(tmp_path: Path):
    forget_consumed_after(tmp_path, 7)
    assert list(tmp_path.iterdir()) == []


def test_a_line_that_was_cut_short_is_no_line(tmp_path: Path):
    append_consumed(tmp_path, Consumed(1, 1, ("a",)))
    with (tmp_path / FILE).open("a") as file:
        file.write('{"iteration": 2, "policy_ver')
    append_consumed(tmp_path, Consumed(2, 2, ("b",)))
    assert [line.rollout_ids for line in read_ledger(tmp_path)] == [("a",), ("b",)]
