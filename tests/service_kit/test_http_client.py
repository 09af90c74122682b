"""HttpClient against real servers that answer byte for byte what a test says."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest

from service_kit import http_client
from service_kit.http_client import MOST_HEAD_BYTES, HttpClient, HttpReply, NoReply, ReplyMalformed, Target
from service_kit.replies import ReplyEncoded, ReplyFault, ReplyTooLarge

OK = b"HTTP/1.1 200 OK\r\n"
# Stands in a list of parts for the end of the connection.
CLOSE = b""
FULL = OK + b"Content-Length: 2\r\n\r\nhi"
MOST = 1_000


@dataclass
class Peer:
    """A server's port and what it met."""

    url: str = ""
    requests: list[bytes] = field(default_factory=list)
    connections: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a client has closed its connection."""
    asked: asyncio.Event = field(default_factory=asyncio.Event)


@asynccontextmanager
async def peer(*replies: list[bytes]) -> AsyncIterator[Peer]:
    """Answers the requests of all connections in order, each with parts that are written one by one."""
    met, rest, serving = Peer(), list(replies), set[asyncio.Task[None]]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        met.connections += 1
        serving.add(asyncio.current_task())  # type: ignore[arg-type]
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                met.requests.append(head + await reader.readexactly(length))
                met.asked.set()
                for part in rest.pop(0) if rest else []:
                    if part == CLOSE:
                        writer.close()
                        return
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0)  # so that the parts are read apart
        met.ended.set()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 20)
    met.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield met
    finally:
        server.close()
        await asyncio.gather(*serving)


async def ask(client: HttpClient, url: str, data: bytes = b"{}", timeout_s: float = 30) -> HttpReply:
    return await client.post(Target(url, {}), data, timeout_s=timeout_s, most_bytes=MOST)


async def reply_to(*parts: bytes) -> HttpReply:
    async with peer([*parts]) as at, HttpClient() as client:
        return await ask(client, at.url)


def chunked(*chunks: bytes, trailer: bytes = b"") -> bytes:
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return OK + b"Transfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n" + trailer + b"\r\n"


def byte_by_byte(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


async def test_a_request_is_written_with_its_host_and_length_and_asks_for_no_encoding():
    async with peer([FULL]) as at, HttpClient() as client:
        target = Target(f"{at.url}/v1/chat completions?cid=7", {"Authorization": "Bearer k", "X-A": "ü"})
        await client.post(target, b'{"a":1}', timeout_s=30, most_bytes=MOST)
    head, _, body = at.requests[0].partition(b"\r\n\r\n")
    assert body == b'{"a":1}'
    assert head.decode().split("\r\n") == [
        "POST /v1/chat%20completions?cid=7 HTTP/1.1", f"Host: {at.url.removeprefix('http://')}",
        "Accept: */*", "Accept-Encoding: identity", "User-Agent: turnwise", "Authorization: Bearer k",
        "X-A: ü", "Content-Length: 7",
    ]  # fmt: skip


@pytest.mark.parametrize("value", ["k\r\nX-Evil: 1", "k\nX", "k\0"])
def test_a_header_that_would_begin_another_one_is_refused(value: str):
    with pytest.raises(ValueError, match="line break"):
        Target("http://h", {"Authorization": value})


WHOLE = {
    "by its length": [FULL],
    "in chunks": [chunked(b"h", b"i")],
    "in chunks with a trailer": [chunked(b"hi", trailer=b"X-Late: 1\r\n")],
    "until the connection ends": [OK + b"\r\nhi", CLOSE],
    "by HTTP/1.0": [b"HTTP/1.0 200 OK\r\n\r\nhi", CLOSE],
    "byte by byte": byte_by_byte(FULL),
    "in chunks, byte by byte": byte_by_byte(chunked(b"h", b"i")),
    "after early hints": [b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n", b"HTTP/1.1 100 C\r\n\r\n", FULL],
    "after early hints at once": [b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + FULL],
}


@pytest.mark.parametrize("name", WHOLE)
async def test_a_reply_is_whole_however_it_is_cut_and_framed(name: str):
    reply = await reply_to(*WHOLE[name])
    assert (reply.status, reply.body) == (200, b"hi")
    assert not {"link", "x-late"} & reply.headers.keys()


async def test_the_status_the_first_header_of_a_name_and_the_most_bytes_are_told():
    reply = await reply_to(b"HTTP/1.1 429 X\r\nRetry-After: 7\r\nRETRY-AFTER: 8\r\nContent-Length: 0\r\n\r\n")
    assert (reply.status, reply.headers["retry-after"], reply.body) == (429, "7", b"")
    assert (await reply_to(b"HTTP/1.1 204 No Content\r\n\r\n")).body == b""
    moved = await reply_to(b"HTTP/1.1 307 X\r\nLocation: http://h/\r\nContent-Length: 0\r\n\r\n")
    assert moved.status == 307, "it is not followed"
    assert len((await reply_to(OK + b"Content-Length: 1000\r\n\r\n" + b"x" * MOST)).body) == MOST


BROKEN = {
    "closed before the reply": ([CLOSE], NoReply),
    "closed in the head": ([OK + b"Content-", CLOSE], NoReply),
    "closed in the body": ([OK + b"Content-Length: 3\r\n\r\nhi", CLOSE], NoReply),
    "closed in a chunk": ([OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhi", CLOSE], NoReply),
    "closed between chunks": ([OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n", CLOSE], NoReply),
    "closed after early hints": ([b"HTTP/1.1 103 Early Hints\r\n\r\n", CLOSE], NoReply),
    "no chunk": ([OK + b"Transfer-Encoding: chunked\r\n\r\nhi\r\n"], NoReply),
    "no HTTP": ([b"SSH-2.0-OpenSSH\r\n"], ReplyMalformed),
    "two lengths": ([OK + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nhi"], ReplyMalformed),
    "another protocol": ([b"HTTP/1.1 101 X\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"], ReplyMalformed),
    "a header without end": ([OK + b"X: " + b"x" * 2 * MOST_HEAD_BYTES], ReplyMalformed),
    "many headers": ([OK + b"X: x\r\n" * MOST_HEAD_BYTES], ReplyMalformed),
    "hints for ever": ([b"HTTP/1.1 103 E\r\nX: x\r\n\r\n" * MOST_HEAD_BYTES], ReplyMalformed),
    "a trailer without end": ([chunked(trailer=b"X: " + b"x" * 2 * MOST_HEAD_BYTES)], ReplyFault),
    "too many bytes, counted": ([OK + b"Content-Length: 1001\r\n\r\n" + b"x" * 1001], ReplyTooLarge),
    "too many bytes, in chunks": ([chunked(*[b"x" * 100] * 11)], ReplyTooLarge),
    "too many bytes, uncounted": ([OK + b"\r\n" + b"x" * 1001], ReplyTooLarge),
    "a zip bomb": ([OK + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\nhi"], ReplyEncoded),
    "another one": ([OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"], ReplyEncoded),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
async def test_a_reply_that_is_cut_or_too_much_is_an_error_and_its_connection_is_closed(name: str):
    parts, kind = BROKEN[name]
    async with peer(parts, [FULL]) as at, HttpClient() as client:
        with pytest.raises(kind):
            await ask(client, at.url)
        assert (await ask(client, at.url)).body == b"hi"
        assert (len(at.requests), at.connections) == (2, 2), "no request is sent twice"


async def test_connections_are_kept_and_requests_that_overlap_have_one_each():
    async with peer([FULL], [FULL], [FULL], [FULL]) as at, HttpClient() as client:
        await ask(client, at.url)
        await ask(client, at.url)
        assert at.connections == 1
        await asyncio.gather(ask(client, at.url), ask(client, at.url))
        assert at.connections == 2


async def test_more_requests_than_places_wait():
    async with peer([FULL], [FULL], [FULL]) as at, HttpClient(at_most=1) as client:
        await asyncio.gather(*(ask(client, at.url) for _ in range(3)))
    assert at.connections == 1


@pytest.mark.parametrize(
    "reply",
    [
        OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nhi",
        FULL + FULL.replace(b"hi", b"no"),
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi",
    ],
    ids=["it says so", "more than the reply came", "it is of HTTP/1.0"],
)
async def test_a_connection_is_not_used_again_where(reply: bytes):
    async with peer([reply], [FULL]) as at, HttpClient() as client:
        assert [(await ask(client, at.url)).body for _ in range(2)] == [b"hi", b"hi"]
        assert at.connections == 2


async def test_bytes_that_were_not_asked_for_never_become_the_next_reply():
    async with peer([FULL, FULL.replace(b"hi", b"no")], [FULL]) as at, HttpClient() as client:
        assert (await ask(client, at.url)).body == b"hi"
        await asyncio.wait_for(at.ended.wait(), 30)
        assert (await ask(client, at.url)).body == b"hi"


async def test_a_kept_connection_that_the_server_has_closed_is_replaced():
    async with peer([FULL, CLOSE], [FULL]) as at, HttpClient() as client:
        await ask(client, at.url)
        (idle,) = next(iter(client._idle.values()))
        while idle.is_open:  # the end arrives
            await asyncio.sleep(0)
        assert (await ask(client, at.url)).body == b"hi"


async def test_a_kept_connection_that_ends_under_a_request_is_an_error_and_nothing_is_repeated():
    async with peer([FULL], [CLOSE], [FULL]) as at, HttpClient() as client:
        await ask(client, at.url)
        with pytest.raises(NoReply, match="closed the connection"):
            await ask(client, at.url)
        assert len(at.requests) == 2


@pytest.mark.parametrize("greeting", [b"", b"SSH-2.0-OpenSSH\r\n"])
async def test_a_server_that_ends_each_connection_at_once_is_an_error_and_not_waited_for(greeting: bytes):
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with server, HttpClient() as client:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises((NoReply, ReplyMalformed)):
            await ask(client, url)


async def test_a_request_on_an_ended_connection_is_an_error_at_once():
    async with peer([FULL]) as at, HttpClient() as client:
        await ask(client, at.url)
        (connection,) = next(iter(client._idle.values()))
        connection.close()
        with pytest.raises(NoReply, match="before the request"):
            connection.ask(b"", MOST)


async def test_a_connection_that_is_not_needed_is_closed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_client, "KEEP_ALIVE_S", 0.0)
    async with peer([FULL]) as at, HttpClient() as client:
        await ask(client, at.url)
        await asyncio.wait_for(at.ended.wait(), 30)
        assert not client._idle


@pytest.mark.parametrize(("end", "error"), [("cancel", asyncio.CancelledError), ("close", NoReply)])
async def test_a_cancelled_request_or_a_closed_client_ends_the_connection(end: str, error: type[Exception]):
    async with peer([]) as at, HttpClient() as client:
        task = asyncio.ensure_future(ask(client, at.url))
        await at.asked.wait()
        if end == "cancel":
            task.cancel()
        else:
            await client.close()
        with pytest.raises(error):
            await task
        await asyncio.wait_for(at.ended.wait(), 30)


async def test_a_silent_server_is_given_up_in_time():
    async with peer([FULL], [OK]) as at, HttpClient() as client:
        await ask(client, at.url)  # a connection may take longer than what follows
        with pytest.raises(TimeoutError):
            await ask(client, at.url, timeout_s=0.05)
        await asyncio.wait_for(at.ended.wait(), 30)


async def test_no_server_and_no_such_host_are_told_with_their_address():
    async with peer() as at:
        url = at.url
    async with HttpClient() as client:
        with pytest.raises(NoReply, match=r"cannot connect to 127\.0\.0\.1:"):
            await ask(client, url)
        with pytest.raises(NoReply, match=r"cannot connect to host\.invalid:80"):
            await ask(client, "http://host.invalid")
