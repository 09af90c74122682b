"""Sampled tokens to text as they come, and stop strings in it: a few tokens decoded a step, never all."""

from collections.abc import Callable, Sequence

# A decoder writes it for bytes that are no character, or not yet.
BROKEN = "\N{REPLACEMENT CHARACTER}"

Decode = Callable[[Sequence[int]], str]


class GrowingText:
    """The text of ids that come one by one. What may still change is held back: a part of a character.

    Decoders look at neighbours (the bytes of one character, a space at the beginning). So ids are decoded
    together with those that gave the last whole text, and only what comes after that text is new.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._context = 0  # so many of the ids gave the text before
        self._given = 0  # characters of the text of all ids that were given out

    def take(self, token_id: int) -> str:
        """What this id adds to the text that is certain; often nothing, where it ends inside a character."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        certain = text.rstrip(BROKEN)
        new = certain[self._given :]
        self._given = max(self._given, len(certain))
        if new and certain == text:
            self._ids = self._ids[self._context :]
            self._context = len(self._ids)
            self._given = len(self._decode(self._ids))
        return new


class StopStrings:
    """A `StopRule`: the first of some strings to appear in the sampled text ends it.

    Source: `stop` of OpenAI's chat completions.
    """

    def __init__(self, decode: Decode, strings: Sequence[str]) -> None:
        self._text = GrowingText(decode)
        self._strings = strings
        self._tail = ""  # as much as may be the beginning of a stop string
        self._longest = max(map(len, strings))

    def take(self, token_id: int) -> str | None:
        new = self._text.take(token_id)
        if not new:
            return None
        text = self._tail + new
        found = earliest(text, self._strings)
        self._tail = text[max(0, len(text) - self._longest + 1) :]
        return None if found is None else found[1]


def earliest(text: str, strings: Sequence[str]) -> tuple[int, str] | None:
    """Where the first of the strings begins, and which it is; None when the text holds none of them."""
    found = ((text.find(string), string) for string in strings)
    return min(((position, string) for position, string in found if position >= 0), default=None)


def cut_before(text: str, strings: Sequence[str]) -> str:
    """The text up to the first of the strings; all of it when it holds none."""
    found = earliest(text, strings)
    return text if found is None else text[: found[0]]


def possible_start(text: str, strings: Sequence[str]) -> int:
    """How many characters at the end of a text that holds none of the strings may be the beginning of one."""
    longest = max(map(len, strings), default=1) - 1
    lengths = range(min(longest, len(text)), 0, -1)
    return next((n for n in lengths if any(string.startswith(text[-n:]) for string in strings)), 0)
