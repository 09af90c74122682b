"""Pure: a document in chunks, none of which cuts a word where that can be helped."""

from dataclasses import dataclass

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
    """Cut after the last white space that fits, or in the middle of a word that is longer than a chunk.

    Raises:
        ValueError: a chunk repeats more than half of another, or there would be too many.
    """
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
