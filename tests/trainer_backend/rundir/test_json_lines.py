"""Files of lines: what a kill, a full disk or a reader in the middle of a write finds."""

from pathlib import Path

import pytest

from tests.trainer_backend.rundir.disk import full_disk
from trainer_backend.errors import RunNotWritten
from trainer_backend.rundir.files import append_line, read_lines, replace_lines


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
