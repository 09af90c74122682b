"""A public address whose process is elsewhere: connections wait, are passed on, and are cut with it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from service_kit.server import Listener
from trainer_backend.processes.public_address import PublicAddress


@asynccontextmanager
async def echo(word: bytes) -> AsyncIterator[str]:
    """A server that answers each line with its word and the line; its address."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(word + line)
        writer.close()

    with Listener("127.0.0.1", 0) as listener:
        async with await asyncio.start_server(serve, sock=listener.socket.dup()):
            yield listener.url


async def test_connections_wait_for_a_process_are_passed_on_and_are_cut_when_it_is_lost():
    with Listener("127.0.0.1", 0) as listener:
        host, port = listener.socket.getsockname()

        async def asked(line: bytes) -> bytes:
            """The answer of a connection of its own; empty where it is cut."""
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(line)
            answer = await reader.readline()
            writer.close()
            return answer

        async with echo(b"one ") as one, echo(b"two ") as two:
            address = PublicAddress(listener)
            early = asyncio.ensure_future(asked(b"early\n"))
            await address.lead_to(one)
            assert await early == b"one early\n"
            assert await asyncio.gather(*(asked(b"%d\n" % number) for number in range(20))) == [
                b"one %d\n" % number for number in range(20)
            ]
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"still here\n")
            assert await reader.readline() == b"one still here\n"
            address.hold()
            assert await reader.read() == b"", "its process is lost, so who asked asks again"
            writer.close()
            waiting = asyncio.ensure_future(asked(b"again\n"))
            await address.lead_to(two)
            assert await waiting == b"two again\n"
            await address.lead_to("http://127.0.0.1:9")  # which refuses
            assert await asked(b"never\n") == b""
            address.hold()
