"""Reads numbers as people and models write them, without rounding. Pure.

This module reads both sides of a comparison: the ground truth of a data row (`read_number`) and the answer of
a model (`last_number`). docs/plugins.md lists the accepted forms.
"""

import math
import re
import unicodedata
from collections.abc import Iterator
from typing import NamedTuple

# Longest number that is read; a longer word is noise, such as a checksum.
LONGEST = 300
# Number of characters at the end of an answer that are read: a hostile answer then takes some tenths of a
# second at most.
_MOST = 100_000

# Each character is replaced by one character, so that positions in a text stay the same.
_PLAIN = str.maketrans(
    "\u2212\u2010\u2011\u2013\ufe63\uff0d\uff0b\uff0e\uff0c\uff0f\u2044\u2215\uff04\uff05\uff03\u2019\u2009\u202f"
    "\u200b\u200e\u200f\u2060\ufeff",
    "------+.,///$%#'\u00a0\u00a0     ",
)
_HALVES = "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒"

_SPACE = r"[^\S\r\n]"  # without line breaks
_MONEY = r"[$£¥¢\u20a0-\u20cf]"
_BLANK = rf"{_SPACE}{{0,20}}"
_OPEN = (
    rf"(?:\\?{_MONEY}\ ?|[*_`({{\[<\"'\u201c\u2018]|\\[(\[]|\\(?:boxed|fbox|text|textbf|mathbf|mathrm)\{{)"
)
_CLOSE = rf"(?:\\?(?:{_MONEY}|%)|[*_`)}}\]>\"'\u201d]|\\[)\]]|[\s.])"
_GROUP = r"(?:[,'_\u00a0]|\{,\}|\\,)"
# No hyphen with a letter may follow: in `3 100-dollar bills`, 100 belongs to a compound, not to the number.
_SPACED = rf"\d{{1,3}}(?:\ \d{{3}})+(?!{_GROUP}?\d|-[^\W\d_])"
_WHOLE = rf"{_SPACED}|\d{{1,3}}(?:{_GROUP}\d{{3}})+|\d{{1,2}}(?:{_GROUP}\d{{2}})+{_GROUP}\d{{3}}|\d+"
_POWER = r"(?:\^|\*\*)\{?[-+]?\d+\}?"
_TIMES = rf"{_SPACE}?(?:[\u00d7·x*]|\\times|\\cdot){_SPACE}?"
_TIMES_TEN = rf"{_TIMES}10{_POWER}"

# The characters of one number, with or without a value: digits and the characters that join them.
_TERM = (
    rf"(?:(?<![\d.,])(?<!\d\ ){_SPACED}(?:\.\d+)?"  # 10 20 300 is a list
    rf"|(?:(?<![\w.])\.)?\d(?:\d|(?:[.:]|{_GROUP})(?=\d))*(?:\.(?=[eE][-+]?\d))?)"
    rf"(?:[eE][-+]?\d+|{_TIMES_TEN}|{_POWER})?"
)
_FRAC = rf"\\[dt]?frac(?:\{{[-+]?{_TERM}\}}\{{{_TERM}\}}|\d\d)"
_BODY = (
    rf"(?P<body>(?:(?<![\d.,])\d+{_SPACE}?)?(?:{_FRAC}|[{_HALVES}])|(?<![\d.,])\d+\ \d+/\d+(?![\d/.,])"
    rf"|{_TERM}(?:{_SPACE}?/{_SPACE}?[-+]?{_TERM})*)"
)


def _number_pattern(blank: str) -> str:
    """Return the regex of a number whose sign may precede or follow currency signs, brackets and emphasis."""
    return (
        rf"(?:(?<![\w)\]}}%\u2014+-])(?<!\d{_MONEY})(?P<sign>[-+]){blank})?"
        rf"(?P<open>(?:{_OPEN}{blank}){{1,8}})?"
        rf"(?(open)(?:(?<!\d{_MONEY})(?P<inner>[-+]){blank})?(?:{_OPEN}{blank}){{0,8}}){_BODY}"
    )


