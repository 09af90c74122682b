"""What a client takes from the reply of another service: no more than a bound, and no other address.

A library that follows a redirect repeats the request with its headers, our key among them, at whatever
address the reply names, and one that reads a whole reply takes as much memory as the other side likes. So no
client here follows redirects, and each one reads through this module.
"""

from collections.abc import AsyncIterable, Iterable, Iterator
from http import HTTPStatus
from urllib.parse import urljoin, urlsplit

_SHOWN = 200


class ReplyTooLarge(Exception):
    """A reply, or a line of one, is longer than its reader takes; each client raises its own error for it."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(f"its reply has more than {most_bytes} bytes")


async def read_bounded(parts: AsyncIterable[bytes], most_bytes: int) -> bytes:
    """Return a whole reply. Raises ReplyTooLarge where it is longer; the rest is not read."""
    reply = bytearray()
    async for part in parts:
        reply += part
        if len(reply) > most_bytes:
            raise ReplyTooLarge(most_bytes)
    return bytes(reply)


def bounded(parts: Iterable[bytes], most_bytes: int) -> Iterator[bytes]:
    """Yield the parts of a reply. Raises ReplyTooLarge where the whole is longer; the rest is not read."""
    room = most_bytes
    for part in parts:
        room -= len(part)
        if room < 0:
            raise ReplyTooLarge(most_bytes)
        yield part


class Lines:
    """Cuts the parts of a reply into lines that end with a line feed; JSON may hold other line ends.

    A line has at most `most_bytes`; a stream as a whole may be longer.
    """

    def __init__(self, most_bytes: int) -> None:
        self._rest, self._most_bytes = bytearray(), most_bytes

    def take(self, part: bytes) -> list[bytes]:
        """Return the lines that this part completes. Raises ReplyTooLarge where the line that has begun is
        longer."""
        self._rest += part
        lines: list[bytearray] = []
        if b"\n" in part:
            *lines, self._rest = self._rest.split(b"\n")
        if max(map(len, [*lines, self._rest])) > self._most_bytes:
            raise ReplyTooLarge(self._most_bytes)
        return [bytes(line) for line in lines]

    @property
    def rest(self) -> bytes:
        """What follows the last line feed: the last line of a stream that ends without one."""
        return bytes(self._rest)


def redirect_target(status: int, location: str | None, url: str) -> str | None:
    """Return where the reply of a URL sends its reader by its header Location, or None if it is no redirect.

    It is the address without a query, as `'https://host:port/path'`; `nowhere` if there is no valid one.
    """
    if not HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST:
        return None
    try:
        parts = urlsplit(urljoin(url, location or ""))
        target = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    except ValueError:
        location = None
    return ascii(target[:_SHOWN]) if location else "nowhere"
