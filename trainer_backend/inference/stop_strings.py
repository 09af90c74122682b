"""Decode sampled tokens one by one, and find stop strings in the text, at a constant cost per token."""

from collections.abc import Callable, Sequence

# The character that decoders write for bytes that do not form a character, or do not form it yet.
BROKEN = "\N{REPLACEMENT CHARACTER}"

Decode = Callable[[Sequence[int]], str]


class GrowingText:
    """Decodes ids one by one. An incomplete character is held back until further ids complete it.

    The text of an id depends on its neighbours: several ids may form one character, and decoders may remove a
    leading space. So a new id is decoded together with the ids before it, and only the new text is returned.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._context = 0  # number of first ids whose text was already returned
        self._emitted = 0  # number of characters returned of the text of all ids

    def take(self, token_id: int) -> str:
        """Return the text that this id adds; "" while a character is incomplete."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        certain = text.rstrip(BROKEN)
        new = certain[self._emitted :]
        self._emitted = max(self._emitted, len(certain))
        if new and certain == text:
            self._ids = self._ids[self._context :]
            self._context = len(self._ids)
            self._emitted = len(self._decode(self._ids))
        return new


class StopStrings:
    """Detects the first stop string in a sampled text (`stop` of OpenAI's API)."""

    def __init__(self, decode: Decode, strings: Sequence[str]) -> None:
        self._decode = decode
        self._text = GrowingText(decode)
        self.strings = tuple(strings)
        self._tail = ""  # text that may be the beginning of a stop string
        self._longest = max(map(len, strings))

    def fresh(self) -> "StopStrings":
        """Return a new detector of the same strings, for a request that another server samples again."""
        return StopStrings(self._decode, self.strings)

    def take(self, token_id: int) -> str | None:
        """Return the stop string that this token completes, else None. This method must not raise."""
        new = self._text.take(token_id)
        if not new:
            return None
        text = self._tail + new
        match = earliest(text, self.strings)
        self._tail = text[max(0, len(text) - self._longest + 1) :]
        return None if match is None else match[1]


def earliest(text: str, strings: Sequence[str]) -> tuple[int, str] | None:
    """Return (position, string) for the string that occurs first in the text, or None if none occurs."""
    positions = ((text.find(string), string) for string in strings)
    return min(((position, string) for position, string in positions if position >= 0), default=None)


def cut_before(text: str, strings: Sequence[str]) -> str:
    match = earliest(text, strings)
    return text if match is None else text[: match[0]]


def possible_start(text: str, strings: Sequence[str]) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of one of the strings."""
    longest = max(map(len, strings), default=1) - 1
    lengths = range(min(longest, len(text)), 0, -1)
    return next((n for n in lengths if any(string.startswith(text[-n:]) for string in strings)), 0)