_ANYWHERE = re.compile(_number_pattern(""))
_MARKED = re.compile(rf"####(?!#){_BLANK.replace('0,', '1,')}{_number_pattern(_BLANK)}")
_ALONE = re.compile(rf"\s*(?:####\s*)?{_number_pattern(_BLANK)}{_CLOSE}*")
_TEN = r"10(?:\^|\*\*)\{?(?P<power>[-+]?\d+)\}?"
_DECIMAL = re.compile(
    rf"(?P<whole>{_WHOLE})?(?:\.(?P<part>\d*)|:00)?"  # 5:00 is five o'clock
    rf"(?:[eE](?P<exponent>[-+]?\d+)|{_TIMES}{_TEN})?"
)
_TEN_POWER = re.compile(_TEN)
_FRAC_PARTS = re.compile(r"\\[dt]?frac(?:\{(?P<top>[^{}]*)\}\{(?P<bottom>[^{}]*)\}|(?P<a>\d)(?P<b>\d))")
_DIGIT = re.compile(rf"[\d{_HALVES}]")
_HALF = re.compile(rf"[{_HALVES}]")
_MIXED = re.compile(r"\s*(\d+)\s+(?!0)(\d+)/(\d+)")  # 1 000/4 is 250
# The rest of a word, or of a number that is longer than the matched part.
_REST = re.compile(rf"(?:\w|[.,:'](?=\d)){{0,{LONGEST}}}")
_COMMA = re.compile(r"(?<![{\\]),(?!\})")


class Exact(NamedTuple):
    """A rational number: numerator / denominator * 2**twos * 5**fives, in lowest terms.

    Equal numbers are equal tuples. Powers of ten stay exponents, so 1e999999999 takes no memory.
    """

    numerator: int
    denominator: int
    twos: int
    fives: int


class Number(NamedTuple):
    """A number that was read from a text or a value."""

    text: str
    """The number without grouping, currency and full stop, such as `-1000.50` or `3/4`."""
    value: Exact | None
    """The exact value; None if the text has no value, such as `1.2.3`."""

    def equals(self, other: "Number") -> bool:
        """Whether both numbers have equal values, as 1.0 and 1,000/1000. False if either has no value."""
        return self.value is not None and self.value == other.value


