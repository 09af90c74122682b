"""Random texts of a regular expression, by the parse tree of Python's `re`."""

import random
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from task_app.policies.json_schema import expression

# The parser that `re` itself uses; hypothesis reads its trees too. It has no public name.
_parser, _codes = import_module("re._parser"), import_module("re._constants")
_PRINTABLE = [chr(code) for code in range(32, 127)]
_WORDS = [char for char in _PRINTABLE if char.isalnum()] + ["_"]
# Repetitions beyond the least of a repeat without an end, and the longest text.
_MORE, _LONGEST = 4, 2_000


def text_like(pattern: str, source: random.Random, *, least: int = 0) -> str:
    """A text in which the pattern probably occurs: assertions about the text around are not heeded.

    Args:
        least: the length that the text needs; repeats without an end may go on until there.
    """
    if expression(pattern) is None:
        return ""
    return _Text(source, least).of(_parser.parse(pattern))


class _Text:
    def __init__(self, source: random.Random, least: int) -> None:
        self._source, self._least, self._room = source, least, _LONGEST + least
        self._groups: dict[int, str] = {}

    def of(self, tree: Any) -> str:
        return "".join([self._one(code, argument) for code, argument in tree])

    def _one(self, code: Any, argument: Any) -> str:
        if code is _codes.LITERAL:
            return self._spend(chr(argument))
        if code is _codes.NOT_LITERAL:
            return self._spend(self._source.choice([char for char in _PRINTABLE if char != chr(argument)]))
        if code is _codes.ANY:
            return self._spend(self._source.choice(_WORDS))
        if code is _codes.IN:
            return self._spend(self._member(argument))
        if code is _codes.BRANCH:
            return self.of(self._source.choice(argument[1]))
        if code is _codes.SUBPATTERN:
            text = self.of(argument[-1])
            if argument[0] is not None:
                self._groups[argument[0]] = text
            return text
        if code in (_codes.MAX_REPEAT, _codes.MIN_REPEAT, _codes.POSSESSIVE_REPEAT):
            return self._repeated(*argument)
        if code is _codes.GROUPREF:
            return self._groups.get(argument, "")
        if code is _codes.ATOMIC_GROUP:
            return self.of(argument)
        if code is _codes.GROUPREF_EXISTS:
            group, present, absent = argument
            return self.of(present if group in self._groups else absent or ())
        return ""  # an assertion

    def _repeated(self, least: int, most: Any, tree: Any) -> str:
        more = self._source.choice((0, _MORE, self._least))
        count = self._source.randint(least, min(int(most), least + more))
        texts: list[str] = []
        while len(texts) < count and self._room > 0:
            texts.append(self.of(tree))
        return "".join(texts)

    def _member(self, items: Sequence[tuple[Any, Any]]) -> str:
        """A character of a class; of a negated one a printable one that none of its items has."""
        if items[0][0] is _codes.NEGATE:
            others = [char for char in _PRINTABLE if not any(_has(item, char) for item in items[1:])]
            return self._source.choice(others) if others else "\u00e9"
        code, argument = self._source.choice(items)
        if code is _codes.LITERAL:
            return chr(argument)
        if code is _codes.RANGE:
            low, high = argument
            if low <= ord("~") and high >= ord(" "):  # neither a NUL nor half a character
                low, high = max(low, ord(" ")), min(high, ord("~"))
            return chr(self._source.randint(low, high))
        return self._source.choice(
            [char for char in [*_PRINTABLE, "\t"] if _has((code, argument), char)] or ["a"]
        )

    def _spend(self, text: str) -> str:
        self._room -= len(text)
        return text


def _has(item: tuple[Any, Any], char: str) -> bool:
    code, argument = item
    if code is _codes.LITERAL:
        return char == chr(argument)
    if code is _codes.RANGE:
        return bool(argument[0] <= ord(char) <= argument[1])
    is_in = {
        _codes.CATEGORY_DIGIT: char.isdigit(),
        _codes.CATEGORY_SPACE: char.isspace(),
        _codes.CATEGORY_WORD: char in _WORDS,
    }
    negated = {
        _codes.CATEGORY_NOT_DIGIT: _codes.CATEGORY_DIGIT,
        _codes.CATEGORY_NOT_SPACE: _codes.CATEGORY_SPACE,
        _codes.CATEGORY_NOT_WORD: _codes.CATEGORY_WORD,
    }
    return not is_in[negated[argument]] if argument in negated else is_in.get(argument, False)
