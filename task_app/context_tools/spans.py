"""Pure: a part of a text, named by its first and its last words, is cut out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Cut:
    """A text without its cut spans.

    Attributes:
        text: what is left, with a note in place of each span.
        spans: [start, end) of all that was cut so far, in the original text, sorted, none touching another.
        chars: how many characters this cut took away.
    """

    text: str
    spans: tuple[Span, ...]
    chars: int


def cut_out(text: str, spans: Sequence[Span], start: str, end: str) -> Cut:
    """Cut from the first place of `start` through the next place of `end` after it.

    Args:
        text: as it was said.
        spans: cut from it before.

    Raises:
        ValueError: the words do not stand in what is left of the text.
    """
    begin = _first(text, start, spans, after=0)
    if begin is None:
        raise ValueError(f"it does not hold the words {start[:80]!r}")
    # `end` may be the same words, or overlap with them, but cannot end before they do.
    earliest = max(begin, begin + len(start) - len(end))
    last = _first(text, end, spans, after=earliest)
    if last is None:
        raise ValueError(f"the words {end[:80]!r} do not follow {start[:80]!r}")
    joined = tuple(_joined([*spans, (begin, last + len(end))]))
    return Cut(_without(text, joined), joined, _length(joined) - _length(spans))


def _first(text: str, words: str, spans: Sequence[Span], *, after: int) -> int | None:
    """The first place of the words that is still shown."""
    place = text.find(words, after)
    while place >= 0:
        hidden = next((b for a, b in spans if a < place + len(words) and place < b), None)
        if hidden is None:
            return place
        place = text.find(words, hidden)
    return None


def _joined(spans: Sequence[Span]) -> Iterator[Span]:
    current: Span | None = None
    for span in sorted(spans):
        if current is None:
            current = span
        elif span[0] <= current[1]:
            current = (current[0], max(current[1], span[1]))
        else:
            yield current
            current = span
    if current is not None:
        yield current


def _without(text: str, spans: Sequence[Span]) -> str:
    parts, place = [], 0
    for begin, end in spans:
        parts += [text[place:begin], f"[{end - begin} characters deleted]"]
        place = end
    return "".join([*parts, text[place:]])


def _length(spans: Sequence[Span]) -> int:
    return sum(end - begin for begin, end in spans)
