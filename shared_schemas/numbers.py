"""Numbers as people and models write them, read exactly. Pure.

Both sides of a comparison are read here: the ground truth of a data row (`read_number`) and the answer of a
model (`last_number`). docs/plugins.md lists the forms, and what is no number.
"""

import math
import re
import unicodedata
from collections.abc import Iterator
from typing import NamedTuple

# A longer word is noise, such as a checksum, and a longer number is no answer to a question.
LONGEST = 300
# Only the end of a longer answer is read: this bounds the time for a hostile one to some tenths of a second.
_MOST = 100_000

# One character each, so that places in a text stay the same.
_PLAIN = str.maketrans(
    "\u2212\u2010\u2011\u2013\ufe63\uff0d\uff0b\uff0e\uff0c\uff0f\u2044\u2215\uff04\uff05\uff03\u2019\u2009\u202f"
    "\u200b\u200e\u200f\u2060\ufeff",
    "------+.,///$%#'\u00a0\u00a0     ",
)
_HALVES = "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒"

_SPACE = r"[^\S\r\n]"  # of one line
_MONEY = r"[$£¥¢\u20a0-\u20cf]"
_BLANK = rf"{_SPACE}{{0,20}}"
_OPEN = (
    rf"(?:\\?{_MONEY}\ ?|[*_`({{\[<\"'\u201c\u2018]|\\[(\[]|\\(?:boxed|fbox|text|textbf|mathbf|mathrm)\{{)"
)
_CLOSE = rf"(?:\\?(?:{_MONEY}|%)|[*_`)}}\]>\"'\u201d]|\\[)\]]|[\s.])"
_GROUP = r"(?:[,'_\u00a0]|\{,\}|\\,)"
# A hyphen makes a compound of the last group: 3 100-dollar bills.
_SPACED = rf"\d{{1,3}}(?:\ \d{{3}})+(?!{_GROUP}?\d|-[^\W\d_])"
_WHOLE = rf"{_SPACED}|\d{{1,3}}(?:{_GROUP}\d{{3}})+|\d{{1,2}}(?:{_GROUP}\d{{2}})+{_GROUP}\d{{3}}|\d+"
_POWER = r"(?:\^|\*\*)\{?[-+]?\d+\}?"
_TIMES = rf"{_SPACE}?(?:[\u00d7·x*]|\\times|\\cdot){_SPACE}?"
_TIMES_TEN = rf"{_TIMES}10{_POWER}"

# Characters that belong to one number, whether or not it has a value: digits and what joins them.
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


def _number(blank: str) -> str:
    """The pattern of a number with its sign, before or behind a currency, bracket or emphasis."""
    return (
        rf"(?:(?<![\w)\]}}%\u2014+-])(?<!\d{_MONEY})(?P<sign>[-+]){blank})?"
        rf"(?P<open>(?:{_OPEN}{blank}){{1,8}})?"
        rf"(?(open)(?:(?<!\d{_MONEY})(?P<inner>[-+]){blank})?(?:{_OPEN}{blank}){{0,8}}){_BODY}"
    )


_ANYWHERE = re.compile(_number(""))
_MARKED = re.compile(rf"####(?!#){_BLANK.replace('0,', '1,')}{_number(_BLANK)}")
_ALONE = re.compile(rf"\s*(?:####\s*)?{_number(_BLANK)}{_CLOSE}*")
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
# The rest of a word, or of a number that is too long to be read at once.
_REST = re.compile(rf"(?:\w|[.,:'](?=\d)){{0,{LONGEST}}}")
_COMMA = re.compile(r"(?<![{\\]),(?!\})")


class Exact(NamedTuple):
    """A rational number: numerator / denominator * 2**twos * 5**fives, in lowest terms.

    Equal numbers are therefore equal tuples. Powers of ten stay exponents: 1e999999999 is never written out.
    """

    numerator: int
    denominator: int
    twos: int
    fives: int


class Number(NamedTuple):
    """A number in a text."""

    text: str
    """Without grouping, currency and full stop, such as `-1000.50` or `3/4`."""
    value: Exact | None
    """None if the text has no value, such as `1.2.3`."""

    def equals(self, other: "Number") -> bool:
        """Whether both have a value, and the same one: 1.0 equals 1,000/1000."""
        return self.value is not None and self.value == other.value


