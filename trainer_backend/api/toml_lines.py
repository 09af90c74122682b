"""Which keys a TOML text has, on which lines: read once, in time linear in the text. Pure.

It is read before it is parsed, as the text of anybody: whatever is in it, no TOML at all, this reads on. What
is a dotted key of a thousand parts to a parser is a thousand tables with their books.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_BLANK = re.compile(r"(?:[ \t\r\n]++|#[^\n]*+)*+")
# A part of a dotted key. All repetitions are possessive: none is tried again with less.
_PART = re.compile(r"[ \t]*+(?:([A-Za-z0-9_-]++)|\"((?:[^\"\\\n]++|\\.)*+)\"|'([^'\n]*+)')[ \t]*+")
# What divides a value, and the strings and comments in it, which nothing divides.
_MARK = re.compile(
    r'"""(?:[^"\\]++|\\.|"(?!""))*+(?:"{3,5}|\\?\Z)'
    r"|'''(?:[^']++|'(?!''))*+(?:'{3,5}|\Z)"
    r'|"(?:[^"\\\n]++|\\[^\n])*+"?'
    r"|'[^'\n]*+'?"
    r"|#[^\n]*+|[\n.,=\[\]{}]",
    re.DOTALL,
)
_AT_LINE = re.compile(r"\(at line (\d+), column \d+\)|\(at end of document\)")
_DOTTED = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*+(?:\.[A-Za-z0-9_-]++)*+")


# Keys and items of lists; of a text what divides them, which is a little more.
MOST_VALUES, _DIVIDERS = 50_000, ".,=[{\n"


def is_too_much(text: str) -> bool:
    """Whether a text may hold more than any job does; then it is not read."""
    return sum(map(text.count, _DIVIDERS)) > MOST_VALUES


@dataclass(frozen=True, slots=True)
class Statement:
    """The header of a table, or a key with its value.

    Attributes:
        line: from 1.
        name: dotted, of a key with that of its table before it.
        depth: parts of its own key, or of the longest in its value.
    """

    line: int
    name: str
    depth: int


def statements(text: str) -> Iterator[Statement]:
    """In the order of the text."""
    table, line, counted, place = "", 1, 0, 0
    while (place := _end(_BLANK, text, place)) < len(text):
        line += text.count("\n", counted, place)
        counted = place
        header = text[place] == "["
        parts, place = _key(text, place + (2 if text.startswith("[[", place) else header))
        place, depth = _rest(text, place)
        name = ".".join(parts)
        if header:
            table = name
        elif table:
            name = f"{table}.{name}"
        yield Statement(line, name, max(depth, len(parts)))


def lines_of(text: str) -> dict[str, int]:
    """The line of each dotted key and each table, from 1; of one that comes twice, the first. None of a text
    that is too much."""
    lines: dict[str, int] = {}
    for statement in () if is_too_much(text) else statements(text):
        if statement.name:
            lines.setdefault(statement.name, statement.line)
    return lines


def line_of(message: str, lines: Mapping[str, int], text: str) -> int | None:
    """The line that a message is about: the one that it names, or that of the first key in it which is there.

    A key that is not there, or inside a value (an inline table), is on the line of what holds it.
    """
    if match := _AT_LINE.search(message):
        return int(match.group(1)) if match.group(1) else max(1, text.count("\n") + (text[-1:] != "\n"))
    for dotted in _DOTTED.findall(message):
        name = dotted
        while name and name not in lines:
            name = name.rpartition(".")[0]
        if name:
            return lines[name]
    return None


def _key(text: str, place: int) -> tuple[list[str], int]:
    """The parts of the dotted key that begins there, and where it ends."""
    parts: list[str] = []
    while match := _PART.match(text, place):
        parts.append(match[match.lastindex or 0])
        place = match.end()
        if not text.startswith(".", place):
            break
        place += 1
    return parts, place


def _rest(text: str, place: int) -> tuple[int, int]:
    """Where a statement ends, and how many parts the longest key in its value has."""
    inside = dots = most_dots = 0
    for match in _MARK.finditer(text, place):
        mark = match[0]
        if mark == ".":
            dots += 1
            most_dots = max(most_dots, dots)
        elif mark[0] in "\"'#":
            continue
        elif mark == "\n" and not inside:
            return match.end(), most_dots + 1
        else:
            dots = 0
            inside = max(0, inside + (mark in "[{") - (mark in "]}"))
    return len(text), most_dots + 1


def _end(pattern: re.Pattern[str], text: str, place: int) -> int:
    match = pattern.match(text, place)
    return match.end() if match else place
