"""What a sample of an engine in a process of its own costs to call: lines on a socket, over HTTP, and frames.

    python -m bench.call_cost [--samples 400] [--tokens 64]

Frames of a length and JSON, read by `StreamReader`, are what `service_kit.rpc` has replaced. The engine
samples at once, and both ends run on one event loop (uvloop), so that the time is the CPU time of both
together: of a sample whose tokens are streamed, and of one that is sent as a whole.
"""

import asyncio
import json
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import aiohttp
from pydantic import ConfigDict, SecretStr, TypeAdapter

from bench import kit
from service_kit.keys import Keys
from service_kit.rpc import PATH, Reply, Tell, calls_app, reply_lines
from service_kit.server import Listener, Server, run
from service_kit.settings import ConnectionSettings
from service_kit.socket_calls import Caller, serve_calls
from shared_schemas.trajectory import Sampling
from trainer_backend.inference.actor import Generation, SampledToken
from trainer_backend.inference.worker import EngineCounters
from trainer_backend.processes.engine_calls import ENGINE_CALLS, EngineCall

PROMPT = tuple(range(100, 500))
# The most that lines may cost, as a ratio to frames.
LIMIT = 1.0
Sample = Callable[[EngineCall, Tell | None], Awaitable[Generation]]


class Engine:
    """Samples at once."""

    async def generate(self, call: EngineCall, tell: Tell) -> tuple[Generation, EngineCounters]:
        count = call.sampling.max_tokens
        ids, logprobs = tuple(range(count)), tuple(-1.0 / (place + 3) for place in range(count))
        if call.streams:
            for token in map(SampledToken, ids, logprobs):
                tell(token)
        return Generation(ids, logprobs, "length", ((0, 7),)), EngineCounters(requests=1)


@asynccontextmanager
async def by_lines() -> AsyncIterator[Sample]:
    ours, theirs = socket.socketpair()
    serving = asyncio.ensure_future(serve_calls(ENGINE_CALLS, Engine(), theirs))
    caller = Caller(ENGINE_CALLS)
    await caller.connect(ours)

    async def sample(call: EngineCall, tell: Tell | None) -> Generation:
        generation: Generation
        generation, _ = await caller.call("generate", call, tell=tell)
        return generation

    yield sample
    caller.close()
    await serving


@asynccontextmanager
async def by_http() -> AsyncIterator[Sample]:
    def begin(request: Any, name: str, body: bytes) -> AsyncIterator[bytes]:
        return reply_lines(ENGINE_CALLS, Engine(), name, body)

    app = calls_app(ENGINE_CALLS, begin, Keys([SecretStr("key")], variable="KEY"))
    with Listener("127.0.0.1", 0) as listener:
        server = Server(app, ConnectionSettings())
        serving = asyncio.ensure_future(server.serve([listener.socket]))
        async with aiohttp.ClientSession(headers={"X-API-Key": "key"}) as session:

            async def sample(call: EngineCall, tell: Tell | None) -> Generation:
                body = ENGINE_CALLS.write_arguments("generate", (call,))
                reply = Reply(ENGINE_CALLS, "generate", body, tell)
                async with session.post(f"{listener.url}{PATH}generate", data=body) as response:
                    async for part in response.content.iter_any():
                        if reply.take(part):
                            generation: Generation = reply.result()[0]
                            return generation
                raise AssertionError("the reply ends")

            yield sample
        server.should_exit = True
        await serving


_LENGTH = struct.Struct("<I")


def _adapter(*kinds: Any) -> TypeAdapter[Any]:
    whole: Any = tuple.__class_getitem__(kinds)
    return TypeAdapter(whole, config=ConfigDict(ser_json_inf_nan="constants"))


KINDS = {
    "generate": _adapter(EngineCall),
    "token": _adapter(SampledToken),
    "done": _adapter(Generation | None, tuple[float, ...]),
}


