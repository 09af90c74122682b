"""Size limits of data rows with documents, and the form in which answers are compared. Pure.

The task app enforces the limits and scores answers; the trainer refuses rows that the task app would refuse.
"""

import re
import unicodedata

MAX_DOCUMENT_CHARS = 10_000_000
MAX_QUESTION_CHARS = 20_000
MAX_ANSWER_CHARS = 2_000

_WORD = re.compile(r"(?<!\w)-?\d+(?:[.,]\d+)*|\w+")
# A comma counts only as a separator of thousands: "1,5" is not 15, and is kept as it is.
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
_ARTICLES = frozenset({"a", "an", "the"})


def normalise(text: str) -> str:
    """Return a text in lower case without punctuation and articles, and with equal numbers written alike.

    "The 1,000.0 Boats!" becomes "1000 boats". A text of only articles keeps them: "A" may be the answer.
    """
    words = [
        _normalise_number(word) for word in _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
    ]
    return " ".join([word for word in words if word not in _ARTICLES] or words)


def _normalise_number(word: str) -> str:
    """Return a number in canonical form (`1000` for `1,000.0`), and any other word unchanged."""
    if not _NUMBER.fullmatch(word):
        return word
    whole, _, fraction = word.removeprefix("-").replace(",", "").partition(".")
    value = f"{whole.lstrip('0') or '0'}.{fraction.rstrip('0')}".removesuffix(".")
    return f"-{value}" if word.startswith("-") and value != "0" else value
