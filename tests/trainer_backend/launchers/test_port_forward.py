"""A port that leads to a process elsewhere: it waits, leads, and leads elsewhere."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from service_kit.server import Listener
from trainer_backend.launchers.port_forward import PortForward


@asynccontextmanager
async def echo(word: bytes) -> AsyncIterator[str]:
    """A server that answers each line with its word and the line; its address."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(word + line)
        writer.close()

    with Listener("127.0.0.1", 0) as listener:
        server = await asyncio.start_server(serve, sock=listener.socket.dup())
        async with server:
            yield listener.url


async def asked(listener: Listener, line: bytes) -> bytes:
    """The answer of a connection of its own; empty where it is cut."""
    host, port = listener.socket.getsockname()
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(line)
    answer = await reader.readline()
    writer.close()
    await writer.wait_closed()
    return answer


async def test_a_connection_waits_until_the_port_leads_somewhere_and_is_cut_when_that_place_is_lost():
    with Listener("127.0.0.1", 0) as listener:
        async with echo(b"one ") as one, echo(b"two ") as two:
            early = asyncio.ensure_future(asked(listener, b"early\n"))  # nobody accepts yet
            forward = await PortForward.opened(listener.socket)
            host, port = listener.socket.getsockname()
            forward.lead_to(one)
            assert await early == b"one early\n"
            assert await asyncio.gather(*(asked(listener, b"%d\n" % n) for n in range(20))) == [
                b"one %d\n" % n for n in range(20)
            ]
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"still here\n")
            assert await reader.readline() == b"one still here\n"
            forward.lead_to(None)
            assert await reader.read() == b"", "its process is lost, so whoever asked asks again"
            writer.close()
            waiting = asyncio.ensure_future(asked(listener, b"again\n"))
            forward.lead_to(two)
            assert await waiting == b"two again\n"
            forward.lead_to("http://127.0.0.1:9")  # nobody listens there
            assert await asked(listener, b"never\n") == b""
            await forward.close()


async def test_a_connection_waits_no_longer_than_it_may():
    with Listener("127.0.0.1", 0) as listener:
        forward = await PortForward.opened(listener.socket, wait_s=0.01)
        assert await asked(listener, b"never\n") == b""
        await forward.close()
