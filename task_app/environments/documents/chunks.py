"""Pure: a document in chunks, which cut no word if possible, and the search over them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import bm25s

# More would make an index of many seconds, and a document of which no chunk says anything.
MAX_CHUNKS = 20_000


@dataclass(frozen=True, slots=True)
class Chunks:
    """Where each chunk of a document begins and ends.

    Attributes:
        size: most characters of one.
        overlap: characters that a chunk repeats of the one before.
        spans: [start, end) of each, in characters.
    """

    size: int
    overlap: int
    spans: tuple[tuple[int, int], ...]


def chunked(text: str, *, size: int, overlap: int) -> Chunks:
    """Cut after the last white space that fits, or in the middle of a word that is longer than a chunk."""
    if overlap > size // 2:
        raise ValueError(f"overlap is {overlap}; at most half of chunk_size, {size // 2}, is allowed")
    spans: list[tuple[int, int]] = []
    start = 0
    while start < len(text):
        if len(spans) == MAX_CHUNKS:
            raise ValueError(f"chunk_size {size} makes more than {MAX_CHUNKS} chunks; give a larger one")
        # Cut in the second half of what is new, so that every chunk brings something new.
        end = _end(text, start, size, least=size - (size - overlap) // 2)
        spans.append((start, end))
        if end == len(text):
            break
        start = end - overlap
    return Chunks(size, overlap, tuple(spans))


def _end(text: str, start: int, size: int, *, least: int) -> int:
    """Behind the last white space between `least` and `size` characters from the start."""
    end = start + size
    if end >= len(text):
        return len(text)
    for place in range(end, start + least, -1):
        if text[place - 1].isspace():
            return place
    return end


# BM25 ranks the chunks; no other file imports bm25s.

_WORD = re.compile(r"\w+")
SNIPPET_CHARS = 120


@dataclass(frozen=True, slots=True)
class Hit:
    """A chunk that holds words of the query, and how well it fits (BM25, larger is better)."""

    chunk_id: int
    score: float


class SearchIndex:
    """Finds chunks by their words. Equal texts and queries give equal hits in equal order, on any machine
    whose float32 sums agree: ties go to the earlier chunk."""

    def __init__(self, texts: Sequence[str]) -> None:
        words = [_words(text) for text in texts]
        self._bm25 = _index(words) if any(words) else None

    def hits(self, query: str, *, at_most: int) -> list[Hit]:
        known = (
            [] if self._bm25 is None else [word for word in _words(query) if word in self._bm25.vocab_dict]
        )
        if self._bm25 is None or not known:
            return []
        scores = self._bm25.get_scores(known)
        # Its own retrieval picks the best with argpartition, whose order of ties differs between processors.
        best = (-scores).argsort(kind="stable")[:at_most]
        return [Hit(int(i), float(scores[i])) for i in best if scores[i] > 0.0]


def snippet(text: str, query: str) -> str:
    """The place of the text that holds most different words of the query, the first of such, on one line."""
    wanted = set(_words(query))
    found = [
        (m.start(), m.group().casefold()) for m in _WORD.finditer(text) if m.group().casefold() in wanted
    ]
    best, most, first = 0, 0, 0
    for last, (place, _) in enumerate(found):
        while place - found[first][0] > SNIPPET_CHARS:
            first += 1
        held = len({word for _, word in found[first : last + 1]})
        if held > most:
            best, most = found[first][0], held
    return " ".join(text[max(0, best - SNIPPET_CHARS // 2) : best + SNIPPET_CHARS].split())


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _index(words: list[list[str]]) -> Any:
    index = bm25s.BM25()
    index.index(words, show_progress=False)
    return index