def read_number(value: object) -> Number | None:
    """The number that a text consists of, or that a value is; None if there is none that an answer can equal.

    NaN, infinity, booleans, containers and numbers of more than 300 characters are none.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    if isinstance(value, int) and abs(value) >= 10**LONGEST:  # Python refuses to write very long ones
        return None
    text = str(value)
    match = _ALONE.fullmatch(text.translate(_PLAIN)) if len(text) <= LONGEST else None
    number = _read(_written(match)) if match is not None else None
    return number if number is not None and number.value is not None else None


def join_thousands(text: str) -> str:
    """The text without what groups its thousands, if it is one number: `$1,000` becomes `$1000`."""
    return text if read_number(text) is None else _ungrouped(text)


def last_number(text: str, *, marked: bool) -> Number | None:
    """The last number of a text, wherever it stands, or if `marked` after the mark `#### ` alone.

    It is read whole, with its sign. A number in a word of more than 300 characters does not count, nor one
    before the last 100,000 characters.
    """
    places = _marked(text) if marked else _anywhere(text)
    written = next((written for written, end in places if _fits(written.body, text, end)), None)
    return None if written is None else _read(written)


def _fits(body: str, text: str, end: int) -> bool:
    rest = _REST.match(text, end)
    return len(body) + len(rest[0] if rest else "") <= LONGEST


class _Written(NamedTuple):
    """The characters of one number, and the signs before them."""

    body: str
    signs: tuple[str, ...]


def _written(match: re.Match[str]) -> _Written:
    return _Written(match["body"], tuple(sign for sign in (match["sign"], match["inner"]) if sign))


def _marked(text: str) -> Iterator[tuple[_Written, int]]:
    """The numbers after marks with the places of their ends, the last number first."""
    matches = [*_MARKED.finditer(text.translate(_PLAIN), max(0, len(text) - _MOST))]
    yield from ((_written(match), match.end()) for match in reversed(matches))


def _anywhere(text: str) -> Iterator[tuple[_Written, int]]:
    """All numbers with the places of their ends, the last number first; of a list its last one alone."""
    end = len(text)
    while (place := _last_digit(text, end)) is not None:
        match, before = _around(text, place)
        item = _last_item(match["body"])
        yield _written(match) if item is None else _Written(item, ()), before + match.end()
        end = min(place, before + match.start())


def _last_item(body: str) -> str | None:
    """The last number of a list such as `1,2,42`; None if this is one number.

    A single comma may be a decimal one, and a group such as 000 is no number of its own: these are no lists.
    """
    items = _COMMA.split(body)
    if len(items) <= 2 or (len(body) <= LONGEST and _body_value(body) is not None):
        return None
    return None if re.match(r"0\d", items[-1]) else items[-1]


def _last_digit(text: str, end: int) -> int | None:
    for stop in range(end, max(0, len(text) - _MOST), -LONGEST):
        start = max(0, stop - LONGEST)
        if digits := [*_DIGIT.finditer(text, start, stop)]:
            return digits[-1].start()
    return None


def _around(text: str, place: int) -> tuple[re.Match[str], int]:
    """The number whose last digit is at this place, and where the text begins that was searched for it."""
    for width in (50, 2 * LONGEST):
        before = max(0, place - width)
        part = text[before : place + 5].translate(_PLAIN)
        match = next(one for one in _ANYWHERE.finditer(part) if before + one.end() > place)
        # A number near the beginning may be cut, with its sign and what stands between the two.
        if before == 0 or match.start() > 20:
            break
    return match, before


def _read(written: _Written) -> Number:
    body, signs = written
    minus = "-" if signs == ("-",) else ""
    value = None if len(signs) > 1 else _body_value(body)
    if value is None:
        return Number(minus + body, None)
    plain = body if _MIXED.fullmatch(body) else _ungrouped(body).removesuffix(".")
    text = minus + "".join(str(int(char)) if char.isdecimal() else char for char in plain)
    return Number(text, value._replace(numerator=-value.numerator) if minus else value)


def _ungrouped(text: str) -> str:
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
    """(m, n) of m * 10**n; None if the text is no decimal number, as 1.2.3."""
    unsigned = text.lstrip("+-")
    if power := _TEN_POWER.fullmatch(unsigned):
        return (-1 if text.startswith("-") else 1), int(power["power"])
    match = _DECIMAL.fullmatch(unsigned)
    if match is None:
        return None
    whole, part = _ungrouped(match["whole"] or ""), match["part"] or ""
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
    numerator, twos, fives = _strip(numerator // shared)
    denominator, fewer_twos, fewer_fives = _strip(denominator // shared)
    return Exact(numerator, denominator, twos - fewer_twos + tens, fives - fewer_fives + tens)


def _strip(number: int) -> tuple[int, int, int]:
    """The number without its factors 2 and 5, and how many of each it has."""
    counts = []
    for prime in (2, 5):
        count = 0
        while number % prime == 0:
            number //= prime
            count += 1
        counts.append(count)
    return number, counts[0], counts[1]