class Frames:
    """One end of the connection as it was: a frame is a length, and a number, a kind and JSON."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def say(self, number: int, kind: str, *carried: Any) -> None:
        body = b"%d %s " % (number, kind.encode()) + KINDS[kind].dump_json(carried)
        self._writer.write(_LENGTH.pack(len(body)) + body)

    async def hear(self) -> tuple[int, str, Any]:
        (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        number, kind, body = (await self._reader.readexactly(length)).split(b" ", 2)
        return int(number), kind.decode(), KINDS[kind.decode()].validate_json(body)


@asynccontextmanager
async def by_frames() -> AsyncIterator[Sample]:
    one, two = socket.socketpair()
    ours = Frames(*await asyncio.open_connection(sock=one))
    theirs = Frames(*await asyncio.open_connection(sock=two))
    waiting: dict[int, tuple[asyncio.Future[Generation], Tell | None]] = {}
    tasks: set[asyncio.Task[None]] = set()

    async def answer(number: int, call: EngineCall) -> None:
        generation, _ = await Engine().generate(call, partial(theirs.say, number, "token"))
        theirs.say(number, "done", generation, (1.0,) * 8)

    async def serve() -> None:
        while True:
            number, _, (call,) = await theirs.hear()
            tasks.add(task := asyncio.ensure_future(answer(number, call)))
            task.add_done_callback(tasks.discard)

    async def listen() -> None:
        while True:
            number, kind, carried = await ours.hear()
            future, tell = waiting[number]
            if kind == "token" and tell is not None:
                tell(*carried)
            elif kind == "done":
                future.set_result(carried[0])

    async def sample(call: EngineCall, tell: Tell | None) -> Generation:
        number, future = len(waiting), asyncio.get_running_loop().create_future()
        waiting[number] = future, tell
        ours.say(number, "generate", call)
        async with asyncio.timeout(600):
            generation: Generation = await future
        return generation

    ends = [asyncio.ensure_future(serve()), asyncio.ensure_future(listen())]
    yield sample
    for end in ends:
        end.cancel()


WAYS = {"frames": by_frames, "lines": by_lines, "http": by_http}


async def microseconds(samples: int, tokens: int, repeats: int) -> dict[str, dict[str, float]]:
    """The least time of a sample by way and kind; ways take turns, for machines that change their pace."""
    least: dict[str, dict[str, float]] = {way: {} for way in WAYS}
    for _ in range(repeats):
        for way, connect in WAYS.items():
            async with connect() as sample:
                for kind in ("streamed", "whole"):
                    call = EngineCall(
                        PROMPT, Sampling(max_tokens=tokens), 0, False, False, (), streams=kind == "streamed"
                    )
                    heard: list[SampledToken] = []
                    start = asyncio.get_running_loop().time()
                    for _ in range(samples):
                        await sample(call, heard.append if call.streams else None)
                    spent = (asyncio.get_running_loop().time() - start) / samples * 1e6
                    assert len(heard) == samples * tokens * call.streams
                    least[way][kind] = min(spent, least[way].get(kind, spent))
    return least


def main(arguments: Sequence[str] | None = None) -> int:
    asked = kit.options(
        __doc__,
        ("--samples", 400, "samples of each measurement"),
        ("--tokens", 64, "tokens of a sample"),
        ("--repeats", 7, "measurements, of which the least counts"),
        arguments=arguments,
    )
    costs = run(microseconds(asked.samples, asked.tokens, asked.repeats))
    for way, kinds in costs.items():
        print(f"{way:8}" + "".join(f"  {kind} {cost:7.0f} us" for kind, cost in kinds.items()))
    ratios = {kind: costs["lines"][kind] / costs["frames"][kind] for kind in costs["lines"]}
    print(json.dumps({kind: round(ratio, 3) for kind, ratio in ratios.items()}))
    return kit.report(
        f"lines / frames {max(ratios.values()):.2f}, at most {LIMIT}", max(ratios.values()) <= LIMIT
    )


if __name__ == "__main__":
    sys.exit(main())
