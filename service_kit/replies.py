"""Functions that read the replies of other services safely: with limited size, strict types and no redirects.

    plain_session, plain_client     open HTTP sessions that refuse compressed replies (so does http_client)
    read_bounded, bounded, Lines    limit the size of a reply
    read_reply, read_value          validate JSON with strict types: `true` is not 1, and "7" is not 7
    redirect_target                 describes a redirect for an error message

All clients of Turnwise use this module. If a function here raises a `ReplyFault`, the client raises an error
of its own. Without these checks, a long or a compressed reply could fill the memory, and a missing JSON field
would raise a KeyError that looks like a bug of the client. No client follows a redirect, because that would
send our API key to the address that the reply names.
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
# Shortens values for error messages, because the text of a value may be megabytes long.
_clip = Repr()
_clip.maxstring = _clip.maxlong = _clip.maxother = 60
_clip.maxlevel = 3

# Maps a type of pydantic's errors to the rule that the value breaks, for types whose message states no rule.
_ALLOWED = {
    "missing": "the reader needs it",
    "extra_forbidden": "no such field is known",
    "model_type": "it should be an object",
    "dict_type": "it should be an object",
    "list_type": "it should be a list",
}

# Request header that asks for an uncompressed reply. The size limits apply to the received bytes, and a
# decompressed reply can be a thousand times as long.
PLAIN = {"Accept-Encoding": "identity"}


class ReplyFault(Exception):
    """The reply cannot be used. Each client catches this exception and raises its own error instead."""


class ReplyTooLarge(ReplyFault):
    """The reply, or a line of it, is longer than `most_bytes`."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(f"its reply has more than {most_bytes} bytes")


class ReplyEncoded(ReplyFault):
    """The body of the reply is compressed, although the request asked for no compression."""

    def __init__(self, encoding: str) -> None:
        super().__init__(f"its reply has the Content-Encoding {show_found(encoding)}; none was asked for")


class ReplyInvalid(ReplyFault):
    """A field of the reply, or the whole reply, is invalid.

    Attributes:
        part: names the server and the route that replied.
        field: path of the invalid field, such as `choices.0.token_ids.3`; "" if the whole reply is invalid.
        found: the shortened value of the field and its type, or `missing`.
        allowed: the rule that the value breaks.
    """

    def __init__(self, part: str, field: str, found: str, allowed: str) -> None:
        self.part, self.field, self.found, self.allowed = part, field, found, allowed
        super().__init__(f"{part}: {self.finding}")

    @property
    def finding(self) -> str:
        """The message of this error without `part`."""
        return f"{self.field or 'its reply'} is {self.found}; {self.allowed}"


def read_reply(kind: type[Model], content: bytes, part: str) -> Model:
    """Parse a JSON reply and validate it as an object of the class `kind`.

    Args:
        kind: pydantic model of the reply, validated in strict mode. NaN and infinity are refused only if the
            model's config contains `allow_inf_nan=False`, which every subclass of `StrictReply` inherits.
        content: the whole body of the reply.
        part: names the server and the route in the error.

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
    """Validate a part of a reply whose JSON was already parsed, and return it as an object of `kind`.

    Args:
        kind: as in `read_reply`. Its sequences must be lists: parsed JSON contains only lists, and strict
            mode does not accept a list in place of a tuple.
        part: names the server and the route in the error.

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
    """Return the shortened text of a value and its type, for an error message.

    The text of a long value is never built as a whole, so this is safe for values of any size.
    """
    shown = value[:61] if isinstance(value, bytes) else value  # `reprlib` would build the whole text of bytes
    return f"{_clip.repr(shown)} ({type(value).__name__})"


def plain_session(*, headers: Mapping[str, str] | None = None, **options: Any) -> "aiohttp.ClientSession":
    """Return an aiohttp session whose requests raise ReplyEncoded if the reply is compressed.

    `headers` are sent with every request. `options` are further arguments of `aiohttp.ClientSession`.
    """
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
    """Return an httpx client that follows no redirects and raises ReplyEncoded if a reply is compressed.

    `headers` are sent with every request. `options` are further arguments of `httpx.Client`.
    """
    import httpx

    return httpx.Client(
        headers=PLAIN | dict(headers or {}), follow_redirects=False,
        event_hooks={"response": [lambda reply: refuse_encoded(reply.headers.get("Content-Encoding"))]},
        **options,
    )  # fmt: skip


def refuse_encoded(encoding: str | None) -> None:
    """Raise ReplyEncoded unless `encoding`, the Content-Encoding of a reply, is `identity` or missing."""
    encoding = encoding or "identity"
    if encoding.strip().lower() != "identity":
        raise ReplyEncoded(encoding)


async def read_bounded(parts: AsyncIterable[bytes], most_bytes: int) -> bytes:
    """Read all parts of a reply and return them joined.

    Raises:
        ReplyTooLarge: the reply is longer than `most_bytes`. Reading stops as soon as this is certain.
    """
    reply = bytearray()
    async for part in parts:
        reply += part
        if len(reply) > most_bytes:
            raise ReplyTooLarge(most_bytes)
    return bytes(reply)


def bounded(parts: Iterable[bytes], most_bytes: int) -> Iterator[bytes]:
    """Yield the parts of a reply unchanged while their total size stays within `most_bytes`.

    Raises:
        ReplyTooLarge: the next part would exceed this limit.
    """
    room = most_bytes
    for part in parts:
        room -= len(part)
        if room < 0:
            raise ReplyTooLarge(most_bytes)
        yield part


class Lines:
    """Splits a stream, which arrives in parts, into lines.

    Lines end at line feeds only, because the strings in a line of JSON may contain other line separators.

    Args:
        most_bytes: the longest accepted line.
        most_in_all: the longest accepted stream; None means no limit.
    """

    def __init__(self, most_bytes: int, most_in_all: int | None = None) -> None:
        self._rest, self._most_bytes = bytearray(), most_bytes
        self._room, self._most_in_all = most_in_all, most_in_all

    def take(self, part: bytes) -> list[bytes]:
        """Add the next part of the stream, and return the lines that are now complete.

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
        """The bytes received after the last line feed."""
        return bytes(self._rest)


def redirect_target(status: int, location: str | None, url: str) -> str | None:
    """Return the target of a redirect for an error message, in quotes and without its query.

    Return None if `status` is not a redirect, and `nowhere` if `location`, the Location header, is missing or
    invalid. `url` is the URL of the request, to which a relative location refers.
    """
    if not HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST:
        return None
    try:
        parts = urlsplit(urljoin(url, location or ""))
        target = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    except ValueError:
        location = None
    return ascii(target[:_SHOWN]) if location else "nowhere"
