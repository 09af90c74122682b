"""CPU time of a client's request by httpx, by aiohttp and by our own client, as a trainer polls and a policy
asks.

    python -m bench.http_clients [--rounds 5] [--limit 2.0]

A server in a process of its own answers GET /BYTES with so many bytes, over connections that it keeps. Each
client asks for a body of 1 KiB (a poll with no results, or a completion) and of 4 MiB (whole games), one
request after another, and 32 at a time. All take turns in this process, whose CPU time counts. Parsing of
the JSON, which is the same for all, is left out. The ratios httpx / aiohttp and aiohttp / own are the medians
over the rounds, with their ranges; the microseconds of all stand before them. The event loop is uvloop, as in
the services.

Exit code 1 where aiohttp is not so many times cheaper for small bodies.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise

import aiohttp
import httpx

from bench import kit
from bench.http_rates import HOST, running
from service_kit.http_client import HttpClient, Target
from service_kit.server import run

_SIZES = {1 << 10: 1_000, 4 << 20: 40}  # bytes of a body: requests in a window
_AT_A_TIME = (1, 32)
CLIENTS = ("httpx", "aiohttp", "own")

Get = Callable[[str], Awaitable[bytes]]


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the requests of one connection until the client leaves."""
    bodies = {size: b"x" * size for size in (*_SIZES, 0)}
    try:
        while request := await reader.readuntil(b"\r\n\r\n"):
            size = int(request.split(b" ", 2)[1].strip(b"/") or 0)
            head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
            writer.write(head.encode() + bodies[size])
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def serve(port: int) -> None:
    server = await asyncio.start_server(_serve, HOST, port)
    await server.serve_forever()


async def cpu_us(get: Get, url: str, *, requests: int, at_a_time: int) -> float:
    """CPU microseconds of this process for a request."""

    async def ask() -> None:
        for _ in range(requests // at_a_time or 1):
            await get(url)

    begin = time.process_time()
    await asyncio.gather(*(ask() for _ in range(at_a_time)))
    return 1e6 * (time.process_time() - begin) / (at_a_time * (requests // at_a_time or 1))


async def compare(rounds: int) -> dict[tuple[int, int], list[list[float]]]:
    """The microseconds by httpx, by aiohttp and by our own of each round, by size and requests at a time."""
    costs: dict[tuple[int, int], list[list[float]]] = {}
    async with (
        running(sys.executable, "-m", "bench.http_clients", "--serve") as server,
        httpx.AsyncClient() as one,
        aiohttp.ClientSession() as other,
        HttpClient() as own,
    ):

        async def by_httpx(url: str) -> bytes:
            return (await one.get(url)).content

        async def by_aiohttp(url: str) -> bytes:
            async with other.get(url) as reply:
                return await reply.read()

        async def by_own(url: str) -> bytes:
            target = targets.setdefault(url, Target(url, {}))
            return (await own.post(target, b"", timeout_s=60, most_bytes=1 << 30)).body

        clients, targets = (by_httpx, by_aiohttp, by_own), dict[str, Target]()
        for size, requests in _SIZES.items():
            url = f"http://{HOST}:{server.port}/{size}"
            for at_a_time in _AT_A_TIME:
                for get in clients:  # connections are made before
                    await cpu_us(get, url, requests=at_a_time, at_a_time=at_a_time)
                costs[size, at_a_time] = [
                    [await cpu_us(get, url, requests=requests, at_a_time=at_a_time) for get in clients]
                    for _ in range(rounds)
                ]
    return costs


def main(arguments: Sequence[str] | None = None) -> int:
    flags = kit.options(
        __doc__,
        ("--rounds", 5, "windows of each client"),
        ("--limit", 2.0, "least ratio for small bodies"),
        ("--serve", int, "the server's port; for this script alone"),
        arguments=arguments,
    )
    if flags.serve:
        asyncio.run(serve(flags.serve))
    least = float("inf")
    for (size, at_a_time), rounds in run(compare(flags.rounds)).items():
        costs = [*zip(*rounds, strict=True)]
        told = [
            f"{name} {statistics.median(cost):7.0f} us" for name, cost in zip(CLIENTS, costs, strict=True)
        ]
        ratios = [sorted(a / b for a, b in zip(*pair, strict=True)) for pair in pairwise(costs)]
        told += [f"x{statistics.median(all):.1f} ({all[0]:.1f} to {all[-1]:.1f})" for all in ratios]
        print(f"{size >> 10:5} KiB, {at_a_time:2} at a time: {', '.join(told)}")
        least = min(least, statistics.median(ratios[0])) if size < 1 << 20 else least
    return kit.report(f"small bodies cost httpx x{least:.1f} (target x{flags.limit:g})", least >= flags.limit)


if __name__ == "__main__":
    raise SystemExit(main())
