"""Reads users' text files: UTF-8 with or without a byte order mark.

Windows editors and shells write a byte order mark, or UTF-16. This module reads all files of users. It
removes the mark, and refuses UTF-16 and UTF-32 with an error that names the encoding.
"""

import json
import re
from pathlib import Path

# C0 without tab and line feed, DEL, C1, and characters that change the direction of text.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_MARK = "\N{ZERO WIDTH NO-BREAK SPACE}".encode()


def read_text(path: Path) -> str:
    """Read a user's file without a byte order mark; all line ends become line feeds.

    Raises OSError if the file cannot be read, and ValueError if it is not UTF-8 (`decode_text`).
    """
    return decode_text(path.read_bytes()).replace("\r\n", "\n").replace("\r", "\n")


def decode_text(data: bytes) -> str:
    """Decode UTF-8, and remove a byte order mark.

    Raises ValueError for UTF-16, UTF-32 or an invalid byte. The message names the encoding or the place of
    the byte, but contains no part of the text, because the text may be a secret key.
    """
    encoding = json.detect_encoding(data)  # by the mark, or by zeros next to the first characters
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
    """Remove a leading UTF-8 byte order mark."""
    return data.removeprefix(_MARK)


def encodable(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode, by `?`."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def visible(text: str) -> str:
    """Replace control characters (except tab and line feed) and text direction marks by escapes like `\\x1b`.

    A terminal that prints the result does not move its cursor, set its title or reorder characters.
    """
    return _CONTROL.sub(lambda one: one[0].encode("unicode_escape").decode(), text)
