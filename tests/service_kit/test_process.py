"""What a child says, and what it leaves behind."""

import sys
from pathlib import Path

import pytest

from service_kit.process import PIPE, Child, last_line


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (b"first\n  out of memory \n\n \n", "out of memory"),
        (b"x" * 100_000 + b"\nthe end", "the end"),
        (b"\xff", "\N{REPLACEMENT CHARACTER}"),
        (b"\n\n", ""),
    ],
)
def test_the_last_line_of_a_log_is_the_last_that_says_something(log: bytes, line: str, tmp_path: Path):
    (tmp_path / "log").write_bytes(log)
    assert last_line(tmp_path / "log") == line
    assert last_line(tmp_path / "none") == ""


async def test_a_line_of_any_length_is_read_and_a_long_one_says_what_was_cut():
    # 65536 bytes fit the reader; of a longer line so many are kept as had come by then.
    printed = "print('a'); print('x' * 500_000); print(); print('y' * 65_536); print('z' * 500_000, end='')"
    child = await Child.start((sys.executable, "-c", printed), stdout=PIPE)
    first, long, empty, fits, last = [line async for line in child.lines()]
    assert (first, empty, fits) == ("a", "", "y" * 65_536)
    for line, letter in ((long, "x"), (last, "z")):
        kept, note = line.split(" ", 1)
        assert set(kept) == {letter}
        assert note == f"... and {500_000 - len(kept)} more bytes"
    assert await child.ended() == 0
