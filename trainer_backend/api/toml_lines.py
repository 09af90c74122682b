"""On which line of a TOML text a key stands, for messages about it. Pure."""

import re
from collections.abc import Mapping

_TABLE = re.compile(r"\s*\[\[?\s*([^\]]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(
    r"\s*((?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*'))*)\s*="
)
_AT_LINE = re.compile(r"\(at line (\d+), column \d+\)|\(at end of document\)")
_DOTTED = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]+)*")
_PARTS = re.compile(r"\"([^\"]*)\"|'([^']*)'|([A-Za-z0-9_-]+)")


def lines_of(text: str) -> dict[str, int]:
    """The line of each dotted key and each table, from 1; of one that comes twice, the first."""
    found: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if match := _TABLE.match(line):
            table = _plain(match.group(1))
            found.setdefault(table, number)
        elif match := _KEY.match(line):
            name = _plain(match.group(1))
            found.setdefault(f"{table}.{name}" if table else name, number)
    return found


def line_of(message: str, lines: Mapping[str, int], text: str) -> int | None:
    """The line that a message is about: the one that it names, or that of the first key in it which is there.

    A key that is not there, or inside a value (an inline table), is on the line of what holds it.
    """
    if match := _AT_LINE.search(message):
        return int(match.group(1)) if match.group(1) else max(1, len(text.splitlines()))
    for dotted in _DOTTED.findall(message):
        name = dotted
        while name and name not in lines:
            name = name.rpartition(".")[0]
        if name:
            return lines[name]
    return None


def _plain(name: str) -> str:
    return ".".join("".join(parts) for parts in _PARTS.findall(name))
