"""Convert sampled tokens to text as they come, and find stop strings, at a constant cost per token."""

from collections.abc import Callable, Sequence

# The character that decoders write for bytes that form no character, or not yet.
BROKEN = "\N{REPLACEMENT CHARACTER}"

Decode = Callable[[Sequence[int]], str]


class GrowingText:
    """The text of ids that come one by one. An incomplete character is held back, since it may still change.

    Decoders depend on neighbouring ids (bytes of one character, a leading space). So new ids are decoded
    together with the ids before them, and only the additional text is returned.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._context = 0  # number of first ids whose text was already returned
        self._emitted = 0  # number of characters returned of the text of all ids

    def take(self, token_id: int) -> str:
        """Return the final text that this id adds; empty inside a character."""
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
    """Strings that end the sampled text as soon as one of them appears (`stop` of OpenAI's API)."""

    def __init__(self, decode: Decode, strings: Sequence[str]) -> None:
        self._decode = decode
        self._text = GrowingText(decode)
        self.strings = tuple(strings)
        self._tail = ""  # text that may be the beginning of a stop string
        self._longest = max(map(len, strings))

    def fresh(self) -> "StopStrings":
        """Return a copy that has taken no token, for a request that another server begins again."""
        return StopStrings(self._decode, self.strings)

    def take(self, token_id: int) -> str | None:
        """Return the string that this token completes, or None to continue. The method must not raise."""
        new = self._text.take(token_id)
        if not new:
            return None
        text = self._tail + new
        match = earliest(text, self.strings)
        self._tail = text[max(0, len(text) - self._longest + 1) :]
        return None if match is None else match[1]


def earliest(text: str, strings: Sequence[str]) -> tuple[int, str] | None:
    """Return the position of the first of the strings in the text, and the string; None if there is none."""
    positions = ((text.find(string), string) for string in strings)
    return min(((position, string) for position, string in positions if position >= 0), default=None)


def cut_before(text: str, strings: Sequence[str]) -> str:
    match = earliest(text, strings)
    return text if match is None else text[: match[0]]


def possible_start(text: str, strings: Sequence[str]) -> int:
    """Count the characters at the end of a text that may be the beginning of one of the strings."""
    longest = max(map(len, strings), default=1) - 1
    lengths = range(min(longest, len(text)), 0, -1)
    return next((n for n in lengths if any(string.startswith(text[-n:]) for string in strings)), 0)
