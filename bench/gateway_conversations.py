"""Many conversations at a gateway: errors, CPU time of a decision, two gateways; and what a capture adds.

    python -m bench.gateway_conversations [--conversations 2000] [--turns 3] [--wait-s 5] [--times 1]
    python -m bench.gateway_conversations --captures [--preset tiny-0.8m] [--conversations 24] [--turns 4]

Gateways are processes as those of a run with [cluster], with the same limits of connections, and an engine
that samples nothing: it waits between half of --wait-s and one and a half of it. The conversations begin
within one --wait-s, so that nearly all of them are open at the same time; each turn appends the answer and an
observation. No failed request is repeated: each is an error. For 10,000 conversations take `--wait-s 60`: one
client opens them all, and a gateway closes a connection that has sent no head within 15 s.

    errors    requests without an answer                                                     0
    cpu       CPU time of a gateway for a decision (Linux only)                              <= 2 ms
    two       CPU time of one gateway for all decisions / of the busier one of two,          >= 1.8
              which share the conversations by their ids as a run's rollouts: what the
              second adds where each has a core

With --captures the gateway has a real model (new weights, one thread, 24 tokens an answer), which is asked by
four conversations at a time: directly, and through captures of a task app that were opened before, in turns.

    overhead  CPU time of the task app for a call / of the gateway alone, median of 5 rounds  <= 10 %

With a larger model the gateway costs more and the capture the same. Exit code 1 when a figure is missed.
"""

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import aiohttp
import torch
from pydantic import SecretStr

from bench import kit
from bench.http_rates import HOST, Rate, Server, running, timed
from service_kit.server import Listener
from service_kit.server import Server as HttpServer
from shared_schemas.chat import ROLLOUT_HEADER
from shared_schemas.trajectory import Sampling
from trainer_backend.collect.plan import Inference
from trainer_backend.inference.actor import NO_EXTRAS, Extras, Generation
from trainer_backend.inference.asgi import error_response
from trainer_backend.inference.engine import LocalEngine
from trainer_backend.inference.gateway_app import create_gateway
from trainer_backend.inference.keys import EngineKeys
from trainer_backend.inference.served_policy import ServedPolicy
from trainer_backend.models import build_preset, train_tokenizer
from trainer_backend.processes.gateway_process import CONNECTIONS

MODEL, KEY = "bench/actor", "the key of the gateways of this script"
ANSWER_TOKENS, CPU_MS, GAIN = 24, 2.0, 1.8
AT_ONCE, ROUNDS, OVERHEAD = 4, 5, 0.10
ENV_KEY = "the key of the task app of this script"
MODULE = (sys.executable, "-m", "bench.gateway_conversations")
# Of a captured conversation: url and headers.
Endpoint = tuple[str, dict[str, str]]
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


def serve(options: Any) -> None:
    """Be a gateway until killed: with a model of --preset, or with an engine that waits."""
    tokenizer = train_tokenizer([observation(turn) for turn in range(20)], 320)
    engine: Any = Waiting(options.wait_s, options.times)
    if options.captures:
        torch.set_num_threads(1)
        keys = EngineKeys(max_running=8, max_model_len=1024)
        engine = LocalEngine(build_preset(options.preset, tokenizer), stop_ids=[], keys=keys)
        engine.start()
    app = create_gateway({MODEL: ServedPolicy(engine, tokenizer)}, key=KEY)
    HttpServer(app, CONNECTIONS, respond=error_response).run_on(Listener(HOST, options.serve))


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
        servers: list[Server] = [
            await stack.enter_async_context(running(*MODULE, *flags)) for _ in range(gateways)
        ]
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


async def short_conversation(session: aiohttp.ClientSession, endpoint: Endpoint, turns: int) -> None:
    (url, headers), messages = endpoint, list[dict[str, Any]]([SYSTEM])
    for turn in range(turns):
        messages.append({"role": "user", "content": observation(turn)[:60]})
        body = {"model": MODEL, "messages": messages, "max_tokens": ANSWER_TOKENS}
        async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
            reply = await response.json()
            assert response.status == 200, reply
        messages.append(reply["choices"][0]["message"])