def read_number(value: object) -> Number | None:
    """Convert an int, a float, or a text that consists of one number. Return None for anything else.

    Return None also for NaN, infinity, booleans, texts like `1.2.3`, and more than 300 characters.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    if isinstance(value, int) and abs(value) >= 10**LONGEST:  # Python refuses to print very long integers
        return None
    text = str(value)
    match = _ALONE.fullmatch(text.translate(_PLAIN)) if len(text) <= LONGEST else None
    number = _evaluate(_written(match)) if match is not None else None
    return number if number is not None and number.value is not None else None


def join_thousands(text: str) -> str:
    """Return a number without separators of thousands (`$1000` for `$1,000`), and other texts unchanged."""
    return text if read_number(text) is None else _ungroup(text)


def last_number(text: str, *, marked: bool) -> Number | None:
    """Return the last number in a text, or None. If `marked`, only numbers directly after `#### ` count.

    Numbers in words of more than 300 characters, or before the last 100,000 characters, are ignored.
    """
    for written, end in _find_marked(text) if marked else _find_all(text):
        rest = _REST.match(text, end)
        if len(written.body) + len(rest[0] if rest else "") <= LONGEST:
            return _evaluate(written)
    return None


class _Written(NamedTuple):
    """The matched characters of one number (`body`), and the signs that precede them."""

    body: str
    signs: tuple[str, ...]


def _written(match: re.Match[str]) -> _Written:
    return _Written(match["body"], tuple(sign for sign in (match["sign"], match["inner"]) if sign))


def _find_marked(text: str) -> Iterator[tuple[_Written, int]]:
    """Yield each number directly after a mark `#### ` and its end index, last number first."""
    matches = [*_MARKED.finditer(text.translate(_PLAIN), max(0, len(text) - _MOST))]
    yield from ((_written(match), match.end()) for match in reversed(matches))


def _find_all(text: str) -> Iterator[tuple[_Written, int]]:
    """Yield each number and its end index, last number first. A list `1,2,42` yields only its last item."""
    stop, least = len(text), max(0, len(text) - _MOST)
    while stop > least:
        digits = [*_DIGIT.finditer(text, max(0, stop - LONGEST), stop)]
        if not digits:
            stop -= LONGEST
            continue
        place = digits[-1].start()
        match, before = _match_number(text, place)
        items = _COMMA.split(body := match["body"])
        # `1,2,42` is a list. A single comma may be a decimal comma, and a last part like 000 is no number.
        is_list = len(items) > 2 and not (len(body) <= LONGEST and _body_value(body) is not None)
        if is_list and not re.match(r"0\d", items[-1]):
            yield _Written(items[-1], ()), before + match.end()
        else:
            yield _written(match), before + match.end()
        stop = min(place, before + match.start())


def _match_number(text: str, place: int) -> tuple[re.Match[str], int]:
    """Return the match of the number whose last digit is at `place`, and the offset to add to its indices."""
    for width in (50, 2 * LONGEST):
        before = max(0, place - width)
        part = text[before : place + 5].translate(_PLAIN)
        match = next(match for match in _ANYWHERE.finditer(part) if before + match.end() > place)
        # A number near the start of the part, or its sign, may be cut: search a longer part.
        if before == 0 or match.start() > 20:
            break
    return match, before


def _evaluate(written: _Written) -> Number:
    body, signs = written
    minus = "-" if signs == ("-",) else ""
    value = None if len(signs) > 1 else _body_value(body)
    if value is None:
        return Number(minus + body, None)
    plain = body if _MIXED.fullmatch(body) else _ungroup(body).removesuffix(".")
    text = minus + "".join(str(int(char)) if char.isdecimal() else char for char in plain)
    return Number(text, value._replace(numerator=-value.numerator) if minus else value)


def _ungroup(text: str) -> str:
    return re.sub(rf"(?<=\d)(?:{_GROUP}(?=\d)|\ (?=\d{{3}}(?!\d)))", "", text)


def _body_value(body: str) -> Exact | None:
    body = _FRAC_PARTS.sub(lambda frac: f" {frac['top'] or frac['a']}/{frac['bottom'] or frac['b']}", body)
    body = _HALF.sub(lambda half: f" {unicodedata.normalize('NFKC', half[0])}", body).translate(_PLAIN)
    if mixed := _MIXED.fullmatch(body):
        whole, top, bottom = map(int, mixed.groups())
        return _exact(whole * bottom + top, bottom) if top < bottom else None
    terms = [_decimal(term.strip()) for term in body.split("/")]
    if len(terms) > 2 or None in terms:
        return None
    (top, tens), (bottom, fewer_tens) = [*(term for term in terms if term is not None), (1, 0)][:2]
    return _exact(top, bottom, tens=tens - fewer_tens)


def _decimal(text: str) -> tuple[int, int] | None:
    """Return (m, n) for the number m * 10**n; None for a text like 1.2.3, which is no decimal number."""
    unsigned = text.lstrip("+-")
    if power := _TEN_POWER.fullmatch(unsigned):
        return (-1 if text.startswith("-") else 1), int(power["power"])
    match = _DECIMAL.fullmatch(unsigned)
    if match is None:
        return None
    whole, part = _ungroup(match["whole"] or ""), match["part"] or ""
    mantissa = int(whole + part)
    exponent = int(match["exponent"] or match["power"] or 0)
    return (-mantissa if text.startswith("-") else mantissa), exponent - len(part)


def _exact(numerator: int, denominator: int, *, tens: int = 0) -> Exact | None:
    if denominator == 0:
        return None
    if numerator == 0:
        return Exact(0, 1, 0, 0)
    if denominator < 0:
        numerator, denominator = -numerator, -denominator
    shared = math.gcd(numerator, denominator)
    numerator, twos, fives = _divide_out(numerator // shared)
    denominator, fewer_twos, fewer_fives = _divide_out(denominator // shared)
    return Exact(numerator, denominator, twos - fewer_twos + tens, fives - fewer_fives + tens)


def _divide_out(number: int) -> tuple[int, int, int]:
    """Return the number without its factors 2 and 5, and the counts of these factors."""
    counts = []
    for prime in (2, 5):
        count = 0
        while number % prime == 0:
            number //= prime
            count += 1
        counts.append(count)
    return number, counts[0], counts[1]
