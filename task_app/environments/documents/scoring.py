"""Pure: whether an answer is one of those that are accepted, after both are brought to one form."""

import re
import unicodedata
from collections.abc import Iterable

_WORD = re.compile(r"(?<!\w)-?\d+(?:[.,]\d+)*|\w+")
# Commas of thousands alone: "1,5" is no 15, and stays text.
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
_ARTICLES = frozenset({"a", "an", "the"})


def normalised(text: str) -> str:
    """Without case, punctuation and articles, numbers by value: "The 1,000.0 Boats!" is "1000 boats".

    Articles stay where nothing else is said: "A" may be the answer.
    """
    words = [_plain(word) for word in _WORD.findall(unicodedata.normalize("NFKC", text).casefold())]
    return " ".join([word for word in words if word not in _ARTICLES] or words)


def correctness(answer: str, accepted: Iterable[str]) -> float:
    """1.0 when the answer is one of the accepted ones, else 0.0."""
    return float(normalised(answer) in map(normalised, accepted))


def _plain(word: str) -> str:
    """A number in the one way to write its value, exact at any length; anything else as it is."""
    if not _NUMBER.fullmatch(word):
        return word
    whole, _, fraction = word.removeprefix("-").replace(",", "").partition(".")
    value = f"{whole.lstrip('0') or '0'}.{fraction.rstrip('0')}".removesuffix(".")
    return f"-{value}" if word.startswith("-") and value != "0" else value
