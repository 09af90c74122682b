"""Regular expressions that callers send: checked when they are received, and matched in linear time.

Python's `re` backtracks: `(a+)+$` on forty letters runs longer than the rollout, and cannot be interrupted.
Rust's `regex` engine, which comes with pydantic, takes linear time, but has no look-around and no
back-references. The time is proportional to the length of the text and to the size of the pattern with all
repetitions expanded, so both are limited.
"""

import re
from math import prod
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import SchemaError, SchemaValidator, core_schema

# Largest product of the pattern's length and the counts of its repetitions.
MAX_EXPANSION = 2_000
# Number of UTF-8 bytes at the end of a text that are searched. The search runs on the event loop; the slowest
# known pattern within the limits (nested optional Unicode classes) takes 40 ms on four-byte letters, and an
# ordinary pattern microseconds.
SEARCH_BYTES = 4_096
# Tokens with a brace or an x flag, in this order: escapes with braces (\x{2028}, \p{Greek}, \b{start}), other
# escapes, plain counts, other braces, the flag. A brace in a character class is taken for a repetition, so a
# few harmless patterns are refused.
_TOKEN = re.compile(
    r"\\[xuUpP]\{[^}]*\}|\\b\{[a-z-]+\}|\\."
    r"|\{(?P<least>[0-9]+)(?:,(?P<most>[0-9]*))?\}|(?P<brace>\{)|(?P<flag>\(\?[a-zA-Z-]*x)",
    re.DOTALL,
)


class LinearPattern:
    """A regular expression in the syntax of Rust's `regex`, compiled and limited in size.

    Raises ValueError if the pattern cannot be compiled, is too large when its repetitions are expanded, sets
    the flag x, or contains a brace that is neither escaped nor part of a count.
    """

    def __init__(self, pattern: str) -> None:
        if (expansion := len(pattern) * _most_repetitions(pattern)) > MAX_EXPANSION:
            raise ValueError(
                f"the pattern is too large: its length times the counts of its repetitions is {expansion}, "
                f"and may be {MAX_EXPANSION} at most"
            )
        try:
            self._search = SchemaValidator(
                core_schema.str_schema(pattern=pattern, regex_engine="rust-regex")
            ).isinstance_python
        except SchemaError as exc:
            # The message ends with "error: ..." or "SchemaError: ..." after a drawing of the place.
            reason = " ".join(str(exc).rpartition("rror: ")[2].split())
            raise ValueError(
                f"the pattern cannot be compiled: {reason} (the syntax is that of Rust's regex)"
            ) from exc

    def matches(self, text: str) -> bool:
        """Whether the pattern matches in the last SEARCH_BYTES of a text, which has no lone surrogates."""
        # A character has at least one byte. Ignore the errors of a character that is cut at the start.
        return self._search(text[-SEARCH_BYTES:].encode()[-SEARCH_BYTES:].decode(errors="ignore"))


def _most_repetitions(pattern: str) -> int:
    """Return the product of all repetition counts, as if they were nested: 6 for {2} and {3}.

    Raises ValueError for the flag x, and for a brace that does not begin a count.
    """
    counts = []
    for token in _TOKEN.finditer(pattern):
        if token["flag"]:
            # The flag allows blanks and comments even in counts: {#}<line break>900} means 900.
            raise ValueError("the flag x (blanks and comments in the pattern) is not allowed")
        if token["brace"]:
            raise ValueError(
                f"the {{ at position {token.start()} begins no {{n}}, {{n,}} or {{n,m}} without blanks; "
                "the character itself is written \\{"
            )
        counts.append(max(1, int(token["least"] or 1), int(token["most"] or 1)))
    return prod(counts)


def _check(pattern: str) -> str:
    LinearPattern(pattern)
    return pattern


Pattern = Annotated[str, Field(min_length=1, max_length=500), AfterValidator(_check)]
