"""Reading replies of other services: bounded bytes, typed values, and no redirect is followed.

    bytes     plain_session, plain_client,
              http_client                       as they came: none is inflated
              read_bounded, bounded, Lines      no more than a bound
    values    read_reply                        of a type, strictly: true is no 1, "7" no 7, NaN no number
    address   redirect_target                   of a redirect, which no client follows

A library that follows a redirect repeats the request with its headers, our key among them, at whatever
address the reply names, one that reads or inflates a whole reply takes as much memory as the other side
likes, and code that reads fields of JSON by itself fails at a missing one as if it were wrong itself. So
each client reads through this module, and raises its own error for a `ReplyFault`.
"""

from collections.abc import AsyncIterable, Iterable, Iterator, Mapping
from functools import partial
from http import HTTPStatus
from reprlib import Repr
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urljoin, urlsplit

from pydantic import BaseModel, ValidationError

from shared_schemas.json_text import RepeatedKey, read_typed

if TYPE_CHECKING:  # each client pays for its own library alone
    import aiohttp
    import httpx

Model = TypeVar("Model", bound=BaseModel)

_SHOWN = 200
# Of a value in an error, whose whole text may have megabytes.
_clip = Repr()
_clip.maxstring = _clip.maxlong = _clip.maxother = 60
_clip.maxlevel = 3

# What is allowed, by the type of pydantic's error, where its own message does not say that.
_ALLOWED = {
    "missing": "the reader needs it",
    "extra_forbidden": "no such field is known",
    "model_type": "it should be an object",
    "dict_type": "it should be an object",
    "list_type": "it should be a list",
}

# An encoded reply could be a thousand times as long as what is counted.
PLAIN = {"Accept-Encoding": "identity"}


class ReplyFault(Exception):
    """A reply that its reader cannot use; each client raises its own error for it."""


class ReplyTooLarge(ReplyFault):
    """A reply, or a line of one, is longer than its reader takes."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(f"its reply has more than {most_bytes} bytes")


class ReplyEncoded(ReplyFault):
    """A reply would have to be inflated."""

    def __init__(self, encoding: str) -> None:
        super().__init__(f"its reply has the Content-Encoding {show_found(encoding)}; none was asked for")


class ReplyInvalid(ReplyFault):
    """A reply has a field that its reader cannot use.

    Attributes:
        part: what replied: a route, with its server.
        field: the path of the field, as `choices.0.token_ids.3`; "" for the whole reply.
        found: its value and type, clipped; `missing` where there is none.
        allowed: what it should be.
    """

    def __init__(self, part: str, field: str, found: str, allowed: str) -> None:
        self.part, self.field, self.found, self.allowed = part, field, found, allowed
        super().__init__(f"{part}: {self.finding}")

    @property
    def finding(self) -> str:
        """The error without its part."""
        return f"{self.field or 'its reply'} is {self.found}; {self.allowed}"


def read_reply(kind: type[Model], content: bytes, part: str) -> Model:
    """Return the value of a whole reply in JSON.

    Args:
        kind: is read strictly, whatever its own configuration says. Only a class with `allow_inf_nan=False`,
            as every `StrictReply`, refuses NaN and infinity.
        part: what replied, for the error.

    Raises:
        ReplyInvalid: it is no JSON, no such value, or has a key twice.
    """
    try:
        return read_typed(partial(kind.model_validate_json, strict=True), content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    except RepeatedKey as error:
        raise ReplyInvalid(part, error.key[:_SHOWN], "there twice", "each key is given once") from error
    except ValueError as error:
        raise ReplyInvalid(part, "", show_found(content), f"JSON is needed ({error})") from error
    if first["type"] == "json_invalid":
        found = show_found(content) if content.strip() else "empty"
        raise ReplyInvalid(part, "", found, f"JSON is needed ({first['msg'].partition(': ')[2]})")
    raise _fault(first, part)


def read_value(kind: type[Model], value: Any, part: str) -> Model:
    """Return the value of a part of a reply whose JSON was parsed before.

    Args:
        kind: as of `read_reply`; its sequences are lists, as JSON's are.

    Raises:
        ReplyInvalid: it is no such value.
    """
    try:
        return kind.model_validate(value, strict=True)
    except ValidationError as error:
        raise _fault(error.errors(include_url=False, include_context=False)[0], part) from error


def _fault(first: Mapping[str, Any], part: str) -> ReplyInvalid:
    """The error of pydantic's first one."""
    found = "missing" if first["type"] == "missing" else show_found(first["input"])
    told = first["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    allowed = _ALLOWED.get(first["type"], told)
    return ReplyInvalid(part, ".".join(map(str, first["loc"])), found, allowed)


def show_found(value: Any) -> str:
    """Return a value with its type, clipped, without first writing the whole of it."""
    return f"{_clip.repr(value)} ({type(value).__name__})"


def plain_session(*, headers: Mapping[str, str] | None = None, **options: Any) -> "aiohttp.ClientSession":
    """Open a session of aiohttp's, whose requests raise ReplyEncoded for a reply that is to be inflated."""
    import aiohttp

    async def refuse(
        request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        response = await send(request)
        try:
            refuse_encoded(response.headers.get("Content-Encoding"))
        except ReplyEncoded:
            response.close()
            raise
        return response

    return aiohttp.ClientSession(
        headers=PLAIN | dict(headers or {}), auto_decompress=False, middlewares=(refuse,), **options
    )


def plain_client(*, headers: Mapping[str, str] | None = None, **options: Any) -> "httpx.Client":
    """Open a client of httpx, which follows no redirect; ReplyEncoded for a reply that is to be inflated."""
    import httpx

    return httpx.Client(
        headers=PLAIN | dict(headers or {}), follow_redirects=False,
        event_hooks={"response": [lambda reply: refuse_encoded(reply.headers.get("Content-Encoding"))]},
        **options,
    )  # fmt: skip


def refuse_encoded(encoding: str | None) -> None:
    """Raise ReplyEncoded for a Content-Encoding of which something would have to be inflated."""
    encoding = encoding or "identity"
    if encoding.strip().lower() != "identity":
        raise ReplyEncoded(encoding)


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

    A line has at most `most_bytes`; the stream as a whole may be longer, up to `most_in_all` where it has to
    end.
    """

    def __init__(self, most_bytes: int, most_in_all: int | None = None) -> None:
        self._rest, self._most_bytes = bytearray(), most_bytes
        self._room, self._most_in_all = most_in_all, most_in_all

    def take(self, part: bytes) -> list[bytes]:
        """Return the lines that this part completes.

        Raises:
            ReplyTooLarge: the line that has begun is longer, or the whole stream is.
        """
        if self._room is not None and self._most_in_all is not None:
            self._room -= len(part)
            if self._room < 0:
                raise ReplyTooLarge(self._most_in_all)
        self._rest += part
        lines: list[bytearray] = []
        if b"\n" in part:
            *lines, self._rest = self._rest.split(b"\n")
        if max(map(len, [*lines, self._rest])) > self._most_bytes:
            raise ReplyTooLarge(self._most_bytes)
        return [bytes(line) for line in lines]

    @property
    def rest(self) -> bytes:
        """The text after the last line feed: the last line of a stream that ends without one."""
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
