"""Safe reading of other services' replies: bounded size, strict types, no redirects.

    bytes     plain_session, plain_client,
              http_client                       never inflated
              read_bounded, bounded, Lines      bounded in size
    values    read_reply                        strict types: true is not 1, "7" is not 7, NaN is not a number
    address   redirect_target                   for the error; no client follows a redirect

A followed redirect would send our key to the address that the reply names. An unbounded or inflated reply
could take all memory. A missing JSON field would raise a KeyError that looks like our own bug. So each client
reads replies through this module, and raises its own error for a `ReplyFault`.
"""

from collections.abc import AsyncIterable, Iterable, Iterator, Mapping
from functools import partial
from http import HTTPStatus
from reprlib import Repr
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urljoin, urlsplit

from pydantic import BaseModel, ValidationError

from shared_schemas.json_text import RepeatedKey, read_typed

if TYPE_CHECKING:  # each client imports its own library only
    import aiohttp
    import httpx

Model = TypeVar("Model", bound=BaseModel)

_SHOWN = 200
# Clips a value in an error, because its text may have megabytes.
_clip = Repr()
_clip.maxstring = _clip.maxlong = _clip.maxother = 60
_clip.maxlevel = 3

# The allowed values by the type of pydantic's error, for types whose message does not name these values.
_ALLOWED = {
    "missing": "the reader needs it",
    "extra_forbidden": "no such field is known",
    "model_type": "it should be an object",
    "dict_type": "it should be an object",
    "list_type": "it should be a list",
}

# An inflated reply can be a thousand times as long as the counted bytes.
PLAIN = {"Accept-Encoding": "identity"}


class ReplyFault(Exception):
    """A reply that its reader cannot use; each client raises its own error for it."""


class ReplyTooLarge(ReplyFault):
    """A reply, or a line of it, is longer than its reader accepts."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(f"its reply has more than {most_bytes} bytes")


class ReplyEncoded(ReplyFault):
    """The body of a reply is compressed."""

    def __init__(self, encoding: str) -> None:
        super().__init__(f"its reply has the Content-Encoding {show_found(encoding)}; none was asked for")


class ReplyInvalid(ReplyFault):
    """A field of a reply is invalid.

    Attributes:
        part: the server and route that replied.
        field: path of the field, as `choices.0.token_ids.3`; "" for the whole reply.
        found: its clipped value and its type, or `missing`.
        allowed: the rule that the value breaks.
    """

    def __init__(self, part: str, field: str, found: str, allowed: str) -> None:
        self.part, self.field, self.found, self.allowed = part, field, found, allowed
        super().__init__(f"{part}: {self.finding}")

    @property
    def finding(self) -> str:
        """The message without `part`."""
        return f"{self.field or 'its reply'} is {self.found}; {self.allowed}"


def read_reply(kind: type[Model], content: bytes, part: str) -> Model:
    """Parse a whole JSON reply.

    Args:
        kind: the model to read, always in strict mode. It refuses NaN and infinity only if its config has
            `allow_inf_nan=False`, as every `StrictReply` has.
        part: server and route, for the error.

    Raises:
        ReplyInvalid: the reply is not JSON, does not fit `kind`, or repeats a key.
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
    """Validate a part of a reply whose JSON is parsed already.

    Args:
        kind: as in `read_reply`; its sequences must be lists.

    Raises:
        ReplyInvalid: the value does not fit `kind`.
    """
    try:
        return kind.model_validate(value, strict=True)
    except ValidationError as error:
        raise _fault(error.errors(include_url=False, include_context=False)[0], part) from error


def _fault(first: Mapping[str, Any], part: str) -> ReplyInvalid:
    found = "missing" if first["type"] == "missing" else show_found(first["input"])
    told = first["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    allowed = _ALLOWED.get(first["type"], told)
    return ReplyInvalid(part, ".".join(map(str, first["loc"])), found, allowed)


def show_found(value: Any) -> str:
    """Return the clipped text of a value and its type; the whole text is never built."""
    shown = value[:61] if isinstance(value, bytes) else value  # of bytes, `reprlib` builds the whole text
    return f"{_clip.repr(shown)} ({type(value).__name__})"


def plain_session(*, headers: Mapping[str, str] | None = None, **options: Any) -> "aiohttp.ClientSession":
    """Open a session of aiohttp that refuses compressed replies with ReplyEncoded."""
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
    """Open a client of httpx that follows no redirect and refuses compressed replies with ReplyEncoded."""
    import httpx

    return httpx.Client(
        headers=PLAIN | dict(headers or {}), follow_redirects=False,
        event_hooks={"response": [lambda reply: refuse_encoded(reply.headers.get("Content-Encoding"))]},
        **options,
    )  # fmt: skip


def refuse_encoded(encoding: str | None) -> None:
    """Raise ReplyEncoded unless the Content-Encoding is `identity` or missing."""
    encoding = encoding or "identity"
    if encoding.strip().lower() != "identity":
        raise ReplyEncoded(encoding)


async def read_bounded(parts: AsyncIterable[bytes], most_bytes: int) -> bytes:
    """Return a whole reply. Raises ReplyTooLarge as soon as it exceeds `most_bytes`."""
    reply = bytearray()
    async for part in parts:
        reply += part
        if len(reply) > most_bytes:
            raise ReplyTooLarge(most_bytes)
    return bytes(reply)


def bounded(parts: Iterable[bytes], most_bytes: int) -> Iterator[bytes]:
    """Yield the parts of a reply. Raises ReplyTooLarge as soon as their total exceeds `most_bytes`."""
    room = most_bytes
    for part in parts:
        room -= len(part)
        if room < 0:
            raise ReplyTooLarge(most_bytes)
        yield part


class Lines:
    """Splits the parts of a reply into lines at line feeds only, because JSON may hold other line separators.

    A line has at most `most_bytes`. The whole stream has at most `most_in_all`; None means no limit.
    """

    def __init__(self, most_bytes: int, most_in_all: int | None = None) -> None:
        self._rest, self._most_bytes = bytearray(), most_bytes
        self._room, self._most_in_all = most_in_all, most_in_all

    def take(self, part: bytes) -> list[bytes]:
        """Return the lines that this part completes.

        Raises:
            ReplyTooLarge: a line or the whole stream is too long.
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
        """The bytes after the last line feed."""
        return bytes(self._rest)


def redirect_target(status: int, location: str | None, url: str) -> str | None:
    """Return the target of a redirect without its query, as `'https://host:port/path'`.

    Return None if the status is no redirect, and `nowhere` if the Location is missing or invalid.
    """
    if not HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST:
        return None
    try:
        parts = urlsplit(urljoin(url, location or ""))
        target = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    except ValueError:
        location = None
    return ascii(target[:_SHOWN]) if location else "nowhere"