async def captured(session: aiohttp.ClientSession, gateway: Server, app: Server) -> Endpoint:
    """Open a capture."""
    url = f"http://{HOST}:{gateway.port}"
    config = {"inference_url": url, "model": MODEL, "max_tokens": ANSWER_TOKENS, "seed": 1}
    body = {"policy": {"policy_name": "openai", "config": config, "inference_key": KEY}}
    captures, headers = f"http://{HOST}:{app.port}/captures", {"X-API-Key": ENV_KEY}
    async with session.post(captures, json=body, headers=headers) as response:
        capture = await response.json()
        assert response.status == 200, capture
    return capture["capture_url"], {"Authorization": f"Bearer {capture['key']}"}


async def capture_rounds(options: Any) -> list[tuple[Rate, Rate, Rate]]:
    """For each round: the gateway asked directly, the gateway behind captures, and the task app."""
    rounds = []
    async with (
        running(*MODULE, "--captures", "--preset", options.preset, "--serve") as gateway,
        running(sys.executable, "-m", "task_app", "--port", key=ENV_KEY) as app,
        aiohttp.ClientSession() as session,
    ):

        async def play(endpoints: Sequence[Endpoint]) -> int:
            for endpoint in endpoints:
                await short_conversation(session, endpoint, options.turns)
            return len(endpoints) * options.turns

        def plays(endpoints: Sequence[Endpoint]) -> list[Callable[[], Awaitable[int]]]:
            return [partial(play, endpoints[first::AT_ONCE]) for first in range(AT_ONCE)]

        for number in range(ROUNDS + 1):
            conversations = range(options.conversations)
            directly = [
                (
                    f"http://{HOST}:{gateway.port}",
                    {"Authorization": f"Bearer {KEY}", ROLLOUT_HEADER: f"r/{conversation}"},
                )
                for conversation in conversations
            ]
            alone = await timed(gateway, plays(directly))
            captures = [await captured(session, gateway, app) for _ in conversations]
            app_s = app.cpu_s()
            behind = await timed(gateway, plays(captures))
            if number:  # the first one warms both up
                rounds.append((alone, behind, Rate(behind.count, behind.wall_s, app.cpu_s() - app_s)))
    return rounds


def report_captures(options: Any) -> int:
    rounds = asyncio.run(capture_rounds(options))
    alone, behind, app = ([rates[i].cpu_us / 1e3 for rates in rounds] for i in range(3))
    shares = [spent / gateway for spent, gateway in zip(app, alone, strict=True)]
    print(f"gateway alone {median(alone):.2f} ms a call, behind a capture {median(behind):.2f} ms")
    print(f"capture {median(app):.2f} ms a call ({min(app):.2f} to {max(app):.2f})")
    share = median(shares)
    return kit.report(f"overhead {share:.1%} ({min(shares):.1%} to {max(shares):.1%})", share <= OVERHEAD)


def report_gateways(options: Any) -> int:
    load, results = Load(options.turns, options.wait_s, options.times), []
    for gateways in (1, 2):
        played = asyncio.run(play(gateways, options.conversations, load))
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


def main() -> int:
    options = kit.options(
        __doc__,
        ("--captures", False, "measure what a capture adds"),
        ("--conversations", int, "how many (default: 2000; with --captures, of a round, 24)"),
        ("--turns", int, "decisions of each (default: 3; with --captures 4)"),
        ("--wait-s", 5.0, "what the engine waits on average"),
        ("--times", 1, "as much text and as many tokens in each turn"),
        ("--preset", "tiny-0.8m", "the model behind captures"),
        ("--serve", int, "be a gateway on this port"),
    )
    conversations, turns = (24, 4) if options.captures else (2000, 3)
    options.conversations, options.turns = options.conversations or conversations, options.turns or turns
    if options.serve is not None:
        serve(options)
        return 0
    return report_captures(options) if options.captures else report_gateways(options)


if __name__ == "__main__":
    sys.exit(main())
