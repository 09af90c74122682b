"""Pieces of log files, at bytes counted by hand."""

from pathlib import Path

import pytest

from trainer_backend.jobs.run_routes import MOST_BYTES, Piece, read_piece


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.log"


def test_lines_come_with_the_byte_after_each_and_one_that_is_being_written_does_not(path):
    path.write_bytes(b"one\n\nthree\nfo")
    assert read_piece(path, 0) == Piece((b"one", b"", b"three"), (4, 5, 11), 11, False)
    assert read_piece(path, 4) == Piece((b"", b"three"), (5, 11), 11, False)
    assert read_piece(path, 11) == read_piece(path, 11, last=True) == Piece((), (), 11, False)


def test_a_file_that_is_not_there_or_was_rewritten(path):
    assert read_piece(path, 7) == Piece((), (), 0, False)
    path.write_bytes(b"new\n")
    assert read_piece(path, 7) == read_piece(path, 7, last=True) == Piece((b"new",), (4,), 4, False)


def test_pieces_of_a_long_file_are_the_file(path):
    line = b"x" * 99_999 + b"\n"
    path.write_bytes(line * 25)
    sizes, offset, more = [], 0, True
    while more:
        piece = read_piece(path, offset)
        sizes.append(len(piece.lines))
        offset, more = piece.end, piece.more
    assert (sizes, offset) == ([10, 10, 5], 2_500_000)  # ten lines are 1,000,000 of 1,048,576 bytes
    last = read_piece(path, 0, last=True)
    assert (len(last.lines), last.end, last.more) == (10, 2_500_000, False)


def test_a_line_that_is_longer_than_a_piece_comes_as_a_whole_and_the_last_piece_begins_with_a_line(path):
    long = b"x" * (MOST_BYTES + 5)
    path.write_bytes(long + b"\nshort\n")
    assert read_piece(path, 0).lines == (long,)
    assert read_piece(path, 0).more
    assert read_piece(path, 0, last=True).lines == (b"short",)
    path.write_bytes(b"before\n" + (b"y" * 1023 + b"\n") * 1024)
    assert len(read_piece(path, 0, last=True).lines) == 1024


def test_what_no_run_has_told_is_left_out_and_what_was_printed_is_shown_somehow(path):
    path.write_bytes(b'{"time": "t", "text": "a"}\n[1]\nhalf {\n')
    assert [(line.time, line.text, end) for line, end in read_piece(path, 0).log_lines()] == [("t", "a", 27)]
    assert Piece((b"tw\xff", b"", b"a\rb")).texts() == ["tw\ufffd", "", "a", "b"]
