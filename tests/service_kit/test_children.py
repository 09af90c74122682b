"""What a child leaves behind."""

from pathlib import Path

import pytest

from service_kit.children import last_line


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
