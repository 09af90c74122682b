"""Many conversations at a gateway: errors, CPU time of a decision, and two gateways against one.

    python -m bench.gateway_conversations [--conversations 2000] [--turns 3] [--wait-s 5] [--times 1]

Gateways are processes as those of a run with [cluster], with the same limits of connections, and an engine
that samples nothing: it waits between half of --wait-s and one and a half of it. The conversations begin
within one --wait-s, so that nearly all of them are open at the same time; each turn appends the answer and an
observation. Nobody repeats a failed request: each is an error. For 10,000 conversations take `--wait-s 60`:
one client opens them all, and a gateway closes a connection that has sent no head within 15 s.

    errors    requests without an answer                                                     0
    cpu       CPU time of a gateway for a decision (Linux only)                              <= 2 ms
    two       CPU time of one gateway for all decisions / of the busier one of two,          >= 1.8
              which share the conversations by their ids as a run's rollouts: what the
              second adds where each has a core

Exit code 1 when a figure is missed.
"""

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import aiohttp
from pydantic import SecretStr

from bench import kit
from bench.http_rates import HOST, Server, running
from service_kit.server import Listener
from service_kit.server import Server as HttpServer
from shared_schemas.chat import ROLLOUT_HEADER
from shared_schemas.trajectory import Sampling
from trainer_backend.collect.plan import Inference
from trainer_backend.inference.actor import NO_EXTRAS, Extras, Generation
from trainer_backend.inference.asgi import error_response
from trainer_backend.inference.gateway_app import create_gateway
from trainer_backend.inference.served_policy import ServedPolicy
from trainer_backend.models import train_tokenizer
from trainer_backend.processes.gateway_process import CONNECTIONS

MODEL, KEY = "bench/actor", "the key of the gateways of this script"
ANSWER_TOKENS, CPU_MS, GAIN = 24, 2.0, 1.8
SYSTEM = {"role": "system", "content": "tree water stone " * 30}


class Waiting:
    """An engine that samples nothing."""

    version, max_model_len = 0, 8192

    def __init__(self, wait_s: float, times: int) -> None:
        self._wait_s, self._random = wait_s, random.Random(0)
        self._tokens = tuple(self._random.randrange(20, 300) for _ in range(ANSWER_TOKENS * times))
        self.breakdown: Future[str] = Future()

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, request_id: str, extras: Extras = NO_EXTRAS
    ) -> Generation:
        await asyncio.sleep(self._wait_s * self._random.uniform(0.5, 1.5))
        return Generation(self._tokens, (-1.0,) * len(self._tokens), "length", ((0, 0),))

    def start(self) -> None: ...

    def stop(self) -> None: ...

    async def close(self) -> None: ...


def serve(port: int, wait_s: float, times: int) -> None:
    """Be a gateway until killed."""
    tokenizer = train_tokenizer([observation(turn) for turn in range(20)], 320)
    app = create_gateway({MODEL: ServedPolicy(Waiting(wait_s, times), tokenizer)}, key=KEY)
    HttpServer(app, CONNECTIONS, respond=error_response).run_on(Listener(HOST, port))


def observation(turn: int) -> str:
    return f"You see: tree water {turn} iron table. Health {turn} food 7 " * 6


@dataclass(frozen=True, slots=True)
class Load:
    """What each conversation asks for.

    turns: decisions.
    wait_s: what the engine waits for each, on average.
    times: as much text and as many tokens in each turn.
    """

    turns: int
    wait_s: float
    times: int


@dataclass
class Played:
    """What some conversations met."""

    answers: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    wall_s: float = 0.0
    cpu_s: list[float] = field(default_factory=list)

    @property
    def cpu_ms(self) -> float:
        return 1e3 * sum(self.cpu_s) / max(self.answers, 1)


async def conversation(
    session: aiohttp.ClientSession, server: Inference, number: int, load: Load, played: Played
) -> None:
    rollout = f"run.1/train/1/{number}/0"
    url, messages = f"{server.for_rollout(rollout).url}/v1/chat/completions", [SYSTEM]
    for turn in range(load.turns):
        messages.append({"role": "user", "content": observation(turn) * load.times})
        tokens = ANSWER_TOKENS * load.times
        body = {"model": MODEL, "messages": messages, "max_tokens": tokens, "temperature": 1.0}
        try:
            async with session.post(url, json=body, headers={ROLLOUT_HEADER: rollout}) as response:
                reply = await response.json()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            played.errors[f"{type(error).__name__} {error}"[-80:]] += 1
            return
        if response.status != 200:
            played.errors[f"{response.status} {reply.get('code')}"] += 1
            return
        played.answers += 1
        messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"] or "x"})


async def play(gateways: int, conversations: int, load: Load) -> Played:
    """All conversations, at so many gateways."""
    played = Played()
    async with AsyncExitStack() as stack:
        flags = ("--wait-s", str(load.wait_s), "--times", str(load.times), "--serve")
        command = (sys.executable, "-m", "bench.gateway_conversations", *flags)
        servers: list[Server] = [await stack.enter_async_context(running(*command)) for _ in range(gateways)]
        first, *others = (f"http://{HOST}:{server.port}" for server in servers)
        inference = Inference(first, MODEL, SecretStr(KEY), other_urls=tuple(others))
        session = await stack.enter_async_context(
            aiohttp.ClientSession(
                headers={"Authorization": f"Bearer {KEY}"},
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=300),
            )
        )

        async def one(number: int) -> None:
            await asyncio.sleep(load.wait_s * number / conversations)
            await conversation(session, inference, number, load, played)

        before, began = [server.cpu_s() for server in servers], time.perf_counter()
        await asyncio.gather(*map(one, range(conversations)))
        played.wall_s = time.perf_counter() - began
        played.cpu_s = [server.cpu_s() - earlier for server, earlier in zip(servers, before, strict=True)]
    return played


def main() -> int:
    chosen = kit.options(
        __doc__,
        ("--conversations", 2000, "how many"),
        ("--turns", 3, "decisions of each"),
        ("--wait-s", 5.0, "what the engine waits on average"),
        ("--times", 1, "as much text and as many tokens in each turn"),
        ("--serve", int, "be a gateway on this port"),
    )
    if chosen.serve is not None:
        serve(chosen.serve, chosen.wait_s, chosen.times)
        return 0
    load, results = Load(chosen.turns, chosen.wait_s, chosen.times), []
    for gateways in (1, 2):
        played = asyncio.run(play(gateways, chosen.conversations, load))
        results.append(played)
        spent = ", ".join(f"{cpu_s:.2f}" for cpu_s in played.cpu_s)
        print(
            f"gateways {gateways}: {played.answers} answers in {played.wall_s:.1f} s, CPU {spent} s; "
            f"errors: {dict(played.errors) or 'none'}"
        )
    one, two = results
    errors = sum((one.errors + two.errors).values())
    gain = max(one.cpu_s) / max(two.cpu_s)
    return max(
        kit.report(f"errors of {one.answers + two.answers + errors} requests: {errors}", errors == 0),
        kit.report(f"CPU time of a decision: {one.cpu_ms:.2f} ms", one.cpu_ms <= CPU_MS),
        kit.report(f"two gateways against one: x{gain:.2f}", gain >= GAIN),
    )


if __name__ == "__main__":
    sys.exit(main())
