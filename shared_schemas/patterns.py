"""Patterns that callers bring: regular expressions in time linear in the text, checked when they are read.

Python's `re` backtracks: `(a+)+$` on forty letters outlives the rollout, and no deadline can stop it. Rust's
`regex` engine, which pydantic brings, never does, so it is used here without a further dependency; it knows
neither look-around nor back-references. Its time also grows with what the pattern unfolds to and with the
text: both are bounded.
"""

import re
from math import prod
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import SchemaError, SchemaValidator, core_schema

# Characters of the pattern times the counts of its repetitions.
MAX_UNFOLDED = 2_000
# UTF-8 bytes. Of a longer text the end is searched: there a signal stands. The search runs on the event loop:
# the worst pattern that we found within the other bounds (optional Unicode classes, nested) needs 40 ms for
# them, on letters of four bytes; one that a person writes, microseconds.
SEARCHED_BYTES = 4_096
# What a brace or an x flag may be part of. In turn: escapes with braces of their own (\x{2028}, \p{Greek},
# \b{start}), any other escape, a plain count, any other brace, and the flag. Classes are not looked for: a
# brace in one is taken for a count, which refuses more and lets nothing through.
_TOKEN = re.compile(
    r"\\[xuUpP]\{[^}]*\}|\\b\{[a-z-]+\}|\\."
    r"|\{(?P<least>[0-9]+)(?:,(?P<most>[0-9]*))?\}|(?P<brace>\{)|(?P<flag>\(\?[a-zA-Z-]*x)",
    re.DOTALL,
)


class LinearPattern:
    """A compiled pattern.

    Raises:
        ValueError: it is no pattern of this engine, has the flag x or an odd brace, or unfolds to a larger
            one than is allowed.
    """

    def __init__(self, pattern: str) -> None:
        if (unfolded := len(pattern) * _most_repetitions(pattern)) > MAX_UNFOLDED:
            raise ValueError(
                f"the pattern is too large: its length times the counts of its repetitions is {unfolded}, "
                f"and may be {MAX_UNFOLDED} at most"
            )
        try:
            self._search = SchemaValidator(
                core_schema.str_schema(pattern=pattern, regex_engine="rust-regex")
            ).isinstance_python
        except SchemaError as exc:
            raise ValueError(
                f"the pattern cannot be compiled: {_why(str(exc))} (the syntax is that of Rust's regex)"
            ) from exc

    def matches(self, text: str) -> bool:
        """Whether the pattern matches anywhere in the last SEARCHED_BYTES of the text, which is encodable."""
        return self._search(_end_of(text))


def _end_of(text: str) -> str:
    """The whole characters within its last SEARCHED_BYTES."""
    # A character has a byte at least: no more of a long text is encoded than may be needed.
    return text[-SEARCHED_BYTES:].encode()[-SEARCHED_BYTES:].decode(errors="ignore")


def _most_repetitions(pattern: str) -> int:
    """As if all counts were nested: {2} beside {3} is taken for 6 times.

    Raises:
        ValueError: a count cannot be read for certain.
    """
    counts = []
    for token in _TOKEN.finditer(pattern):
        if token["flag"]:
            # With it the engine skips blanks and comments, in counts too: {#}<line break>900} is 900 times.
            raise ValueError("the flag x (blanks and comments in the pattern) is not allowed")
        if token["brace"]:
            raise ValueError(
                f"the {{ at position {token.start()} begins no {{n}}, {{n,}} or {{n,m}} without blanks; "
                "the character itself is written \\{"
            )
        counts.append(max(1, int(token["least"] or 1), int(token["most"] or 1)))
    return prod(counts)


def _why(told: str) -> str:
    """The engine's reason ("error: ..." or "SchemaError: ..."), without the drawing that shows the place."""
    return " ".join(told.rpartition("rror: ")[2].split())


def _checked(pattern: str) -> str:
    LinearPattern(pattern)
    return pattern


Pattern = Annotated[str, Field(min_length=1, max_length=500), AfterValidator(_checked)]
