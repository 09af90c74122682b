"""Text as people's programs save it: UTF-8, with or without a byte order mark; nothing else is guessed at.

Editors and shells of Windows write a mark, or UTF-16. Every file that a user writes is read here, so that
the mark never counts as a character of the text, and another encoding is named instead of a syntax error.
"""

import json
import re
from pathlib import Path

# C0 without tab and line feed, DEL, C1, and characters that change the direction of writing.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_MARK = "\N{ZERO WIDTH NO-BREAK SPACE}".encode()


def read_text(path: Path) -> str:
    """The text of a user's file, without a byte order mark; line ends are those of Python's text files.

    Raises OSError where the file cannot be read, and ValueError as `decode_text`.
    """
    return decode_text(path.read_bytes()).replace("\r\n", "\n").replace("\r", "\n")


def decode_text(data: bytes) -> str:
    """The text of these bytes, without a byte order mark.

    Raises ValueError where they are no UTF-8; it says where, or which other encoding it is. It holds none of
    them, since the text may be a key.
    """
    encoding = json.detect_encoding(data)  # by the mark, or by the zeros around the first characters
    if not encoding.startswith("utf-8"):
        raise ValueError(f"the text is {encoding[:6].upper()}; save or send it as UTF-8")
    try:
        return without_mark(data).decode("utf-8")
    except UnicodeDecodeError as error:
        before = error.object[: error.start].decode("utf-8")
        column = len(before) - before.rfind("\n")
        of_line = f" of line {before.count(chr(10)) + 1}" if b"\n" in error.object.rstrip(b"\n") else ""
        raise ValueError(f"column {column}{of_line} is no UTF-8; save or send the text as UTF-8") from None


def without_mark(data: bytes) -> bytes:
    """The bytes without a byte order mark of UTF-8 at their start."""
    return data.removeprefix(_MARK)


def encodable(text: str) -> str:
    """The text with `?` for lone surrogates, which JSON can write and UTF-8 cannot."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def visible(text: str) -> str:
    """The text with every control character as an escape (`\\x1b`), except tabs and line breaks.

    Shown text can then not move a terminal's cursor, set its title or reverse its lines.
    """
    return _CONTROL.sub(lambda one: one[0].encode("unicode_escape").decode(), text)
