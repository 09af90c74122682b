"""Callers' regular expressions, matched in linear time and checked when they are read.

Python's `re` backtracks: `(a+)+$` on forty letters outlives the rollout, and no deadline can stop it. Rust's
`regex` engine, which comes with pydantic, does not; it knows neither look-around nor back-references. Its
time also grows with the expanded pattern and with the text, so both are limited.
"""

import re
from math import prod
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import SchemaError, SchemaValidator, core_schema

# Length of the pattern times the counts of its repetitions.
MAX_EXPANSION = 2_000
# UTF-8 bytes at the end of a text that are searched, since a signal stands at the end. The search runs on the
# event loop. The worst pattern that we know within the other limits (optional Unicode classes, nested) needs
# 40 ms on letters of four bytes; an ordinary one, microseconds.
SEARCH_BYTES = 4_096
# Tokens with a brace or an x flag. In turn: escapes with braces of their own (\x{2028}, \p{Greek},
# \b{start}), any other escape, a plain count, any other brace, and the flag. Classes are not parsed: a brace
# in one counts as a repetition, which only refuses more patterns.
_TOKEN = re.compile(
    r"\\[xuUpP]\{[^}]*\}|\\b\{[a-z-]+\}|\\."
    r"|\{(?P<least>[0-9]+)(?:,(?P<most>[0-9]*))?\}|(?P<brace>\{)|(?P<flag>\(\?[a-zA-Z-]*x)",
    re.DOTALL,
)


class LinearPattern:
    """A compiled pattern.

    Raises ValueError where the engine cannot compile it, it has the flag x or an unclear brace, or it expands
    too far.
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
            # "error: ..." or "SchemaError: ...", before a drawing of the place.
            reason = " ".join(str(exc).rpartition("rror: ")[2].split())
            raise ValueError(
                f"the pattern cannot be compiled: {reason} (the syntax is that of Rust's regex)"
            ) from exc

    def matches(self, text: str) -> bool:
        """Whether the pattern matches in the last SEARCH_BYTES of the text, which must be encodable."""
        # A character has at least a byte, so this encodes no more than needed; one that is cut is left out.
        return self._search(text[-SEARCH_BYTES:].encode()[-SEARCH_BYTES:].decode(errors="ignore"))


def _most_repetitions(pattern: str) -> int:
    """The product of all repetition counts, as if they were nested: {2} and {3} count as 6.

    Raises ValueError where a count cannot be read for certain.
    """
    counts = []
    for token in _TOKEN.finditer(pattern):
        if token["flag"]:
            # With this flag the engine skips blanks and comments, even in counts: {#}<line break>900} is 900.
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
