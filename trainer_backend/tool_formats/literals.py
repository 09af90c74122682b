"""Reads calls whose arguments are literals in Python's syntax, or in a syntax of Google's models.

LFM2, LFM2.5: `<|tool_call_start|>[name(key="text", number=1), ...]<|tool_call_end|>`, in Python's syntax.
These models may also write a list of calls in JSON.
Gemma 4: `<|tool_call>call:name{key:<|"|>text<|"|>,number:1}<tool_call|>`, with keys without quotation marks.
FunctionGemma: `<start_function_call>call:name{key:<escape>text<escape>}<end_function_call>`.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from trainer_backend.tool_formats.calls import (
    WORDS,
    ParsedCall,
    Tools,
    as_call,
    as_calls,
    expect,
    read_json,
    read_until,
    skip_space,
)
from trainer_backend.tool_formats.tags import ReasoningMarks, parse_marked

LFM2_OPEN, _LFM2_CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
GEMMA_OPEN, _GEMMA_CLOSE = "<|tool_call>", "<tool_call|>"
FUNCTION_GEMMA_OPEN, _FUNCTION_GEMMA_CLOSE = "<start_function_call>", "<end_function_call>"
_THOUGHT = ReasoningMarks("<|channel>thought\n", "<channel|>", is_apart=True)

# Python's quotation marks, the longest first. In strings with these marks, a backslash begins an escape.
_PYTHON_QUOTES = ('"""', "'''", '"', "'")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_NAME = re.compile(r"[^\s()\[\]{}=,:'\"<>|]+")
_WORD = re.compile(r"[^\s,:()\[\]{}<>'\"]+")
# Numbers as Python and jinja print them. `int` raises ValueError for too many digits.
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


class LiteralReader:
    """Reads literals one after the other, starting at `position` of a text.

    `quotes` are the quotation marks of strings. If these are Python's, a backslash in a string begins an
    escape. Otherwise, strings have no escapes, and the keys of objects may lack quotation marks.

    Methods raise ValueError if the text has another syntax, and RecursionError if it is nested too deeply.
    """

    def __init__(self, text: str, position: int, quotes: tuple[str, ...]) -> None:
        self.text = text
        self.position = position
        self._quotes = quotes
        self._has_escapes = quotes == _PYTHON_QUOTES

    def take(self, token: str) -> bool:
        """Skip white space and `token` and return True, or return False if `token` does not come next."""
        start = skip_space(self.text, self.position)
        is_next = self.text.startswith(token, start)
        self.position = start + len(token) if is_next else self.position
        return is_next

    def expect(self, *tokens: str) -> None:
        self.position = expect(self.text, self.position, *tokens)

    def word(self, pattern: re.Pattern[str]) -> str:
        start = skip_space(self.text, self.position)
        if not (match := pattern.match(self.text, start)):
            raise ValueError(f"expected a name or a value, found {self.text[start : start + 20]!r}")
        self.position = match.end()
        return match[0]

    def value(self) -> object:
        for quote in self._quotes:
            if self.take(quote):
                return self._string(quote)
        if self.take("["):
            return [self.value() for _ in self._places("]")]
        if self.take("("):
            return [self.value() for _ in self._places(")")]
        return self.mapping() if self.take("{") else _parse_number_or_word(self.word(_WORD))

    def mapping(self) -> dict[str, object]:
        """Read the rest of an object whose opening brace has been read."""
        return self._pairs("}", ":", self._key)

    def arguments(self) -> dict[str, object]:
        """Read the arguments of `name(key=value, ...)`; the opening parenthesis has been read."""
        return self._pairs(")", "=", partial(self.word, _NAME))

    def _pairs(self, closing: str, separator: str, read_key: Callable[[], str]) -> dict[str, object]:
        items: dict[str, object] = {}
        for _ in self._places(closing):
            key = read_key()
            self.expect(separator)
            items[key] = self.value()
        return items

    def _places(self, closing: str) -> Iterator[None]:
        """Yield once for each item of a list that ends with `closing`, so that the caller reads the item."""
        while not self.take(closing):
            yield
            if not self.take(","):
                self.expect(closing)
                return

    def _key(self) -> str:
        if not self._has_escapes and not self.text.startswith(self._quotes, self.position):
            key, self.position = read_until(self.text, self.position, ":")
            self.position -= 1
            return key.strip()
        key_value = self.value()
        return key_value if isinstance(key_value, str) else json.dumps(key_value)

    def _string(self, quote: str) -> str:
        if not self._has_escapes:
            string, self.position = read_until(self.text, self.position, quote)
            return string
        start = self.position
        for match in re.compile(rf"\\.|{quote}", re.DOTALL).finditer(self.text, start):
            if match[0] == quote:
                self.position = match.end()
                return _ESCAPE.sub(_unescape, self.text[start : match.start()])
        raise ValueError(f"{quote} is missing at the end of a string")


def _unescape(match: re.Match[str]) -> str:
    escape = match[1]
    if len(escape) > 1:
        return chr(int(escape[1:], 16))  # ValueError beyond Unicode
    return _ESCAPED.get(escape, escape if escape in "\\'\"" else match[0])


def _parse_number_or_word(word: str) -> object:
    if word in WORDS:
        return WORDS[word]
    if not (match := _NUMBER.fullmatch(word)):
        raise ValueError(f"{word[:20]!r} is no value")
    return float(word) if "." in match[1] or match[2] else int(word)


def read_pythonic(text: str, start: int, tools: Tools) -> tuple[list[ParsedCall], int]:
    """Read one call or a list of calls, in Python's syntax or in JSON."""
    if text[skip_space(text, start) :].removeprefix("[").lstrip().startswith("{"):
        value, end = read_json(text, start)
        return as_calls(value), expect(text, end, _LFM2_CLOSE)
    reader = LiteralReader(text, start, _PYTHON_QUOTES)
    is_list = reader.take("[")
    calls: list[ParsedCall] = []
    while not calls or (is_list and reader.take(",")):
        name = reader.word(_NAME)
        reader.expect("(")
        calls.append(as_call({"name": name, "arguments": reader.arguments()}))
    if is_list:
        reader.expect("]")
    reader.expect(_LFM2_CLOSE)
    return calls, reader.position


def write_pythonic(calls: Sequence[ParsedCall]) -> str:
    """Write calls as LFM2 does."""
    written = [
        f"{call.name}({', '.join([f'{key}={value!r}' for key, value in json.loads(call.arguments).items()])})"
        for call in calls
    ]
    return f"{LFM2_OPEN}[{', '.join(written)}]{_LFM2_CLOSE}"


def read_gemma(
    text: str, start: int, tools: Tools, *, quote: str, closing: str
) -> tuple[list[ParsedCall], int]:
    name, position = read_until(text, expect(text, start, "call:"), "{")
    reader = LiteralReader(text, position, (quote,))
    call = as_call({"name": name.strip(), "arguments": reader.mapping()})
    reader.expect(closing)
    return [call], reader.position


# Liquid's chat templates.
parse_lfm2 = partial(parse_marked, opening=LFM2_OPEN, read=read_pythonic)
# Google's prompt formats of Gemma 4 and FunctionGemma. The chat template of Gemma 4 drops reasoning that
# is part of the content.
parse_gemma4 = partial(
    parse_marked,
    opening=GEMMA_OPEN,
    read=partial(read_gemma, quote='<|"|>', closing=_GEMMA_CLOSE),
    reasoning=_THOUGHT,
)
parse_function_gemma = partial(
    parse_marked,
    opening=FUNCTION_GEMMA_OPEN,
    read=partial(read_gemma, quote="<escape>", closing=_FUNCTION_GEMMA_CLOSE),
)
