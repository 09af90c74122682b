"""Cuts a document into chunks, preferably between words, and searches the chunks."""

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@contextmanager
def _hide_module(name: str) -> Iterator[None]:
    """Make any `import` of this module fail inside the context, as if the module were not installed."""
    loaded = {name: sys.modules[name]} if name in sys.modules else {}
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]
        sys.modules.update(loaded)


# When bm25s is imported, it also imports JAX if JAX is installed. JAX then reserves three quarters of a GPU's
# memory, so that the learner lacks this memory and a second task app fails.
with _hide_module("jax"):
    import bm25s

# More chunks would be too small to be useful, and their index would take many seconds.
MAX_CHUNKS = 20_000


@dataclass(frozen=True, slots=True)
class Chunks:
    """The result of cutting a document into chunks."""

    size: int
    """Limit of a chunk's length, in characters."""
    overlap: int
    """Number of characters that each chunk repeats from the end of the previous chunk."""
    spans: tuple[tuple[int, int], ...]
    """[start, end) of each chunk in the document, in characters."""


def cut_into_chunks(text: str, *, size: int, overlap: int) -> Chunks:
    """Cut a text into chunks of at most `size` characters that overlap by `overlap` characters.

    A chunk consists of repeated text and new text. It ends after the last white space in the second half of
    its new text; without white space there, it ends after `size` characters, inside a word. Raises ValueError
    if `overlap` is more than half of `size`, or if the text makes more than MAX_CHUNKS chunks.
    """
    if overlap > size // 2:
        raise ValueError(f"overlap is {overlap}; at most half of chunk_size, {size // 2}, is allowed")
    spans: list[tuple[int, int]] = []
    start = 0
    while start < len(text):
        if len(spans) == MAX_CHUNKS:
            raise ValueError(f"chunk_size {size} makes more than {MAX_CHUNKS} chunks; give a larger one")
        # Cut in the second half of the new text, so that every chunk adds text.
        end = _find_end(text, start, size, least=size - (size - overlap) // 2)
        spans.append((start, end))
        if end == len(text):
            break
        start = end - overlap
    return Chunks(size, overlap, tuple(spans))


def _find_end(text: str, start: int, size: int, *, least: int) -> int:
    """Return where the chunk that begins at `start` ends.

    The chunk ends with the text if the rest fits into it. Otherwise it ends after the last white space
    between `least` and `size` characters from its start, or after `size` characters if there is none.
    """
    end = start + size
    if end >= len(text):
        return len(text)
    for place in range(end, start + least, -1):
        if text[place - 1].isspace():
            return place
    return end


_WORD = re.compile(r"\w+")
SNIPPET_CHARS = 120


class SearchIndex:
    """Finds the chunks that match a query, ranked by BM25.

    The same texts and query give the same hits in the same order on all machines that compute equal float32
    sums. Of chunks with equal scores, the earlier one comes first.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._bm25, words = bm25s.BM25(), [_split_words(text) for text in texts]
        self._bm25.vocab_dict = {}  # bm25s cannot index texts without words
        if any(words):
            self._bm25.index(words, show_progress=False)

    def hits(self, query: str, *, at_most: int) -> list[int]:
        """Return the ids of up to `at_most` chunks that contain words of the query, the best chunk first."""
        known = [word for word in _split_words(query) if word in self._bm25.vocab_dict]
        if not known:
            return []
        scores = self._bm25.get_scores(known)
        # bm25s's own retrieval uses argpartition, whose order of ties depends on the processor.
        best = (-scores).argsort(kind="stable")[:at_most]
        return [int(i) for i in best if scores[i] > 0.0]


def snippet(text: str, query: str) -> str:
    """Return the passage of `text` that contains the most different words of the query, on one line.

    Of equally good passages, the first is returned.
    """
    query_words = set(_split_words(query))
    matches = [
        (m.start(), m.group().casefold()) for m in _WORD.finditer(text) if m.group().casefold() in query_words
    ]
    best, most, first = 0, 0, 0
    for last, (place, _) in enumerate(matches):
        while place - matches[first][0] > SNIPPET_CHARS:
            first += 1
        count = len({word for _, word in matches[first : last + 1]})
        if count > most:
            best, most = matches[first][0], count
    return " ".join(text[max(0, best - SNIPPET_CHARS // 2) : best + SNIPPET_CHARS].split())


def _split_words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())
